"""Audits: what the updates of a whole run look like, what storing them would cost, and whether patches pay."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from weightvc.comparison import Diff, GroupDiff, costs, diff, spread
from weightvc.delta import open_delta
from weightvc.errors import BadFile, Refused
from weightvc.objects.policy import Policy
from weightvc.objects.schema import CHUNK

PIECE: Final = 42
"""Bytes of a manifest for each tensor that changed, and of a large one for each chunk: digests and indexes."""
MANIFEST: Final = 700
"""And for itself, with the root's entry."""
SPAN: Final = 4
"""Compaction makes patches over powers of so many versions,"""
LONGEST: Final = 1024
"""up to so many,"""
USUAL: Final = Policy()
"""and bases by this policy, unless told otherwise."""
PAYS: Final = 10.0
"""From so many times smaller than a whole checkpoint patches are said to pay,"""
HARDLY: Final = 2.5
"""and below so many times not to: a base alone is 1.5 times smaller."""


@dataclass(frozen=True, slots=True)
class AuditedPair:
    """Two checkpoints of a run, `apart` places from each other in its order."""

    old: str
    new: str
    apart: int
    elements: int
    changed: int
    patch: int
    """Bytes of a patch, with the digests that a version needs."""
    xor: int
    """Bytes of XOR and zstd."""
    full: int
    """Bytes of the new checkpoint."""
    other: int
    """Of its bytes, those of tensors that the old one does not have so."""

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Distance:
    """All pairs that were looked at that are so far apart; figures are medians."""

    apart: int
    pairs: tuple[AuditedPair, ...]

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return median(pair.density for pair in self.pairs)

    @property
    def changed(self) -> float:
        """Changed elements."""
        return median(pair.changed for pair in self.pairs)

    @property
    def patch(self) -> float:
        """Bytes of a patch."""
        return median(pair.patch for pair in self.pairs)

    @property
    def xor(self) -> float:
        """Bytes of XOR and zstd."""
        return median(pair.xor for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class Audit:
    """What a run's updates look like, and whether patches of them pay."""

    checkpoints: tuple[str, ...]
    stride: float | None
    """Steps from a checkpoint to the next, if that is known."""
    full: int
    """Bytes of the newest checkpoint."""
    elements: int
    distances: tuple[Distance, ...]
    """1, 2, 4, … checkpoints apart."""
    dtypes: tuple[GroupDiff, ...]
    """The newest pair by dtype, what has the most elements first."""
    cast: AuditedPair | None
    """The newest pair again, as bfloat16, where most of it is wider."""

    @property
    def times(self) -> float:
        """How many times smaller a patch is than the whole; infinite if nothing changes."""
        return self.full / self.distances[0].patch if self.distances[0].patch else math.inf

    @property
    def growth(self) -> float | None:
        """The power of the distance that the changed share grows as; None if that is not to be told."""
        points = [(math.log(d.apart), math.log(d.density)) for d in self.distances if d.density]
        if len(points) < 2:
            return None
        x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
        slope: float = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
        return slope

    @property
    def compacted(self) -> float:
        """Bytes that a version takes with what compaction adds for it, at most about: longer patches, and bases."""
        patch, growth = self.distances[0].patch, self.growth or 0.0
        longer, span = 0.0, SPAN
        while span <= LONGEST:
            longer += min(patch * math.pow(span, growth), self.full) / span
            span *= SPAN
        return min(patch + longer + max(100 * patch / USUAL.share, self.full / USUAL.base_every), patch + self.full)

    def costs(self, step_seconds: float, readers: int = 1) -> dict[str, float]:
        """A day of such versions on S3, as weightvc.diff's, for patches, for those with what compaction adds (which
        costs no more requests, and is sent to few), for XOR and zstd, and for whole checkpoints."""
        first = self.distances[0]
        sizes = {"patch": first.patch, "compacted": self.compacted, "xor": first.xor, "full": float(self.full)}
        out = costs(sizes, step_seconds, readers)
        out["compacted_egress"] = out["patch_egress"]
        return out

    @property
    def pays(self) -> bool:
        """Whether patches are worth having: at least PAYS times smaller than whole checkpoints."""
        return self.times >= PAYS

    @property
    def verdict(self) -> str:
        """Whether patches pay, and if not, why not, and what would mend it."""
        newest = self.distances[0].pairs[-1]
        if not self.distances[0].changed:
            return (
                f"Nothing changes from {newest.old} to {newest.new}: a version costs a record and no patch. If they "
                "should differ, see whether the trainer writes what it trained."
            )
        if 2 * newest.other > newest.full:
            return (
                f"Patches do not pay: {newest.other / newest.full:.0%} of {newest.new} lies in tensors that "
                f"{newest.old} does not have, or with another dtype or shape: compare checkpoints of one model, "
                "under the same names."
            )
        smaller = f"{_times(self.times)} smaller than whole checkpoints"
        beside = self.distances[0].xor / self.distances[0].patch
        if self.pays:
            xor = f"{_times(beside)} smaller than XOR and zstd"
            if beside < 1:
                xor = f"{_times(1 / beside)} larger than XOR and zstd, since so little changes"
            return f"Patches pay: they are {smaller}, and {xor}. {self._better()}".strip()
        head = f"Patches pay little: they are {smaller}" if self.times > HARDLY else "Patches do not pay"
        if self.times <= HARDLY:
            head += f": they are only {smaller}"
        return f"{head}, since {self._why()} {self._mend()}".strip()

    def _why(self) -> str:
        most = max(self.dtypes, key=lambda group: group.patch)
        return f"{most.density:.0%} of the {most.name} elements change from one to the next."

    def _better(self) -> str:
        if self.cast is None or self.cast.patch * 2 > self.distances[0].pairs[-1].patch:
            return ""
        return (
            f"As bf16 (--dtype bf16), if that is what hosts serve, {self.cast.density:.2%} of the elements change, "
            f"and a patch is {_times(self.distances[0].pairs[-1].patch / self.cast.patch)} smaller still."
        )

    def _mend(self) -> str:
        if self.cast is not None and self.cast.full > HARDLY * self.cast.patch:
            return (
                f"Serve bf16 (--dtype bf16): there {self.cast.density:.2%} change, and a patch is "
                f"{_times(self.cast.full / self.cast.patch)} smaller than the whole."
            )
        if self.stride is not None and self.stride > 1:
            return (
                f"They are {self.stride:g} steps apart, in which changes add up: publish every step, which changes "
                "less, and audit those."
            )
        for one in self.distances:
            if one.apart == 8 and one.patch < 6 * self.distances[0].patch:
                part = one.patch / 8 / self.distances[0].patch
                return (
                    f"Publish every 8th: its patch has {part:.0%} of the bytes of eight. The share falls by itself "
                    "as the learning rate does."
                )
        return "That falls with the learning rate: publish fewer versions until it has decayed, and audit again."


def audit(
    checkpoints: Sequence[Any] | Mapping[str, Any],
    *,
    steps: Sequence[int] | None = None,
    pairs: int = 3,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Audit:
    """Compare a run's checkpoints 1, 2, 4, … apart, in their order; of each distance at most `pairs`, evenly spread.

    A checkpoint is anything that can be committed, or a function that opens a source of it, called when it is needed;
    a mapping has them by the names that they are to have. `steps` are their numbers. Two are open at once. `options`
    are those of diff(). Raises Refused for less than two, and what cannot be read.
    """
    named = checkpoints if isinstance(checkpoints, Mapping) else _named(checkpoints)
    names = list(named)
    if len(names) < 2:
        raise Refused(
            f"an audit compares the checkpoints of a run, and {len(names) or 'none'} is there: give two at least"
        )
    if pairs < 1:
        raise Refused(f"pairs={pairs}: look at one pair of each distance at least")
    if steps is not None and len(steps) != len(names):
        raise Refused(f"{len(steps)} steps for {len(names)} checkpoints: give each its number")
    wanted = [
        (at, at + apart)
        for apart in (1 << i for i in range((len(names) - 1).bit_length()))
        if apart < len(names)
        for at in spread(len(names) - apart, pairs)
    ]
    made: dict[int, list[AuditedPair]] = {}
    newest: Diff | None = None
    cast = None

    def compared(old: str, new: str, done: int, **more: Any) -> Diff:
        def step(part: int, whole: int) -> None:
            if progress is not None:
                progress(done * whole + part, len(wanted) * whole)

        with _opened(named[old]) as before, _opened(named[new]) as after:
            return diff(before, after, closely=True, progress=step, **(options | more))

    for done, (i, j) in enumerate(wanted):
        found = compared(names[i], names[j], done)
        made.setdefault(j - i, []).append(_pair(names[i], names[j], j - i, found))
        if (i, j) == (len(names) - 2, len(names) - 1):
            newest = found
            if sum(group.elements for group in found.dtypes if group.name in ("F32", "F64")) * 2 > found.elements:
                again = compared(names[i], names[j], done, dtype="bfloat16")
                cast = _pair(names[i], names[j], 1, again)
    assert newest is not None
    apart = [b - a for a, b in pairwise(steps)] if steps is not None else []
    return Audit(
        tuple(names),
        median(apart) if apart else None,
        newest.full,
        newest.elements,
        tuple(Distance(k, tuple(made[k])) for k in sorted(made)),
        tuple(newest.dtypes),
        cast,
    )


def _named(checkpoints: Sequence[Any]) -> dict[str, Any]:
    """By their paths, or else by their places."""
    out: dict[str, Any] = {}
    for i, one in enumerate(checkpoints):
        name = os.fspath(one) if isinstance(one, str | os.PathLike) else f"checkpoint {i}"
        out[name if name not in out else f"{name} ({i})"] = one
    return out


@contextmanager
def _opened(checkpoint: Any) -> Iterator[Any]:
    """What diff() takes; a source that was opened here is closed. Raises BadFile for a delta: it is no checkpoint."""
    if isinstance(checkpoint, str | os.PathLike) and os.path.isdir(checkpoint):
        delta = open_delta(checkpoint)
        if delta is not None:
            delta.close()
            raise BadFile(f"{os.fspath(checkpoint)} is a delta: `weightvc import` the run, and audit its branch")
    if not callable(checkpoint) or hasattr(checkpoint, "state_dict"):
        yield checkpoint
        return
    source = checkpoint()
    try:
        yield source
    finally:
        source.close()


def _pair(old: str, new: str, apart: int, found: Diff) -> AuditedPair:
    from weightvc.objects import dtypes

    touched = [tensor for tensor in found.tensors if tensor.changed]
    weights = [-(-dtypes.nbytes(tensor.dtype, tensor.shape) // CHUNK) for tensor in touched]
    extra = MANIFEST + PIECE * sum(weights) if touched else 0
    other = sum(
        dtypes.nbytes(tensor.dtype, tensor.shape)
        for tensor in touched
        if tensor.status in ("added", "reshaped", "retyped")
    )
    assert found.xor is not None
    return AuditedPair(
        old, new, apart, found.elements, found.changed, found.patch + extra, found.xor, found.full, other
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 9.95 else f"{ratio:,.0f} times"
