"""Compiled passes of the RICE codec. Importing this module imports numba: `rice` does so on first use.

The layout is in docs/patch.md. All indices are unsigned and every function is nogil, as in `context_kernels`: no
wraparound tests, no exceptions, and a status instead.

Conventions of the arguments:

    x, y       old and new lanes [lanes], uint8, 16, 32 or 64
    lane       a tuple of as many zeros as a lane has bytes: its length is known to the compiler
    form       uint64 [4]: shift and mask that give a lane's class, bits of a lane, bits to flip if negative
    where      uint32 [changes]: ascending positions; was, now: the old and new lanes there
    data       uint8: a payload, and SLACK bytes more
    bounds     uint64 [groups + 1, 3]: by group the bit that it begins at, lanes before it, and the bit that its signs
               begin at; the last row has the payload's end
    prices     what price() of a number is, uint32 [k, bit length]
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from numba import int64 as i64
from numba import uint32, uint64

from weightvc_kernels.context_kernels import step_of
from weightvc_kernels.context_vectors import (
    bit_length,
    changes_of,
    compiled,
    inlined,
    load_word,
    lowest_bit,
    pointer,
    prefetch,
    store_word,
)

# Copies of constants in `rice`, literal for numba's cache; a test holds both equal.
GROUP = 256
GAP_BITS = 26
K_BITS = 5
ALL = 31
ESCAPE = 16
RUN_LIMIT = 8
BORDER_LIMIT = 4096
AHEAD = 64
"""Pieces of 64 bytes that memory is asked for in advance."""
SLACK = 8192
"""More than the bytes that the codes of one group can take, whatever they are."""

OK = 0
WRONG_INDEX = 1
WRONG_GAP = 2
WRONG_STEP = 3
WRONG_SIZE = 4
WRONG_END = 5


@compiled
def scan(x, y, lane, where, was, now):
    """Find what differs: fills where, was and now, which have room for all lanes, and returns how many there are."""
    piece = uint64(64 // len(lane))
    n, one, zero = uint64(x.size), uint64(1), uint64(0)
    x, y, where, was, now = pointer(x), pointer(y), pointer(where), pointer(was), pointer(now)
    count = zero
    for p in range(uint64(0), n, piece):
        prefetch(x, p + uint64(AHEAD) * piece)
        prefetch(y, p + uint64(AHEAD) * piece)
        different = zero
        if p + piece <= n:
            different = changes_of(x, y, p)
        else:
            for j in range(n - p):
                different |= uint64(x[p + j] != y[p + j]) << j
        while different != zero:
            at = p + lowest_bit(different)
            different &= different - one
            where[count] = uint32(at)
            was[count] = x[at]
            now[count] = y[at]
            count += one
    return count


@inlined
def _put(out, place, held, value, count):
    """Append up to 56 bits. held has those of the unfinished byte at bit `place`; returns both anew."""
    held |= value << (place & uint64(7))
    store_word(out, place >> uint64(3), held)
    end = place + count
    held >>= ((end >> uint64(3)) - (place >> uint64(3))) << uint64(3)
    return end, held


@inlined
def _put_code(out, place, held, value, k, limit):
    one, four = uint64(1), uint64(4)
    q = value >> k
    z, zeros = uint64(0), q
    if q >= four:
        z = bit_length(q - uint64(3)) - one
        zeros = four + z
    if zeros >= uint64(ESCAPE):
        place, held = _put(out, place, held, uint64(0), uint64(ESCAPE))
        raw, size = value, limit
    else:
        raw = value - ((min(zeros, four) + (one << z) - one) << k)
        size = k + z
        if size <= uint64(39):
            return _put(out, place, held, (one << zeros) | (raw << (zeros + one)), zeros + one + size)
        place, held = _put(out, place, held, one << zeros, zeros + one)
    low = min(size, uint64(32))
    place, held = _put(out, place, held, raw & ((one << low) - one), low)
    return _put(out, place, held, raw >> low, size - low)


@compiled
def tally(was, now, count, form, counts):
    """Count changes by class and bit length of u: adds to counts, uint32 [classes, bits of a lane]."""
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    was, now, counts = pointer(was), pointer(now), pointer(counts)
    for i in range(uint64(count)):
        old = uint64(was[i])
        size = bit_length(step_of(old, uint64(now[i]), bits, flip) >> uint64(1))
        counts[((old >> shift) & mask) * bits + size] += uint32(1)


@compiled
def settle(counts, prices):
    """The border of the wild classes that costs least by `prices`, and the parameter of runs."""
    classes, lengths = counts.shape
    first, final, last = classes, 0, 0
    for c in range(classes):
        for size in range(lengths):
            if counts[c, size]:
                first, final = min(first, c), c
                last = max(last, c + size + 1)
    best, best_cost, best_run = 0, -1, 0
    for border in range(min(last, BORDER_LIMIT) + 1):
        if 0 < border <= first:
            continue
        cost, calm, exceptions = 0, 0, 0
        for c in range(first, final + 1):
            if c < border:
                k = min(border - 1 - c, lengths - 1)
                for size in range(lengths):
                    cost += i64(counts[c, size]) * i64(prices[k, size])
            else:
                calm += i64(counts[c, 0])
                for size in range(1, lengths):
                    exceptions += i64(counts[c, size])
                    cost += i64(counts[c, size]) * (i64(prices[0, size]) - 2)
        run = RUN_LIMIT
        if exceptions:
            length = i64(bit_length(uint64(calm // exceptions)))
            cost += exceptions * (2 * length + 2)
            run = min(run, max(0, length - 1))
        if best_cost < 0 or cost < best_cost:
            best, best_cost, best_run = border, cost, run
    return best, best_run


@inlined
def _end(where, high):
    """Lanes up to the last of the changes before number `high`."""
    return uint64(where[high - uint64(1)]) + uint64(1)


@inlined
def _parameter(where, low, high, before, prices, tallies):
    """The k that codes a group's gaps for least, by how many there are of each bit length; ALL if all are 0."""
    lengths = uint64(GAP_BITS + 2)
    for size in range(lengths):
        tallies[size] = uint32(0)
    for i in range(low, high):
        after = uint64(where[i]) + uint64(1)
        tallies[bit_length(after - before - uint64(1))] += uint32(1)
        before = after
    best, least = uint64(ALL), ~uint64(0)
    if tallies[uint64(0)] != high - low:
        for k in range(uint64(GAP_BITS + 1)):
            cost = uint64(0)
            for size in range(lengths):
                cost += uint64(tallies[size]) * uint64(prices[k * lengths + size])
            if cost < least:
                best, least = uint64(k), cost
    return best


@compiled
def pack(where, was, now, count, form, border, run_bits, prices, tallies, runs, bounds, out):
    """Write the groups to out, uint8. tallies uint32 [GAP_BITS + 2] and runs uint64 [GROUP + 1] are room to work in.

    Fills bounds, uint64 [groups, 2], with span and size of each group. Returns the bits written.
    """
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    one, zero, top = uint64(1), uint64(0), bits - uint64(1)
    count, border, run_bits = uint64(count), uint64(border), uint64(run_bits)
    where, was, now, prices = pointer(where), pointer(was), pointer(now), pointer(prices)
    tallies, runs, bounds, out = pointer(tallies), pointer(runs), pointer(bounds), pointer(out)
    place, held, row = zero, zero, zero
    before = zero
    for low in range(zero, count, uint64(GROUP)):
        high = min(count, low + uint64(GROUP))
        begin = place
        k = _parameter(where, low, high, before, prices, tallies)
        place, held = _put(out, place, held, k, uint64(K_BITS))
        last = before
        if k != uint64(ALL):
            for i in range(low, high):
                after = uint64(where[i]) + one
                place, held = _put_code(out, place, held, after - last - one, k, uint64(GAP_BITS))
                last = after
        # Signs; and how many calm changes lie between those that are an exception.
        calm, found = zero, zero
        signs, some = zero, zero
        for i in range(low, high):
            old = uint64(was[i])
            step = step_of(old, uint64(now[i]), bits, flip)
            signs |= (step & one) << some
            some += one
            if some == uint64(56):
                place, held = _put(out, place, held, signs, some)
                signs, some = zero, zero
            quiet = uint64(((old >> shift) & mask) >= border)
            runs[found] = calm
            loud = quiet & uint64(step > one)
            found += loud
            calm += quiet ^ loud
            if loud:
                calm = zero
        runs[found] = calm
        place, held = _put(out, place, held, signs, some)
        known, next_run = zero, zero
        for i in range(low, high):
            old = uint64(was[i])
            u = step_of(old, uint64(now[i]), bits, flip) >> one
            size = (old >> shift) & mask
            if size < border:
                place, held = _put_code(out, place, held, u, min(border - one - size, top), top)
                continue
            if known == zero:
                place, held = _put_code(out, place, held, runs[next_run], run_bits, uint64(GAP_BITS))
                next_run += one
                known = one
            if u != zero:
                place, held = _put_code(out, place, held, u - one, zero, top)
                known = zero
        bounds[row] = _end(where, high) - before
        bounds[row + one] = place - begin
        row += uint64(2)
        before = _end(where, high)
    return place


@inlined
def _window(data, place):
    """The bits from `place` on, at least 57 of them."""
    return load_word(data, place >> uint64(3)) >> (place & uint64(7))


@inlined
def _index(data, begin, span_bits, size_bits, limit, groups, bounds):
    """Fill the first two columns of bounds from the index that begins at byte `begin`. Returns a status."""
    one, three = uint64(1), uint64(3)
    place = uint64(8) * begin
    end = place + (groups - one) * (span_bits + size_bits)
    at = (end + uint64(7)) & ~uint64(7)
    if at > limit or (_window(data, end) & ((one << (at - end)) - one)) != uint64(0):
        return WRONG_INDEX
    passed = uint64(0)
    for g in range(groups):
        bounds[three * g] = at
        bounds[three * g + one] = passed
        if g < groups - one:
            passed += _window(data, place) & ((one << span_bits) - one)
            place += span_bits
            at += _window(data, place) & ((one << size_bits) - one)
            place += size_bits
            if at > limit:
                return WRONG_INDEX
    bounds[three * groups] = limit
    return OK


@compiled
def positions(data, nbytes, begin, span_bits, size_bits, count, size, bounds, where, block, lane):
    """Decode where uint32 [changes], all below `size`, and bounds, of the `nbytes` of a payload whose index begins at
    byte `begin`. Returns a status.

    Asks memory for the lanes at those positions of `lane` bytes, if there is a block, uint8 [bytes].
    """
    one, zero, three, four = uint64(1), uint64(0), uint64(3), uint64(4)
    groups = uint64(bounds.shape[0] - 1)
    count, lane, size = uint64(count), uint64(lane), uint64(size)
    ahead = block.size > 0
    data, bounds, where, block = pointer(data), pointer(bounds), pointer(where), pointer(block)
    status = _index(
        data, uint64(begin), uint64(span_bits), uint64(size_bits), uint64(8) * uint64(nbytes), groups, bounds
    )
    if status != OK:
        return status
    for g in range(groups):
        place = bounds[three * g]
        at = bounds[three * g + one]
        low = g * uint64(GROUP)
        high = min(count, low + uint64(GROUP))
        k = _window(data, place) & uint64(31)
        place += uint64(K_BITS)
        if k == uint64(ALL):
            for i in range(low, high):
                where[i] = uint32(at)
                at += one
        elif k > uint64(GAP_BITS):
            return WRONG_GAP
        else:
            wrong = zero
            for i in range(low, high):
                window = _window(data, place)
                zeros = lowest_bit(window | uint64(1 << ESCAPE))
                z = max(zeros, four) - four
                raw_bits = k + z
                gap = (window >> (zeros + one)) & ((one << raw_bits) - one)
                gap += (min(zeros, four) + (one << z) - one) << k
                place += zeros + one + raw_bits
                if zeros == uint64(ESCAPE):
                    gap = (window >> uint64(ESCAPE)) & uint64((1 << GAP_BITS) - 1)
                    place += uint64(GAP_BITS) - one - raw_bits
                wrong |= gap >> uint64(GAP_BITS)
                at += gap
                where[i] = uint32(at)
                if ahead:
                    prefetch(block, at * lane)
                at += one
            if wrong != zero:
                return WRONG_GAP
        bounds[three * g + uint64(2)] = place
        # The end of the last group is told by its steps.
        if g < groups - one and at != bounds[three * (g + one) + one]:
            return WRONG_INDEX
        if at > size or place > bounds[three * (g + one)]:
            return WRONG_GAP
    return OK


@compiled
def gather(x, where, was):
    """was becomes the lanes of x at `where`."""
    count = uint64(where.size)
    x, where, was = pointer(x), pointer(where), pointer(was)
    for i in range(count):
        was[i] = x[uint64(where[i])]


@compiled
def scatter(x, where, now):
    """The lanes of x at `where` become now."""
    count = uint64(where.size)
    x, where, now = pointer(x), pointer(where), pointer(now)
    for i in range(count):
        x[uint64(where[i])] = now[i]


@inlined
def _code(data, place, k, limit, wide):
    """A number below 2^limit, the place behind it, and not 0 if there is none."""
    one, zero, four = uint64(1), uint64(0), uint64(4)
    window = _window(data, place)
    zeros = lowest_bit(window | uint64(1 << ESCAPE))
    z = max(zeros, four) - four
    size = k + z
    base = min(zeros, four) + (one << z) - one
    place += zeros + one
    if zeros == uint64(ESCAPE):
        size, base = limit, zero
        place -= one
    wrong = uint64(size > limit)
    size = min(size, limit)
    if wide:
        raw = _window(data, place) & uint64(0xFFFFFFFF)
        raw |= _window(data, place + uint64(32)) << uint64(32)
        place += size
    else:
        raw = _window(data, place)
        place += size
    raw &= (one << size) - one
    value = (base << k) + raw
    return value, place, wrong | (value >> limit)


@compiled
def values(data, count, lane, form, border, run_bits, bounds, was):
    """was, the old lanes [changes], become the new ones. Returns a status; unless it is OK they are neither."""
    wide = len(lane) == 8
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    one, zero, three = uint64(1), uint64(0), uint64(3)
    top = bits - one
    ones = (((one << top) - one) << one) | one
    groups = uint64(bounds.shape[0] - 1)
    count, border, run_bits = uint64(count), uint64(border), uint64(run_bits)
    data, bounds, was = pointer(data), pointer(bounds), pointer(was)
    for g in range(groups):
        low = g * uint64(GROUP)
        high = min(count, low + uint64(GROUP))
        sign_at = bounds[three * g + uint64(2)]
        place = sign_at + high - low
        wrong = zero
        known, run = zero, zero
        for i in range(low, high):
            sign = (uint64(data[sign_at >> three]) >> (sign_at & uint64(7))) & one
            sign_at += one
            old = uint64(was[i])
            size = (old >> shift) & mask
            u = zero
            if size < border:
                u, place, bad = _code(data, place, min(border - one - size, top), top, wide)
                wrong |= bad
            else:
                if known == zero:
                    run, place, bad = _code(data, place, run_bits, uint64(GAP_BITS), False)
                    wrong |= bad
                    known = one
                if run == zero:
                    u, place, bad = _code(data, place, zero, top, wide)
                    wrong |= bad
                    u += one
                    known = zero
                else:
                    run -= one
            wrong |= u >> top
            value = old ^ (flip * (old >> top))
            value = (value + ((u + one) ^ (zero - sign)) + sign) & ones
            was[i] = value ^ (flip * (value >> top))
        if wrong != zero:
            return WRONG_STEP
        end = bounds[three * (g + one)]
        if g < groups - one:
            if place != end:
                return WRONG_SIZE
        elif (
            place > end or end - place > uint64(7) or (_window(data, place) & ((one << (end - place)) - one)) != zero
        ):
            return WRONG_END
    return OK
