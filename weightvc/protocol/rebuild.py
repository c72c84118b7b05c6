"""Rebuilding a lost root: from its newest copy, the segments, and the manifests that nobody names.

Why no collector can delete afterwards what the new root names. A collector deletes what a list of the dead says, and
each list was published by a root that did not name it. Those roots are lost, so the new root, made of an older copy,
might name what is on such a list. But a list lies in the store until all that it names is gone; and what is gone
does not come back, since names are not used twice. So every list that anybody may still be working through is there
to be read, and what is on one is treated as if it were gone already. (A list that cannot be read counts as one of
all that began before it.) A collector that is still marking swaps against the lost root's ETag: it loses, and marks
anew.

Why no writer can publish what the new root does not keep. Its sequence number, which is its horizon too, is higher
than that of any root that there can have been, so whoever began before is refused and begins again. Sequence numbers
are known from keys, copies and entries, all but the newest: a root that is replaced without an upload adds an entry
to the tail, and some 70 of them are followed by a segment, which is one. JUMP is far more than that.

Who has claimed a branch is not known for sure either, so nobody has: trainers are refused until they claim it again.

What the old root was, is kept under lost/. All uploads come before the one write that publishes.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from weightvc.errors import (
    Conflict,
    Corrupt,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    Refused,
    StateUnknown,
    Unavailable,
)
from weightvc.objects import frame, key
from weightvc.objects import root as roots
from weightvc.objects.catalogue import EXPIRED, SEGMENT, Entry, SegmentRef
from weightvc.objects.root import Root
from weightvc.protocol import live, rewrite, salvage, swap
from weightvc.protocol.refs import encode_tags, tag_page
from weightvc.protocol.salvage import Condemned, History
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.survey import Sufferer, Witness, sufferer

COPIES: Final = "root.d/"
"""Where copies of the root lie."""
LOST: Final = "lost/root-"
"""Where the bytes of a root that was rebuilt are kept, by their digest."""
_NUMBERED: Final = re.compile(r"root\.d/([0-9]{1,19})(?![0-9])")
JUMP: Final = 1 << 20
"""How far past all sequence numbers that are known the new root begins."""


@dataclass(slots=True)
class Rebuilt:
    """A root that was made anew."""

    sequence: int
    copy: str | None
    """The key of the copy that it was made of; None: of what lies in the store alone."""
    kept: str | None
    """The key under which the old root's bytes are kept; None if there was none."""
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    versions: int = 0
    offered: list[Sufferer] = field(default_factory=list)
    """Versions that the copy does not know: published since, or uploaded and never published."""
    adopted: list[Sufferer] = field(default_factory=list)
    """Those of them that were catalogued."""
    expired: list[Sufferer] = field(default_factory=list)
    """Versions that were let go of since, and are being collected."""
    lacking: list[Sufferer] = field(default_factory=list)
    """Versions of which objects are missing: fsck says which."""
    notes: list[str] = field(default_factory=list)


def rebuild(shelf: Shelf, *, adopt: bool) -> Rebuilt:
    """Write a root where it is missing or corrupt.

    Raises Refused if it can be read, or if without `adopt` nothing would be in it, KeyNotFound if nothing is there to
    make one of, Conflict if somebody else wrote one meanwhile, and what the store raises.
    """
    old, etag = _lost_root(shelf)
    builder = _Builder(shelf, adopt=adopt)
    made = builder.made
    if made.offered and not adopt and not made.branches:
        raise Refused(
            f"{shelf.store.url}: no operation is known, and manifests alone tell of versions ({len(made.offered)}): "
            "catalogue them with --adopt (adopt=True)"
        )
    new = builder.write()
    if old is not None:
        made.kept = LOST + frame.digest(old).hex()
        shelf.store.put(made.kept, old)
    _publish(shelf, new, etag)
    return made


def prospect(shelf: Shelf) -> Rebuilt:
    """What rebuild() would make, without writing anything. Raises as it does."""
    return _Builder(shelf, adopt=False).made


def _lost_root(shelf: Shelf) -> tuple[bytes | None, str | None]:
    """The bytes and the ETag of a root that cannot be read; None for both if there is none."""
    for last in (False, True):
        try:
            got = shelf.store.get(key.ROOT)
        except KeyNotFound:
            if last:
                return None, None
            continue
        assert got is not None
        try:
            roots.decode(got.data, f"{shelf.store.url}: root")
            break
        except Corrupt:
            if last:
                return got.data, got.etag
    raise Refused(f"{shelf.store.url}: the root can be read: `weightvc fsck --repair` mends what it names")


def _newest_copy(shelf: Witness, listed: Mapping[str, int]) -> tuple[str | None, Root | None]:
    best: tuple[str | None, Root | None] = (None, None)
    for name in listed:
        if not name.startswith(COPIES):
            continue
        try:
            got = shelf.store.get(name)
            assert got is not None
            root = roots.decode(got.data, name)
        except (Corrupt, KeyNotFound):
            continue
        if best[1] is None or root.sequence > best[1].sequence:
            best = name, root
    return best


def _sequence(listed: Iterable[str], copy: Root | None) -> int:
    known = [0 if copy is None else max(copy.sequence, copy.horizon)]
    for name in listed:
        if (match := _NUMBERED.match(name)) is not None:
            known.append(int(match[1]))
        with contextlib.suppress(Corrupt):
            known.append(key.parse(name).begin)
    return max(known) + JUMP


class _Builder:
    """Puts a root together: `made` tells of it, write() uploads what it needs."""

    def __init__(self, shelf: Shelf, *, adopt: bool) -> None:
        self._shelf = shelf
        self._witness = witness = Witness(Shelf(shelf.store, None))
        self._listed = listed = {one.key: one.size for one in shelf.store.list()}
        name, self._copy = _newest_copy(witness, listed)
        if self._copy is None and not any(name.startswith(("manifest/", "segment/")) for name in listed):
            raise KeyNotFound(f"{shelf.store.url}: nothing is there to make a root of")
        self.made = Rebuilt(_sequence(listed, self._copy), name, None)
        self._adopt = adopt
        self._doomed: Condemned = salvage.condemned(witness, listed)
        self._operations: list[Entry] = []
        self._default = "main"
        self._deleted: dict[str, str] = {}
        self._write = secrets.token_hex(16)
        self._prepare()

    def _prepare(self) -> None:
        made, copy = self.made, self._copy
        history = self._history()
        entries, offers = self._entries(history)
        operations = sorted([*entries.values(), *history.moves.values()], key=_order)
        made.sequence = max([made.sequence, *(entry.sequence + JUMP for entry in operations)])
        since = [e for e in operations if copy is None or e.sequence > copy.sequence]
        made.branches = salvage.branches(since, copy.branches if copy is not None else None)
        self._default = copy.default if copy is not None else "main"
        for entry in since:
            if entry.op == "default" and entry.new is not None:
                self._default = entry.new
        made.tags, self._deleted = self._tags(operations, since)
        self._operations = operations + self._offers(entries, offers, made.branches)
        self._settle(entries, made.branches, made.tags)
        placed = [entry for entry in self._operations if entry.place is not None]
        made.versions = len(placed)
        made.lacking = [sufferer(e) for e in placed if any(name not in self._listed for name in live.named(e))]

    def write(self) -> Root:
        """The new root; its segments and its page of tags are uploaded."""
        made = self.made
        transaction = key.Transaction(made.sequence)
        page = None
        if made.tags or self._deleted:
            page = self._shelf.put(transaction, "page", encode_tags(made.tags, self._deleted))
        operations = self._operations
        tail = operations[-swap.RECENT :]
        new = self._new(page, tail, ())
        if len(roots.encode(replace(new, branches={}, writers={}))) > roots.LIMIT:
            tail = operations[-1:]
        rest = operations[: len(operations) - len(tail)]
        segments: list[SegmentRef] = []
        for at in range(0, len(rest), SEGMENT):
            segments += rewrite.put(self._shelf, transaction, rest[at : at + SEGMENT])
        return self._new(page, tail, segments)

    def _history(self) -> History:
        """All operations that are known: what any segment says, and the copy's tail."""
        history, copy = History(), self._copy
        taken = copy is None
        for begin, entries in salvage.segments(self._witness, self._listed):
            if copy is not None and not taken and begin < copy.sequence:
                history.add(copy.tail)
                taken = True
            history.add(entries)
        if copy is not None and not taken:
            history.add(copy.tail)
        return history

    def _entries(self, history: History) -> tuple[dict[str, Entry], dict[str, list[Entry]]]:
        """The entry of each version that is known, and what manifests offer beside, by version."""
        named = {
            way.manifest
            for forms in history.versions.values()
            for form in forms
            if form.place is not None
            for way in form.place.all_ways
        }
        unnamed = [name for name in self._listed if name.startswith("manifest/") and name not in named]
        offers = salvage.manifests(self._witness, self._listed, salvage.sound(unnamed, self._doomed), self.made.notes)
        entries = {
            ident: salvage.best(forms, offers.get(ident, []), self._doomed, self._listed)
            for ident, forms in history.versions.items()
        }
        for ident, entry in entries.items():
            if entry.op == EXPIRED and all(form.op != EXPIRED for form in history.versions[ident]):
                self.made.expired.append(sufferer(entry))
        return entries, {ident: forms for ident, forms in offers.items() if ident not in entries}

    def _tags(self, operations: list[Entry], since: list[Entry]) -> tuple[dict[str, str], dict[str, str]]:
        """Tags after all operations; or as the newest page has them, if it is newer than those that are known."""
        copy = self._copy
        pages = [name for name in self._listed if name.startswith("page/") and self._is_tags(name)]
        last = max((e.sequence for e in operations if e.op in ("tag", "untag")), default=copy.sequence if copy else 0)
        for name in sorted(pages, key=lambda one: key.parse(one).begin, reverse=True):
            if key.parse(name).begin < last:
                break
            with contextlib.suppress(Corrupt, KeyNotFound):
                found = tag_page(self._witness, self._new(name, [], ()))
                self.made.notes.append(f"tags are as {name} has them, the newest page, if it was ever published")
                return found
        if copy is not None:
            with contextlib.suppress(Corrupt, KeyNotFound):
                return salvage.tags(since, tag_page(self._witness, copy))
        return salvage.tags(operations)

    def _is_tags(self, name: str) -> bool:
        try:
            return self._witness.page(name).get("weightvc") == "tags 1"
        except (Corrupt, KeyNotFound):
            return False

    def _offers(
        self, entries: dict[str, Entry], offers: dict[str, list[Entry]], branches: dict[str, str]
    ) -> list[Entry]:
        """Versions that no operation tells of: listed, and with `adopt` catalogued where their parents are known.

        A version that another one was made on was surely published. One that nothing was made on may be the upload of
        a writer that was killed or lost a race: where two compete for a branch, it follows neither.
        """
        made = self.made
        new = sorted((forms[0] for forms in offers.values()), key=_order_of_versions)
        made.offered = [sufferer(entry) for entry in new]
        if not self._adopt:
            return []
        grounds = {parent for entry in new if entry.version is not None for parent in entry.version.parents}
        rivals: dict[tuple[str | None, str | None], list[Entry]] = {}
        for entry in new:
            rivals.setdefault((entry.name, entry.old), []).append(entry)
        out: list[Entry] = []
        for entry in new:
            assert entry.version is not None
            assert entry.place is not None
            needs = [*entry.version.parents, *(edge.source for edge in entry.place.edges if edge.source)]
            if any(ident not in entries for ident in needs):
                made.notes.append(f"version {entry.version.short} was passed over: what it was made on is not known")
                continue
            if entry.name is not None:
                entry = self._placed(entry, entry.name, rivals[entry.name, entry.old], grounds, branches)
            # When it was published is not known, only that it is newer than the rest.
            entry = replace(entry, sequence=made.sequence)
            entries[entry.new or ""] = entry
            out.append(entry)
        made.adopted = [sufferer(entry) for entry in out]
        return out

    def _placed(
        self, entry: Entry, branch: str, beside: list[Entry], grounds: set[str], branches: dict[str, str]
    ) -> Entry:
        """A version on its branch, which moves to it; or on none, if it is not clear that the branch was there."""
        assert entry.version is not None
        first = [one for one in beside if one.new in grounds] or beside
        if first == [entry] and branches.get(branch) in (None, entry.old):
            old = branches.get(branch)
            branches[branch] = entry.version.id
            return replace(entry, old=old)
        self.made.notes.append(
            f"version {entry.version.short} was made for {branch!r} beside others: it is catalogued, and no branch "
            f"was moved to it; `weightvc reset {branch} {entry.version.short} --rewind` does that"
        )
        return replace(entry, name=None, old=None)

    def _settle(self, entries: dict[str, Entry], branches: dict[str, str], tags: dict[str, str]) -> None:
        """Names whose versions have gone: a branch goes back to the nearest version that is there, a tag goes."""
        for name, head in [*branches.items()]:
            ident: str | None = head
            while ident is not None and ((entry := entries.get(ident)) is None or entry.place is None):
                parents = entry.version.parents if entry is not None and entry.version is not None else ()
                ident = parents[0] if parents else None
            if ident == head:
                continue
            if ident is None:
                del branches[name]
                self.made.notes.append(f"the branch {name!r} is gone: nothing of its history is there")
            else:
                branches[name] = ident
                self.made.notes.append(
                    f"the branch {name!r} was at {head[:12]}, which is not there any more: it is at {ident[:12]} now"
                )
        offered = {one.id for one in self.made.offered}
        for name, ident in [*tags.items()]:
            if (entry := entries.get(ident)) is None or entry.place is None:
                del tags[name]
                why = "is told by its manifest alone (--adopt)" if ident in offered else "is not there any more"
                self.made.notes.append(f"the tag {name!r} is gone: version {ident[:12]} {why}")

    def _new(self, page: str | None, tail: list[Entry], segments: Iterable[SegmentRef]) -> Root:
        made = self.made
        # What the copy says of the repository itself, fields of later writers among it, goes on.
        new = self._copy or roots.first(self._default, time.time_ns() // 1000, {})
        return replace(
            new,
            sequence=made.sequence,
            horizon=made.sequence,
            default=self._default,
            branches=made.branches,
            tags=page,
            tail=tuple(tail),
            segments=tuple(segments),
            ring=(self._write,),
            collector=None,
            # The copy may tell of an older epoch than the last: a trainer that was fenced off could write again.
            writers={},
        )


def _order(entry: Entry) -> tuple[int, int]:
    return entry.sequence, entry.version.generation if entry.version is not None else 0


def _order_of_versions(entry: Entry) -> tuple[int, int, str]:
    assert entry.version is not None
    return entry.version.generation, entry.sequence, entry.version.id


def _publish(shelf: Shelf, new: Root, etag: str | None) -> None:
    """Write the root over the one with `etag`, or where there is none; sure of it at the end."""
    body = roots.encode(new)
    url = shelf.store.url
    doubt: Exception | None = None
    for attempt in range(swap.ATTEMPTS):
        try:
            if etag is None:
                shelf.store.create(key.ROOT, body)
            else:
                shelf.store.swap(key.ROOT, body, etag)
            return
        except (PreconditionFailed, KeyExists, StateUnknown, Unavailable) as error:
            doubt = error
        found = ""
        with contextlib.suppress(KeyNotFound, Unavailable):
            got = shelf.store.get(key.ROOT)
            assert got is not None
            found = got.etag
            with contextlib.suppress(Corrupt):
                if new.write in roots.decode(got.data, f"{url}: root").ring:
                    return
        if found and found != etag:
            raise Conflict(f"{url}: somebody else wrote the root meanwhile: look at `weightvc log`") from doubt
        swap._pause(attempt)
    raise StateUnknown(f"{url}: whether the root was written is unknown ({doubt}): run `weightvc fsck`")
