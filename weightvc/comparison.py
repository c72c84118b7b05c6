"""Diff: what changed between two sets of weights, tensor by tensor, and what storing such steps would take."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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

FLOATS: Final = {
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F64": (11, 52),
    "F8_E4M3": (4, 3),
    "F8_E4M3FNUZ": (4, 3),
    "F8_E5M2": (5, 2),
    "F8_E5M2FNUZ": (5, 2),
}
"""Bits of exponent and of mantissa, of the dtypes whose order is that of their bits."""
_NUMBER: Final = re.compile(r"(?:.*?\.)?[0-9]+(?=\.|$)")


def spread(count: int, most: int) -> list[int]:
    """At most so many of [0, count), evenly, the last among them."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def costs(sizes: Mapping[str, float], step_seconds: float, readers: int = 1) -> dict[str, float]:
    """A day of versions on S3, one every `step_seconds`, in US dollars and bytes.

    `sizes` has the bytes that a version takes, by the name under which the figures come.
    """
    steps = 86400 / step_seconds
    puts, gets = REQUESTS
    out: dict[str, float] = {"steps": steps, "step_seconds": step_seconds, "readers": readers}
    for name, nbytes in sizes.items():
        out[f"{name}_bytes"] = nbytes * steps
        out[f"{name}_requests"] = steps * (puts * PUT_PRICE + gets * GET_PRICE + readers * 2 * GET_PRICE)
        out[f"{name}_month"] = nbytes * steps * MONTH_PRICE
        out[f"{name}_egress"] = nbytes * steps * readers * EGRESS_PRICE
    return out


def layer_of(component: str, name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, else without its last part."""
    found = _NUMBER.match(name)
    layer = found[0] if found else name.rpartition(".")[0] or name
    return f"{component}/{layer}" if component else layer


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
class GroupDiff:
    """Tensors of the new side that have something in common: a layer, or a dtype."""

    name: str
    tensors: int = 0
    elements: int = 0
    changed: int = 0
    patch: int = 0

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(slots=True)
class ExponentDiff:
    """Old weights of one dtype from 2^exponent up to twice that; None: zeros and subnormal numbers."""

    dtype: str
    exponent: int | None
    elements: int
    changed: int
    single: int
    """Of those that changed, how many moved to the next representable value."""

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

    xor: int | None = None
    """Bytes of zstd of the XORs, by chunk, which is what is done without a codec; None unless looked at closely."""
    exponents: list[ExponentDiff] = field(default_factory=list)
    """Floating elements that both sides have, by dtype and exponent; none unless looked at closely."""

    @property
    def density(self) -> float:
        """Changed elements over elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def layers(self) -> list[GroupDiff]:
        """The new side's tensors by layer, in order."""
        made = self._by((layer_of(t.component, t.name), t) for t in self.tensors)
        return sorted(made, key=lambda group: [(len(w), w) if w.isdigit() else (0, w) for w in group.name.split(".")])

    @property
    def dtypes(self) -> list[GroupDiff]:
        """The new side's tensors by dtype, what has the most elements first."""
        made = self._by((t.dtype, t) for t in self.tensors)
        return sorted(made, key=lambda group: (-group.elements, group.name))

    def _by(self, named: Iterable[tuple[str, TensorDiff]]) -> Iterable[GroupDiff]:
        made: dict[str, GroupDiff] = {}
        for name, tensor in named:
            if tensor.status != "removed":
                group = made.setdefault(name, GroupDiff(name))
                group.tensors += 1
                group.elements += tensor.elements
                group.changed += tensor.changed
                group.patch += tensor.patch
        return made.values()

    def costs(self, step_seconds: float, readers: int = 1) -> dict[str, float]:
        """A day of such steps on S3, in US dollars and bytes, for patches and for full checkpoints."""
        return costs({"patch": self.patch, "full": self.full}, step_seconds, readers)


def diff(
    old: Any,
    new: Any,
    *,
    closely: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Diff:
    """Compare the tensors of anything that can be committed: paths, URLs, dicts, modules, or open sources.

    `closely`: count by exponent too, and see what XOR and zstd would take, for about twice the time. `options` are
    those of open_source (dtype, names, name, exclude). Raises Refused for what cannot be read.
    """
    opened: list[Source] = []
    try:
        for side in (old, new):
            opened.append(open_source(side, side_files=False, **options))
        return _diff(opened[0], opened[1], closely, progress)
    finally:
        for side, source in zip((old, new), opened, strict=False):
            if source is not side:
                source.close()


def _diff(old: Source, new: Source, closely: bool, progress: Callable[[int, int], None] | None) -> Diff:
    import weightvc_kernels as kernels

    ours, theirs = Schema(new.tensors), Schema(old.tensors)
    result = Diff([], {}, elements=ours.elements, full=ours.nbytes)
    rows: dict[tuple[str, str], TensorDiff] = {}
    steps: Counter[int] = Counter()
    exponents: dict[str, Any] = {}
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

    def work(block: tuple[int, int]) -> tuple[tuple[int, int], _Found]:
        low, high = block
        a, b = _bytes(old, theirs, ours, low, high), _bytes(new, ours, ours, low, high)
        tensor = ours.tensors[ours.tensor_of(low)]
        lane = dtypes.lane(tensor.dtype)
        assert b is not None
        if a is None:
            _, payload = kernels.encode_whole(b, lane)
            return block, _Found(len(payload), len(b) // lane, len(payload))
        found = _Found()
        if a != b:
            _, payload, was = coding.patch(tensor.dtype, lane, a, b)
            found = _Found(len(payload), was.size)
        _look(kernels, found, a, b, lane, tensor.dtype, closely)
        return block, found

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
    done = xor = 0
    with Pool(parallel.workers(), "weightvc-diff") as pool:
        if ours.nbytes >= coder.CONTEXT_FROM:
            coding.learn(parallel.ordered(pool, sample, blocks[4::8] or blocks, 16))
        for (low, high), found in parallel.ordered(pool, work, blocks, 2 * parallel.workers() + 2):
            tensor = ours.tensors[ours.tensor_of(low)]
            row = rows[tensor.component, tensor.name]
            row.patch += found.nbytes
            row.changed += found.changed
            steps.update(found.steps)
            xor += found.xor
            if found.exponents is not None:
                exponents[tensor.dtype] = exponents.get(tensor.dtype, 0) + found.exponents
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
    if closely:
        result.xor = xor
        result.exponents = [row for dtype in sorted(exponents) for row in _exponents(dtype, exponents[dtype])]
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


@dataclass(slots=True)
class _Found:
    """What one block tells."""

    nbytes: int = 0
    changed: int = 0
    xor: int = 0
    steps: "Counter[int]" = field(default_factory=Counter)
    exponents: Any = None
    """Elements, changed, and moved by one, int64 [3, exponents]."""


def _look(kernels: Any, found: _Found, old: Any, new: Any, lane: int, dtype: str, closely: bool) -> None:
    """Add to what was found the steps, and if `closely`, exponents, and what others would store."""
    import numpy as np

    kind = np.dtype(f"<u{lane}")
    before, after = np.frombuffer(old, kind), np.frombuffer(new, kind)
    at = np.empty(0, np.int64)
    moved = at
    if dtype in FLOATS and found.changed:
        at = kernels.diff_lanes(old, new, lane)
        moved = np.abs(step := kernels.ulp_steps(before[at], after[at], lane))
        values, counts = np.unique(step[moved <= STEPS_KEPT], return_counts=True)
        found.steps = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    if closely and found.changed:
        import zstandard

        # Level 1, as all do who need it beside training.
        found.xor = len(zstandard.compress((before ^ after).tobytes(), 1))
    if closely and dtype in FLOATS:
        width, mantissa = FLOATS[dtype]
        mask = (1 << width) - 1
        one = moved == 1
        found.exponents = np.zeros((3, mask + 1), np.int64)
        # Piece by piece: what counts takes eight bytes an element.
        for piece in range(0, before.size, 1 << 18):
            found.exponents[0] += np.bincount(
                before[piece : piece + (1 << 18)] >> mantissa & mask, minlength=mask + 1
            )
        for row, some in ((1, at), (2, at[one])):
            found.exponents[row] += np.bincount(before[some] >> mantissa & mask, minlength=mask + 1)


def _exponents(dtype: str, counts: Any) -> list[ExponentDiff]:
    width, _ = FLOATS[dtype]
    bias = (1 << (width - 1)) - (0 if dtype.endswith("FNUZ") else 1)
    return [
        ExponentDiff(dtype, i - bias if i else None, *counts[:, i].tolist())
        for i in range(1 << width)
        if counts[0, i]
    ]
