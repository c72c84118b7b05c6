"""PLANES: lanes rotated to the left by one bit, so that the sign is apart from the exponent, as byte planes.

Where numba is loaded, lanes of 16 and 32 bits are taken apart and put together by compiled passes, three to eight
times as fast as by numpy. What codes patches loads it, and `load`, which pays from `LARGE` bytes.
"""

import sys
import threading

import numpy as np

from weightvc_kernels import lanes, streams
from weightvc_kernels.lanes import Buffer, Bytes, Lanes

LARGE = 1 << 29
"""Bytes of a base from which loading compiled code takes less than it saves."""

_local = threading.local()


def load(nbytes: int) -> None:
    """Load the compiled passes if `nbytes` are to be coded or decoded, and that is worth it."""
    if nbytes >= LARGE:
        from weightvc_kernels import planes_kernels  # noqa: F401


def prepare() -> None:
    """Have the compiled passes compiled, so that no later call waits for it."""
    load(LARGE)
    for lane in (2, 4):
        block = np.zeros(1, lanes.dtype_of(lane))
        decode_into(encode(block), block)


def encode(block: Lanes) -> bytes:
    """The payload of a block, unsigned [lanes]: a section for each plane, least significant first."""
    parts: list[bytes | memoryview] = []
    for plane in _split(block):
        parts += streams.section_of(plane)
    return b"".join(parts)


def decode_into(payload: Buffer, out: Lanes) -> None:
    """Fill `out` [lanes] with the block of that length. Raises CodecError for a malformed payload."""
    reader = streams.Reader(payload)
    planes = [reader.section(out.size, f"byte plane {j}") for j in range(out.itemsize)]
    reader.end()
    if not _compiled(out):
        streams.merge(planes, out.size, out.itemsize, left=8 * out.itemsize - 1 if out.itemsize > 1 else 0, out=out)
        return
    from weightvc_kernels import planes_kernels

    places = np.array([lanes.address(plane) for plane in planes], np.uint64)
    planes_kernels.merge(places, (0,) * out.itemsize, np.empty(0, np.uint8), out)


def _split(block: Lanes) -> list[Bytes]:
    """Planes of a block, which are good until this thread's next call."""
    if not _compiled(block):
        return streams.split(block, left=int(block.itemsize > 1))
    from weightvc_kernels import planes_kernels

    room: Bytes = getattr(_local, "room", np.empty(0, np.uint8))
    if room.size < block.nbytes:
        _local.room = room = np.empty(block.nbytes, np.uint8)
    planes = list(room[: block.nbytes].reshape(block.itemsize, block.size))
    places = np.array([lanes.address(plane) for plane in planes], np.uint64)
    planes_kernels.split(lanes.frozen(block), (0,) * block.itemsize, np.empty(0, np.uint8), places)
    return planes


def _compiled(block: Lanes) -> bool:
    loaded = lanes.compiled() or "weightvc_kernels.planes_kernels" in sys.modules
    return loaded and block.itemsize in (2, 4) and block.flags.aligned
