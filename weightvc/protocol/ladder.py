"""The ladder: which ways compaction adds, and to which versions.

A version stands on rung k if it is the first of its line, along first parents, at or past a multiple of 4^k in
generation: where each parent is one generation below, those whose generation 4^k divides. It gets a patch from the
one before it on that rung. So a reader climbs from what it holds, goes along, and climbs down again: 3 patches a rung
at most, each way. As a patch over a long span is far smaller than the sum of those that it spans, and stands once in
4^k versions, all rungs together take some half of what the commits took.

A base is due where patches outweigh a share of the last one, or that is far. From it, a dozen patches lead to any
version: where the ladder alone would need more, the version gets a patch from the base itself.

Nothing here reads or writes; it looks at entries, says what it wants next, and is told what became of it. What it
wants depends on what there is and not on when it is asked, so a second run finds nothing to do.
"""

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from weightvc.objects.catalogue import Entry, Way
from weightvc.objects.policy import Policy
from weightvc.protocol.plan import steps_to

SPAN: Final = 4
RUNGS: Final = 16
"""Rungs above the lowest: 4^16 versions are more than there will be."""
DOZEN: Final = 12
"""Patches after a base, at most."""
WAYS: Final = 64
"""Ways of one version that compaction adds to, at most."""


class Wanted(NamedTuple):
    """A way that is wanted to `target`: a patch from `source`, or a base (None)."""

    target: str
    source: str | None
    back: bool = False
    """Whether it leads from a newer version to an older one."""


class _Cold(NamedTuple):
    """The cheapest way from nothing: of which base, and by which patches. The cheaper is the smaller."""

    cost: int
    base: str
    generation: int
    base_bytes: int
    patches: int
    patch_bytes: int


class Ladder:
    """Goes through all versions, parents first. `entries` has them by id, with the ways that were made."""

    def __init__(self, entries: Iterable[Entry], policy: Policy) -> None:
        self.entries = {entry.new: entry for entry in entries if entry.version is not None and entry.new is not None}
        self._policy = policy
        self._rungs: dict[str, tuple[str, ...]] = {}
        """Of each version, the nearest one at or before it on each rung."""
        self._cold: dict[str, _Cold] = {}

    def wanted(self) -> Generator[Wanted, Way | None, None]:
        """What is wanted, one after the other; to be sent the way that was made, or None if it could not be."""
        for ident in sorted(self.entries, key=self._order):
            version = self.entries[ident].version
            assert version is not None
            before: tuple[str, ...] = ()
            parent = self.entries.get(version.parents[0]) if version.parents else None
            below = -1
            if parent is not None and parent.version is not None:
                before, below = self._rungs[version.parents[0]], parent.version.generation
            # What a line begins with stands on all rungs.
            rung = _rung(version.generation, below) if before else RUNGS
            if self.entries[ident].gone:
                # It gets no ways, and nothing gets one from it: its children go on from those before it.
                self._rungs[ident] = before
                self._cold_of(ident)
                continue
            self._rungs[ident] = (ident,) * (rung + 1) + before[rung + 1 :]
            for source in dict.fromkeys(before[1 : rung + 1]):
                yield from self._want(Wanted(ident, source))
            yield from self._from_nothing(ident, rung, below)
            if self._policy.reverse:
                for source in dict.fromkeys(before[: rung + 1]):
                    yield from self._want(Wanted(source, ident, back=True))

    def _order(self, ident: str) -> tuple[int, int, str]:
        entry = self.entries[ident]
        assert entry.version is not None
        return entry.version.generation, entry.sequence, ident

    def _want(self, want: Wanted) -> Generator[Wanted, Way | None, bool]:
        """Whether the way is there, once it was asked for."""
        entry = self.entries[want.target]
        assert entry.place is not None
        if any(step.edge.source == want.source for step in steps_to(entry)):
            return True
        if len(entry.place.ways) >= WAYS:
            return False
        made = yield want
        if made is None:
            return False
        self.entries[want.target] = replace(entry, place=replace(entry.place, ways=(*entry.place.ways, made)))
        return True

    def _from_nothing(self, ident: str, rung: int, below: int) -> Generator[Wanted, Way | None, None]:
        """A base, or a patch from the last one, where it is due."""
        cold = self._cold_of(ident)
        if cold is None or rung == 0:
            return
        if self._base_due(ident, cold, below):
            yield from self._want(Wanted(ident, None))
            cold = self._cold_of(ident) or cold
        # From here on 3 more patches a rung, down to the next one like it.
        while cold.patches > DOZEN - 3 * min(rung, 3) and not self.entries[cold.base].gone:
            base = cold.base
            there = yield from self._want(Wanted(ident, base))
            cold = self._cold_of(ident) or cold
            if not there or cold.base == base:
                break

    def _base_due(self, ident: str, cold: _Cold, below: int) -> bool:
        version = self.entries[ident].version
        assert version is not None
        every = self._policy.base_every
        far = version.generation - cold.generation
        # Bases that stand where the ladder's long spans begin serve best.
        aligned = version.generation // every > below // every
        return cold.patches > 0 and (
            100 * cold.patch_bytes > self._policy.share * cold.base_bytes
            or far >= every
            or (aligned and 2 * far >= every)
        )

    def _cold_of(self, ident: str) -> _Cold | None:
        """The cheapest way from nothing, forward."""
        entry = self.entries[ident]
        assert entry.version is not None
        best: _Cold | None = None
        for step in steps_to(entry):
            edge = step.edge
            if edge.source is None:
                found = _Cold(step.cost, ident, entry.version.generation, edge.nbytes, 0, 0)
            elif (under := self._cold.get(edge.source)) is not None:
                cost, base, generation, base_bytes, patches, patch_bytes = under
                found = _Cold(cost + step.cost, base, generation, base_bytes, patches + 1, patch_bytes + edge.nbytes)
            else:
                continue
            if best is None or found < best:
                best = found
        if best is not None:
            self._cold[ident] = best
        return best


def _rung(generation: int, below: int) -> int:
    rung = 0
    while rung < RUNGS and generation // SPAN ** (rung + 1) > below // SPAN ** (rung + 1):
        rung += 1
    return rung
