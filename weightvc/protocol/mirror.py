"""Mirroring: a branch of one repository is copied to another. Objects go first, and the ref last.

A mirror is a repository of its own, which keeps its own rules: what comes in is an upload like any other, under fresh
keys of transactions that began at the mirror's root, and one swap publishes it. So its collector, its writers and
other mirrors need not know of this one. Versions keep their ids, since no id depends on where objects lie. Of what is
copied only manifests change, in which keys stand: packs, schemas, layouts and files are the same bytes, each seen to
be what its key says before it is written.

The source is only read. What its collector takes meanwhile is looked for in its newest root, by planning anew.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from weightvc.errors import (
    BranchMoved,
    Conflict,
    Corrupt,
    Expired,
    KeyNotFound,
    RefNotFound,
    Refused,
    StoreError,
    Unsupported,
)
from weightvc.objects import frame, key, manifest
from weightvc.objects.catalogue import COMMIT, EXPIRED, Entry, Place, Way
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.protocol import live, parallel, pins, swap
from weightvc.protocol.plan import needed
from weightvc.protocol.refs import Refs, check_name
from weightvc.protocol.rewrite import rewritten
from weightvc.protocol.shelf import Shelf

BATCH: Final = 256
"""Versions that one swap publishes with their weights at most; a kill loses what one batch has uploaded."""
BATCH_BYTES: Final = 4 << 30
"""And their bytes, about."""
BATCH_RECORDS: Final = 2048
"""And versions at all: those that have expired are records alone."""
MANIFESTS: Final = 8
"""Versions that are copied side by side."""
PACKS: Final = 4
"""Packs in memory at once, of up to 64 MiB each."""
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


@dataclass(slots=True)
class _Item:
    """A version on its way: `ways`, the one first by which it is reached in the mirror; none for a record alone."""

    entry: Entry
    ways: tuple[Way, ...]
    kept: bool
    """Whether it is promised to readers there; else it is a step to others, or a record."""
    place: Place | None = None
    reused: list[tuple[str, str]] = field(default_factory=list)
    """Keys that the mirror had, each with the version that names it there."""
    into: Entry | None = None
    """The mirror's entry that gets further ways: they name what it names."""

    @property
    def id(self) -> str:
        assert self.entry.new is not None
        return self.entry.new

    @property
    def sources(self) -> Iterator[str]:
        """The version that the first way starts from, unless it has a base."""
        edges = self.ways[0].edges if self.ways else ()
        if all(edge.source is not None for edge in edges):
            yield from (str(edge.source) for edge in edges)


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
            except KeyNotFound as error:
                now = [swap.must_read(shelf.store).root.sequence for shelf in (self._source, self._target)]
                before = there.root.sequence if attempt is None else attempt.sequence
                if now == [here.root.sequence, before]:
                    raise KeyNotFound(
                        f"{error}: a root names it: run `weightvc fsck` there, then mirror again; what was copied "
                        "stays"
                    ) from None
                failure, done = error, False
            if attempt is not None:
                total = _sum(total, attempt.done)
            if done and total is not None:
                return total
        if isinstance(failure, Expired):
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
            raise RefNotFound(
                f"{self._source.store.url} has no branch {self.branch!r}, or no version on it yet: nothing is "
                "mirrored"
            )
        self._head = self._from.entry(head)
        assert self._head.version is not None
        self._old = there.root.branches.get(self.branch)
        self.done = Mirrored(self.branch, self._head.version, self._old)
        self._check()
        self._shared: dict[tuple[str, str], tuple[str, str | None]] = {}
        """What the mirror has of small objects, by kind and digest: the key, and the version that names it there
        (None while it is on its way)."""
        self._lock = threading.Lock()
        self._counts = threading.Lock()
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
        batches = list(_batches(self._plan()))
        self._total = sum(way.nbytes for batch in batches for item in batch for way in item.ways)
        for i, batch in enumerate(batches or [[]]):
            if self._stop is not None and self._stop.is_set():
                return
            with self._pinned():
                self._copy(batch)
                self._publish(batch, final=i >= len(batches) - 1)
        self._further_ways()

    # What is missing

    def _there_already(self, ident: str) -> bool:
        found = self._to.find(ident)
        return found is not None and found.place is not None

    def _plan(self) -> list[_Item]:
        """What has to be catalogued in the mirror, parents first, and the ways by which it is read."""
        missing = self._missing([self._head])
        kept = {ident for ident, entry in missing.items() if not entry.gone}
        head = self._head.new or ""
        if self._mirroring._last is not None:
            kept &= self._newest(self._mirroring._last)
        there = self._to.find(head)
        # A branch that was reset may lead to what the mirror has let go of: it is fetched again, or promised again.
        if there is None or there.place is None:
            kept.add(head)
        elif there.gone:
            missing[head] = self._head
        steps = self._steps([*missing.values(), self._head], kept)
        wanted = {ident: [step.way] for ident, step in steps.items()}
        known = steps.keys() | missing.keys()
        for ident in kept & wanted.keys():
            entry = steps[ident].entry
            assert entry.place is not None
            wanted[ident] += [
                way
                for way in entry.place.all_ways
                if way not in wanted[ident]
                and any(e.source is None or e.source in steps or self._there_already(e.source) for e in way.edges)
                and all(e.source is None or e.source in known or self._to.find(e.source) for e in way.edges)
            ]
        # Steps may lie beside the branch; what they start from, and descend from, is part of the history too.
        beside = [self._from.find(str(edge.source)) for ways in wanted.values() for w in ways for edge in w.edges]
        missing |= self._missing([*(step.entry for step in steps.values()), *(e for e in beside if e is not None)])
        entries = {**missing, **{ident: step.entry for ident, step in steps.items()}}
        return [
            _Item(entry, tuple(wanted.get(ident, ())), ident in kept or ident == head)
            for ident, entry in sorted(entries.items(), key=lambda one: _order(one[1]))
        ]

    def _missing(self, starts: Iterable[Entry]) -> dict[str, Entry]:
        """What some versions descend from, and they, as far as the mirror has not catalogued them."""
        found: dict[str, Entry] = {}
        todo = list(starts)
        while todo:
            entry = todo.pop()
            ident = entry.new or ""
            if ident in found:
                continue
            there = self._to.find(ident)
            if there is not None:
                self._learn(there)
                continue
            found[ident] = entry
            assert entry.version is not None
            todo += [self._from.entry(parent) for parent in entry.version.parents if parent not in found]
        return found

    def _newest(self, count: int) -> set[str]:
        found: set[str] = set()
        for entry in self._from.ancestors(self._head):
            if not entry.gone:
                found.add(entry.new or "")
                if len(found) == count:
                    break
        return found

    def _steps(self, entries: Sequence[Entry], kept: set[str]) -> dict[str, Any]:
        """The steps that lead to what is kept, from what the mirror has: within `entries` if that is enough."""
        for among in (entries, self._from.catalogue):
            found = {entry.new: entry for entry in among if entry.place is not None}
            places = [entry.place for entry in found.values() if entry.place is not None]
            sources = {edge.source for place in places for way in place.all_ways for edge in way.edges}
            held = {one for one in sources if one is not None and one not in kept and self._there_already(one)}
            steps = needed(found.values(), kept, held)
            if kept <= steps.keys():
                for ident in held:
                    self._learn(self._to.entry(ident))
                return steps
        lost = min(kept - steps.keys())
        raise Corrupt(
            f"{self._source.store.url}: no base and no patches lead to version {lost[:12]}: run `weightvc fsck` there"
        )

    def _learn(self, there: Entry) -> None:
        """The mirror has a version: what it names need not be copied again."""
        if there.place is not None:
            for name in _small(there.place):
                parsed = key.parse(name)
                self._shared.setdefault((parsed.kind, parsed.digest), (name, there.new))

    # Copying

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """What takes long asks the mirror's collector to wait, as a commit does."""
        holder = pins.Holder(self._target.store, begin=self._there.root.sequence, after=self._patience)
        if self._patience <= 0:
            with suppress(StoreError):  # a courtesy: it may do without
                holder.take()
        with holder:
            yield

    def _copy(self, batch: Sequence[_Item]) -> None:
        """Upload what a batch needs, under transactions that begin now."""
        todo = [item for item in batch if item.ways]
        if not todo:
            return
        begin = self._there.root.sequence
        # What was uploaded before and did not land is named by nothing: it must not be referred to.
        self._shared = {what: known for what, known in self._shared.items() if known[1] is not None}
        with (
            ThreadPoolExecutor(PACKS, "weightvc-mirror-packs") as packs,
            ThreadPoolExecutor(MANIFESTS, "weightvc-mirror") as pool,
        ):

            def work(item: _Item) -> None:
                made = [self._way(item, way, key.Transaction(begin), packs) for way in item.ways]
                (first, schema, layout, files), *more = made
                item.place = Place(
                    first.manifest,
                    schema,
                    layout,
                    files,
                    first.packs,
                    first.edges,
                    first.nbytes,
                    tuple(one[0] for one in more),
                )

            for _ in parallel.ordered(pool, work, todo, MANIFESTS):
                pass

    def _way(
        self, item: _Item, way: Way, transaction: key.Transaction, pool: ThreadPoolExecutor
    ) -> tuple[Way, str, str | None, tuple[str, ...]]:
        """Copy one manifest and what it names. Returns the way, and the mirror's schema, layout and files."""
        name, place = way.manifest, item.entry.place
        assert place is not None
        data = self._get(name)
        made = manifest.decode(data, name)
        said = made.version.id, made.schema, made.layout, sorted(made.files.values())
        if said != (item.id, place.schema, place.layout, sorted(place.files)):
            raise Corrupt(f"{self._source.store.url}: {name} is corrupt: it is not what the catalogue says of it")
        keys: dict[str, str] = {}
        nbytes = 0
        for small in _small(place):
            keys[small], size = self._small(item, small, transaction)
            nbytes += size
        streams = [made.base, made.patch.stream if made.patch is not None else None]
        packs = [pack for stream in streams if stream is not None for pack, _ in stream.packs]
        copied = parallel.ordered(pool, lambda pack: self._object(pack, transaction), packs, PACKS)
        for pack, (to, size) in zip(packs, copied, strict=True):
            keys[pack] = to
            nbytes += size
        head, sections = frame.decode(frame.MANIFEST, data, name)
        new = frame.encode(frame.MANIFEST, _renamed(head, keys, name), sections)
        to = self._put(transaction, "manifest", new)
        nbytes += len(new)
        layout = None if place.layout is None else keys[place.layout]
        return (
            Way(to, way.packs, way.edges, nbytes),
            keys[place.schema],
            layout,
            tuple(keys[file] for file in place.files),
        )

    def _small(self, item: _Item, name: str, transaction: key.Transaction) -> tuple[str, int]:
        """The mirror's key of a schema, a layout or a file, and the bytes that were written for it."""
        parsed = key.parse(name)
        what = parsed.kind, parsed.digest
        if item.into is not None and item.into.place is not None:
            there = {key.parse(one).digest: one for one in _small(item.into.place) if one.startswith(parsed.kind)}
            return there[parsed.digest], 0
        with self._lock:
            size = 0
            if what not in self._shared:
                to, size = self._object(name, transaction)
                self._shared[what] = to, None
            to, via = self._shared[what]
            if via is not None:
                item.reused.append((to, via))
            return to, size

    def _object(self, name: str, transaction: key.Transaction) -> tuple[str, int]:
        data = self._get(name)
        return self._put(transaction, key.parse(name).kind, data), len(data)

    def _get(self, name: str) -> frame.Buffer:
        """An object of the source, seen to be what its key says."""
        try:
            return self._source.get(name, keep=False)
        except Corrupt as error:
            raise Corrupt(
                f"{self._source.store.url}: {error}. It is not copied: mend it with `weightvc fsck --repair` there, "
                "then mirror again; what was copied stays"
            ) from None

    def _put(self, transaction: key.Transaction, kind: str, data: frame.Buffer) -> str:
        name = self._target.put(transaction, kind, data, keep=False)
        with self._counts:
            self.done.objects += 1
            self.done.nbytes += len(data)
            if self._mirroring._progress is not None:
                self._mirroring._progress(self.done.nbytes, max(self._total, self.done.nbytes))
        return name

    # Publishing

    def _publish(self, batch: Sequence[_Item], *, final: bool) -> None:
        """Catalogue a batch by one swap, and with the last one move the branch."""
        transaction = key.Transaction(self._there.root.sequence)
        published: list[_Item] = []

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

    def _count(self, published: Sequence[_Item]) -> None:
        self.done.swaps += 1
        for item in published:
            self.done.versions += item.place is not None
            self.done.records += item.place is None
            if item.place is not None:
                for name in _small(item.place):
                    parsed = key.parse(name)
                    self._shared[parsed.kind, parsed.digest] = name, item.id

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
        found = [item for entry in self._from.catalogue if (item := _extended(entry, known)) is not None]
        found.sort(key=lambda item: _order(item.entry))
        for batch in _batches(found):
            if self._stop is not None and self._stop.is_set():
                return
            with self._pinned():
                self._copy(batch)
                self._add_ways(batch)
        self._mirroring._looked = looked

    def _add_ways(self, batch: Sequence[_Item]) -> None:
        transaction = key.Transaction(self._there.root.sequence)
        added: list[int] = []

        def make(root: Root) -> Root:
            known = Refs(self._target, root)
            edits: dict[str, Entry] = {}
            added.clear()
            for item in batch:
                have = known.find(item.id)
                assert item.place is not None
                if have is None or have.place is None or have.gone or _small(have.place) != _small(item.place):
                    continue
                more = _usable(have, item.place.all_ways, known)
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


def _extended(entry: Entry, known: Refs) -> _Item | None:
    """The ways of a version that the mirror lacks, and can use."""
    if entry.gone or entry.place is None or not entry.place.ways:
        return None
    there = known.find(entry.new or "")
    if there is None or there.gone:
        return None
    ways = _usable(there, entry.place.all_ways, known)
    return _Item(entry, ways, True, into=there) if ways else None


def _usable(there: Entry, ways: Iterable[Way], known: Refs) -> tuple[Way, ...]:
    """Those ways that an entry of the mirror has not, and that start from what is promised there."""
    assert there.place is not None
    have = {edge.source for way in there.place.all_ways for edge in way.edges}

    def promised(source: str | None) -> bool:
        found = known.find(source) if source is not None else None
        return source is None or (found is not None and not found.gone)

    return tuple(way for way in ways if all(e.source not in have and promised(e.source) for e in way.edges))


def _order(entry: Entry) -> tuple[int, int, str]:
    assert entry.version is not None
    return entry.version.generation, entry.sequence, entry.version.id


def _small(place: Place) -> tuple[str, ...]:
    """Keys of what versions share."""
    return (place.schema, *(() if place.layout is None else (place.layout,)), *place.files)


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Cut into what one swap publishes, so that nothing is published before what it is a patch against. Further ways
    that start from a later batch are left out: they are copied once all versions are there."""
    number = {item.id: i for i, item in enumerate(items) if item.into is None}
    batch: list[_Item] = []
    placed = nbytes = until = 0
    for i, item in enumerate(items):
        batch.append(item)
        placed += bool(item.ways)
        nbytes += sum(way.nbytes for way in item.ways)
        # A patch back starts from a version that comes later.
        first = [edge.source for way in item.ways[:1] for edge in way.edges]
        until = max([until, *(number.get(source, 0) for source in first if source is not None)])
        full = placed >= BATCH or nbytes >= BATCH_BYTES or len(batch) >= BATCH_RECORDS
        if i + 1 == len(items) or (i >= until and full):
            for one in batch:
                one.ways = tuple(
                    way
                    for way in one.ways
                    if all(edge.source is None or number.get(edge.source, 0) <= i for edge in way.edges)
                )
            yield batch
            batch, placed, nbytes = [], 0, 0


def _entry(item: _Item, sequence: int) -> Entry:
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


def _filled(have: Entry, item: _Item) -> Entry | None:
    """A catalogued version that is to be had again; None where nothing changes."""
    if have.place is not None:
        return replace(have, expired=None) if item.kept and have.expired is not None else None
    if item.place is None:
        return None
    return replace(have, op=COMMIT, place=item.place, expired=None if item.kept else have.expired)


def _check_named(known: Refs, batch: Sequence[_Item]) -> None:
    """The swap rule: what is not of this transaction is named by the root that is replaced."""
    for item in batch:
        for name, via in item.reused:
            there = known.find(via)
            if there is None or name not in live.named(there):
                raise _Again(f"the mirror has let go of version {via[:12]}")


def _renamed(head: Mapping[str, Any], keys: Mapping[str, str], what: str) -> dict[str, Any]:
    """The head of a manifest with the mirror's keys in it; all other fields as they are.

    Raises Unsupported for a key in a field that is not known here.
    """
    new = dict(head)
    new["schema"] = [head["schema"][0], keys[head["schema"][1]]]
    new["layout"] = None if head["layout"] is None else keys[head["layout"]]
    new["files"] = {content: keys[name] for content, name in head["files"].items()}
    for stream in ("base", "patch"):
        if stream in head:
            new[stream] = {**head[stream], "packs": [[keys[name], size] for name, size in head[stream]["packs"]]}
    if set(key.found(new)).difference(keys.values()):
        raise Unsupported(f"{what} names objects in a field that is not known here: upgrade weightvc")
    return new
