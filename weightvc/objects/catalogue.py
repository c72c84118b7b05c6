"""The catalogue: every operation on the repository, oldest first, and so every version's record and place.

Its newest entries are the root's tail; older ones lie in segments. An entry is one operation. A commit's has the
version's record, its manifests, and the edges by which it can be reached; the others move a branch or a tag.
The reflog of a branch is the catalogue read backwards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from weightvc.errors import AccessDenied, Corrupt, Expired, KeyNotFound, Unsupported
from weightvc.objects import expect, frame, key, version
from weightvc.objects.version import Edge, Version
from weightvc.stores.base import MISSING

SEGMENT: Final = 4096
"""Entries of a full segment."""
TAIL: Final = 64
"""Entries that the root holds before they spill into a segment."""

COMMIT: Final = "commit"
EXPIRED: Final = "expired"
"""What the entry of a commit becomes once retention has let its version go: the record stays, no key does."""
CLAIM: Final = "claim"
"""A writer has claimed a branch, which stays where it is."""
_MOVE: Final = ["op", "seq", "name", "old", "new", "time", "author", "message"]
_OWN: Final = {
    COMMIT: frozenset(
        [
            *("op", "seq", "name", "old", "record", "manifest", "schema", "layout", "files", "packs", "edges"),
            *("bytes", "ways", "expired", "released"),
        ]
    ),
    EXPIRED: frozenset([*_MOVE, "record", "expired", "released"]),
}
_OWN_MOVE: Final = frozenset(_MOVE)


@dataclass(frozen=True, slots=True)
class Way:
    """One manifest of a version, and the edges that it has: a base, a patch, or both."""

    manifest: str
    packs: int
    """Packs of the manifest's transaction that it needs."""
    edges: tuple[Edge, ...]
    nbytes: int
    """Bytes stored for it, all objects together."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a version lies: all keys that keep it alive (with the packs of its manifests' transactions)."""

    manifest: str
    schema: str
    layout: str | None
    files: tuple[str, ...]
    packs: int
    edges: tuple[Edge, ...]
    nbytes: int
    """Bytes that the commit stored, all objects together."""
    ways: tuple[Way, ...] = ()
    """Further manifests of the same version, from other sources: with the same schema, layout and files."""

    @property
    def all_ways(self) -> tuple[Way, ...]:
        """The manifest of the commit, then the further ones."""
        return Way(self.manifest, self.packs, self.edges, self.nbytes), *self.ways


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation: `name` is a branch or tag (None for a detached commit), `old` and `new` version ids."""

    op: str
    sequence: int
    time: int
    author: str
    name: str | None
    old: str | None
    new: str | None
    message: str = ""
    version: Version | None = None
    place: Place | None = None
    """None for a version that has expired, and is not to be had any more."""
    expired: int | None = None
    """Sequence number of the root in which retention let the version go. With a place, it is a stepping stone that
    versions which are kept are still reached by."""
    released: tuple[str, ...] = ()
    """Transactions whose manifests and packs this entry named before, and let go of."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of later writers, kept as they are."""

    @property
    def gone(self) -> bool:
        """Whether retention let the version go, if perhaps still stored as a stepping stone; also if it is none."""
        return self.place is None or self.expired is not None

    @property
    def patch(self) -> Edge | None:
        """The patch that the commit stored, or None if the version stands alone."""
        return next((edge for edge in self.place.edges if edge.source is not None), None) if self.place else None

    @property
    def base(self) -> Edge | None:
        """The base that the commit stored, or None."""
        return next((edge for edge in self.place.edges if edge.source is None), None) if self.place else None

    @property
    def changed(self) -> int:
        """Elements that changed against the first parent; all of them without a patch."""
        patch = self.patch
        if patch is not None:
            return patch.changed
        return self.version.elements if self.version else 0

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.version.elements if self.version and self.version.elements else 0.0


def to_json(entry: Entry) -> dict[str, Any]:
    """An entry as the root and segments hold it; what the record repeats is left out."""
    fields: dict[str, Any] = {
        **entry.extra,
        "op": entry.op,
        "seq": entry.sequence,
        "name": entry.name,
        "old": entry.old,
    }
    if entry.expired is not None:
        fields["expired"] = entry.expired
    if entry.released:
        fields["released"] = list(entry.released)
    if entry.version is not None and entry.place is not None:
        place = entry.place
        fields["record"] = entry.version.record
        fields["manifest"] = place.manifest
        fields["schema"] = place.schema
        fields["layout"] = place.layout
        fields["files"] = list(place.files)
        fields["packs"] = place.packs
        fields["edges"] = _edges_to_json(place.edges)
        fields["bytes"] = place.nbytes
        if place.ways:
            fields["ways"] = [
                {
                    "manifest": way.manifest,
                    "packs": way.packs,
                    "edges": _edges_to_json(way.edges),
                    "bytes": way.nbytes,
                }
                for way in place.ways
            ]
    else:
        fields |= {"new": entry.new, "time": entry.time, "author": entry.author, "message": entry.message}
        if entry.version is not None:
            fields["record"] = entry.version.record
    return fields


def from_json(fields: Any, what: str) -> Entry:
    """Read an entry. Raises Corrupt naming `what`."""
    try:
        op = expect.text(fields["op"], "op")
        own = _OWN.get(op, _OWN_MOVE)
        extra = {name: value for name, value in fields.items() if name not in own}
        sequence, name = expect.integer(fields["seq"], "seq"), expect.maybe_text(fields["name"], "name")
        expired: int | None = None
        released: tuple[str, ...] = ()
        if op in _OWN:
            if fields.get("expired") is not None:
                expired = expect.integer(fields["expired"], "expired")
            released = tuple(
                [expect.random(one, "released") for one in expect.array(fields.get("released", []), "r")]
            )
        if op == EXPIRED:
            gone = version.read(fields["record"])
            return Entry(
                op,
                sequence,
                gone.time,
                gone.author,
                name,
                expect.maybe_digest(fields["old"], "old"),
                gone.id,
                gone.message,
                gone,
                None,
                expired,
                released,
                extra,
            )
        if op != COMMIT:
            return Entry(
                op,
                sequence,
                expect.integer(fields["time"], "time", 0, expect.TIME),
                expect.text(fields["author"], "author"),
                name,
                expect.maybe_text(fields["old"], "old"),
                expect.maybe_text(fields["new"], "new"),
                expect.text(fields["message"], "message"),
                extra=extra,
            )
        made = version.read(fields["record"], f"{what}: a record")
        place = Place(
            manifest=key.checked(fields["manifest"], "manifest"),
            schema=key.checked(fields["schema"], "schema"),
            layout=None if fields["layout"] is None else key.checked(fields["layout"], "layout"),
            files=tuple([key.checked(one, "file") for one in expect.array(fields["files"], "files")]),
            packs=expect.integer(fields["packs"], "packs"),
            edges=_edges(fields["edges"]),
            nbytes=expect.integer(fields["bytes"], "bytes"),
            ways=tuple([_way(one) for one in expect.array(fields.get("ways", []), "ways")]),
        )
        return Entry(
            COMMIT,
            sequence,
            made.time,
            made.author,
            name,
            expect.maybe_digest(fields["old"], "old"),
            made.id,
            made.message,
            made,
            place,
            expired,
            released,
            extra,
        )
    except Unsupported:
        raise
    except (Corrupt, *expect.MALFORMED) as error:
        raise Corrupt(f"{what} is corrupt: an entry of the catalogue: {error!r:.300}") from None


def _edges_to_json(edges: tuple[Edge, ...]) -> list[list[Any]]:
    return [[edge.source, edge.nbytes, edge.changed] for edge in edges]


def _way(value: object) -> Way:
    fields = expect.mapping(value, "a way")
    return Way(
        key.checked(fields["manifest"], "manifest"),
        expect.integer(fields["packs"], "packs"),
        _edges(fields["edges"]),
        expect.integer(fields["bytes"], "bytes"),
    )


def _edges(value: object) -> tuple[Edge, ...]:
    return tuple([_edge(*one) for one in expect.array(value, "edges")])


def _edge(source: object, nbytes: object, changed: object) -> Edge:
    return Edge(
        expect.maybe_digest(source, "an edge's source"),
        expect.integer(nbytes, "an edge's bytes"),
        expect.integer(changed, "an edge's changed"),
    )


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment as the root lists it."""

    key: str
    count: int


def encode_segment(entries: Sequence[Entry]) -> bytes:
    """Entries, oldest first, as a stored object."""
    return frame.encode(frame.SEGMENT, {"entries": [to_json(e) for e in entries], "weightvc": "segment 1"})


def decode_segment(data: frame.Buffer, what: str) -> list[Entry]:
    """Read a segment. Raises Corrupt naming `what`."""
    return [from_json(fields, what) for fields in _stored(data, what)]


def _stored(data: frame.Buffer, what: str) -> list[Any]:
    head, _ = frame.decode(frame.SEGMENT, data, what)
    frame.check_type(head.get("weightvc"), "segment 1", what)
    if not isinstance(head.get("entries"), list):
        raise Corrupt(f"{what} is corrupt: it has no entries")
    entries: list[Any] = head["entries"]
    return entries


class Keys(NamedTuple):
    """What entries name, and what they let go of."""

    names: frozenset[str]
    released: frozenset[str]
    """Transactions."""


def keys_of(entries: Iterable[Entry]) -> Keys:
    """The keys that entries name."""
    names: set[str] = set()
    released: set[str] = set()
    for entry in entries:
        if (place := entry.place) is not None:
            names.add(place.schema)
            names.update(place.files)
            names.update([way.manifest for way in place.all_ways])
            if place.layout is not None:
                names.add(place.layout)
        if entry.extra:
            names.update(key.found(entry.extra))
        released.update(entry.released)
    return Keys(frozenset(names), frozenset(released))


def decode_keys(data: frame.Buffer, what: str) -> Keys:
    """What the entries of a segment name: a tenth of the work of reading them. Raises Corrupt naming `what`."""
    names: set[str] = set()
    released: set[str] = set()
    try:
        for fields in _stored(data, what):
            op = fields["op"]
            own = _OWN.get(op, _OWN_MOVE)
            if op == COMMIT:
                names.add(fields["manifest"])
                names.add(fields["schema"])
                names.update(fields["files"])
                if fields["layout"] is not None:
                    names.add(fields["layout"])
                if "ways" in fields:
                    names.update([way["manifest"] for way in fields["ways"]])
            if "released" in fields and op in _OWN:
                released.update(fields["released"])
            if not fields.keys() <= own:
                names.update(key.found([value for name, value in fields.items() if name not in own]))
        if not all(map(key.OBJECT.fullmatch, names)):
            raise ValueError("it names what is no key")
    except (Corrupt, *expect.MALFORMED) as error:
        raise Corrupt(f"{what} is corrupt: an entry of the catalogue: {error!r:.300}") from None
    return Keys(frozenset(names), frozenset(released))


def named(value: object, what: str) -> dict[str, str]:
    """Version ids by name, checked. Raises ValueError."""
    fields = expect.mapping(value, what)
    return {expect.text(name, "a name"): expect.digest(ident, name) for name, ident in fields.items()}


class Catalogue:
    """The catalogue of one root. `fetch` reads a segment; nothing is read before it is needed.

    A segment may have been collected since the root was read. `newest` has the segments of the root that there is by
    now, or raises the error that it is given: a catalogue only grows, and what is rewritten keeps its place, so the
    older entries are read on from there. Raises Expired if that happens again at once.
    """

    def __init__(
        self,
        tail: Sequence[Entry],
        segments: Sequence[SegmentRef],
        fetch: Callable[[SegmentRef], list[Entry]],
        newest: Callable[[KeyNotFound | AccessDenied], Sequence[SegmentRef]] | None = None,
    ) -> None:
        self._parts: list[Sequence[Entry] | SegmentRef] = [tail, *reversed(segments)]
        self._fetch = fetch
        self._newest = newest
        self._loaded = 0
        self._entries: list[Entry] = []
        self._by_id: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        """Entries, newest first."""
        at = 0
        while at < len(self._entries) or self._more():
            if at < len(self._entries):
                yield self._entries[at]
                at += 1

    def _more(self) -> bool:
        if self._loaded == len(self._parts):
            return False
        part = self._parts[self._loaded]
        entries = self._read(part) if isinstance(part, SegmentRef) else part
        self._loaded += 1
        for entry in reversed(entries):
            self._entries.append(entry)
            if entry.version is not None:
                self._by_id[entry.version.id] = entry
        return True

    def _read(self, ref: SegmentRef) -> Sequence[Entry]:
        try:
            return self._fetch(ref)
        except MISSING as error:
            if self._newest is None:
                raise
            left = sum(part.count for part in self._parts[self._loaded :] if isinstance(part, SegmentRef))
            parts: list[SegmentRef] = []
            for one in self._newest(error):
                count = min(one.count, left)
                if count:
                    parts.append(SegmentRef(one.key, count))
                    left -= count
            if left:
                raise
        self._parts[self._loaded :] = reversed(parts)
        try:
            # The last one may have grown.
            return self._fetch(parts[-1])[: parts[-1].count]
        except KeyNotFound as error:
            raise Expired(
                f"{error}: collected before it could be read, twice: this host is slower than the grace period of "
                "`weightvc gc`: try again, or let that be longer"
            ) from None

    @property
    def unread(self) -> int:
        """Segments that have not been read yet."""
        return sum(isinstance(part, SegmentRef) for part in self._parts[self._loaded :])

    def find(self, ident: str, most: int | None = None) -> Entry | None:
        """The entry of the version with this full id, or None: reads as few segments as it can, at most `most`."""
        until = None if most is None else self._loaded + most + (self._loaded == 0)
        while ident not in self._by_id:
            if self._loaded == until or not self._more():
                return None
        return self._by_id[ident]

    def matching(self, prefix: str) -> list[Entry]:
        """All versions whose id begins with `prefix`; reads everything."""
        while self._more():
            pass
        return [entry for ident, entry in self._by_id.items() if ident.startswith(prefix)]
