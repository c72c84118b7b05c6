"""What a mirror lacks of a branch: the versions that have to be catalogued there, and the ways to copy for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from weightvc.errors import Corrupt
from weightvc.objects.catalogue import Entry, Place, Way
from weightvc.protocol.plan import Step, needed
from weightvc.protocol.refs import Refs

BATCH: Final = 256
"""Versions that one swap publishes with their weights at most; a kill loses what one batch has uploaded."""
BATCH_BYTES: Final = 4 << 30
"""And their bytes, about."""
BATCH_RECORDS: Final = 2048
"""And versions at all: those that have expired are records alone."""


@dataclass(slots=True)
class Item:
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
        """The version's id."""
        assert self.entry.new is not None
        return self.entry.new

    @property
    def sources(self) -> Iterator[str]:
        """The version that the first way starts from, unless it has a base."""
        edges = self.ways[0].edges if self.ways else ()
        if all(edge.source is not None for edge in edges):
            yield from (str(edge.source) for edge in edges)


class Lack:
    """What one root of a mirror lacks of what a head in the source leads to."""

    def __init__(
        self,
        source: Refs,
        target: Refs,
        head: Entry,
        last: int | None,
        learn: Callable[[Entry], None],
        url: str,
    ) -> None:
        """`last` is how many of the newest versions are copied, or None; `learn` is told of entries of the mirror
        whose small objects can be referred to; `url` is the source's."""
        self._url = url
        self._from = source
        self._to = target
        self._head = head
        self._last = last
        self._learn = learn

    def _there_already(self, ident: str) -> bool:
        found = self._to.find(ident)
        return found is not None and found.place is not None

    def items(self) -> list[Item]:
        """What has to be catalogued in the mirror, parents first, and the ways by which it is read."""
        missing = self._missing([self._head])
        kept = {ident for ident, entry in missing.items() if not entry.gone}
        head = self._head.new or ""
        if self._last is not None:
            kept &= self._newest(self._last)
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
            Item(entry, tuple(wanted.get(ident, ())), ident in kept or ident == head)
            for ident, entry in sorted(entries.items(), key=lambda one: order(one[1]))
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

    def _steps(self, entries: Sequence[Entry], kept: set[str]) -> dict[str, Step]:
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
        raise Corrupt(f"{self._url}: no base and no patches lead to version {lost[:12]}: run `weightvc fsck` there")


def order(entry: Entry) -> tuple[int, int, str]:
    """Parents come first."""
    assert entry.version is not None
    return entry.version.generation, entry.sequence, entry.version.id


def shared(place: Place) -> tuple[str, ...]:
    """Keys of what versions share."""
    return (place.schema, *(() if place.layout is None else (place.layout,)), *place.files)


def batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Cut into what one swap publishes, so that nothing is published before what it is a patch against. Further ways
    that start from a later batch are left out: they are copied once all versions are there."""
    number = {item.id: i for i, item in enumerate(items) if item.into is None}
    batch: list[Item] = []
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


def extended(entry: Entry, known: Refs) -> Item | None:
    """The ways of a version that the mirror lacks, and can use."""
    if entry.gone or entry.place is None or not entry.place.ways:
        return None
    there = known.find(entry.new or "")
    if there is None or there.gone:
        return None
    ways = usable(there, entry.place.all_ways, known)
    return Item(entry, ways, True, into=there) if ways else None


def usable(there: Entry, ways: Iterable[Way], known: Refs) -> tuple[Way, ...]:
    """Those ways that an entry of the mirror has not, and that start from what is promised there."""
    assert there.place is not None
    have = {edge.source for way in there.place.all_ways for edge in way.edges}

    def promised(source: str | None) -> bool:
        found = known.find(source) if source is not None else None
        return source is None or (found is not None and not found.gone)

    return tuple(way for way in ways if all(e.source not in have and promised(e.source) for e in way.edges))
