"""Lanes: a block's bytes seen as little-endian unsigned integers, their differences and steps.

Everything here is about bits. -0 and +0 differ, a NaN is the integer that its bits spell, and no value is
ever compared as a float. numpy releases the GIL in all the passes over a block.
"""

import sys
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightvc_kernels.errors import CodecError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Lanes: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Positions: TypeAlias = npt.NDArray[np.int64]
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

MANY = 1 << 14
"""Lanes from which a compiled pass is quicker."""
_PIECE = 1 << 20
_local = threading.local()

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("weightvc_kernels works on little-endian machines only")

DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def dtype_of(lane: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer of `lane` bytes. Raises CodecError for a lane other than 1, 2, 4, 8."""
    try:
        return DTYPES[lane]
    except KeyError:
        raise CodecError(f"lane of {lane} bytes: it must be 1, 2, 4 or 8") from None


def as_bytes(buffer: Buffer) -> Bytes:
    """`buffer` as uint8 [bytes], without a copy, so that writing to the result writes to the buffer.

    Raises CodecError if the buffer is not contiguous: a copy would be written to in vain.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise CodecError("array is not contiguous: pass np.ascontiguousarray of it")
        return buffer.reshape(-1).view(np.uint8)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise CodecError("buffer is not contiguous: pass bytes() of it")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def as_lanes(buffer: Buffer, lane: int) -> Lanes:
    """`buffer` as unsigned integers [lanes], without a copy.

    Raises CodecError if it is not contiguous or not a whole number of lanes.
    """
    dtype = dtype_of(lane)
    data = as_bytes(buffer)
    if data.size % lane:
        raise CodecError(f"block of {data.size} bytes is not a whole number of {lane}-byte lanes: use lane 1")
    return data.view(dtype)


def address(block: Lanes) -> int:
    """Where the first lane of a block lies in memory."""
    place: int = block.__array_interface__["data"][0]
    return place


def frozen(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view, of a copy if it is not aligned: one type for the compiler, whatever the caller holds."""
    view = block.view() if block.flags.aligned else block.copy()
    view.flags.writeable = False
    return view


def compiled() -> bool:
    """Whether numba has been loaded for a patch: where it has not, it costs more to load than it saves elsewhere."""
    return "weightvc_kernels.context_kernels" in sys.modules or "weightvc_kernels.rice_kernels" in sys.modules


def changed(old: Lanes, new: Lanes) -> Positions:
    """Ascending positions [changes], int64, of the lanes in which `old` and `new` [lanes] differ."""
    if old.size >= MANY and compiled():
        return _changed(old, new)
    per = 8 // old.itemsize
    whole = old.size - old.size % per
    words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    if per == 1:
        return words.astype(np.int64, copy=False)
    # Few words differ in a small optimizer step: look at lanes in those words only.
    if words.size * 4 > whole // per:
        return np.flatnonzero(old != new).astype(np.int64, copy=False)
    lanes = np.flatnonzero(old[:whole].reshape(-1, per)[words] != new[:whole].reshape(-1, per)[words])
    found = words[lanes // per] * per + lanes % per
    tail = np.flatnonzero(old[whole:] != new[whole:]) + whole
    return np.concatenate([found, tail]).astype(np.int64, copy=False)


def _changed(old: Lanes, new: Lanes) -> Positions:
    """The same by a compiled pass."""
    from weightvc_kernels import lanes_kernels

    # Room for every position of a piece, kept: what is large comes from the system in pages that it fills with zeros.
    room: Positions | None = getattr(_local, "room", None)
    if room is None:
        room = _local.room = np.empty(_PIECE, np.int64)
    like, parts = np.empty(0, old.dtype), []
    for at in range(0, old.size, _PIECE):
        a, b = old[at : at + _PIECE], new[at : at + _PIECE]
        places = np.array([address(a), address(b), a.size], np.uint64)
        found = int(lanes_kernels.changed(places, (0,) * old.itemsize, like, at, room))
        parts.append(room[:found].copy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def diff_lanes(old: Buffer, new: Buffer, lane: int) -> Positions:
    """Ascending lane positions [changes], int64, at which two buffers of one length differ.

    Raises CodecError if the lengths differ or are not a whole number of lanes.
    """
    a, b = as_lanes(old, lane), as_lanes(new, lane)
    if a.size != b.size:
        raise CodecError(f"old has {a.nbytes} bytes, new {b.nbytes}: a patch needs blocks of one length")
    return changed(a, b)


def monotone(values: Lanes) -> Lanes:
    """Map the bits of IEEE-like numbers to integers in their order (two's complement); its own inverse.

    Sign bit clear: as it is. Sign bit set: all other bits inverted, so that -0 is -1, next to +0.
    """
    sign = np.negative(values >> (8 * values.itemsize - 1))
    mapped: Lanes = values ^ (sign >> 1)
    return mapped


def steps(old: Lanes, new: Lanes) -> Lanes:
    """Zigzag of monotone(new) - monotone(old) modulo 2^bits: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    step = monotone(new) - monotone(old)
    zigzag: Lanes = (step << 1) ^ np.negative(step >> (8 * step.itemsize - 1))
    return zigzag


def unstep(old: Lanes, zigzag: Lanes) -> Lanes:
    """The new lanes that `steps` made `zigzag` of."""
    step = (zigzag >> 1) ^ np.negative(zigzag & 1)
    return monotone(monotone(old) + step)


def rotate(values: Lanes, left: int) -> Lanes:
    """Every lane's bits rotated to the left by `left`, from 1 to one less than its bits."""
    rotated: Lanes = np.bitwise_or(values << left, values >> (8 * values.itemsize - left))
    return rotated


def ulp_steps(old_values: Lanes, new_values: Lanes, lane: int) -> npt.NDArray[np.int64]:
    """Signed distance [values], int64, in representable numbers, from old to new bits [values] of floats.

    Exact for lanes of 1, 2 and 4 bytes; modulo 2^64 for 8. +0 and -0 are one step apart.
    """
    dtype = dtype_of(lane)
    signed = np.dtype(f"i{lane}")
    before = monotone(np.asarray(old_values, dtype).reshape(-1)).view(signed).astype(np.int64)
    after = monotone(np.asarray(new_values, dtype).reshape(-1)).view(signed).astype(np.int64)
    return after - before
