"""Salvage: what a catalogue said, told by other objects. Manifests carry their version's record and branch; segments
that were replaced may still lie there; and the operations say which branches and tags there are.

Nothing is invented. What an upload says of itself is sure; whether it was ever published is not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightvc.errors import Corrupt, NotFound, Unsupported
from weightvc.objects import catalogue, frame, key
from weightvc.objects.catalogue import COMMIT, EXPIRED, Entry, Place
from weightvc.objects.manifest import Manifest
from weightvc.objects.version import Edge
from weightvc.pool import Pool
from weightvc.protocol import live, parallel
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.survey import READERS, Survey, Witness, led

MOVES = (COMMIT, EXPIRED, "branch", "reset", "restore")


@dataclass(slots=True)
class Condemned:
    """What some collector has said to be dead, and may be deleting at this moment."""

    names: set[str] = field(default_factory=set)
    transactions: set[str] = field(default_factory=set)
    """Transactions of condemned manifests and packs."""
    before: int = 0
    """A list that cannot be read may have anything whose transaction began before this sequence number."""

    def __contains__(self, name: str) -> bool:
        """Whether an object may be deleted, or (of a manifest) one of its packs may. Raises Corrupt for no key."""
        parsed = key.parse(name)
        if name in self.names or parsed.begin < self.before:
            return True
        return parsed.kind in ("manifest", "pack") and parsed.transaction in self.transactions


def condemned(shelf: Witness, listed: Iterable[str]) -> Condemned:
    """Every list of the dead that lies in the store: one stays there until all that it names has been deleted."""
    made = Condemned()
    for name in listed:
        if not _is(name, "page"):
            continue
        try:
            page = shelf.page(name)
        except NotFound:
            continue
        except Corrupt:
            made.before = max(made.before, key.parse(name).begin)
            continue
        if page.get("weightvc") != "tags 1":
            made.names.update(_keys(page))
    for name in made.names:
        parsed = key.parse(name)
        if parsed.kind in ("manifest", "pack"):
            made.transactions.add(parsed.transaction)
    return made


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if _is(value):
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _keys(one)
    elif isinstance(value, list):
        for one in value:
            yield from _keys(one)


def _is(name: str, kind: str | None = None) -> bool:
    try:
        key.parse(name, kind)
    except Corrupt:
        return False
    return True


def entry_of(name: str, made: Manifest, listed: Mapping[str, int]) -> Entry:
    """The entry of the commit that a manifest is of, as far as the manifest tells: the root that published it was
    the next after its transaction's begin, or a later one; its branch stood at its first parent."""
    version = made.version
    edges, packs = [], []
    if made.patch is not None:
        edges.append(Edge(made.patch.source, made.patch.stream.nbytes, made.patch.changed))
        packs += [pack for pack, _ in made.patch.stream.packs]
    if made.base is not None:
        edges.append(Edge(None, made.base.nbytes, version.elements))
        packs += [pack for pack, _ in made.base.packs]
    parsed = key.parse(name)
    beside = [made.schema, *([made.layout] if made.layout else []), *made.files.values()]
    own = [name, *packs, *(one for one in beside if key.parse(one).transaction == parsed.transaction)]
    place = Place(
        manifest=name,
        schema=made.schema,
        layout=made.layout,
        files=tuple(made.files.values()),
        packs=len(packs),
        edges=tuple(edges),
        nbytes=sum(listed.get(one, 0) for one in own),
    )
    old = version.parents[0] if made.branch is not None and version.parents else None
    return Entry(
        COMMIT,
        parsed.begin + 1,
        version.time,
        version.author,
        made.branch,
        old,
        version.id,
        version.message,
        version,
        place,
    )


def manifests(
    shelf: Witness, listed: Mapping[str, int], names: Iterable[str], notes: list[str]
) -> dict[str, list[Entry]]:
    """Entries of the versions that manifests are of, by id; only of those whose objects are all there."""

    def work(name: str) -> Entry | None:
        try:
            data = shelf.get(name, keep=False)
            from weightvc.objects import manifest

            made = manifest.decode(data, name)
        except Unsupported as error:
            notes.append(str(error))
            return None
        except (Corrupt, NotFound) as error:
            shelf.blame(name, error)
            return None
        streams = [made.base, made.patch.stream if made.patch else None]
        sizes = {pack: size + frame.HEADER_SIZE for stream in streams if stream for pack, size in stream.packs}
        needed = [made.schema, *([made.layout] if made.layout else []), *made.files.values()]
        missing = [one for one in needed if one not in listed]
        missing += [pack for pack, size in sizes.items() if listed.get(pack) != size]
        if missing:
            notes.append(
                f"{name} (version {made.version.short}) was passed over: {missing[0]} is missing or cut short"
            )
            return None
        return entry_of(name, made, listed)

    out: dict[str, list[Entry]] = {}
    with Pool(READERS, "weightvc-salvage") as pool:
        for entry in parallel.ordered(pool, work, sorted(names), READERS):
            if entry is not None and entry.new is not None:
                out.setdefault(entry.new, []).append(entry)
    return out


def sound(names: Iterable[str], doomed: Condemned) -> list[str]:
    """Those of some manifests that nobody may be deleting."""
    return [name for name in names if name not in doomed]


def best(forms: Sequence[Entry], offers: Sequence[Entry], doomed: Condemned, listed: Mapping[str, int]) -> Entry:
    """The entry of a version, of the forms that are known (the newest first) and those that manifests offer: one
    whose objects are there and not condemned; else one whose objects are only missing, so that they are missed and
    can be put there again; else, what says that the version has expired."""
    placed = [entry for entry in (*forms, *offers) if entry.place is not None]
    for entry in placed:
        if (whole := _whole(entry, doomed, listed)) is not None:
            return whole
    if forms[0].place is not None and not any(name in doomed for name in live.named(forms[0])):
        return forms[0]
    gone = next((form for form in forms if form.op == EXPIRED), forms[0])
    return replace(gone, op=EXPIRED, place=None)


def _whole(entry: Entry, doomed: Condemned, listed: Mapping[str, int]) -> Entry | None:
    """An entry with those of its ways that are there; None if there is none."""
    place = entry.place
    assert place is not None
    beside = [place.schema, *([place.layout] if place.layout else []), *place.files]
    if any(name in doomed or name not in listed for name in beside):
        return None
    kept = [way for way in place.all_ways if way.manifest in listed and way.manifest not in doomed]
    return replace(entry, place=led(place, kept)) if kept else None


@dataclass(slots=True)
class History:
    """Operations, each once, in the newest form that is known of it."""

    versions: dict[str, list[Entry]] = field(default_factory=dict)
    """The forms of each version's entry, the newest first."""
    moves: dict[tuple[int, str, str | None, str | None], Entry] = field(default_factory=dict)

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in entries that are older than, or as old as, all that were taken in before."""
        for entry in entries:
            if entry.version is not None and entry.new is not None:
                forms = self.versions.setdefault(entry.new, [])
                if entry not in forms:
                    forms.append(entry)
            else:
                self.moves.setdefault((entry.sequence, entry.op, entry.name, entry.new), entry)


def segments(shelf: Witness, listed: Iterable[str]) -> Iterator[tuple[int, list[Entry]]]:
    """The begin and the entries of every segment that can be read, the newest first, in a catalogue or not.

    An operation gets into a segment from the tail of a published root, so all that they say has happened.
    """
    names = sorted((n for n in listed if _is(n, "segment")), key=lambda n: (key.parse(n).begin, n), reverse=True)
    for name in names:
        try:
            data = shelf.get(name, keep=False)
            entries = catalogue.decode_segment(data, name)
        except (Corrupt, NotFound) as error:
            shelf.blame(name, error)
            continue
        yield key.parse(name).begin, entries


def branches(entries: Iterable[Entry], start: Mapping[str, str] | None = None) -> dict[str, str]:
    """Where branches stand after operations, oldest first."""
    out = dict(start or {})
    for entry in entries:
        if entry.name is None:
            continue
        if entry.op in MOVES and entry.new is not None:
            out[entry.name] = entry.new
        elif entry.op == "delete":
            out.pop(entry.name, None)
    return out


def tags(
    entries: Iterable[Entry], start: tuple[dict[str, str], dict[str, str]] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Tags, and what deleted ones named, after operations, oldest first."""
    here, deleted = start if start is not None else ({}, {})
    here, deleted = dict(here), dict(deleted)
    for entry in entries:
        if entry.op == "tag" and entry.name is not None and entry.new is not None:
            here[entry.name] = entry.new
            deleted.pop(entry.name, None)
        elif entry.op == "untag" and entry.name is not None and entry.old is not None:
            here.pop(entry.name, None)
            deleted[entry.name] = entry.old
    return here, deleted


def tell(found: Survey) -> None:
    """Note in `found.told` the operations of segments that cannot be read, as far as other objects tell them: what
    segments say that were replaced, and the versions that those which we know were made on, from their manifests."""
    lost = [ref for ref in found.root.segments if ref.key in found.bad]
    if not lost:
        return
    witness = Witness(Shelf(found.shelf.store, None))
    doomed = condemned(witness, found.listed)
    history = History()
    for _, entries in segments(witness, found.listed):
        history.add(entries)
    known = found.entries.keys() | found.expired()
    moves = {(e.sequence, e.op, e.name, e.new) for e in found.others}
    named = found.named()
    unnamed = [n for n in found.listed if n.startswith("manifest/") and n not in named]
    offers = manifests(witness, found.listed, sound(unnamed, doomed), found.notes)
    out: dict[str, Entry] = {}
    for ident, forms in history.versions.items():
        if ident not in known:
            out[ident] = best(forms, offers.get(ident, []), doomed, found.listed)
    todo = [*found.root.branches.values(), *found.tags.values()]
    for entry in (*found.entries.values(), *out.values()):
        todo += _needs(entry)
    missing = set()
    while todo:
        ident = todo.pop()
        if ident in known or ident in out:
            continue
        if ident in offers:
            out[ident] = offers[ident][0]
            todo += _needs(out[ident])
        else:
            missing.add(ident)
    for ident in sorted(missing):
        found.notes.append(f"version {ident[:12]} was in a lost segment, and no manifest of it is left")
    told = [*out.values(), *(entry for name, entry in history.moves.items() if name not in moves)]
    found.told = sorted(told, key=lambda entry: entry.sequence)


def _needs(entry: Entry) -> list[str]:
    """Versions that an entry's version names."""
    out = list(entry.version.parents) if entry.version is not None else []
    if entry.place is not None:
        out += [edge.source for way in entry.place.all_ways for edge in way.edges if edge.source is not None]
    return out
