"""The coder of one patch: for each block a codec, with tables made from a sample of the whole patch.

What a patch should be is its policy:

    small    the smallest coding of each block
    fast     RICE, unless another coding of the block is smaller by over an eighth
    auto     the smallest, unless RICE is at most an eighth larger

RICE blocks are applied several times as fast as CONTEXT blocks. Where few weights changed they take some 45 % more
bytes, so that auto keeps CONTEXT there; of dense float32 and of integers they take a few per cent more.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from weightvc.objects import manifest
from weightvc.objects.frame import Buffer

if TYPE_CHECKING:
    from weightvc_kernels.context import Stats

POLICIES: Final = ("small", "fast", "auto")
MARGIN: Final = 8
"""By more than one part in so many another coding has to be smaller, to be had instead of RICE."""
CONTEXT_FROM: Final = 1 << 20
"""Bytes of a tree from which the context codec pays: it loads compiled code, and its tables weigh something."""
Coded: TypeAlias = tuple[int, bytes, Any]
"""Codec, payload, and the old lanes [changes] that change."""
FEW: Final = 4
"""Changes of a block that may not earn the start of the context coder: of so many SPARSE is tried too."""


class Coder:
    """Learn first, then code blocks in any number of threads."""

    def __init__(self, policy: str = "small") -> None:
        self._policy = policy
        self._large = False
        self._tables: dict[str, bytes] = {}
        self._models: dict[str, Any] = {}
        self._used: set[str] = set()

    def learns(self, nbytes: int) -> bool:
        """Whether a patch of a tree of so many bytes needs a sample."""
        self._large = nbytes >= CONTEXT_FROM
        return self._large and self._policy != "fast"

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

    def patch(self, dtype: str, lane: int, old: Buffer, new: Buffer) -> Coded:
        """Codec, payload, and the old lanes [changes] that change."""
        return self.patches(dtype, lane, [(old, new)])[0]

    def patches(self, dtype: str, lane: int, pairs: Sequence[tuple[Buffer, Buffer]]) -> list[Coded]:
        """The same of each of many blocks: in compiled code they are all coded at once."""
        if not pairs:
            return []
        # What is compiled has to be loaded: for small trees only if asked for.
        rice = self._policy == "fast" or (self._policy == "auto" and self._large)
        coded = (self._rice if rice else self._small)(dtype, lane, pairs)
        if any(codec == manifest.CONTEXT for codec, _, _ in coded):
            self._used.add(dtype)
        return coded

    def _rice(self, dtype: str, lane: int, pairs: Sequence[tuple[Buffer, Buffer]]) -> list[Coded]:
        import weightvc_kernels as kernels

        others = self._small(dtype, lane, pairs) if self._policy == "auto" else []
        made: list[Coded] = []
        for i, (payload, was) in enumerate(kernels.rice.encode_batch(pairs, dtype, lane)):
            old, new = pairs[i]
            made.append((manifest.RICE, payload, was))
            if others:
                other = others[i]
            elif 4 * len(payload) > len(new):
                other = kernels.encode_patch(old, new, lane)
            else:
                # The others never come near where little changed.
                continue
            if MARGIN * len(payload) > (MARGIN + 1) * len(other[1]) or len(payload) > len(new):
                made[i] = other
        return made

    def _small(self, dtype: str, lane: int, pairs: Sequence[tuple[Buffer, Buffer]]) -> list[Coded]:
        import weightvc_kernels as kernels

        model = self._models.get(dtype)
        if model is None:
            return [kernels.encode_patch(old, new, lane) for old, new in pairs]
        made: list[Coded] = []
        for (old, new), (payload, was) in zip(pairs, kernels.context.encode_batch(model, pairs), strict=True):
            coded = manifest.CONTEXT, payload, was
            if not payload:
                coded = kernels.SPARSE, payload, was
            # Few changes do not earn the coder's start; many may be stored whole. Between the two it always wins.
            elif was.size < FEW or 4 * len(payload) > len(new):
                plain = kernels.encode_patch(old, new, lane)
                if len(plain[1]) <= len(payload):
                    coded = plain
            made.append(coded)
        return made

    @property
    def tables(self) -> dict[str, bytes]:
        """The tables that blocks were coded with, by dtype."""
        return {dtype: self._tables[dtype] for dtype in sorted(self._used)}
