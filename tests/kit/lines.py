"""Catalogues without content: entries of versions, whose edges weigh what a test says."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from weightvc.objects import catalogue, version
from weightvc.objects.catalogue import Entry, Place, Way
from weightvc.objects.policy import Policy
from weightvc.objects.version import Edge, Version
from weightvc.protocol.ladder import Ladder, Wanted

BASE = 30_000_000
ONE = 100_000
ASIDE = 4_700
"""Bytes of a manifest beside its streams."""
_SCHEMA = f"schema/{'0' * 64}.1-{'0' * 32}-0"


def name() -> str:
    """The key of a manifest."""
    return f"manifest/{secrets.token_hex(32)}.1-{secrets.token_hex(16)}-1"


def entry(number: int, parents: Iterable[Version] = (), edges: Iterable[Edge] = (), branch: str = "main") -> Entry:
    """A version whose tree is told by its number, by these edges."""
    made = version.make(
        tree=f"{number:064x}",
        layout=None,
        parents=[*parents],
        step=number,
        run=None,
        message="",
        author="test",
        metadata=None,
        elements=BASE,
        nbytes=2 * BASE,
        now=number,
    )
    edges = tuple(edges)
    place = Place(name(), _SCHEMA, None, (), 0, edges, ASIDE + sum(edge.nbytes for edge in edges))
    return Entry(catalogue.COMMIT, number + 1, number, "test", branch, None, made.id, "", made, place)


def line(count: int, on: Entry | None = None, first: int = 0) -> list[Entry]:
    """Versions one after the other, each by a patch from the one before; the first by a base, or on top of `on`."""
    out: list[Entry] = []
    for number in range(first, first + count):
        below = out[-1] if out else on
        if below is None or below.version is None:
            out.append(entry(number, edges=[Edge(None, BASE, BASE)]))
        else:
            out.append(entry(number, [below.version], [Edge(below.new, ONE, ONE)]))
    return out


def grown(span: int) -> int:
    """Bytes of a patch over a span, as published for late training."""
    return round(ONE * span**0.25)


def compacted(
    entries: Iterable[Entry], policy: Policy | None = None, weigh: Callable[[int], int] = grown
) -> tuple[dict[str, Entry], list[Wanted]]:
    """The entries with the ways that the ladder wants, by id, and what it wanted."""
    ladder = Ladder(entries, policy or Policy())
    wants = ladder.wanted()
    asked: list[Wanted] = []
    way: Way | None = None
    while True:
        try:
            wanted = wants.send(way)
        except StopIteration:
            return ladder.entries, asked
        asked.append(wanted)
        if wanted.source is None:
            edge = Edge(None, BASE, BASE)
        else:
            ends = [ladder.entries[one].version for one in (wanted.target, wanted.source)]
            assert ends[0] is not None
            assert ends[1] is not None
            edge = Edge(wanted.source, weigh(abs(ends[0].generation - ends[1].generation)), 1)
        way = Way(name(), edge.nbytes // (32 << 20), (edge,), edge.nbytes + ASIDE)


class All:
    """Finds entries among some that are all at hand."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries
        self.unread = 0

    def find(self, ident: str, most: int | None = None) -> Entry | None:
        return self._entries.get(ident)


def without_ways(entry: Entry) -> Entry:
    """An entry as it was committed."""
    assert entry.place is not None
    return replace(entry, place=replace(entry.place, ways=()))
