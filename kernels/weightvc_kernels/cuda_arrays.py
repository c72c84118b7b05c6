"""Arrays on a CUDA device as lanes, and what else every call on them needs. Importing this imports numba.cuda."""

# mypy: disable-error-code="no-untyped-call"

import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda
from numba.core.errors import NumbaPerformanceWarning
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray

from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import dtype_of

# Small arrays make small grids, which is as it has to be.
warnings.filterwarnings("ignore", "Grid size", NumbaPerformanceWarning)

DeviceArray: TypeAlias = Any
"""Anything with __cuda_array_interface__: an array of numba or CuPy, a torch.Tensor on a CUDA device."""

Stream: TypeAlias = Any
"""A cudaStream_t as an integer (torch.cuda.current_stream().cuda_stream), a stream of numba's, or 0, the default."""

THREADS = 256
"""Threads a block, a power of two. The tests take fewer: their simulator makes an OS thread of each."""


def stream_of(stream: Stream) -> Any:
    """The stream as numba takes it."""
    return cuda.external_stream(stream) if isinstance(stream, int) and stream else stream or 0


def lanes_of(array: DeviceArray, what: str, stream: Any, *, write: bool = False) -> Any:
    """`array` as numba's device array of unsigned integers [lanes], without a copy.

    Raises CodecError for what `flat` refuses, elements of other sizes than 1, 2, 4 or 8 bytes, and, to `write` to, a
    read-only array.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if write and interface is not None and interface["data"][1]:
        raise CodecError(f"{what} is read-only: pass an array that can be written to")
    held = flat(array, what, stream)
    dtype = dtype_of(held.dtype.itemsize)
    return held.view(dtype) if held.size else empty(0, dtype)


def flat(array: DeviceArray, what: str, stream: Any) -> Any:
    """`array` as numba's device array of one dimension, without a copy.

    Without a stream of the caller's, the host waits for the one that the array names, if it names one. Raises
    CodecError for what is no device array or is not contiguous.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None and not is_cuda_ndarray(array):
        raise CodecError(f"{what} is no array on a CUDA device: it has no __cuda_array_interface__")
    held = array if is_cuda_ndarray(array) else cuda.as_cuda_array(array, sync=not stream)
    if not held.size:
        return empty(0, held.dtype)
    if not held.is_c_contiguous():
        raise CodecError(f"{what} is not contiguous: a copy would be written to in vain")
    return held if held.ndim == 1 else held.reshape(held.size)


def words_of(lanes: Any, *, of: int) -> Any:
    """The first `of` words of 8 bytes of lanes [n], without a copy; none if they do not lie at a multiple of 8."""
    return lanes[: of * (8 // lanes.dtype.itemsize)].view(np.uint64) if of else empty(0, np.dtype(np.uint64))


def whole_words(*arrays: Any) -> int:
    """How many words of each of these lanes, all of one size, can be loaded as such."""
    if any(_address(array) % 8 for array in arrays):
        return 0
    return int(arrays[0].size * arrays[0].dtype.itemsize // 8)


def _address(array: Any) -> int:
    # Numba's simulator has host memory, and tells of it as numpy does.
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """A new device array of whatever was there before."""
    return cuda.device_array(shape, np.dtype(dtype))


def send(array: npt.NDArray[Any], stream: Any) -> Any:
    """A host array, on the device."""
    return cuda.to_device(np.ascontiguousarray(array), stream=stream)


def fetch(array: Any, stream: Any) -> npt.NDArray[Any]:
    """A device array, on the host, once all that the stream had to do before is done."""
    held: npt.NDArray[Any] = array.copy_to_host(stream=stream)
    if stream:
        stream.synchronize()
    return held


def cut(array: Any, sizes: list[int]) -> list[Any]:
    """Consecutive parts of a device array, of these sizes, without copies."""
    parts, at = [], 0
    for size in sizes:
        parts.append(array[at : at + size] if size else empty(0, array.dtype))
        at += size
    return parts


def blocks(count: int, each: int) -> int:
    """How many blocks it takes for `count` items, so many each."""
    return -(-count // each)
