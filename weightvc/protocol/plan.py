"""The planner: the cheapest way to a version, by bytes and requests, over the edges of all manifests of all versions.

Versions are the nodes of a graph, and every edge to one stands in its own entry. So a shortest path is searched from
the version that is wanted towards what is at hand, and reads no entry that it has no use for: of a long catalogue it
sees the end. The same search goes forward from a base or an old tree, along long edges, back along reverse ones, and
sideways through an ancestor that two branches share.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from weightvc.errors import Corrupt, Expired
from weightvc.objects import manifest
from weightvc.objects.catalogue import Entry, Way
from weightvc.objects.version import Edge
from weightvc.stores.base import MISSING

REQUEST: Final = 64 << 10
"""What a request weighs beside its bytes, in bytes: some 5 ms of a 100 Mbit/s link."""
LOOK: Final = 8 << 20
"""What a way has to cost for each segment that is read in search of a cheaper one: some eight times the segment."""
DOUBT: Final = 1 << 60
"""What a manifest weighs, each time that a way with it turned out to be bad."""
AWAY: Final = 1 << 50
"""What it weighs, in needed(), to step on a version that is not kept."""


class Finder(Protocol):
    """Finds entries. Refs is one."""

    @property
    def unread(self) -> int:
        """Segments that have not been read yet."""
        ...

    def find(self, ident: str, most: int | None = None) -> Entry | None:
        """The entry of a version, or None; reads segments for it, `most` at most if that is given."""
        ...


class Step(NamedTuple):
    """One edge to a version: by a base (`edge.source` is None), or by a patch from another version."""

    entry: Entry
    way: Way
    edge: Edge
    nbytes: int
    """Bytes to fetch: manifest and packs. (Of a commit with a new schema or layout, those as well.)"""
    requests: int

    @property
    def cost(self) -> int:
        """Bytes, and what requests weigh."""
        return self.nbytes + REQUEST * self.requests


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to `target`: from `start`, whose tree is held, or else (None) from the base that is the first step."""

    target: Entry
    start: Entry | None
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(step.nbytes for step in self.steps)

    @property
    def requests(self) -> int:
        """Objects to fetch: manifests and packs; root, segments, schema and layout not counted."""
        return sum(step.requests for step in self.steps)

    @property
    def patches(self) -> int:
        """Patches on the way."""
        return sum(step.edge.source is not None for step in self.steps)


def steps_to(entry: Entry) -> Iterator[Step]:
    """All edges to a version."""
    if entry.place is None:
        return
    for way in entry.place.all_ways:
        if len(way.edges) == 1:
            edge = way.edges[0]
            yield Step(entry, way, edge, max(way.nbytes, edge.nbytes), 1 + way.packs)
            continue
        payload = sum(edge.nbytes for edge in way.edges)
        # Streams that lie in the manifest come with it, wanted or not.
        inline = sum(edge.nbytes for edge in way.edges if edge.nbytes <= manifest.INLINE)
        beside = max(0, way.nbytes - payload) + inline
        for edge in way.edges:
            if edge.nbytes <= manifest.INLINE:
                yield Step(entry, way, edge, beside, 1)
            else:
                packs = max(1, way.packs * edge.nbytes // (payload - inline))
                yield Step(entry, way, edge, beside + edge.nbytes, 1 + packs)


def plan(finder: Finder, entry: Entry, held: Set[str] = frozenset(), failed: Mapping[str, int] | None = None) -> Plan:
    """The cheapest way to a version. `held` are the digests of trees that are at hand, or the ids of their versions;
    `failed` says how often ways with a manifest, by its key, turned out to be bad: they are avoided if there are
    others.

    Segments are read where a way has to go on. Once there is one, more of them are read only as far as it is worth it
    (LOOK), in search of a held tree; where nothing is held, the bases further on are taken to be as large as the
    smallest seen, and nothing is looked for beyond. Within what was looked at, the way is the cheapest.
    Raises Expired if no way leads to the version any more, Corrupt if patches lead round in a circle.
    """
    target = entry.new or ""
    failed = failed or {}
    costs: dict[str, int] = {target: 0}
    taken: dict[str, Step] = {}
    heap: list[tuple[int, str]] = [(0, target)]
    unseen: list[tuple[int, str]] = []
    goal: tuple[str, Step | None] | None = None
    goal_cost, least, looked = 0, 0, 0
    gone = False
    while heap or unseen:
        # What is known comes first, then what stands in segments that have not been read.
        known = bool(heap) and (goal is None or heap[0][0] < goal_cost)
        if not known and not unseen:
            break
        cost, ident = heapq.heappop(heap if known else unseen)
        if goal is not None and cost + (0 if held else least) >= goal_cost:
            continue
        if cost > costs[ident]:
            continue
        current: Entry | None = None
        if ident == target:
            current = entry
        elif known:
            current = finder.find(ident, 0)
            if current is None:
                heapq.heappush(unseen, (cost, ident))
                continue
        elif goal is None:
            current = finder.find(ident)
        else:
            before = finder.unread
            # What stands in a segment that cannot be read is no better way.
            with suppress(Corrupt, *MISSING):
                current = finder.find(ident, max(0, goal_cost // LOOK - looked))
            looked += before - finder.unread
        if current is None or current.version is None:
            gone = True
            continue
        # Of what has expired not even the schema is there any more.
        if (current.version.tree in held or ident in held) and current.place is not None:
            goal, goal_cost = (ident, None), cost
            continue
        steps = list(steps_to(current))
        gone |= not steps
        for step in steps:
            source = step.edge.source
            reached = cost + step.cost + DOUBT * failed.get(step.way.manifest, 0)
            if source is None:
                least = min(least, step.cost) if least else step.cost
                if goal is None or reached < goal_cost:
                    goal, goal_cost = (ident, step), reached
            elif source not in costs or reached < costs[source]:
                costs[source] = reached
                taken[source] = step
                heapq.heappush(heap, (reached, source))
    if goal is None:
        if gone:
            raise Expired(f"version {target[:12]}: no base and no patches lead to it any more")
        raise Corrupt(f"version {target[:12]}: the patches that lead to it go round in a circle")
    at, base = goal
    steps = [base] if base is not None else []
    start = None
    if base is None:
        start = entry if at == target else finder.find(at)
    while at != target:
        steps.append(taken[at])
        at = taken[at].entry.new or ""
    return Plan(entry, start, tuple(steps))


def needed(entries: Iterable[Entry], kept: Set[str], held: Set[str] = frozenset()) -> dict[str, Step]:
    """What has to stay so that every version of `kept` can be read from nothing: those versions and, where patches
    lead to them through others, as few of these as can be, each by its id with the step that leads to it. Versions
    that are `held` are there already, and no step leads to them.

    A version of `kept` that is not among the keys cannot be read from nothing even now.
    """
    out: dict[str | None, list[Step]] = {}
    for entry in entries:
        for step in steps_to(entry):
            out.setdefault(step.edge.source, []).append(step)
    taken: dict[str, Step] = {}
    heap: list[tuple[int, str, int]] = []
    waiting: list[Step] = []

    def reach(cost: int, steps: list[Step]) -> None:
        for step in steps:
            ident = step.entry.new or ""
            if ident not in taken and ident not in held:
                waiting.append(step)
                heapq.heappush(heap, (cost + step.cost + (0 if ident in kept else AWAY), ident, len(waiting) - 1))

    for start in (None, *held):
        reach(0, out.get(start, []))
    while heap:
        cost, ident, number = heapq.heappop(heap)
        if ident not in taken:
            taken[ident] = waiting[number]
            reach(cost, out.get(ident, []))
    found: dict[str, Step] = {}
    for one in kept:
        at: str | None = one
        while at is not None and at in taken and at not in found:
            found[at] = taken[at]
            at = taken[at].edge.source
    return found
