"""blake3 of many short pieces: what each call of the library costs is more than a short piece's hashing.

    if worth(count): digests(data, cuts)

The compiled pass is in `hash_kernels`. It, and numba, cost more to load than a process saves that has not loaded
numba for a patch: so `worth` says no there.
"""

from collections.abc import Sequence

import blake3
import numpy as np

from weightvc_kernels import lanes
from weightvc_kernels.lanes import Buffer

MANY = 1024
"""Pieces from which the compiled pass is quicker, with what it costs to load."""


def worth(count: int) -> bool:
    """Whether digests() is quicker for `count` pieces than a call of the library for each."""
    return count >= MANY and lanes.compiled()


def digests(data: Buffer, cuts: "np.typing.NDArray[np.int64] | Sequence[int]") -> bytes:
    """blake3 of each piece of `data` between two neighbouring `cuts`, one after the other: 32 bytes a piece.

    `cuts` ascend from 0 or more to at most the length of `data`: ValueError if they do not.
    """
    from weightvc_kernels import hash_kernels as kernels

    source, borders = lanes.as_bytes(data), np.asarray(cuts, np.int64)
    begins, sizes = borders[:-1], np.diff(borders)
    if borders.size and (borders[0] < 0 or borders[-1] > source.size or (sizes < 0).any()):
        raise ValueError(f"pieces that do not ascend within {source.size} bytes")
    out = np.empty((begins.size, 8), np.uint32)
    # Neighbours of as many blocks are hashed side by side.
    order = np.argsort((sizes + 63) // 64, kind="stable")
    short = order[: int((sizes <= kernels.LIMIT).sum())]
    if short.size:
        found = np.empty((short.size, 8), np.uint32)
        rooms = [np.zeros(n * kernels.LANES, np.uint32) for n in (16, 8, 1, 1, 1)]
        kernels.hash_pieces(lanes.frozen(source), begins[short], sizes[short], kernels.START, *rooms, found)
        out[short] = found
    for i in order[short.size :].tolist():
        piece = source[borders[i] : borders[i + 1]]
        out[i] = np.frombuffer(blake3.blake3(piece.data).digest(), np.uint32)
    return out.tobytes()
