"""Pairs of checkpoints in memory, cut as a commit cuts them, and the bound of what a patch of one can be.

The files are trusted: they are read as safetensors says, and not checked.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightvc.objects import manifest
from weightvc.objects.dtypes import lane as lane_of
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc_kernels.lanes import ulp_steps

Bytes = npt.NDArray[np.uint8]
CLASSES = {
    "BF16": (7, 0xFF),
    "F16": (10, 0x1F),
    "F8_E4M3": (0, 0xFF),
    "F8_E5M2": (0, 0xFF),
}
"""Shift and mask that give what the old element tells of its change: the exponent, or of a byte all."""


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
    """dtype, shape and bytes of every tensor of a safetensors file."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    found = {}
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return found


def joined(path: Path, least: int, count: int, folder: Path) -> Path:
    """A file of the elements of another one (of the dtype that most of it is), one after the other and again until
    they have `least` bytes, as `count` tensors of one size: a larger model's blocks, with a smaller one's changes."""
    found = read(path)
    sizes: dict[str, int] = {}
    for dtype, _, data in found.values():
        sizes[dtype] = sizes.get(dtype, 0) + data.size
    dtype = max(sizes, key=lambda name: sizes[name])
    one = np.concatenate([data for name, (kind, _, data) in sorted(found.items()) if kind == dtype])
    every = np.tile(one, max(1, round(least / one.size)))
    size = every.size // count // 64 * 64
    shape = [size // lane_of(dtype)]
    entries = {
        f"{i:04}": {"dtype": dtype, "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(count)
    }
    header = json.dumps(entries).encode()
    out = folder / path.name
    with out.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        every[: count * size].tofile(file)
    return out


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor, or a block of one dtype: bytes [start, stop) of a model."""

    dtype: str
    start: int
    stop: int
    cuts: tuple[int, ...]
    """Where its chunks begin, and where the last ends, counted from `start`: what digests cover."""

    @property
    def lane(self) -> int:
        """Bytes of a lane."""
        return lane_of(self.dtype)

    def of(self, model: Bytes) -> Bytes:
        """Its bytes in a model."""
        return model[self.start : self.stop]


class Pair:
    """Two models, `old` and `new`, uint8 [bytes]: tensors in a commit's order, blocks beginning aligned."""

    def __init__(self, title: str, old: Path, new: Path, least: int = 0) -> None:
        """Read two files. Tensors are repeated, under other names, until the model has `least` bytes."""
        before, after = read(old), read(new)
        if {name: entry[:2] for name, entry in before.items()} != {name: entry[:2] for name, entry in after.items()}:
            raise SystemExit(f"{old} and {new} differ in names, dtypes or shapes: a pair has the same tensors")
        self.title = title
        size = sum(data.size for _, _, data in after.values())
        self.copies = max(1, round(least / max(size, 1)))
        self.schema = Schema(
            [
                TensorInfo(f"{copy:04}", name, after[name][0], after[name][1], after[name][2].size)
                for copy in range(self.copies)
                for name in sorted(after)
            ]
        )
        self.nbytes = self.schema.nbytes
        self.elements = self.schema.elements
        self.infos = [tensor for tensor in self.schema.tensors if tensor.nbytes]
        self.blocks, self.tensors, end = self._cut()
        self.runs = self._joined()
        self.old, self.new = np.zeros(end, np.uint8), np.zeros(end, np.uint8)
        for info, span in zip(self.infos, self.tensors):
            span.of(self.old)[:] = before[info.name][2]
            span.of(self.new)[:] = after[info.name][2]

    def _cut(self) -> tuple[list[Span], list[Span], int]:
        schema, end = self.schema, 0
        blocks, starts = [], {}
        for low, high in manifest.blocks(schema, None):
            tensor, within, _ = schema.span(low)
            if within == 0:
                end = (end + 63) // 64 * 64
            cuts = tuple(schema.cuts(low, high).tolist())
            blocks.append(Span(schema.tensors[tensor].dtype, end, end + cuts[-1], cuts))
            for chunk, at in zip(range(low, high), cuts):
                tensor, within, _ = schema.span(chunk)
                if within == 0:
                    starts[tensor] = end + at
            end += cuts[-1]
        tensors = [
            Span(schema.tensors[i].dtype, at, at + size, (*range(0, size, manifest.BLOCK), size))
            for i, at in starts.items()
            for size in [schema.tensors[i].nbytes]
        ]
        return blocks, tensors, end

    def _joined(self) -> list[list[Span]]:
        """Blocks in runs, as a thread takes them."""
        left = iter(self.blocks)
        return [[next(left) for _ in run] for run in manifest.runs(self.schema, manifest.blocks(self.schema, None))]

    def sides(self) -> Iterator[tuple[str, npt.NDArray[Any], npt.NDArray[Any]]]:
        """dtype and both states of every tensor, as unsigned integers."""
        for span in self.tensors:
            yield span.dtype, span.of(self.old).view(f"u{span.lane}"), span.of(self.new).view(f"u{span.lane}")


@dataclass(slots=True)
class Bound:
    """What a lossless patch costs that knows every count, tensor by tensor and exponent by exponent, for free."""

    changed: int = 0
    """Changed elements, of all dtypes."""
    nbytes: float = 0.0
    """Of floats of 8 and 16 bits. Wider steps hardly come twice, so that counting them would tell nothing."""
    left_out: int = 0
    """Changed elements of other dtypes."""


def bound(pair: Pair) -> Bound:
    """Entropy of positions and steps, given tensor and old exponent."""
    out, bits = Bound(), 0.0
    for dtype, x, y in pair.sides():
        at = np.flatnonzero(x != y)
        out.changed += at.size
        if dtype not in CLASSES:
            out.left_out += at.size
            continue
        if not at.size:
            continue
        shift, mask = CLASSES[dtype]
        seen = np.bincount((x >> shift) & mask, minlength=mask + 1)
        there = ((x[at] >> shift) & mask).astype(np.int64)
        met = np.bincount(there, minlength=mask + 1)
        bits += _entropy(met) + _entropy(seen - met) - _entropy(seen)
        steps = ulp_steps(x[at], y[at], x.itemsize)
        # A row an exponent, a column a step that occurs: one count for all.
        _, column = np.unique(steps, return_inverse=True)
        table = np.bincount(there * (column.max() + 1) + column)
        bits += _entropy(table) - _entropy(met)
    out.nbytes = bits / 8
    return out


def _entropy(counts: npt.NDArray[Any]) -> float:
    """Sum of -n log2 n: differences of it are entropies of sequences with these counts."""
    counts = counts[counts > 0].astype(float)
    return float(-(counts * np.log2(counts)).sum())
