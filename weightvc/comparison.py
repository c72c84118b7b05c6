"""Diff: what changed between two sets of weights, tensor by tensor, and what storing such steps would take."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from weightvc.objects import dtypes
from weightvc.objects.schema import CHUNK, Schema
from weightvc.pool import Pool
from weightvc.protocol import coder, parallel
from weightvc.sources import open_source
from weightvc.sources.base import Source

STEPS_KEPT: Final = 64
"""Steps of at most so many representable values are counted apart."""

# What Amazon S3 Standard asked in us-east-1 in 2026, in US dollars (its price page).
PUT_PRICE: Final = 0.005 / 1000
GET_PRICE: Final = 0.0004 / 1000
MONTH_PRICE: Final = 0.023 / 1e9
"""Of a byte kept for a month."""
EGRESS_PRICE: Final = 0.09 / 1e9
"""Of a byte sent to the internet."""
REQUESTS: Final = (2, 2)
"""PUTs and GETs of one commit with its baseline at hand."""


@dataclass(slots=True)
class TensorDiff:
    """One tensor. `status` is "same", "changed", "added", "removed", "reshaped" or "retyped"."""

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    status: str
    elements: int
    changed: int
    patch: int
    """Bytes that its part of a patch would take."""

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(slots=True)
class Diff:
    """All tensors of both sides, in order."""

    tensors: list[TensorDiff]
    steps: dict[int, int]
    """How many changed floating elements moved by so many representable values (+ is up); larger moves are not
    listed."""
    elements: int = 0
    changed: int = 0
    patch: int = 0
    """Bytes of the patch's streams."""
    full: int = 0
    """Canonical bytes of the new side."""

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.elements if self.elements else 0.0

    def costs(self, step_seconds: float, readers: int = 1) -> dict[str, float]:
        """A day of such steps on S3, in US dollars and bytes, for patches and for full checkpoints."""
        steps = 86400 / step_seconds
        puts, gets = REQUESTS
        out: dict[str, float] = {"steps": steps, "step_seconds": step_seconds, "readers": readers}
        for name, nbytes in (("patch", self.patch), ("full", self.full)):
            out[f"{name}_bytes"] = nbytes * steps
            out[f"{name}_requests"] = steps * (puts * PUT_PRICE + gets * GET_PRICE + readers * 2 * GET_PRICE)
            out[f"{name}_month"] = nbytes * steps * MONTH_PRICE
            out[f"{name}_egress"] = nbytes * steps * readers * EGRESS_PRICE
        return out


def diff(old: Any, new: Any, *, progress: Callable[[int, int], None] | None = None, **options: Any) -> Diff:
    """Compare anything that can be committed: paths, URLs, dicts, modules, or open sources.

    `options` are those of open_source (dtype, names, name, exclude). Raises Refused for what cannot be read.
    """
    opened: list[Source] = []
    try:
        for side in (old, new):
            opened.append(open_source(side, **options))
        return _diff(opened[0], opened[1], progress)
    finally:
        for side, source in zip((old, new), opened, strict=False):
            if source is not side:
                source.close()


def _diff(old: Source, new: Source, progress: Callable[[int, int], None] | None) -> Diff:
    import weightvc_kernels as kernels

    ours, theirs = Schema(new.tensors), Schema(old.tensors)
    result = Diff([], {}, elements=ours.elements, full=ours.nbytes)
    rows: dict[tuple[str, str], TensorDiff] = {}
    steps: Counter[int] = Counter()
    for tensor in new.tensors:
        i = theirs.index.get((tensor.component, tensor.name), -1)
        before = old.tensors[i] if i >= 0 else None
        status = "same"
        if before is None:
            status = "added"
        elif before.dtype != tensor.dtype:
            status = "retyped"
        elif before.shape != tensor.shape:
            status = "reshaped"
        rows[tensor.component, tensor.name] = _row(tensor, status)
    for tensor in old.tensors:
        if (tensor.component, tensor.name) not in rows:
            rows[tensor.component, tensor.name] = _row(tensor, "removed")

    def work(block: tuple[int, int]) -> tuple[tuple[int, int], int, int, Counter[int]]:
        low, high = block
        a, b = _bytes(old, theirs, ours, low, high), _bytes(new, ours, ours, low, high)
        tensor = ours.tensors[ours.tensor_of(low)]
        lane = dtypes.lane(tensor.dtype)
        assert b is not None
        if a is None:
            _, payload = kernels.encode_whole(b, lane)
            return block, len(payload), len(b) // lane, Counter()
        if a == b:
            return block, 0, 0, Counter()
        _, payload, was = coding.patch(tensor.dtype, lane, a, b)
        return block, len(payload), was.size, _steps(kernels, a, b, lane, tensor.dtype)

    # One tensor a block here: the weight of each is asked for, not the smallest whole.
    blocks = [
        (low, min(low + 1, ours.first_chunk[i + 1]))
        for i in range(len(ours.tensors))
        for low in range(ours.first_chunk[i], ours.first_chunk[i + 1])
    ]

    def sample(block: tuple[int, int]) -> tuple[str, Any]:
        dtype = ours.tensors[ours.tensor_of(block[0])].dtype
        a, b = _bytes(old, theirs, ours, *block), _bytes(new, ours, ours, *block)
        known = a is not None and kernels.context.supports(dtype)
        return dtype, kernels.context.sample(a, b, dtype, 2) if known else None

    coding = coder.Coder()
    done = 0
    with Pool(parallel.workers(), "weightvc-diff") as pool:
        if ours.nbytes >= coder.CONTEXT_FROM:
            coding.learn(parallel.ordered(pool, sample, blocks[4::8] or blocks, 16))
        for (low, high), nbytes, changed, found in parallel.ordered(pool, work, blocks, 2 * parallel.workers() + 2):
            tensor = ours.tensors[ours.tensor_of(low)]
            row = rows[tensor.component, tensor.name]
            row.patch += nbytes
            row.changed += changed
            steps.update(found)
            if progress is not None:
                done += ours.position(high) - ours.position(low)
                progress(done, ours.nbytes)
    for row in rows.values():
        if row.status == "same" and row.changed:
            row.status = "changed"
    result.tensors = [rows[name] for name in sorted(rows)]
    result.changed = sum(row.changed for row in result.tensors)
    result.patch = sum(row.patch for row in result.tensors)
    result.steps = dict(sorted(steps.items()))
    return result


def _row(tensor: Any, status: str) -> TensorDiff:
    return TensorDiff(
        tensor.component, tensor.name, tensor.dtype, tensor.shape, status, dtypes.count(tensor.shape), 0, 0
    )


def _bytes(source: Source, schema: Schema, ours: Schema, low: int, high: int) -> Any:
    """Bytes of chunks of `ours`, read from `source`; None if it has no tensor of the dtype with chunks of that size
    there: then all that is new is stored."""
    pieces = []
    for chunk in range(low, high):
        i, start, stop = ours.span(chunk)
        if schema is not ours:
            tensor = ours.tensors[i]
            i = schema.index.get((tensor.component, tensor.name), -1)
            if i < 0:
                return None
            was = schema.tensors[i]
            if was.dtype != tensor.dtype or min(was.nbytes, start + CHUNK) != stop:
                return None
        pieces.append(source.read(i, start, stop))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _steps(kernels: Any, old: Any, new: Any, lane: int, dtype: str) -> "Counter[int]":
    import numpy as np

    if not dtype.startswith(("F", "BF")) or dtype in ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"):
        return Counter()
    at = kernels.diff_lanes(old, new, lane)
    kind = np.dtype(f"<u{lane}")
    moved = kernels.ulp_steps(np.frombuffer(old, kind)[at], np.frombuffer(new, kind)[at], lane)
    values, counts = np.unique(moved[np.abs(moved) <= STEPS_KEPT], return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
