"""The coder of one patch: the smallest coding of each block, with tables made from a sample of the whole patch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from weightvc.objects import manifest
from weightvc.objects.frame import Buffer

if TYPE_CHECKING:
    from weightvc_kernels.context import Stats

CONTEXT_FROM: Final = 1 << 20
"""Bytes of a tree from which the context codec pays: it loads compiled code, and its tables weigh something."""
FEW: Final = 64
"""Changes of a block that may not earn the start of the context coder."""


class Coder:
    """Learn first, then code blocks in any number of threads."""

    def __init__(self) -> None:
        self._tables: dict[str, bytes] = {}
        self._models: dict[str, Any] = {}
        self._used: set[str] = set()

    def learn(self, samples: Iterable[tuple[str, "Stats | None"]]) -> None:
        """Make tables for each dtype of which a sample saw changes."""
        from weightvc_kernels import context

        totals: dict[str, Stats] = {}
        for dtype, stats in samples:
            if stats is not None:
                totals[dtype] = totals[dtype] + stats if dtype in totals else stats
        for dtype, stats in totals.items():
            if stats.changed.any():
                self._tables[dtype] = context.tables(stats, dtype)
                self._models[dtype] = context.Model(self._tables[dtype], dtype)

    def patch(self, dtype: str, lane: int, old: Buffer, new: Buffer) -> tuple[int, bytes, Any]:
        """Codec, payload, and the old lanes [changes] that change."""
        import weightvc_kernels as kernels

        model = self._models.get(dtype)
        if model is None:
            return kernels.encode_patch(old, new, lane)
        payload, was = kernels.context.encode_patch(model, old, new)
        # Few changes do not earn the coder's start; many may be stored whole. Between the two it always wins.
        if was.size < FEW or 4 * len(payload) > len(new):
            plain = kernels.encode_patch(old, new, lane)
            if len(plain[1]) <= len(payload):
                return plain
        self._used.add(dtype)
        return manifest.CONTEXT, payload, was

    @property
    def tables(self) -> dict[str, bytes]:
        """The tables that blocks were coded with, by dtype."""
        return {dtype: self._tables[dtype] for dtype in sorted(self._used)}
