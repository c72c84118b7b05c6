"""Byte planes of 16-bit and 32-bit lanes that are rotated to the left by one bit, compiled. Imports numba."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from numba import uint8, uint16, uint32, uint64

from weightvc_kernels.context_vectors import at_address, compiled, pointer


@compiled
def split(values, lane, like, places):
    """Take apart lanes [n], as many bytes each as the tuple `lane` is long, into planes of n bytes each.

    places, uint64 [planes], has their addresses; `like` is an empty uint8 array.
    """
    like = pointer(like)
    v = pointer(values)
    a, b = at_address(places[0], like), at_address(places[1], like)
    if len(lane) == 2:
        for i in range(uint64(values.size)):
            x = uint16(v[i])
            a[i] = uint8(x << uint16(1) | x >> uint16(15))
            b[i] = uint8(x >> uint16(7))
    else:
        c, d = at_address(places[2], like), at_address(places[3], like)
        for i in range(uint64(values.size)):
            y = uint32(v[i])
            a[i] = uint8(y << uint32(1) | y >> uint32(31))
            b[i] = uint8(y >> uint32(7))
            c[i] = uint8(y >> uint32(15))
            d[i] = uint8(y >> uint32(23))


@compiled
def merge(places, lane, like, out):
    """The reverse: `out` [n] from planes of n bytes each."""
    like = pointer(like)
    v = pointer(out)
    a, b = at_address(places[0], like), at_address(places[1], like)
    if len(lane) == 2:
        for i in range(uint64(out.size)):
            x = uint16(a[i]) | uint16(b[i]) << uint16(8)
            v[i] = uint16(x >> uint16(1) | x << uint16(15))
    else:
        c, d = at_address(places[2], like), at_address(places[3], like)
        for i in range(uint64(out.size)):
            y = uint32(a[i]) | uint32(b[i]) << uint32(8) | uint32(c[i]) << uint32(16) | uint32(d[i]) << uint32(24)
            v[i] = uint32(y >> uint32(1) | y << uint32(31))
