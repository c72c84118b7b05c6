"""python -m weightvc_kernels: compile everything now, as when an image is built, not when a patch is waited for."""

import time

import numpy as np

from weightvc_kernels import context, hash_kernels, hashes, pieces, planes, rice

print("compiling: some seconds, a minute or two on a busy machine", flush=True)
began = time.monotonic()
context.prepare()
rice.prepare()
hashes.digests(bytes(hashes.MANY), range(hashes.MANY + 1))
planes.prepare()
pieces.gather(*np.zeros((2, hashes.MANY), np.int64))
# numba asks that whoever loads it may write there, and that the processor is the same.
place = (
    hash_kernels.hash_pieces.stats.cache_path or "no place: set NUMBA_CACHE_DIR to a directory that can be written"
)
print(f"ready after {time.monotonic() - began:.0f} s, kept in {place}")
