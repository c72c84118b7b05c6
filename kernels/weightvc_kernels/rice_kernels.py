"""Compiled passes of the RICE codec. Importing this module imports numba: `rice` does so on first use.

The layout is in docs/patch.md. All indices are unsigned and every function is nogil, as in `context_kernels`: no
wraparound tests, no exceptions, and a status instead.

Conventions of the arguments:

    table      uint64 [blocks, 3], for the decoder [blocks, 4]: where the blocks of a batch lie, and how long they
    are.
               An address is of lanes, uint8, 16, 32 or 64, and a multiple of their size; the caller holds the memory
    lane       a tuple of as many zeros as a lane has bytes: its length is known to the compiler
    form       uint64 [4]: shift and mask that give a lane's class, bits of a lane, bits to flip if negative
    like       an array of such lanes
    where      uint32 [changes]: ascending positions; was, now: the old and new lanes there
    data       uint8: payloads, one after the other, and SLACK bytes more
    bounds     uint64 [groups + 1, 3]: by group the bit that it begins at, lanes before it, and the bit that its signs
               begin at; the last row has the payload's end
    head       uint64 [FIELDS]: how a payload begins, and the byte where its index does
    prices     what price() of a number is, uint32 [k, bit length]
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from numba import int64 as i64
from numba import uint32, uint64

from weightvc_kernels.context_kernels import step_of
from weightvc_kernels.context_vectors import (
    at_address,
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
WRONG_HEAD = 6

PLAIN = 64
RUN_BITS_LIMIT = 15
CHANGES, SHIFT, IS_PLAIN, RUN_BITS, BORDER, SPAN_BITS, SIZE_BITS, INDEX_AT = range(8)
FIELDS = 8
HEAD_ROOM = 16
"""More than the bytes of a head without its index."""


@compiled
def scan(table, lane, where, was, now, ends):
    """Find what differs in each block: fills where, was and now, which have room for all lanes, block after block,
    and ends, int64 [blocks], with the changes up to each block's end."""
    piece = uint64(64 // len(lane))
    one, zero, blocks = uint64(1), uint64(0), table.shape[0]
    table, where, was, now, ends = pointer(table), pointer(where), pointer(was), pointer(now), pointer(ends)
    count = zero
    for block in range(uint64(blocks)):
        place = uint64(3) * block
        x, y, n = at_address(table[place], was), at_address(table[place + one], was), table[place + uint64(2)]
        for p in range(zero, n, piece):
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
        ends[block] = i64(count)


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


@inlined
def _tally(was, now, low, high, form, counts):
    """Count changes [low, high) by class and bit length of u: adds to counts, uint32 [classes, bits of a lane].
    Returns the least and the greatest class."""
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    first, final = mask, uint64(0)
    for i in range(low, high):
        old = uint64(was[i])
        size = bit_length(step_of(old, uint64(now[i]), bits, flip) >> uint64(1))
        c = (old >> shift) & mask
        counts[c * bits + size] += uint32(1)
        first, final = min(first, c), max(final, c)
    return i64(first), i64(final)


@inlined
def settle(counts, prices, first, final):
    """The border of the wild classes that costs least by `prices`, and the parameter of runs, of changes whose least
    and greatest class are `first` and `final`."""
    lengths = counts.shape[1]
    last, longest = 0, 0
    for c in range(first, final + 1):
        for size in range(lengths):
            if counts[c, size]:
                last = max(last, c + size + 1)
                longest = max(longest, size)
    best, best_cost, best_run = 0, -1, 0
    for border in range(min(last, BORDER_LIMIT) + 1):
        if 0 < border <= first:
            continue
        cost, calm, exceptions = 0, 0, 0
        for c in range(first, final + 1):
            if c < border:
                k = min(border - 1 - c, lengths - 1)
                for size in range(longest + 1):
                    cost += i64(counts[c, size]) * i64(prices[k, size])
            else:
                calm += i64(counts[c, 0])
                for size in range(1, longest + 1):
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


@inlined
def _groups(where, was, now, start, stop, form, border, run_bits, prices, tallies, runs, bounds, out, place):
    """Write the groups of changes [start, stop) from bit `place` of out on, a byte's first.

    Fills bounds, uint64 [groups, 2], with span and size of each group. Returns the bit behind them.
    """
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    one, zero, top = uint64(1), uint64(0), bits - uint64(1)
    held, row = zero, zero
    before = zero
    for low in range(start, stop, uint64(GROUP)):
        high = min(stop, low + uint64(GROUP))
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
def _put_index(bounds, groups, out, at):
    """Write spans and sizes of all groups but the last, in as many bits as they need, from byte `at` of out on;
    before them how many those are. Returns the byte behind them."""
    one, zero, two = uint64(1), uint64(0), uint64(2)
    spans, sizes = zero, zero
    for g in range(groups - one):
        spans |= bounds[two * g]
        sizes |= bounds[two * g + one]
    span_bits, size_bits = bit_length(spans), bit_length(sizes)
    out[at], out[at + one] = span_bits, size_bits
    place, held = (at + two) << uint64(3), zero
    for g in range(groups - one):
        place, held = _put(out, place, held, bounds[two * g], span_bits)
        place, held = _put(out, place, held, bounds[two * g + one], size_bits)
    return (place + uint64(7)) >> uint64(3)


@compiled
def pack(
    ends, where, was, now, form, step_prices, gap_prices, counts, tallies, runs, bounds, out, spans
):  # fmt: skip
    """Write the payloads of what scan found to out, uint8, block after block.

    Fills spans, int64 [blocks, 2], with where in out each begins and ends: nowhere if nothing changed. Room to work
    in: counts uint32 [classes, bits of a lane], all 0, tallies uint32 [GAP_BITS + 2], runs uint64 [GROUP + 1], and
    bounds uint64 [most groups of a block, 2].
    """
    blocks, lengths = ends.shape[0], uint64(counts.shape[1])
    ends, where, was, now, spans = pointer(ends), pointer(where), pointer(was), pointer(now), pointer(spans)
    tallies, runs, bounds, out = pointer(tallies), pointer(runs), pointer(bounds), pointer(out)
    gap_prices = pointer(gap_prices)
    one, zero, two, three = uint64(1), uint64(0), uint64(2), uint64(3)
    start, at = zero, zero
    for block in range(uint64(blocks)):
        stop = uint64(ends[block])
        begin = at
        if stop > start:
            first, final = _tally(was, now, start, stop, form, pointer(counts))
            border, run_bits = settle(counts, step_prices, first, final)
            for i in range(uint64(first) * lengths, uint64(final + 1) * lengths):
                pointer(counts)[i] = uint32(0)
            changes = stop - start
            groups = (changes + uint64(GROUP - 1)) // uint64(GROUP)
            # The head is written last, in front of the groups: only then is it known how long it is.
            room = uint64(HEAD_ROOM) + groups * uint64(8)
            body = at + room
            end = _groups(
                where, was, now, start, stop, form, uint64(border), uint64(run_bits), gap_prices, tallies, runs,
                bounds, out, body << three,
            )  # fmt: skip
            while changes > uint64(127):
                out[at] = (changes & uint64(127)) | uint64(128)
                changes >>= uint64(7)
                at += one
            out[at] = changes
            out[at + one] = form[0] + (uint64(PLAIN) if form[3] == zero else zero)
            out[at + two] = uint64(run_bits)
            out[at + three] = uint64(border) & uint64(255)
            out[at + uint64(4)] = uint64(border) >> uint64(8)
            at += uint64(5)
            if groups > one:
                at = _put_index(bounds, groups, out, at)
            size = ((end + uint64(7)) >> three) - body
            for i in range(size):
                out[at + i] = out[body + i]
            at += size
        spans[two * block], spans[two * block + one] = i64(begin), i64(at)
        start = stop


@inlined
def _window(data, place):
    """The bits from `place` on, at least 57 of them."""
    return load_word(data, place >> uint64(3)) >> (place & uint64(7))


@inlined
def _head(data, begin, end, size, lane, head):
    """Parse how a payload in bytes [begin, end), for `size` lanes, begins. Returns a status: what is wrong there
    `rice.Head` tells."""
    one, bits = uint64(1), uint64(8 * len(lane))
    at, changes, shift, byte = begin, uint64(0), uint64(0), uint64(128)
    while byte > uint64(127):
        if at >= end or shift > uint64(56):
            return WRONG_HEAD
        byte = uint64(data[at])
        changes |= (byte & uint64(127)) << shift
        shift += uint64(7)
        at += one
    if at + uint64(4) > end or changes < one or changes > min(size, uint64(8) * (end - begin)):
        return WRONG_HEAD
    form, run_bits = uint64(data[at]), uint64(data[at + one])
    border = uint64(data[at + uint64(2)]) | (uint64(data[at + uint64(3)]) << uint64(8))
    at += uint64(4)
    shift = form & uint64(PLAIN - 1)
    if (
        form >= uint64(2 * PLAIN)
        or shift >= bits
        or run_bits > uint64(RUN_BITS_LIMIT)
        or border > uint64(BORDER_LIMIT)
    ):
        return WRONG_HEAD
    span_bits, size_bits = uint64(0), uint64(0)
    if changes > uint64(GROUP):
        if at + uint64(2) > end:
            return WRONG_HEAD
        span_bits, size_bits = uint64(data[at]), uint64(data[at + one])
        at += uint64(2)
        if span_bits > uint64(GAP_BITS + 1) or size_bits > uint64(32):
            return WRONG_HEAD
    head[uint64(CHANGES)], head[uint64(SHIFT)], head[uint64(IS_PLAIN)] = changes, shift, form >> uint64(6)
    head[uint64(RUN_BITS)], head[uint64(BORDER)] = run_bits, border
    head[uint64(SPAN_BITS)], head[uint64(SIZE_BITS)], head[uint64(INDEX_AT)] = span_bits, size_bits, at
    return OK


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


@inlined
def _positions(data, end, head, size, bounds, where, x, ahead):
    """Decode where uint32 [changes], all below `size`, and bounds, of the payload whose head is `head` and that ends
    at byte `end`. Returns a status.

    Asks memory for the lanes of x at those positions, if `ahead`.
    """
    one, zero, three, four = uint64(1), uint64(0), uint64(3), uint64(4)
    count = head[uint64(CHANGES)]
    groups = (count + uint64(GROUP - 1)) // uint64(GROUP)
    status = _index(
        data,
        head[uint64(INDEX_AT)],
        head[uint64(SPAN_BITS)],
        head[uint64(SIZE_BITS)],
        uint64(8) * end,
        groups,
        bounds,
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
                    prefetch(x, at)
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


@inlined
def _values(data, head, lane, bounds, was):
    """was, the old lanes [changes], become the new ones. Returns a status; unless it is OK they are neither."""
    wide = len(lane) == 8
    one, zero, three = uint64(1), uint64(0), uint64(3)
    bits = uint64(8 * len(lane))
    top = bits - one
    ones = (((one << top) - one) << one) | one
    count, border, run_bits = head[uint64(CHANGES)], head[uint64(BORDER)], head[uint64(RUN_BITS)]
    groups = (count + uint64(GROUP - 1)) // uint64(GROUP)
    shift = head[uint64(SHIFT)]
    mask = (one << (top - shift)) - one
    flip = zero if head[uint64(IS_PLAIN)] != zero else (one << top) - one
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


@compiled
def positions(data, nbytes, head, size, bounds, where):
    """Decode where uint32 [changes], all below `size`, and bounds, of a payload of `nbytes` bytes. Returns a
    status."""
    data = pointer(data)
    return _positions(data, uint64(nbytes), pointer(head), uint64(size), pointer(bounds), pointer(where), data, False)


@compiled
def values(data, head, lane, bounds, was):
    """was, the old lanes [changes], become the new ones. Returns a status; unless it is OK they are neither."""
    return _values(pointer(data), pointer(head), lane, pointer(bounds), pointer(was))


@compiled
def decode(table, lane, data, head, bounds, where, was):
    """Decode into lanes that hold the old ones, block after block: their addresses and how many there are, and where
    the payload begins and ends in data. where, was and bounds are room for the most changes and groups that one can
    have.

    Returns how many blocks were decoded, and a status: unless that is OK the next one, as those behind it, is as it
    was.
    """
    blocks = table.shape[0]
    table, data, head, bounds = pointer(table), pointer(data), pointer(head), pointer(bounds)
    where, was = pointer(where), pointer(was)
    one = uint64(1)
    for block in range(uint64(blocks)):
        place = uint64(4) * block
        x, size = at_address(table[place], was), table[place + one]
        begin, end = table[place + uint64(2)], table[place + uint64(3)]
        status = _head(data, begin, end, size, lane, head)
        if status == OK:
            status = _positions(data, end, head, size, bounds, where, x, True)
        if status == OK:
            count = head[uint64(CHANGES)]
            for i in range(count):
                was[i] = x[uint64(where[i])]
            status = _values(data, head, lane, bounds, was)
            if status == OK:
                for i in range(count):
                    x[uint64(where[i])] = was[i]
        if status != OK:
            return i64(block), status
    return i64(blocks), OK
