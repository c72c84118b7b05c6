"""Which lanes differ, compiled. Imports numba."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from numba import uint64

from weightvc_kernels.context_vectors import at_address, changes_of, compiled, lowest_bit, pointer


@compiled
def changed(places, size, like, base, out):
    """Fill `out`, int64, with the positions, counted from `base`, at which lanes differ, and return how many do.

    places: uint64 [3], the addresses of old and new lanes, and how many there are. size: a tuple of as many zeros as
    a lane has bytes. `like` is an array of such lanes. `out` has room for all positions.
    """
    like, out, one = pointer(like), pointer(out), uint64(1)
    x, y, n = at_address(places[0], like), at_address(places[1], like), places[2]
    piece = uint64(64 // len(size))
    whole, found, base = n - n % piece, uint64(0), uint64(base)
    for j in range(uint64(0), whole, piece):
        bits = changes_of(x, y, j)
        while bits != uint64(0):
            out[found] = base + j + lowest_bit(bits)
            found += one
            bits &= bits - one
    for j in range(whole, n):
        if x[j] != y[j]:
            out[found] = base + j
            found += one
    return found
