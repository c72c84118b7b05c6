"""Many short pieces of memory, gathered: what a call for each costs is more than to copy what is short."""

from ctypes import string_at

import numpy as np

from weightvc_kernels import hashes

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def gather(addresses: Numbers, sizes: Numbers) -> bytes:
    """The bytes of pieces of this process's memory, one after the other.

    Nothing is checked: the caller has just asked where each lies, and keeps it alive. No other thread of Python runs
    while they are copied.
    """
    if not hashes.worth(addresses.size):
        return b"".join(map(string_at, addresses.tolist(), sizes.tolist()))
    from weightvc_kernels import pieces_kernels

    # Room that nobody else has seen yet: to fill it here saves a copy.
    out = bytes(int(sizes.sum()))
    pieces_kernels.gather(addresses, sizes, np.frombuffer(out, np.uint8).ctypes.data)
    return out
