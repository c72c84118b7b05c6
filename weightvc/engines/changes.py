"""What differs between two checkpoints on disk, in checkpoint coordinates: full shapes, flat positions, values.

A file of changes is a safetensors file that lives for one update, in a folder beside the slots. For each tensor NAME
that differs it has `i:NAME`, ascending flat positions (I32, or I64 where a tensor is too large for that), and
`v:NAME`, the values there; the metadata has `from` and `to`, version ids, and `shapes`, JSON.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weightvc.engines.vllm import FOLDER
from weightvc.objects import dtypes
from weightvc.objects.tensor import TensorInfo
from weightvc.pool import Pool
from weightvc.protocol import parallel
from weightvc.protocol.checkout import local_errors
from weightvc.sources import header, memory, open_source
from weightvc.sources.base import Source

PIECE: Final = 16 << 20
"""Bytes that are compared at once."""
INT32: Final = 2**31 - 1
"""The last flat position that an int32 can have."""
INFINITY: Final = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""Bits of infinity by dtype: where the sign bit is left out, what is larger is a NaN. Other dtypes have no NaN that
every torch kernel knows, or none."""


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that differs: numpy arrays [changes] of flat positions, int32 or int64, and of values.

    Values are a bit view as unsigned integers: numpy has no bfloat16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    positions: Any
    values: Any


def file_of(new: Path, old: str, made: str) -> Path:
    """Where the changes from version `old` to `made` lie, whose slot is `new`."""
    return new.parent / FOLDER / f"{made[:12]}-from-{old[:12]}.safetensors"


def write(old: Path, new: Path, old_id: str, new_id: str) -> str:
    """Write the file of changes between two slots; others are removed. Why there is none, or "".

    There is none where the sparse loader of an engine could not take one: it marks unchanged elements with NaN.
    """
    target = file_of(new, old_id, new_id)
    if target.exists():
        return ""
    with closing(open_source(old)) as before, closing(open_source(new)) as after:
        pairs = _pairs(before, after)
        if pairs is None:
            return "names, dtypes or shapes changed"
        with Pool(parallel.workers(), "weightvc-changes") as pool:
            found = [change for change in pool.map(lambda pair: _change(before, after, *pair), pairs) if change]
        whole = sum(tensor.nbytes for tensor in after.tensors)
    for change in found:
        if why := dense_for(change):
            return why
    if sum(change.positions.nbytes + change.values.nbytes for change in found) > whole:
        return "most of the elements changed"
    with local_errors(target.parent):
        _write(target, found, old_id, new_id)
    return ""


def dense_for(change: Change) -> str:
    """Why a tensor's new elements cannot be marked among NaNs, or ""."""
    infinity = INFINITY.get(change.dtype)
    if infinity is None:
        return f"{change.name!r:.200} changed, which is {change.dtype}"
    sign = 1 << (8 * change.values.itemsize - 1)
    if (change.values & (sign - 1) > infinity).any():
        return f"{change.name!r:.200} has a NaN among its new values"
    return ""


def differing(old: Path, new: Path) -> list[str] | None:
    """Names of the tensors that differ between two slots; None if names, dtypes or shapes do."""
    with closing(open_source(old)) as before, closing(open_source(new)) as after:
        pairs = _pairs(before, after)
        if pairs is None:
            return None
        with Pool(parallel.workers(), "weightvc-changes") as pool:
            same = pool.map(lambda pair: _same(before, after, *pair), pairs)
            return [after.tensors[j].name for (_, j), equal in zip(pairs, same, strict=True) if not equal]


def tensors(directory: Path, names: set[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The torch tensors of a checkpoint, or those of some names, in the order of their names, one at a time."""
    make = memory.maker("torch")
    with closing(open_source(directory)) as source:
        for i, tensor in enumerate(source.tensors):
            if not tensor.component and (names is None or tensor.name in names):
                yield tensor.name, make(tensor.dtype, tensor.shape, bytearray(source.read(i, 0, tensor.nbytes)))


def read(path: Path, old_id: str, new_id: str) -> list[Change] | None:
    """The changes in a file, mapped; None if there is none from and to these versions."""
    import numpy

    if not path.exists():
        return None
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = header.read_header(lambda start, stop: os.pread(file.fileno(), stop - start, start), size, str(path))
        data = numpy.memmap(file, numpy.uint8, "r") if size else None
    metadata = head.metadata or {}
    if metadata.get("from") != old_id or metadata.get("to") != new_id or data is None:
        return None
    shapes = json.loads(metadata["shapes"])
    at = {name: (dtype, data[begin:end]) for name, dtype, _, begin, end in head.tensors}
    out = []
    for name, shape in shapes.items():
        (kind, where), (dtype, values) = at[f"i:{name}"], at[f"v:{name}"]
        positions = where.view("<i4" if kind == "I32" else "<i8")
        out.append(Change(name, dtype, tuple(shape), positions, values.view(f"<u{dtypes.lane(dtype)}")))
    return out


def _pairs(before: Source, after: Source) -> list[tuple[int, int]] | None:
    """Pairs of the tensors outside of folders, which are all that an engine loads; None if they are not alike."""
    old = {t[1:4]: i for i, t in enumerate(before.tensors) if not t.component}
    new = {t[1:4]: i for i, t in enumerate(after.tensors) if not t.component}
    return [(old[key], new[key]) for key in new] if old.keys() == new.keys() else None


def _pieces(before: Source, after: Source, i: int, j: int) -> Iterator[tuple[int, Any, Any]]:
    size = after.tensors[j].nbytes
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        yield start, before.read(i, start, stop), after.read(j, start, stop)


def _same(before: Source, after: Source, i: int, j: int) -> bool:
    return all(one == other for _, one, other in _pieces(before, after, i, j))


def _change(before: Source, after: Source, i: int, j: int) -> Change | None:
    import numpy

    import weightvc_kernels as kernels

    tensor = after.tensors[j]
    lane = dtypes.lane(tensor.dtype)
    positions, values = [], []
    for start, one, other in _pieces(before, after, i, j):
        if one == other:
            continue
        at = kernels.diff_lanes(one, other, lane)
        values.append(numpy.frombuffer(other, f"<u{lane}")[at])
        positions.append((at + start // lane).astype(position_type(tensor.shape)))
    if not positions:
        return None
    return Change(tensor.name, tensor.dtype, tensor.shape, numpy.concatenate(positions), numpy.concatenate(values))


def position_type(shape: tuple[int, ...]) -> str:
    """The type of flat positions in a shape."""
    return "<i4" if dtypes.count(shape) - 1 <= INT32 else "<i8"


def _write(target: Path, found: list[Change], old_id: str, new_id: str) -> None:
    infos, arrays = [], {}
    for change in found:
        wide = "I32" if change.positions.itemsize == 4 else "I64"
        for kind, dtype, array in (("i", wide, change.positions), ("v", change.dtype, change.values)):
            info = TensorInfo("", f"{kind}:{change.name}", dtype, (array.size,), array.nbytes)
            infos.append(info)
            arrays[info.name] = array
    shapes = json.dumps({change.name: change.shape for change in found})
    prefix = header.build_header(infos, {"from": old_id, "to": new_id, "shapes": shapes})
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(prefix)
        for info in header.order(infos):
            file.write(memoryview(arrays[info.name]).cast("B") if info.nbytes else b"")
    os.rename(beside, target)
