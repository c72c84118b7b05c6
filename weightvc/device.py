"""Tensors on a device: changed lanes are sent there while the old version serves, and written when it holds still.

Blocks are decoded and hashed by the host, which reads them from the device for that, a few at a time: a digest is of
a whole chunk, so whoever proves it needs all of the chunk's bytes, and only the host hashes. A patch decoded on the
device (weightvc_kernels.cuda_rice) would spare that copy, and give lanes that nothing has proved. What is left to do
in a pause is the same either way: absolute lanes to their places. weightvc_kernels.cuda does it on NVIDIA's, for all
tensors of a device at once; where numba cannot run there, and on other devices, torch does.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from weightvc.errors import Corrupt

if TYPE_CHECKING:
    from weightvc.live import Write


class Scatter(NamedTuple):
    """`lanes[at] = new`, all torch tensors of one device: lanes of a tensor, `at` int64 and ascending."""

    lanes: Any
    at: Any
    new: Any


class Scatters:
    """What is to be written to a few places of each of many tensors; it lies on their devices by now."""

    def __init__(self, writes: Iterable["Write"]) -> None:
        """Takes 8 bytes and a lane of its device for each lane to be written; raises what torch does without room."""
        self._of: dict[Any, list[Scatter]] = {}
        # One for a tensor, not for each of its chunks: a call costs the host more than the device.
        for _, run in groupby(sorted(writes, key=lambda write: (write.tensor, write.start)), lambda w: w.tensor):
            made = _joined([*run])
            self._of.setdefault(made.lanes.device, []).append(made)
        for place, scatters in self._of.items():
            for dtype in {one.lanes.dtype for one in scatters}:
                _compile(place, dtype)

    def apply(self) -> None:
        """Write them. They may still be under way when this returns: see wait().

        Raises Corrupt, and writes nothing to the device, where what was sent there is not what it was.
        """
        for place, scatters in self._of.items():
            kernels = _kernels() if _is_cuda(place) else None
            if kernels is None:
                for lanes, at, new in scatters:
                    lanes[at] = new
                continue
            try:
                with _on(place):
                    kernels.apply([kernels.Write(*one) for one in scatters], stream=_stream(place))
            except kernels.CodecError as error:
                raise Corrupt(
                    f"what was staged on {place} is not what it was: {error}; the target's forget(), then pull"
                ) from None


def _joined(writes: Sequence["Write"]) -> Scatter:
    """Writes to chunks of one tensor, as one: to the lanes from the first of these chunks to the last."""
    import numpy

    first, last = writes[0].lanes, writes[-1].lanes
    begin, end = first.storage_offset(), last.storage_offset() + last.numel()
    lanes = first.as_strided((end - begin,), (1,), begin)
    at = numpy.concatenate([write.at + (write.lanes.storage_offset() - begin) for write in writes])
    new = numpy.concatenate([write.new for write in writes])
    return Scatter(lanes, of_host(at, lanes), of_host(new, lanes))


def of_host(array: Any, like: Any) -> Any:
    """A numpy array, on the device of the tensor `like`."""
    import torch

    return torch.from_numpy(array).to(like.device)


def wait(tensors: Iterable[Any]) -> None:
    """Return when all that was written to these tensors of torch is there, so that what failed is told now."""
    for place in {tensor.device for tensor in tensors if hasattr(tensor, "data_ptr")}:
        if _is_cuda(place):
            import torch

            torch.cuda.current_stream(place).synchronize()


def _is_cuda(place: Any) -> bool:
    return bool(place.type == "cuda")


def _stream(place: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(place).cuda_stream)


def _on(place: Any) -> Any:
    """A context in which numba's current device is this one."""
    from numba import cuda

    return nullcontext() if place.index is None else cuda.gpus[place.index]


@cache
def _kernels() -> Any:
    """The kernels, if numba can run here; else None."""
    try:
        from numba import cuda

        if not cuda.is_available():
            return None
        from weightvc_kernels import cuda as kernels
    except ImportError:
        return None
    return kernels


@cache
def _compile(place: Any, dtype: Any) -> None:
    """Compile what writes these lanes: not in the pause, in which that would take the longest."""
    kernels = _kernels() if _is_cuda(place) else None
    if kernels is not None:
        import torch

        lanes = torch.zeros(1, dtype=dtype, device=place)
        at = torch.zeros(1, dtype=torch.int64, device=place)
        with _on(place):
            kernels.apply([kernels.Write(lanes, at, lanes)], stream=_stream(place))
