"""blake3 of many short pieces at once, compiled. Imports numba.

A piece of at most 1,024 bytes is one chunk of blake3: its blocks of 64 bytes are compressed one after the other. So
LANES pieces are taken side by side, and the compiler makes one instruction of the same step of all of them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from numba import uint32, uint64

from weightvc_kernels.context_vectors import compiled, inlined, pointer

LANES = 16
LIMIT = 1024
"""Bytes of a piece at most."""

CHUNK_START, CHUNK_END, ROOT = 1, 2, 8
START = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)


@inlined
def _turned(x, by):
    return uint32((x >> uint32(by)) | (x << uint32(32 - by)))


@inlined
def _mix(a, b, c, d, x, y):
    a = uint32(a + b + x)
    d = _turned(d ^ a, 16)
    c = uint32(c + d)
    b = _turned(b ^ c, 12)
    a = uint32(a + b + y)
    d = _turned(d ^ a, 8)
    c = uint32(c + d)
    b = _turned(b ^ c, 7)
    return a, b, c, d


@inlined
def _round(v, m):
    """One of the seven rounds on the 16 words of the state, with those of the message in this round's order."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = v
    a0, b0, c0, d0 = _mix(a0, b0, c0, d0, m[0], m[1])
    a1, b1, c1, d1 = _mix(a1, b1, c1, d1, m[2], m[3])
    a2, b2, c2, d2 = _mix(a2, b2, c2, d2, m[4], m[5])
    a3, b3, c3, d3 = _mix(a3, b3, c3, d3, m[6], m[7])
    a0, b1, c2, d3 = _mix(a0, b1, c2, d3, m[8], m[9])
    a1, b2, c3, d0 = _mix(a1, b2, c3, d0, m[10], m[11])
    a2, b3, c0, d1 = _mix(a2, b3, c0, d1, m[12], m[13])
    a3, b0, c1, d2 = _mix(a3, b0, c1, d2, m[14], m[15])
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@inlined
def _permuted(m):
    """The message's words in the order of the next round."""
    # Numba cannot take a star in the middle of a tuple.
    one = (m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13])
    two = (m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8])
    return one + two


@inlined
def _eight(rows, i):
    one = (rows[i], rows[16 + i], rows[32 + i], rows[48 + i])
    two = (rows[64 + i], rows[80 + i], rows[96 + i], rows[112 + i])
    return one + two


@inlined
def _compress(m, chain, nbytes, flags, last, block, start):
    """A block a lane: from m, uint32 [16 x LANES], into chain, uint32 [8 x LANES], but for lanes that ended."""
    for i in range(uint64(LANES)):
        w = _eight(m, i) + _eight(m, 128 + i)
        h = _eight(chain, i)
        ends = (start[0], start[1], start[2], start[3], uint32(0), uint32(0), nbytes[i], flags[i])
        v = h + ends
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        w = _permuted(w)
        v = _round(v, w)
        live = block <= last[i]
        chain[i] = v[0] ^ v[8] if live else h[0]
        chain[16 + i] = v[1] ^ v[9] if live else h[1]
        chain[32 + i] = v[2] ^ v[10] if live else h[2]
        chain[48 + i] = v[3] ^ v[11] if live else h[3]
        chain[64 + i] = v[4] ^ v[12] if live else h[4]
        chain[80 + i] = v[5] ^ v[13] if live else h[5]
        chain[96 + i] = v[6] ^ v[14] if live else h[6]
        chain[112 + i] = v[7] ^ v[15] if live else h[7]


@compiled
def hash_pieces(data, begins, sizes, start, m, chain, nbytes, flags, last, out):
    """out[i], uint32 [8], becomes the blake3 of data[begins[i] :][: sizes[i]]. Quick where neighbours are of a size.

    Room to work in comes from the caller: m, uint32 [16 x LANES]; chain, uint32 [8 x LANES]; nbytes, flags and last,
    uint32 [LANES].
    """
    bytes, m, chain, start = pointer(data), pointer(m), pointer(chain), pointer(start)
    nbytes, flags, last, out = pointer(nbytes), pointer(flags), pointer(last), pointer(out)
    total = uint64(begins.size)
    for first in range(uint64(0), total, uint64(LANES)):
        count = min(uint64(LANES), total - first)
        most = uint32(0)
        for i in range(uint64(LANES)):
            size = uint32(sizes[first + i]) if i < count else uint32(0)
            last[i] = (max(size, uint32(1)) - uint32(1)) >> uint32(6)
            most = max(most, last[i])
            for j in range(uint64(8)):
                chain[16 * j + i] = start[j]
        for block in range(most + uint32(1)):
            for i in range(count):
                size, done = uint32(sizes[first + i]), uint32(64 * block)
                at = uint64(begins[first + i]) + done
                left = min(size - done, uint32(64)) if size > done else uint32(0)
                nbytes[i] = left
                flags[i] = (CHUNK_START if block == 0 else 0) | (CHUNK_END | ROOT if block == last[i] else 0)
                if left == 64:
                    for j in range(uint64(16)):
                        k = at + 4 * j
                        m[16 * j + i] = (
                            uint32(bytes[k])
                            | (uint32(bytes[k + 1]) << uint32(8))
                            | (uint32(bytes[k + 2]) << uint32(16))
                            | (uint32(bytes[k + 3]) << uint32(24))
                        )
                else:
                    for j in range(uint64(16)):
                        word = uint32(0)
                        for k in range(uint64(4)):
                            if 4 * j + k < left:
                                word |= uint32(bytes[at + 4 * j + k]) << uint32(8 * k)
                        m[16 * j + i] = word
            _compress(m, chain, nbytes, flags, last, block, start)
        for i in range(count):
            for j in range(uint64(8)):
                out[8 * (first + i) + j] = chain[16 * j + i]
