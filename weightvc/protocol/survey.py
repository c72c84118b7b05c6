"""A survey of a repository: what its root names, what is there, what of it is bad, and which versions suffer.

One listing, and reads of the root, the segments and the page of tags. Sizes are known without reading more: a
transaction's objects have together the bytes that the catalogue says. Only where they have not is each of them read.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from weightvc.errors import Corrupt, Expired, KeyNotFound, NotFound, Unsupported, WeightvcError
from weightvc.objects import frame, key
from weightvc.objects.catalogue import EXPIRED, Entry, Place, Way
from weightvc.objects.manifest import Manifest
from weightvc.objects.root import Root
from weightvc.pool import Pool
from weightvc.protocol import live, parallel, swap
from weightvc.protocol.refs import Refs, tag_page
from weightvc.protocol.shelf import Shelf

READERS: Final = 4
"""Objects in memory at once, of up to 64 MiB each."""
SMALLEST: Final = frame.HEADER_SIZE
"""No object has fewer bytes than its header."""
WORK: Final = 4_000_000
"""Steps after which damaged objects are named with the versions that name them, no longer with all that suffer."""
STORED: Final = ("manifest", "pack", "schema", "layout", "file")
"""Kinds that a commit uploads before the root, and counts."""


@dataclass(frozen=True, slots=True)
class Sufferer:
    """A version that a damaged object is missed by."""

    id: str
    branch: str | None
    generation: int
    step: int | None


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that is missing or bad."""

    key: str
    fault: str
    referred: tuple[str, ...]
    """Who names it: "root", keys of segments and manifests, "version ID"."""
    lost: tuple[Sufferer, ...] = ()
    """Versions that no way leads to any more, because of this object among others."""
    files: tuple[Sufferer, ...] = ()
    """Versions whose weights can be read, and whose files cannot be written as they were."""
    elsewhere: tuple[Sufferer, ...] = ()
    """Versions that lose a way by it and have another."""


class Witness(Shelf):
    """A shelf that remembers which objects it saw good and which bad."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf.store, shelf.cache)
        self.good: set[str] = set()
        self.bad: dict[str, str] = {}

    def get(self, name: str, *, keep: bool = True) -> frame.Buffer:
        try:
            data = super().get(name, keep=keep)
        except (Corrupt, NotFound) as error:
            self.blame(name, error)
            raise
        self.good.add(name)
        return data

    def blame(self, name: str, error: WeightvcError) -> None:
        """An object is bad: remember why."""
        self.good.discard(name)
        if isinstance(error, KeyNotFound):
            self.bad[name] = "missing"
        else:
            self.bad.setdefault(name, str(error).removeprefix(name).removeprefix(" is corrupt: ").lstrip(": "))


@dataclass(slots=True)
class Survey:
    """What was found. `bad` may grow as more is read; the questions below are answered by what it has now."""

    root: Root
    listed: dict[str, int]
    """Sizes of all objects by key."""
    shelf: Witness
    entries: dict[str, Entry] = field(default_factory=dict)
    """The entry of each version that has a place, by id, oldest first."""
    others: list[Entry] = field(default_factory=list)
    """All other entries, oldest first."""
    tags: dict[str, str] = field(default_factory=dict)
    lost_entries: int = 0
    """Entries in segments that cannot be read."""
    told: list[Entry] = field(default_factory=list)
    """Those of them that other objects tell, oldest first."""
    packs: dict[tuple[str, bool], tuple[str, ...]] = field(default_factory=dict)
    """The packs of a manifest's base (True) or patch (False), where they have been looked at."""
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> dict[str, str]:
        """What is wrong with each bad object."""
        return self.shelf.bad

    def refs(self) -> Refs:
        """References against what can be read now: versions by ways that are whole."""
        readable = tuple(ref for ref in self.root.segments if ref.key not in self.bad)
        return _Whole(self, replace(self.root, segments=readable))

    def expired(self) -> set[str]:
        """Versions that are catalogued and have no place any more."""
        return {entry.new for entry in self.others if entry.op == EXPIRED and entry.new}

    def named(self) -> set[str]:
        """The keys of all objects that the root names directly or through entries; packs as far as they are known."""
        out = set(live.of_copy(self.root).names)
        for entry in self.entries.values():
            out.update(live.named(entry))
        for packs in self.packs.values():
            out.update(packs)
        return out

    # Who suffers

    def readable(self) -> dict[str, int]:
        """Versions that some way leads to, each with its rank: one of its ways comes from a version of lower rank."""
        onward: dict[str, list[str]] = defaultdict(list)
        todo: deque[str] = deque()
        for ident, entry in self.entries.items():
            for way in ways(entry):
                for edge in way.edges:
                    if self.broken(entry, way, base=edge.source is None):
                        continue
                    if edge.source is None:
                        todo.append(ident)
                    else:
                        onward[edge.source].append(ident)
        found: dict[str, int] = {}
        while todo:
            ident = todo.popleft()
            if ident not in found:
                found[ident] = len(found)
                todo += onward.get(ident, ())
        return found

    def broken(self, entry: Entry, way: Way, *, base: bool) -> bool:
        """Whether an object is bad that reading a base or a patch of a version needs."""
        bad = self.bad
        if not bad:
            return False
        assert entry.place is not None
        packs = self.packs.get((way.manifest, base), ())
        return way.manifest in bad or entry.place.schema in bad or any(pack in bad for pack in packs)

    def lost(self) -> list[Sufferer]:
        """Versions that no way leads to; those that retention has let go are promised to nobody."""
        found = self.readable()
        lost = [entry for ident, entry in self.entries.items() if ident not in found and entry.expired is None]
        return self._uncatalogued() + [sufferer(entry) for entry in lost]

    def damages(self) -> list[Damage]:
        """Every bad object with who names it and who suffers."""
        bad = self.bad
        if not bad:
            return []
        readable = self.readable()
        referred: dict[str, list[str]] = defaultdict(list)
        direct: dict[str, list[str]] = defaultdict(list)
        files: dict[str, list[str]] = defaultdict(list)
        onward: dict[str, list[str]] = defaultdict(list)
        segments = [ref.key for ref in self.root.segments if ref.key in bad]
        for name in live.of_copy(self.root).names & bad.keys():
            referred[name].append("root")
        for ident, entry in self.entries.items():
            assert entry.place is not None
            for way in ways(entry):
                for edge in way.edges:
                    if edge.source is not None:
                        onward[edge.source].append(ident)
                        if edge.source not in self.entries:
                            for name in segments:
                                direct[name].append(ident)
                for base in (True, False):
                    for pack in self.packs.get((way.manifest, base), ()):
                        if pack in bad:
                            referred[pack].append(way.manifest)
                            direct[pack].append(ident)
                if way.manifest in bad:
                    direct[way.manifest].append(ident)
            for name in {*live.named(entry)} & bad.keys():
                referred[name].append(f"version {ident}")
                if name == entry.place.schema:
                    direct[name].append(ident)
                elif key.parse(name).kind in ("layout", "file"):
                    files[name].append(ident)
        work = WORK
        out = []
        for name in sorted(bad, key=_order):
            hurt = dict.fromkeys(direct[name])
            todo = [ident for ident in hurt if ident not in readable]
            while todo and work > 0:
                for ident in onward.get(todo.pop(), ()):
                    work -= 1
                    if ident not in hurt:
                        hurt[ident] = None
                        if ident not in readable:
                            todo.append(ident)
            lost = self._sufferers(ident for ident in hurt if ident not in readable)
            if name in segments:
                lost = _sorted([*lost, *self._uncatalogued()])
            out.append(
                Damage(
                    name,
                    bad[name],
                    tuple(referred[name]) or ("root",),
                    lost,
                    self._sufferers(files[name]),
                    self._sufferers(ident for ident in hurt if ident in readable),
                )
            )
        return out

    def _sufferers(self, idents: Iterable[str]) -> tuple[Sufferer, ...]:
        entries = [self.entries[ident] for ident in idents]
        return _sorted([sufferer(entry) for entry in entries if entry.expired is None])

    def _uncatalogued(self) -> list[Sufferer]:
        return [sufferer(entry) for entry in self.told if entry.place is not None and entry.expired is None]


def _sorted(made: list[Sufferer]) -> tuple[Sufferer, ...]:
    return tuple(sorted(made, key=lambda one: (one.generation, one.id)))


class _Whole(Refs):
    """References in which each version has only those ways that lead to it, so that no plan chooses a broken one."""

    def __init__(self, found: Survey, root: Root) -> None:
        super().__init__(found.shelf, root)
        self._found = found
        self._ranks = found.readable() if found.bad else {}

    def entry(self, ident: str) -> Entry:
        entry = self._found.entries.get(ident)
        if entry is None:
            super().entry(ident)  # raises where it is not catalogued at all
            raise Expired(f"version {ident[:12]} has expired: it has no place any more")
        return self.whole(entry)

    def whole(self, entry: Entry) -> Entry:
        """An entry with the ways that lead to it. Raises Corrupt if none does."""
        if not self._found.bad:
            return entry
        assert entry.place is not None
        rank = self._ranks.get(entry.new or "", 0)
        kept = []
        for way in ways(entry):
            edges = [
                edge
                for edge in way.edges
                if not self._found.broken(entry, way, base=edge.source is None)
                and (edge.source is None or self._ranks.get(edge.source, rank) < rank)
            ]
            if edges:
                kept.append(replace(way, edges=tuple(edges)))
        if not kept:
            raise Corrupt(f"version {(entry.new or '')[:12]}: no way leads to it that is whole")
        return replace(entry, place=led(entry.place, kept))


def led(place: Place, kept: Sequence[Way]) -> Place:
    """A place with other ways: the first, and further ones."""
    first, *more = kept
    return replace(
        place, manifest=first.manifest, packs=first.packs, edges=first.edges, nbytes=first.nbytes, ways=tuple(more)
    )


def sufferer(entry: Entry) -> Sufferer:
    """A version, as a report names it."""
    assert entry.version is not None
    return Sufferer(entry.version.id, entry.name, entry.version.generation, entry.version.step)


def ways(entry: Entry) -> tuple[Way, ...]:
    """The manifests of a version that has a place."""
    assert entry.place is not None
    return entry.place.all_ways


def _order(name: str) -> tuple[int, str]:
    kinds = ("segment", "page", "manifest", "pack", "schema", "layout", "file")
    kind = name.partition("/")[0]
    return kinds.index(kind) if kind in kinds else -1, name


def survey(shelf: Shelf) -> Survey:
    """Look at what the root names, and whether it is there. Raises Corrupt or KeyNotFound for the root itself, and
    what the store raises."""
    for last in (False, False, True):
        found = _look(shelf)
        if not found.bad or last:
            break
        # What is missing may have been collected since the root was read: then a newer root does not name it.
        if read_root(shelf).sequence == found.root.sequence:
            break
    return found


def read_root(shelf: Shelf) -> Root:
    """The root; a bad one is read twice, since bytes may be bad on the way."""
    try:
        return swap.must_read(shelf.store).root
    except Corrupt:
        return swap.must_read(shelf.store).root


def _look(shelf: Shelf) -> Survey:
    # The root first: what it names was uploaded before, and so is in a listing that begins after.
    root = read_root(shelf)
    found = Survey(root, {one.key: one.size for one in shelf.store.list()}, Witness(Shelf(shelf.store, None)))
    for entry in read_segments(found, root):
        _enter(found, entry)
    for entry in root.tail:
        _enter(found, entry)
    _names(found)
    _presence(found)
    _sizes(found)
    return found


def read_segments(found: Survey, root: Root) -> list[Entry]:
    """Entries of all segments that can be read, oldest first; the others are noted as bad."""
    out: list[Entry] = []
    for ref in root.segments:
        try:
            out += found.shelf.segment(ref)
        except (Corrupt, NotFound) as error:
            found.shelf.blame(ref.key, error)
            found.lost_entries += ref.count
    return out


def _enter(found: Survey, entry: Entry) -> None:
    if entry.place is not None and entry.new is not None:
        found.entries[entry.new] = entry
    else:
        found.others.append(entry)


def _names(found: Survey) -> None:
    """What branches, tags, parents and edges name is catalogued, if the catalogue can be read as a whole."""
    root, shelf = found.root, found.shelf
    if root.tags is not None:
        try:
            found.tags = tag_page(shelf, root)[0]
        except (Corrupt, NotFound) as error:
            shelf.blame(root.tags, error)
    if root.collector is not None:
        try:
            shelf.page(root.collector)
        except (Corrupt, NotFound) as error:
            shelf.blame(root.collector, error)
    if found.lost_entries:
        return
    expired = found.expired()
    faults = []
    for what, names in (("branch", root.branches), ("tag", found.tags)):
        faults += [
            f"the {what} {name!r} names version {ident[:12]}, which is not catalogued"
            for name, ident in names.items()
            if ident not in found.entries and ident not in expired
        ]
    for ident, entry in found.entries.items():
        assert entry.version is not None
        assert entry.place is not None
        sources = [edge.source for way in entry.place.all_ways for edge in way.edges if edge.source is not None]
        faults += [
            f"version {ident[:12]} has the {what} {other[:12]}, which is not catalogued"
            for what, others in (("parent", entry.version.parents), ("source", sources))
            for other in others
            if other not in found.entries and other not in expired
        ]
    # Sources may have expired, as long as another way is left.
    readable = found.readable()
    faults += [
        f"no way is catalogued that leads to version {ident[:12]}"
        for ident, entry in found.entries.items()
        if ident not in readable and entry.expired is None
    ]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        found.bad[key.ROOT] = "; ".join(faults[:5]) + more


def _presence(found: Survey) -> None:
    for entry in found.entries.values():
        for name in live.named(entry):
            if name not in found.listed:
                found.bad[name] = "missing"
            elif found.listed[name] < SMALLEST:
                found.bad[name] = f"it has {found.listed[name]} bytes"


def _sizes(found: Survey) -> None:
    """Look closely at transactions that have not as many packs, or bytes, as the catalogue says."""
    count: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    for name, nbytes in found.listed.items():
        if name.partition("/")[0] in STORED:
            parsed = _parsed(name)
            if parsed is not None:
                size[parsed.transaction] += nbytes
                count[parsed.transaction] += parsed.kind == "pack"
    owners: dict[str, list[tuple[Entry, Way]]] = defaultdict(list)
    for entry in found.entries.values():
        for way in ways(entry):
            owners[key.parse(way.manifest).transaction].append((entry, way))
    suspects: dict[str, None] = {}
    closer: list[tuple[Entry, Way]] = []
    for transaction, owned in owners.items():
        packs, nbytes = sum(way.packs for _, way in owned), sum(way.nbytes for _, way in owned)
        if count[transaction] >= packs and size[transaction] == nbytes:
            continue
        closer += owned
        for entry, _ in owned:
            suspects.update((name, None) for name in live.named(entry) if key.parse(name).transaction == transaction)
    with Pool(READERS, "weightvc-fsck") as pool:
        todo = [name for name in suspects if name not in found.bad]
        for _ in parallel.ordered(pool, lambda name: read(found.shelf, name), todo, READERS):
            pass
    for entry, way in closer:
        learn_packs(found, entry, way)


def _parsed(name: str) -> key.Key | None:
    try:
        return key.parse(name)
    except Corrupt:
        return None


def read(shelf: Witness, name: str) -> None:
    """Read an object whole and check its digest; `shelf` remembers the outcome."""
    try:
        shelf.get(name, keep=False)
    except (Corrupt, NotFound):
        pass


def learn_packs(found: Survey, entry: Entry, way: Way) -> Manifest | None:
    """Read a manifest, compare it with its entry, and look whether its packs are there. None where it is bad."""
    if way.manifest in found.bad:
        return None
    try:
        made = found.shelf.manifest(way.manifest)
        _agree(entry, way, made)
    except Unsupported as error:
        found.notes.append(str(error))
        return None
    except (Corrupt, NotFound) as error:
        found.shelf.blame(way.manifest, error)
        return None
    for base, stream in ((True, made.base), (False, made.patch.stream if made.patch else None)):
        if stream is None:
            continue
        found.packs[way.manifest, base] = tuple(name for name, _ in stream.packs)
        for name, nbytes in stream.packs:
            have = found.listed.get(name)
            if have is None:
                found.bad[name] = "missing"
            elif have != nbytes + frame.HEADER_SIZE:
                found.bad[name] = f"it has {have} bytes where {nbytes + frame.HEADER_SIZE} are promised"
    return made


def _agree(entry: Entry, way: Way, made: Manifest) -> None:
    """Raise Corrupt unless a manifest says what the catalogue says of it."""
    place = entry.place
    assert place is not None
    packs: Sequence[tuple[str, int]] = made.base.packs if made.base else []
    patch = made.patch
    said = {
        "version": (made.version.id, entry.new),
        "schema": (made.schema, place.schema),
        "layout": (made.layout, place.layout),
        "files": (sorted(made.files.values()), sorted(place.files)),
        "packs": (len(packs) + (len(patch.stream.packs) if patch else 0), way.packs),
        "edges": (_edges(made), sorted((edge.source or "", edge.nbytes) for edge in way.edges)),
    }
    for what, (here, there) in said.items():
        if here != there:
            raise Corrupt(f"{way.manifest} is corrupt: its {what} is {here!r:.200}, in the catalogue {there!r:.200}")


def _edges(made: Manifest) -> list[tuple[str, int]]:
    out = [("", made.base.nbytes)] if made.base else []
    out += [(made.patch.source, made.patch.stream.nbytes)] if made.patch else []
    return sorted(out)


def files_of(place: Place) -> tuple[str, ...]:
    """The keys that a version's files need, beside its weights."""
    return (*(() if place.layout is None else (place.layout,)), *place.files)
