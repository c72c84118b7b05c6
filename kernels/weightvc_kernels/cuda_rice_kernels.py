"""Kernels of the RICE codec for CUDA devices: a thread a group of changes, and what lies around that.

The layout is in docs/patch.md, what the CPU does in `rice_kernels`; here everything is for many blocks at once. Each
has a row of int64 in a table, COLUMNS wide, and each group has the number of its block. Changes of all blocks lie one
after the other, in positions, was and now [changes], and so do the groups. Bits are counted through all payloads, in
words of 8 bytes. Arithmetic is on uint64 and int64 as in `cuda_kernels`.

A flag a block says what is wrong with it. Every kernel passes over blocks that are flagged, nothing but the caller
writes to targets, and no thread reads further than SLACK bytes past where the block before it, or its index, may end.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,attr-defined,operator,call-overload,arg-type"

from functools import cache
from types import SimpleNamespace

from numba import cuda, int64, uint32, uint64

from weightvc_kernels.rice_kernels import (
    ALL,
    BORDER_LIMIT,
    ESCAPE,
    GAP_BITS,
    GROUP,
    K_BITS,
    RUN_LIMIT,
    SLACK,
    WRONG_END,
    WRONG_GAP,
    WRONG_INDEX,
    WRONG_SIZE,
    WRONG_STEP,
)

# Columns of a block's row. Those of the payload count for decoding only, FIRST_GROUP too for encoding.
FIRST_CHANGE, CHANGES, FIRST_GROUP, GROUPS, BASE, LANES, BORDER, RUN_BITS = 0, 1, 2, 3, 4, 5, 6, 7
SHIFT, FLIP, INDEX_AT, END, SPAN_BITS, SIZE_BITS = 8, 9, 10, 11, 12, 13
COLUMNS = 14

# Columns of a group's row: the bit it begins at and the one behind it, the lane behind the change before, and the bit
# that its signs begin at.
BEGIN, STOP, START, SIGNS = 0, 1, 2, 3
BOUNDS = 4

SLACK_WORDS = SLACK // 8 + 1
"""Words behind all payloads."""

FEW = 32
"""Threads a block where each has a group: few, so that some thousand groups meet every processor."""

CLEARED = 8192
"""Words that a block of `clear` sets to 0."""

LENGTHS = GAP_BITS + 2
ONE = uint64(1)
ZERO = uint64(0)
FOUR = uint64(4)


@cuda.jit(device=True)
def _length(value):
    """How many bits a uint64 has below and with its highest."""
    bits = ZERO
    half = uint64(32)
    while half != ZERO:
        if value >> half:
            value >>= half
            bits += half
        half >>= ONE
    return bits + value


@cuda.jit(device=True)
def _window(words, place):
    """64 bits from bit `place` on."""
    at, by = place >> uint64(6), place & uint64(63)
    window = words[at] >> by
    if by:
        window |= words[at + ONE] << (uint64(64) - by)
    return window


@cuda.jit(device=True)
def _code(words, place, k, limit):
    """A number below 2^limit, the place behind it, and not 0 if there is none."""
    window = _window(words, place) & uint64((1 << ESCAPE) - 1)
    if window == ZERO:
        value = _window(words, place + uint64(ESCAPE)) & ((ONE << limit) - ONE)
        return value, place + uint64(ESCAPE) + limit, ZERO
    zeros = uint64(cuda.popc((window ^ (window & (window - ONE))) - ONE))
    z = max(zeros, FOUR) - FOUR
    size = k + z
    wrong = uint64(size > limit)
    size = min(size, limit)
    place += zeros + ONE
    raw = _window(words, place) & ((ONE << size) - ONE)
    value = ((min(zeros, FOUR) + (ONE << z) - ONE) << k) + raw
    return value, place + size, wrong | (value >> limit)


@cuda.jit(device=True)
def _put(out, first, place, held, value, count, write):
    """Append up to 63 bits. held has those of the unfinished word at bit `place`; returns both anew.

    The word `first` may have bits of the group before: those are kept.
    """
    by = place & uint64(63)
    held |= value << by
    if by + count >= uint64(64):
        at = place >> uint64(6)
        if write:
            if at == first:
                cuda.atomic.or_(out, at, held)
            else:
                out[at] = held
        held = ZERO
        if by:
            held = value >> (uint64(64) - by)
    return place + count, held


@cuda.jit(device=True)
def _put_code(out, first, place, held, value, k, limit, write):
    """Append the code of a number, as `rice_kernels` does."""
    q = value >> k
    z, zeros = ZERO, q
    if q >= FOUR:
        z = _length(q - uint64(3)) - ONE
        zeros = FOUR + z
    if zeros >= uint64(ESCAPE):
        place, held = _put(out, first, place, held, ZERO, uint64(ESCAPE), write)
        return _put(out, first, place, held, value, limit, write)
    place, held = _put(out, first, place, held, ONE << zeros, zeros + ONE, write)
    return _put(out, first, place, held, value - ((min(zeros, FOUR) + (ONE << z) - ONE) << k), k + z, write)


@cuda.jit(device=True)
def _step(before, after, bits, flip):
    """2 × (distance - 1) + sign of the step between two lanes."""
    top = bits - ONE
    ones = (((ONE << top) - ONE) << ONE) | ONE
    a = before ^ (flip * (before >> top))
    b = after ^ (flip * (after >> top))
    s = (b - a) & ones
    sign = s >> top
    if sign:
        s = (~s + ONE) & ones
    return ((s - ONE) << ONE) | sign


@cuda.jit
def parameters(positions, blocks, owners, prices, ks, spans):
    """A thread a group: its k, the one whose codes of gaps cost least by `prices` [k, bit length], and its span."""
    g = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if g >= owners.size:
        return
    b = owners[g]
    low = blocks[b, FIRST_CHANGE] + (g - blocks[b, FIRST_GROUP]) * GROUP
    high = min(low + GROUP, blocks[b, FIRST_CHANGE] + blocks[b, CHANGES])
    start = blocks[b, BASE]
    if low > blocks[b, FIRST_CHANGE]:
        start = int64(positions[low - 1]) + 1
    room = cuda.local.array(LENGTHS, uint32)
    for size in range(LENGTHS):
        room[size] = 0
    last = start
    for i in range(low, high):
        at = int64(positions[i])
        room[int64(_length(uint64(at - last)))] += 1
        last = at + 1
    k = ALL
    if int64(room[0]) != high - low:
        best = int64(-1)
        for candidate in range(GAP_BITS + 1):
            cost = int64(0)
            for size in range(LENGTHS):
                cost += int64(room[size]) * int64(prices[candidate, size])
            if best < 0 or cost < best:
                best, k = cost, candidate
    ks[g] = k
    spans[g] = last - start


@cuda.jit
def settle(counts, prices, reach, chosen):
    """A block of threads a block: chosen [blocks, 2] becomes border and parameter of runs.

    counts [blocks, classes, bit lengths] is what `tally` counted; reach [blocks, classes] is room for how many of its
    columns matter. Every thread tries its share of the borders.
    """
    firsts = cuda.shared.array(FEW, int64)
    finals = cuda.shared.array(FEW, int64)
    lasts = cuda.shared.array(FEW, int64)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    classes, lengths = counts.shape[1], counts.shape[2]
    first, final, last = int64(classes), int64(0), int64(0)
    for c in range(t, classes, cuda.blockDim.x):
        columns = int64(0)
        for size in range(lengths):
            if counts[b, c, size]:
                columns = int64(size + 1)
        reach[b, c] = columns
        if columns:
            first, final, last = min(first, int64(c)), int64(c), max(last, int64(c + columns))
    firsts[t] = first
    finals[t] = final
    lasts[t] = last
    cuda.syncthreads()
    for other in range(cuda.blockDim.x):
        first, final, last = min(first, firsts[other]), max(final, finals[other]), max(last, lasts[other])
    cuda.syncthreads()
    best, best_cost, best_run = int64(0), int64(-1), int64(0)
    for border in range(t, min(last, int64(BORDER_LIMIT)) + 1, cuda.blockDim.x):
        if 0 < border <= first:
            continue
        cost, calm, exceptions = int64(0), int64(0), int64(0)
        for c in range(first, final + 1):
            columns = int64(reach[b, c])
            if c < border:
                k = min(border - 1 - c, lengths - 1)
                for size in range(columns):
                    cost += int64(counts[b, c, size]) * int64(prices[k, size])
            elif columns:
                calm += int64(counts[b, c, 0])
                for size in range(1, columns):
                    exceptions += int64(counts[b, c, size])
                    cost += int64(counts[b, c, size]) * (int64(prices[0, size]) - 2)
        run = int64(RUN_LIMIT)
        if exceptions:
            length = int64(_length(uint64(calm // exceptions)))
            cost += exceptions * (2 * length + 2)
            run = min(run, max(int64(0), length - 1))
        if best_cost < 0 or cost < best_cost:
            best, best_cost, best_run = int64(border), cost, run
    # The same room again, for what each thread found.
    firsts[t] = best
    finals[t] = best_cost
    lasts[t] = best_run
    cuda.syncthreads()
    if t == 0:
        # Threads take borders in turns: of those that cost the same the smallest is to win.
        for other in range(1, cuda.blockDim.x):
            cost = finals[other]
            if cost >= 0 and (best_cost < 0 or cost < best_cost or (cost == best_cost and firsts[other] < best)):
                best, best_cost, best_run = firsts[other], cost, lasts[other]
        chosen[b, 0] = best
        chosen[b, 1] = best_run


@cuda.jit
def index(words, blocks, bounds, flags):
    """A block of threads a block: fill BEGIN, STOP and START of its groups from its index."""
    spans = cuda.shared.array(FEW, int64)
    sizes = cuda.shared.array(FEW, int64)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    groups, first = blocks[b, GROUPS], blocks[b, FIRST_GROUP]
    if groups == 0:
        return
    span_bits, size_bits = uint64(blocks[b, SPAN_BITS]), uint64(blocks[b, SIZE_BITS])
    entry = span_bits + size_bits
    at = uint64(blocks[b, INDEX_AT])
    end = at + uint64(groups - 1) * entry
    body = (end + uint64(7)) & ~uint64(7)
    limit = blocks[b, END]
    if int64(body) > limit or (_window(words, end) & ((ONE << (body - end)) - ONE)) != ZERO:
        if t == 0:
            flags[b] = WRONG_INDEX
        return
    share = (groups - 1 + cuda.blockDim.x - 1) // cuda.blockDim.x
    low = min(t * share, groups - 1)
    high = min(low + share, groups - 1)
    span, size = int64(0), int64(0)
    for g in range(low, high):
        place = at + uint64(g) * entry
        span += int64(_window(words, place) & ((ONE << span_bits) - ONE))
        size += int64(_window(words, place + span_bits) & ((ONE << size_bits) - ONE))
    spans[t], sizes[t] = span, size
    cuda.syncthreads()
    span, size = blocks[b, BASE], int64(body)
    for other in range(t):
        span += spans[other]
        size += sizes[other]
    for g in range(low, high):
        bounds[first + g, BEGIN] = size
        bounds[first + g, START] = span
        place = at + uint64(g) * entry
        span += int64(_window(words, place) & ((ONE << span_bits) - ONE))
        size += int64(_window(words, place + span_bits) & ((ONE << size_bits) - ONE))
        bounds[first + g, STOP] = size
    if t == cuda.blockDim.x - 1:
        bounds[first + groups - 1, BEGIN] = size
        bounds[first + groups - 1, START] = span
        bounds[first + groups - 1, STOP] = limit
        # Sizes add up, so that if the last group begins in the payload, all do.
        if size > limit:
            flags[b] = WRONG_INDEX


@cuda.jit
def places(words, blocks, owners, bounds, positions, flags):
    """A thread a group: its positions, counted from the first block's beginning, and where its signs begin."""
    g = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if g >= owners.size:
        return
    b = owners[g]
    if flags[b]:
        return
    low = blocks[b, FIRST_CHANGE] + (g - blocks[b, FIRST_GROUP]) * GROUP
    high = min(low + GROUP, blocks[b, FIRST_CHANGE] + blocks[b, CHANGES])
    place = uint64(bounds[g, BEGIN])
    at = bounds[g, START]
    k = _window(words, place) & uint64((1 << K_BITS) - 1)
    place += uint64(K_BITS)
    wrong = ZERO
    if k == uint64(ALL):
        for i in range(low, high):
            positions[i] = at
            at += 1
    elif k > uint64(GAP_BITS):
        wrong = ONE
    else:
        for i in range(low, high):
            gap, place, bad = _code(words, place, k, uint64(GAP_BITS))
            wrong |= bad
            at += int64(gap & uint64((1 << GAP_BITS) - 1))
            positions[i] = at
            at += 1
    bounds[g, SIGNS] = int64(place)
    if wrong != ZERO or at > blocks[b, BASE] + blocks[b, LANES] or int64(place) > bounds[g, STOP]:
        cuda.atomic.max(flags, b, WRONG_GAP)
    elif g + 1 < blocks[b, FIRST_GROUP] + blocks[b, GROUPS] and at != bounds[g + 1, START]:
        cuda.atomic.max(flags, b, WRONG_INDEX)


@cuda.jit
def gather(lanes, base, positions, low, high, was):
    """was = the lanes at positions[low:high], counted from `base`, of those that lie in lanes [n]."""
    i = low + int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if i < high:
        at = positions[i] - base
        if 0 <= at < lanes.size:
            was[i] = lanes[at]


@cuda.jit
def scatter(lanes, base, positions, low, high, now):
    """The counterpart of `gather`, once nothing is flagged."""
    i = low + int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if i < high:
        at = positions[i] - base
        if 0 <= at < lanes.size:
            lanes[at] = now[i]


@cuda.jit
def clear(words):
    """words [n] = 0; a block of FEW threads clears CLEARED of them."""
    first = int64(cuda.blockIdx.x) * CLEARED
    for i in range(first + cuda.threadIdx.x, min(first + CLEARED, words.size), FEW):
        words[i] = 0


@cache
def made(lane: int) -> SimpleNamespace:
    """The kernels that look at lanes of `lane` bytes."""
    bits = uint64(8 * lane)
    top = uint64(8 * lane - 1)
    ones = uint64((1 << 8 * lane) - 1)
    magnitude = uint64((1 << (8 * lane - 1)) - 1)

    @cuda.jit
    def tally(was, now, blocks, owners, counts):
        """A thread a group: count changes by class and bit length of u in counts [blocks, classes, bit lengths]."""
        g = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if g >= owners.size:
            return
        b = int64(owners[g])
        low = blocks[b, FIRST_CHANGE] + (g - blocks[b, FIRST_GROUP]) * GROUP
        high = min(low + GROUP, blocks[b, FIRST_CHANGE] + blocks[b, CHANGES])
        shift, flip = uint64(blocks[b, SHIFT]), uint64(blocks[b, FLIP])
        for i in range(low, high):
            old = uint64(was[i])
            length = _length(_step(old, uint64(now[i]), bits, flip) >> ONE)
            cuda.atomic.add(counts, (b, int64((old & magnitude) >> shift), int64(length)), uint32(1))

    @cuda.jit
    def pack(positions, was, now, blocks, owners, chosen, ks, bounds, out, write):
        """A thread a group: set STOP to the bit behind it, if it begins at BEGIN, and `write` it into out [words]."""
        g = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if g >= owners.size:
            return
        b = owners[g]
        low = blocks[b, FIRST_CHANGE] + (g - blocks[b, FIRST_GROUP]) * GROUP
        high = min(low + GROUP, blocks[b, FIRST_CHANGE] + blocks[b, CHANGES])
        border, run_bits = uint64(chosen[b, 0]), uint64(chosen[b, 1])
        shift, flip = uint64(blocks[b, SHIFT]), uint64(blocks[b, FLIP])
        place = uint64(bounds[g, BEGIN])
        first = place >> uint64(6)
        k = uint64(ks[g])
        place, held = _put(out, first, place, ZERO, k, uint64(K_BITS), write)
        if k != uint64(ALL):
            last = blocks[b, BASE]
            if low > blocks[b, FIRST_CHANGE]:
                last = int64(positions[low - 1]) + 1
            for i in range(low, high):
                at = int64(positions[i])
                place, held = _put_code(out, first, place, held, uint64(at - last), k, uint64(GAP_BITS), write)
                last = at + 1
        for i in range(low, high):
            sign = _step(uint64(was[i]), uint64(now[i]), bits, flip) & ONE
            place, held = _put(out, first, place, held, sign, ONE, write)
        known = False
        for i in range(low, high):
            old = uint64(was[i])
            u = _step(old, uint64(now[i]), bits, flip) >> ONE
            size = (old & magnitude) >> shift
            if size < border:
                k = min(border - ONE - size, top)
                place, held = _put_code(out, first, place, held, u, k, top, write)
                continue
            if not known:
                # The calm changes up to the next that is an exception, or to the group's end.
                run, ahead = ZERO, i
                while ahead < high:
                    other = uint64(was[ahead])
                    if (other & magnitude) >> shift >= border:
                        if _step(other, uint64(now[ahead]), bits, flip) > ONE:
                            break
                        run += ONE
                    ahead += 1
                place, held = _put_code(out, first, place, held, run, run_bits, uint64(GAP_BITS), write)
                known = True
            if u != ZERO:
                place, held = _put_code(out, first, place, held, u - ONE, ZERO, top, write)
                known = False
        if write and place & uint64(63):
            cuda.atomic.or_(out, place >> uint64(6), held)
        bounds[g, STOP] = int64(place)

    @cuda.jit
    def values(words, blocks, owners, bounds, was, now, flags):
        """A thread a group: now, the new lanes, of was, the old ones."""
        g = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if g >= owners.size:
            return
        b = owners[g]
        if flags[b]:
            return
        low = blocks[b, FIRST_CHANGE] + (g - blocks[b, FIRST_GROUP]) * GROUP
        high = min(low + GROUP, blocks[b, FIRST_CHANGE] + blocks[b, CHANGES])
        border, run_bits = uint64(blocks[b, BORDER]), uint64(blocks[b, RUN_BITS])
        shift, flip = uint64(blocks[b, SHIFT]), uint64(blocks[b, FLIP])
        sign_at = uint64(bounds[g, SIGNS])
        place = sign_at + uint64(high - low)
        wrong, run = ZERO, ZERO
        known = False
        for i in range(low, high):
            sign = (words[sign_at >> uint64(6)] >> (sign_at & uint64(63))) & ONE
            sign_at += ONE
            old = uint64(was[i])
            size = (old & magnitude) >> shift
            u = ZERO
            if size < border:
                u, place, bad = _code(words, place, min(border - ONE - size, top), top)
                wrong |= bad
            else:
                if not known:
                    run, place, bad = _code(words, place, run_bits, uint64(GAP_BITS))
                    wrong |= bad
                    known = True
                if run == ZERO:
                    u, place, bad = _code(words, place, ZERO, top)
                    wrong |= bad
                    u += ONE
                    known = False
                else:
                    run -= ONE
            wrong |= u >> top
            step = u + ONE
            if sign:
                step = ~step + ONE
            value = old ^ (flip * (old >> top))
            value = (value + step) & ones
            now[i] = value ^ (flip * (value >> top))
        end = uint64(bounds[g, STOP])
        if wrong != ZERO:
            cuda.atomic.max(flags, b, WRONG_STEP)
        elif g + 1 < blocks[b, FIRST_GROUP] + blocks[b, GROUPS]:
            if place != end:
                cuda.atomic.max(flags, b, WRONG_SIZE)
        elif place > end or end - place > uint64(7) or _window(words, place) & ((ONE << (end - place)) - ONE):
            cuda.atomic.max(flags, b, WRONG_END)

    return SimpleNamespace(tally=tally, pack=pack, values=values)
