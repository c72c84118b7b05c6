"""Mirroring: a branch of one repository is copied to another. Objects go first, and the ref last.

A mirror is a repository of its own, which keeps its own rules: what comes in is an upload like any other, under fresh
keys of transactions that began at the mirror's root, and one swap publishes it. So its collector, its writers and
other mirrors need not know of this one. Versions keep their ids, since no id depends on where objects lie. Of what is
copied only manifests change, in which keys stand: packs, schemas, layouts and files are the same bytes, each seen to
be what its key says before it is written.

The source is only read. What its collector takes meanwhile is looked for in its newest root, by planning anew.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from weightvc.errors import (
    AccessDenied,
    BadName,
    BranchMoved,
    Conflict,
    Expired,
    KeyNotFound,
    RefNotFound,
    Refused,
    Unsupported,
)
from weightvc.objects import key
from weightvc.objects.catalogue import COMMIT, EXPIRED, Entry
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.protocol import live, pins, swap
from weightvc.protocol.mirror_carrier import Carrier
from weightvc.protocol.mirror_plan import Item, Lack, batches, extended, order, shared, usable
from weightvc.protocol.refs import Refs, check_name
from weightvc.protocol.rewrite import rewritten
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import MISSING

ATTEMPTS: Final = 8
"""Times that it plans anew because the source, the mirror or its collector moved on meanwhile."""


@dataclass(slots=True)
class Mirrored:
    """What a run did."""

    branch: str
    head: Version
    """The head of the branch, in both repositories."""
    old: str | None
    """The id of the head that the mirror had before; None without one."""
    versions: int = 0
    """Versions that were copied."""
    records: int = 0
    """Versions of which only the record was copied: what has expired, and what `last` left out."""
    ways: int = 0
    """Further ways, to versions that were there."""
    objects: int = 0
    nbytes: int = 0
    """Bytes of the objects that were written."""
    swaps: int = 0
    rewound: bool = False
    """Whether the mirror's branch went back, or to the side, as the source's had."""

    @property
    def changed(self) -> bool:
        """Whether anything was done."""
        return self.swaps > 0


class _Again(Exception):
    """What was planned does not fit the mirror's newest root."""


class _Nothing(Exception):
    """There is nothing to swap."""


class Mirroring:
    """Copies one branch, again and again: it remembers what it has seen of the two catalogues."""

    def __init__(
        self,
        source: Shelf,
        target: Shelf,
        branch: str,
        author: str,
        now: Callable[[], int],
        *,
        last: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`branch` is a name, or HEAD; `now` gives microseconds since the epoch, for the mirror's reflog; `progress`
        is called with bytes that were written, and all that will be, about. Raises Refused for `last` that is no
        number from 1."""
        if last is not None and (type(last) is not int or last < 1):
            raise Refused(f"last={last!r:.100}: give how many of the newest versions are copied, 1 at least")
        self._source = source
        self._target = target
        self._branch = branch
        self._author = author
        self._now = now
        self._last = last
        self._progress = progress
        self._looked: object = None
        """The source's entries with ways, when they were last compared."""

    def run(self, stop: threading.Event | None = None) -> Mirrored:
        """Bring the mirror to the source's head. With `stop` it ends early, between two swaps, once that is set: the
        branch then stays where it was.

        Raises RefNotFound for a branch that the source has not, BranchMoved where the mirror has versions of its own
        on it, Conflict, Refused; Corrupt and KeyNotFound for what the source cannot give whole; Expired where the
        collectors are always faster; and what the stores raise.
        """
        total: Mirrored | None = None
        failure: Exception | None = None
        for number in range(ATTEMPTS):
            # The mirror first: whatever another mirror brought there, the source's root knows then.
            there = swap.must_read(self._target.store)
            here = swap.must_read(self._source.store)
            # Once it was overtaken by the mirror's collector, it asks that to wait from the start.
            attempt: _Attempt | None = None
            try:
                attempt = _Attempt(self, here, there, stop, pins.PATIENCE if number == 0 else 0.0)
                attempt.run()
                done = True
            except (_Again, Expired) as error:
                failure, done = error, False
            except MISSING as error:
                now = [swap.must_read(shelf.store).root.sequence for shelf in (self._source, self._target)]
                before = there.root.sequence if attempt is None else attempt.sequence
                if now == [here.root.sequence, before]:
                    if isinstance(error, AccessDenied):
                        raise
                    raise KeyNotFound(
                        f"{error}: a root names it: run `weightvc fsck` there, then mirror again; what was copied "
                        "stays"
                    ) from None
                failure, done = error, False
            if attempt is not None:
                total = _sum(total, attempt.done)
            if done and total is not None:
                return total
        if isinstance(failure, Expired | AccessDenied):
            raise failure
        raise Conflict(
            f"{self._target.store.url}: the repositories changed {ATTEMPTS} times under the mirror ({failure}): run "
            "it again"
        )


def _sum(total: Mirrored | None, done: Mirrored) -> Mirrored:
    if total is None:
        return done
    for name in ("versions", "records", "ways", "objects", "nbytes", "swaps"):
        setattr(done, name, getattr(done, name) + getattr(total, name))
    done.old, done.rewound = total.old, total.rewound or done.rewound
    return done


class _Attempt:
    """One plan, made of one root of each side."""

    def __init__(
        self,
        mirroring: Mirroring,
        here: swap.Seen,
        there: swap.Seen,
        stop: threading.Event | None,
        patience: float,
    ) -> None:
        self._mirroring = mirroring
        self._source = mirroring._source
        self._target = mirroring._target
        self._there = there
        self._stop = stop
        self._patience = patience
        if here.root.repository == there.root.repository:
            raise Refused(
                f"{self._target.store.url} is the repository that is mirrored, or a copy of its objects: make "
                "another with `weightvc init`, and name that"
            )
        self._from = Refs(self._source, here.root)
        self._to = Refs(self._target, there.root)
        self._here = here.root
        named = mirroring._branch
        self.branch = here.root.default if named in ("HEAD", "@") else check_name(named)
        head = here.root.branches.get(self.branch)
        if head is None:
            with suppress(RefNotFound):
                self._from.resolve(self.branch)
                raise BadName(
                    f"only a branch can be mirrored: {self.branch!r} is a tag or an id in {self._source.store.url}"
                )
            raise RefNotFound(
                f"{self._source.store.url} has no branch {self.branch!r}, or no version on it yet: nothing is "
                "mirrored"
            )
        self._head = self._from.entry(head)
        assert self._head.version is not None
        self._old = there.root.branches.get(self.branch)
        self.done = Mirrored(self.branch, self._head.version, self._old)
        self._check()
        self._carrier = Carrier(self._source, self._target, self._wrote)
        self._total = 0

    @property
    def sequence(self) -> int:
        """The sequence number of the mirror's root that it goes by."""
        return self._there.root.sequence

    def _check(self) -> None:
        """The mirror's branch is where the source's once was."""
        if self._old is None:
            if self.branch in self._to.tags():
                raise Conflict(
                    f"{self._target.store.url} has a tag {self.branch!r}, which the branch would hide: delete the "
                    "tag there, or mirror to another place"
                )
            return
        if self._old == self._head.new:
            return
        if self._from.find(self._old) is None:
            raise BranchMoved(
                f"{self._target.store.url} has versions of its own on {self.branch!r}: its head is {self._old[:12]}, "
                f"which {self._source.store.url} does not know. Nothing was changed. Give them a branch there "
                f"(`weightvc branch NAME {self.branch}`), then `weightvc reset {self.branch} REF --rewind` to a "
                "version that both have, and mirror again",
                branch=self.branch,
                expected=self._head.new,
                head=self._old,
            )
        self.done.rewound = not self._from.descends(self._head, self._old)

    def run(self) -> None:
        """Copy what is missing, and move the branch."""
        lack = Lack(
            self._from, self._to, self._head, self._mirroring._last, self._carrier.learn, self._source.store.url
        )
        cut = list(batches(lack.items()))
        self._total = sum(way.nbytes for batch in cut for item in batch for way in item.ways)
        for i, batch in enumerate(cut or [[]]):
            if self._stop is not None and self._stop.is_set():
                return
            with self._pinned():
                self._carrier.copy(batch, self._there.root.sequence)
                self._publish(batch, final=i >= len(cut) - 1)
        self._further_ways()

    # Copying

    def _wrote(self, nbytes: int) -> None:
        self.done.objects += 1
        self.done.nbytes += nbytes
        if self._mirroring._progress is not None:
            self._mirroring._progress(self.done.nbytes, max(self._total, self.done.nbytes))

    def _pinned(self) -> pins.Holder:
        """What takes long asks the mirror's collector to wait, as a commit does; at once where it was overtaken."""
        return pins.Holder(self._target.store, begin=self._there.root.sequence, after=self._patience)

    # Publishing

    def _publish(self, batch: Sequence[Item], *, final: bool) -> None:
        """Catalogue a batch by one swap, and with the last one move the branch."""
        transaction = key.Transaction(self._there.root.sequence)
        published: list[Item] = []

        def make(root: Root) -> Root:
            published.clear()
            if final and root.branches.get(self.branch) != self._old:
                raise _Again(f"the branch {self.branch!r} of the mirror moved")
            known = Refs(self._target, root)
            _check_named(known, batch)
            sequence = root.sequence + 1
            edits: dict[str, Entry] = {}
            fresh: list[Entry] = []
            for item in batch:
                have = known.find(item.id)
                if have is None:
                    fresh.append(_entry(item, sequence))
                    published.append(item)
                elif (new := _filled(have, item)) is not None:
                    edits[item.id] = new
                    published.append(item)
            sound = {item.id for item in published if item.place is not None}
            for item in published:
                for source in item.sources if item.place is not None else ():
                    there = known.find(source)
                    if source not in sound and (there is None or there.place is None):
                        raise _Again(f"the mirror has let go of version {source[:12]}")
            tail, segments = root.tail, root.segments
            if edits:
                tail, segments = rewritten(self._target, root, transaction, lambda entry: edits.get(entry.new or ""))
            branches = root.branches
            if final:
                fresh = self._line(fresh, known, sequence)
                branches = {**branches, self.branch: self._head.new or ""}
            if not fresh and not edits and branches == root.branches:
                raise _Nothing
            return root.next(tail=(*tail, *fresh), segments=segments, branches=branches)

        try:
            self._there = swap.change(self._target, make, transaction, self._there)
        except _Nothing:
            return
        self._count(published)

    def _count(self, published: Sequence[Item]) -> None:
        self.done.swaps += 1
        for item in published:
            self.done.versions += item.place is not None
            self.done.records += item.place is None
            self._carrier.landed(item)

    def _line(self, fresh: Sequence[Entry], known: Refs, sequence: int) -> list[Entry]:
        """The entries of the last batch, so that the mirror's reflog tells how its branch moved: by the commits where
        they lead on from where it was, else by one entry that says so."""
        head = self._head.new or ""
        if self._old == head:
            return list(fresh)
        out = list(fresh)
        index = {entry.new: i for i, entry in enumerate(out)}
        if head in index and not self.done.rewound:
            line: list[int] = []
            at: str | None = head
            while at in index:
                line.append(index[at])
                version = out[index[at]].version
                at = version.parents[0] if version is not None and version.parents else None
            before = self._old
            for i in reversed(line):
                out[i] = replace(out[i], name=self.branch, old=before)
                before = out[i].new
            return out
        message = f"mirrored from {self._source.store.url}"[:1000]
        op = "branch" if self._old is None else "reset"
        now, author = self._mirroring._now(), self._mirroring._author
        return [*out, Entry(op, sequence, now, author, self.branch, self._old, head, message)]

    # Ways that came later

    def _further_ways(self) -> None:
        """Copy what the source's compaction has added since to versions that the mirror has."""
        ways = [way.manifest for entry in self._here.tail if entry.place is not None for way in entry.place.ways]
        looked = self._here.segments, ways
        if looked == self._mirroring._looked:
            return
        known = Refs(self._target, self._there.root)
        found = [item for entry in self._from.catalogue if (item := extended(entry, known)) is not None]
        found.sort(key=lambda item: order(item.entry))
        for batch in batches(found):
            if self._stop is not None and self._stop.is_set():
                return
            with self._pinned():
                self._carrier.copy(batch, self._there.root.sequence)
                self._add_ways(batch)
        self._mirroring._looked = looked

    def _add_ways(self, batch: Sequence[Item]) -> None:
        transaction = key.Transaction(self._there.root.sequence)
        added: list[int] = []

        def make(root: Root) -> Root:
            known = Refs(self._target, root)
            edits: dict[str, Entry] = {}
            added.clear()
            for item in batch:
                have = known.find(item.id)
                assert item.place is not None
                if have is None or have.place is None or have.gone or shared(have.place) != shared(item.place):
                    continue
                more = usable(have, item.place.all_ways, known)
                if more:
                    edits[item.id] = replace(have, place=replace(have.place, ways=(*have.place.ways, *more)))
                    added.append(len(more))
            if not edits:
                raise _Nothing
            tail, segments = rewritten(self._target, root, transaction, lambda entry: edits.get(entry.new or ""))
            return root.next(tail=tail, segments=segments)

        try:
            self._there = swap.change(self._target, make, transaction, self._there)
        except _Nothing:
            return
        self.done.swaps += 1
        self.done.ways += sum(added)


def _entry(item: Item, sequence: int) -> Entry:
    """A version as the mirror catalogues it, on no branch. Raises Unsupported for keys in a field not known here."""
    old = item.entry
    if next(key.found(old.extra), None) is not None:
        raise Unsupported(f"version {item.id[:12]} names objects in a field that is not known here: upgrade weightvc")
    if item.place is None:
        return replace(
            old,
            op=EXPIRED,
            sequence=sequence,
            name=None,
            old=None,
            place=None,
            expired=sequence,
            released=(),
            extra={},
        )
    expired = None if item.kept else sequence
    return replace(
        old, op=COMMIT, sequence=sequence, name=None, old=None, place=item.place, expired=expired, released=()
    )


def _filled(have: Entry, item: Item) -> Entry | None:
    """A catalogued version that is to be had again; None where nothing changes."""
    if have.place is not None:
        return replace(have, expired=None) if item.kept and have.expired is not None else None
    if item.place is None:
        return None
    return replace(have, op=COMMIT, place=item.place, expired=None if item.kept else have.expired)


def _check_named(known: Refs, batch: Sequence[Item]) -> None:
    """The swap rule: what is not of this transaction is named by the root that is replaced."""
    for item in batch:
        for name, via in item.reused:
            there = known.find(via)
            if there is None or name not in live.named(there):
                raise _Again(f"the mirror has let go of version {via[:12]}")
