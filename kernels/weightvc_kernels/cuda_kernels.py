"""Kernels for CUDA devices. Importing this module imports numba.cuda: `cuda` does so when it is asked for.

Everything is made for one width of lanes and one number of threads a block (`made`): both are constants to the
compiler, so loops over the lanes of a word unroll. Kernels that need no order among threads are plain functions.

A word is 8 bytes. A thread of `mark` owns WORDS consecutive words; its block's threads load all their words together,
so that neighbours load what lies side by side, and hand them on through shared memory. Neither here nor in the
callers does a kernel use instructions of warps: Numba's simulator, which runs the tests, has none.

Arithmetic is on int64 and uint64, cast at every load: of an int64 and a uint64 numba and numpy make a float64.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined,operator,call-overload"

from functools import cache
from types import SimpleNamespace

from numba import cuda, int32, int64, uint8, uint64

WORDS = 8
"""Words that a thread of `mark` owns: 8, so that a mask has a bit a lane and at most 64."""

# What a kernel says in the flag, the greatest one counting.
OK = 0
UNSORTED = 1
OUTSIDE = 2


@cache
def made(lane: int, threads: int) -> SimpleNamespace:
    """The kernels for lanes of `lane` bytes in blocks of `threads` threads, a power of two."""
    bits = 8 * lane
    per = 8 // lane
    low = uint64((1 << bits) - 1)
    one = uint64(1)
    words_per_block, room = WORDS * threads, 2 * threads

    @cuda.jit
    def mark(x, y, xw, yw, masks, counts, block):
        """Set a bit of masks [threads of all blocks] for each lane that differs, and count them by block.

        x, y: lanes [n]; xw, yw: their first words [up to n // per], as many as can be loaded whole. `block` is the
        number that this array's first block has in masks and counts, which many arrays share.
        """
        shared = cuda.shared.array(words_per_block, uint8)
        total = cuda.shared.array(1, int32)
        differ = cuda.local.array(WORDS, uint64)
        t = cuda.threadIdx.x
        first = int64(cuda.blockIdx.x) * words_per_block
        if t == 0:
            total[0] = 0
        if first + words_per_block <= xw.size:
            for k in range(WORDS):
                at = first + k * threads + t
                differ[k] = xw[at] ^ yw[at]
        else:
            for k in range(WORDS):
                at = first + k * threads + t
                differ[k] = 0
                if at < xw.size:
                    differ[k] = xw[at] ^ yw[at]
                else:
                    for j in range(per):
                        i = at * per + j
                        if i < x.size:
                            differ[k] |= (uint64(x[i]) ^ uint64(y[i])) << uint64(j * bits)
        for k in range(WORDS):
            found = uint64(0)
            if differ[k] != 0:
                for j in range(per):
                    if (differ[k] >> uint64(j * bits)) & low:
                        found |= one << uint64(j)
            shared[k * threads + t] = found
        cuda.syncthreads()
        mask = uint64(0)
        for k in range(WORDS):
            mask |= uint64(shared[t * WORDS + k]) << uint64(k * per)
        b = block + int64(cuda.blockIdx.x)
        masks[b * threads + t] = mask
        if mask != 0:
            cuda.atomic.add(total, 0, int32(cuda.popc(mask)))
        cuda.syncthreads()
        if t == 0:
            counts[b] = total[0]

    @cuda.jit
    def scatter(x, y, masks, starts, block, positions, old, new):
        """Write, in order, what `mark` found. starts [blocks + 1]: where the changes of each block go."""
        shared = cuda.shared.array(room, int32)
        t = cuda.threadIdx.x
        b = block + int64(cuda.blockIdx.x)
        begin = int64(starts[b])
        if begin == int64(starts[b + 1]):
            return
        mask = uint64(masks[b * threads + t])
        mine = int32(cuda.popc(mask))
        # Each round adds what lies `reach` threads before; the two halves take turns, so that one barrier does.
        side = 0
        shared[t] = mine
        cuda.syncthreads()
        reach = 1
        while reach < threads:
            value = shared[side + t]
            if t >= reach:
                value += shared[side + t - reach]
            side = threads - side
            shared[side + t] = value
            cuda.syncthreads()
            reach *= 2
        at = begin + int64(shared[side + t]) - int64(mine)
        lowest = (int64(cuda.blockIdx.x) * threads + t) * (WORDS * per)
        while mask != 0:
            rest = mask & (mask - one)
            i = lowest + int64(cuda.popc((mask ^ rest) - one))
            positions[at] = i
            old[at] = x[i]
            new[at] = y[i]
            at += 1
            mask = rest

    return SimpleNamespace(mark=mark, scatter=scatter)


@cache
def scanned(threads: int):
    """The kernel that sums up counts, in one block of `threads` threads, a power of two."""
    room = 2 * threads

    @cuda.jit
    def scan(counts, starts):
        """starts [n + 1]: the sum of the counts [n] before each, and of all."""
        shared = cuda.shared.array(room, int64)
        t = cuda.threadIdx.x
        share = (counts.size + threads - 1) // threads
        begin = min(t * share, counts.size)
        end = min(begin + share, counts.size)
        mine = int64(0)
        for i in range(begin, end):
            mine += int64(counts[i])
        side = 0
        shared[t] = mine
        cuda.syncthreads()
        reach = 1
        while reach < threads:
            value = shared[side + t]
            if t >= reach:
                value += shared[side + t - reach]
            side = threads - side
            shared[side + t] = value
            cuda.syncthreads()
            reach *= 2
        at = shared[side + t] - mine
        for i in range(begin, end):
            starts[i] = at
            at += int64(counts[i])
        if t == threads - 1:
            starts[counts.size] = at

    return scan


@cuda.jit
def inspect(positions, lanes, gathered, flags, which):
    """Flag positions that do not ascend or lie outside lanes [n]; gather the lanes at those that do not."""
    i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if i >= positions.size:
        return
    at = int64(positions[i])
    before = int64(-1)
    if i > 0:
        before = int64(positions[i - 1])
    if at < 0 or at >= lanes.size:
        cuda.atomic.max(flags, which, OUTSIDE)
        return
    if at <= before:
        cuda.atomic.max(flags, which, UNSORTED)
    if i < gathered.size:
        gathered[i] = lanes[at]


@cuda.jit
def put(lanes, positions, values):
    """lanes[positions] = values, for positions that `inspect` let pass."""
    i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if i < positions.size:
        lanes[positions[i]] = values[i]
