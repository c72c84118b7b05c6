"""Diff and apply on CUDA devices: arrays there in, arrays there out.

    diff(pairs)       what changed between pairs of arrays
    apply(writes)     write changes into arrays, in place, after everything has been checked

Any object with __cuda_array_interface__ is taken as the bits that it holds, in lanes of its elements: arrays of numba
and CuPy, tensors of torch (bfloat16 ones as `tensor.view(torch.uint16)`). What comes back are numba's device arrays,
which torch.as_tensor and cupy.asarray take without a copy. All arrays are on the current device.

Importing this module imports numba.cuda, so nothing else here does. The kernels are compiled at their first call.
Numba's simulator (NUMBA_ENABLE_CUDASIM=1) runs them on the host, slowly.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import blake3
import numpy as np
import numpy.typing as npt

from weightvc_kernels import cuda_arrays, cuda_kernels
from weightvc_kernels.cuda_arrays import (
    DeviceArray,
    Stream,
    blocks,
    cut,
    empty,
    fetch,
    flat,
    lanes_of,
    send,
    stream_of,
    whole_words,
    words_of,
)
from weightvc_kernels.errors import CodecError

__all__ = ["Changes", "Write", "apply", "diff"]


class Changes(NamedTuple):
    """What changed in an array, on the device."""

    positions: Any
    """Lane positions [changes], int64, ascending."""
    old: Any
    """The lanes there before [changes], unsigned."""
    new: Any
    """The lanes there now [changes], unsigned."""


class Write(NamedTuple):
    """Lanes to be written into an array."""

    target: DeviceArray
    """What is written to."""
    positions: DeviceArray
    """Lane positions [changes], int64, strictly ascending."""
    values: DeviceArray
    """What to write there [changes], of the target's element size."""
    check: int | None = None
    """Of the lanes that are to be replaced, in order: the first 4 bytes of their blake3, little-endian. None: any."""


def diff(pairs: Sequence[tuple[DeviceArray, DeviceArray]], *, stream: Stream = 0) -> list[Changes]:
    """What differs between the arrays (old, new) of each pair, bit for bit.

    The host waits for the device once for each element size among the pairs, however many pairs there are: pass all
    tensors of a model together. Beside the results it takes a bit a lane. Arrays are read once, in words of 8 bytes
    where both lie at multiples of 8.

    Raises CodecError for arrays that do not pair up, and as `Write` says of targets.
    """
    on = stream_of(stream)
    held = lane_pairs(pairs, on)
    found: list[Changes | None] = [None] * len(held)
    for dtype in {x.dtype for x, _ in held}:
        chosen = [i for i, (x, _) in enumerate(held) if x.dtype == dtype]
        all_, tiles, starts = find([held[i] for i in chosen], on)
        sizes = np.diff(starts[tiles]).tolist()
        parts = zip(*(cut(each, sizes) for each in all_), strict=True)
        for i, part in zip(chosen, parts, strict=True):
            found[i] = Changes(*part)
    return [changes for changes in found if changes is not None]


def lane_pairs(pairs: Sequence[tuple[DeviceArray, DeviceArray]], stream: Any) -> list[tuple[Any, Any]]:
    """The pairs as lanes. Raises CodecError as `diff` does."""
    held = []
    for i, (old, new) in enumerate(pairs):
        x, y = lanes_of(old, f"old array {i}", stream), lanes_of(new, f"new array {i}", stream)
        if x.size != y.size or x.dtype != y.dtype:
            raise CodecError(
                f"pair {i}: old has {x.size} elements of {x.dtype.itemsize} bytes, "
                f"new {y.size} of {y.dtype.itemsize}: they must be equal"
            )
        held.append((x, y))
    return held


def tile_bytes() -> int:
    """Bytes of an array that a block of threads looks at."""
    return cuda_kernels.WORDS * cuda_arrays.THREADS * 8


class Found(NamedTuple):
    """What changed in several arrays."""

    changes: Changes
    """Of all arrays, one after the other; positions are those in their array."""
    tiles: list[int]
    """Arrays are seen in tiles of `tile_bytes`: the first one of each array, and last how many there are."""
    starts: npt.NDArray[np.int64]
    """Where the changes of each tile begin [tiles + 1], on the host."""


def find(pairs: list[tuple[Any, Any]], stream: Any) -> Found:
    """What differs between pairs of lanes, all of one size of lanes. Waits for the device, once."""
    dtype = pairs[0][0].dtype
    lane, threads = dtype.itemsize, cuda_arrays.THREADS
    kernels = cuda_kernels.made(lane, threads)
    needed = [blocks(x.nbytes, tile_bytes()) for x, _ in pairs]
    tiles = [0, *accumulate(needed)]
    masks = empty(tiles[-1] * threads, f"u{8 // lane}")
    counts = empty(tiles[-1], np.int32)
    device_starts = empty(tiles[-1] + 1, np.int64)
    for (x, y), first, n in zip(pairs, tiles, needed, strict=False):
        if n:
            whole = whole_words(x, y)
            words = words_of(x, of=whole), words_of(y, of=whole)
            kernels.mark[n, threads, stream](x, y, *words, masks, counts, first)
    cuda_kernels.scanned(threads)[1, threads, stream](counts, device_starts)
    starts = fetch(device_starts, stream)
    changes = Changes(*(empty(int(starts[-1]), each) for each in (np.int64, dtype, dtype)))
    for (x, y), first, n in zip(pairs, tiles, needed, strict=False):
        if n:
            kernels.scatter[n, threads, stream](x, y, masks, device_starts, first, *changes)
    return Found(changes, tiles, starts)


def apply(writes: Sequence[Write], *, stream: Stream = 0) -> None:
    """Write values at positions into arrays on the device, in place: all of the writes, or none.

    Positions and, where a `check` is given, what they hold are checked for all writes before the first is made, in
    one pass; for that the host waits once, and gets the lanes that are to be replaced. Writes are absolute: to repeat
    them changes nothing. They go on when this returns, in order with the stream.

    Raises CodecError, nothing written, for positions that do not ascend or lie outside, unequal counts, lanes that
    are not what `check` says, and arrays that are not on a device, not contiguous or read-only.
    """
    on, threads = stream_of(stream), cuda_arrays.THREADS
    held = []
    for i, write in enumerate(writes):
        target = lanes_of(write.target, f"target {i}", on, write=True)
        values = lanes_of(write.values, f"values {i}", on)
        positions = flat(write.positions, f"positions {i}", on)
        if positions.dtype != np.int64:
            raise CodecError(f"positions {i} are {positions.dtype}: they must be int64")
        if positions.size != values.size:
            raise CodecError(f"write {i} has {positions.size} positions, but {values.size} values")
        if values.dtype != target.dtype:
            raise CodecError(
                f"write {i} has values of {values.dtype.itemsize} bytes for a target of {target.dtype.itemsize}"
            )
        held.append((target, positions, values, write.check))
    _inspect(held, on)
    for target, positions, values, _ in held:
        if positions.size:
            cuda_kernels.put[blocks(positions.size, threads), threads, on](target, positions, values)


def _inspect(writes: list[tuple[Any, Any, Any, int | None]], stream: Any) -> None:
    """Raise CodecError for the first write whose positions or old lanes are not right. Waits for the device, once."""
    threads = cuda_arrays.THREADS
    flags = send(np.zeros(max(1, len(writes)), np.int32), stream)
    gathered = []
    for i, (target, positions, _, check) in enumerate(writes):
        gathered.append(empty(positions.size if check is not None else 0, target.dtype))
        if positions.size:
            grid = blocks(positions.size, threads)
            cuda_kernels.inspect[grid, threads, stream](positions, target, gathered[-1], flags, i)
    for i, flag in enumerate(fetch(flags, stream)[: len(writes)].tolist()):
        if flag == cuda_kernels.OUTSIDE:
            raise CodecError(f"write {i} reaches past its target's {writes[i][0].size} lanes: nothing was written")
        if flag == cuda_kernels.UNSORTED:
            raise CodecError(f"positions {i} do not ascend, or repeat: nothing was written")
    for i, (old, (*_, check)) in enumerate(zip(gathered, writes, strict=True)):
        if check is not None and check_of(fetch(old, stream)) != check:
            raise CodecError(f"target {i} does not hold what write {i} replaces: nothing was written")


def check_of(old: Any) -> int:
    """The check of replaced lanes, a host array: the first 4 bytes of their blake3, little-endian."""
    return int.from_bytes(blake3.blake3(old.tobytes()).digest()[:4], "little")
