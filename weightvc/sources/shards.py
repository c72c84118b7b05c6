"""Shards: what one rank has of tensors that lie on many, and which bytes of the whole tensors that is.

A box is a range of elements in each dimension of a whole tensor. A rank has its elements in row-major order, so that
the bytes of a box that lie in any range of the whole tensor's bytes follow each other in what the rank has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from weightvc.errors import BadTensor, Refused
from weightvc.objects import dtypes
from weightvc.objects.tensor import TensorInfo
from weightvc.sources.base import Source
from weightvc.sources.cast import cast
from weightvc.sources.header import shown
from weightvc.sources.memory import is_torch, name_fault, open_tensors, tensor_fault
from weightvc.sources.transform import Transform, detached

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Numbers = numpy.typing.NDArray[numpy.int64]

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension, in elements."""


class Offered(NamedTuple):
    """A piece of a tensor that a rank has: `tensor` is the whole one."""

    tensor: TensorInfo
    box: Box


class Part(NamedTuple):
    """A piece of a tensor of this name and shape, as a tensor of its own."""

    name: str
    shape: tuple[int, ...]
    box: Box
    value: Any


@dataclass(frozen=True)
class Runs:
    """Where a box's bytes are in its tensor: runs of `length` bytes each, which begin at `starts`, ascending."""

    starts: "Numbers"
    length: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return len(self.starts) * self.length

    def before(self, positions: "Numbers") -> "Numbers":
        """How many of the box's bytes lie before each position in the tensor."""
        import numpy as np

        run = np.searchsorted(self.starts, positions, "right") - 1
        inside = np.minimum(positions - self.starts[np.maximum(run, 0)], self.length)
        return np.where(run < 0, 0, run * self.length + inside)

    def scatter(self, first: int, data: Any, origin: int, into: Any) -> None:
        """Put the box's bytes from number `first` on into `into`, which holds the tensor's from `origin` on."""
        import numpy as np

        into, data = np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
        run, skip = divmod(first, self.length)
        done = 0
        if skip or len(data) < self.length:
            done = min(self.length - skip, len(data))
            at = int(self.starts[run]) + skip - origin
            into[at : at + done] = data[:done]
            run += 1
        count = (len(data) - done) // self.length
        starts = self.starts[run : run + count] - origin
        steps = np.diff(starts)
        if count > 1 and (steps == steps[0]).all():
            # Rows of one array: no loop over what may be few bytes.
            step = int(steps[0])
            rows = np.lib.stride_tricks.as_strided(into[starts[0] :], (count, self.length), (step, 1))
            rows[:] = data[done : done + count * self.length].reshape(count, self.length)
            done += count * self.length
        else:
            for at in starts.tolist():
                into[at : at + self.length] = data[done : done + self.length]
                done += self.length
        if done < len(data):
            at = int(self.starts[run + count]) - origin
            into[at : at + len(data) - done] = data[done:]


def runs(offered: Offered) -> Runs:
    """Where a piece's bytes are. Raises BadTensor for part of a tensor whose elements are no whole bytes."""
    import numpy as np

    tensor, box = offered
    shape = tensor.shape
    sizes = [stop - start for start, stop in box]
    if tuple(sizes) == shape:
        return Runs(np.zeros(1 if tensor.nbytes else 0, np.int64), max(tensor.nbytes, 1))
    width, odd = divmod(dtypes.bits(tensor.dtype), 8)
    if odd:
        raise BadTensor(f"tensor {shown(tensor.name)}: {tensor.dtype} in shards: gather it, or view it as uint8")
    if 0 in sizes:
        return Runs(np.zeros(0, np.int64), 1)
    last = max(i for i, size in enumerate(sizes) if size != shape[i])
    inner = math.prod(shape[last + 1 :]) * width
    starts = np.array([box[last][0] * inner], np.int64)
    stride = inner * shape[last]
    for i in range(last - 1, -1, -1):
        starts = (np.arange(*box[i], dtype=np.int64)[:, None] * stride + starts).reshape(-1)
        stride *= shape[i]
    return Runs(starts, sizes[last] * inner)


class Shards:
    """What a rank has, as `offered`, and `source`, whose tensor number i has the bytes of offered[i]; and `files`,
    which lie beside the tensors, by path."""

    def __init__(self, offered: Sequence[Offered], source: Source, files: Mapping[str, bytes] | None = None) -> None:
        self.offered: Sequence[Offered] = list(offered)
        self.source = source
        self.files = files or {}

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of offered[index]."""
        return self.source.read(index, start, stop)


def open_shards(tensors: Mapping[str, Any], dtype: Any = None, transform: Transform | None = None) -> Shards:
    """What this rank has of `{name: tensor}`: of a DTensor its shard; any other tensor is whole, here, or the same on
    all ranks that have it. Floating tensors are read as `dtype`; or a transform is given all of them, and what it
    makes is what this rank has. Nothing is copied.

    Raises BadTensor naming tensors that cannot be kept: also a DTensor with a Partial placement; Refused for what is
    no mapping; and what the transform raises.
    """
    if not isinstance(tensors, Mapping):
        mend = "give model.state_dict()" if hasattr(tensors, "state_dict") else "give a mapping of names to tensors"
        raise Refused(f"a {type(tensors).__name__} is no mapping of names to what this rank has of tensors: {mend}")
    if transform is not None:
        tensors = transform.made({name: detached(value) for name, value in tensors.items()})
    parts: list[Part] = []
    faults = []
    for name, value in tensors.items():
        try:
            if _is_sharded(value):
                parts += [Part(name, tuple(value.shape), box, part) for box, part in _boxes(value)]
            elif hasattr(value, "shape"):
                shape = tuple(value.shape)
                parts.append(Part(name, shape, tuple((0, extent) for extent in shape), value))
            else:
                parts.append(Part(name, (), (), value))
        except BadTensor as error:
            faults.append(f"{name!r:.200}: {error}")
    _refuse(faults)
    return open_parts(parts, dtype)


def _refuse(faults: Sequence[str]) -> None:
    """Raise BadTensor if there are faults of tensors."""
    if faults:
        raise BadTensor(f"this rank has what cannot be kept: {'; '.join(faults[:10])}")


def open_parts(parts: Sequence[Part], dtype: Any = None, files: Mapping[str, bytes] | None = None) -> Shards:
    """What this rank has, as parts of tensors; floating ones are read as `dtype`. Nothing is copied.

    Raises BadTensor naming tensors that cannot be kept.
    """
    _refuse([f"{part.name!r:.200}: {fault}" for part in parts if (fault := name_fault(part.name))])
    # In the order of their numbers, since a name may come more than once.
    width = len(str(len(parts)))
    numbered = {f"{i:0{width}}": part.value for i, part in enumerate(parts)}
    try:
        opened: Source = open_tensors({"": numbered} if numbered else {})
    except BadTensor:
        _refuse([f"{part.name!r:.200}: {fault}" for part in parts if (fault := tensor_fault(part.value))])
        raise
    source = cast(opened, dtype) if dtype is not None else opened
    offered = []
    for (name, shape, box, _), info in zip(parts, source.tensors, strict=True):
        if tuple(stop - start for start, stop in box) == shape:
            # As it is: packed types count their last extent otherwise than torch.
            shape, box = info.shape, tuple((0, extent) for extent in info.shape)
        offered.append(Offered(TensorInfo("", name, info.dtype, shape, dtypes.nbytes(info.dtype, shape)), box))
    return Shards(offered, source, files)


def _is_sharded(value: Any) -> bool:
    return is_torch(value) and any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _boxes(value: Any) -> list[tuple[Box, Any]]:
    """The boxes that a DTensor's local tensor is, each with its part of it."""
    import numpy as np

    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    indexes = [np.arange(extent) for extent in value.shape]
    for i, placement in enumerate(placements):
        kind = type(placement).__name__
        if placement.is_replicate():
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise BadTensor(
                f"a DTensor with the placement {placement!r}: redistribute() it to Shard or Replicate first"
            )
        # As torch splits it: into `split_factor` parts first, of each of which every rank has its part.
        dim = placement.dim % len(indexes)
        parts = _chunks(indexes[dim], int(getattr(placement, "split_factor", 1)))
        indexes[dim] = np.concatenate([_chunks(part, mesh.size(i))[coordinate[i]] for part in parts])
    local = value.to_local()
    if tuple(local.shape) != tuple(map(len, indexes)):
        raise BadTensor(
            f"a DTensor whose local tensor has the shape {list(local.shape)}, where its placements make "
            f"{[len(index) for index in indexes]}: it was not split as torch splits"
        )
    if not all(map(len, indexes)):
        # Nothing of it is here, or nothing anywhere: that it exists is to be known.
        return [(tuple((0, 0) for _ in indexes), local)]
    out = []
    for ranges in product(*map(_ranges, indexes)):
        part = local
        for dim, (at, start, stop) in enumerate(ranges):
            if stop - start != part.shape[dim]:
                part = part.narrow(dim, at, stop - start)
        out.append((tuple((start, stop) for _, start, stop in ranges), part))
    return out


def _chunks(index: "Numbers", count: int) -> "list[Numbers]":
    """`index` in `count` parts, as torch.chunk has them; the last ones may be shorter, or empty."""
    size = -(-len(index) // count)
    return [index[i * size : (i + 1) * size] for i in range(count)]


def _ranges(index: "Numbers") -> list[tuple[int, int, int]]:
    """(place in the local tensor, start, stop) of each range of consecutive indexes."""
    import numpy as np

    cuts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [(a, int(index[a]), int(index[b - 1]) + 1) for a, b in pairwise(cuts) if b > a]
