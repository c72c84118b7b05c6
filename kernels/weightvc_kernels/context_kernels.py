"""Compiled passes of the context codec. Importing this module imports numba: `context` does so on first use.

Layouts and meanings are in docs/patch.md; what is here must do exactly that, in whatever order is fast.
All indices are unsigned and every function is nogil: no wraparound tests, no exceptions, and a status instead.

Conventions of the arguments:

    table      uint64 [blocks, 3], for the decoder [blocks, 4]: where the blocks of a batch lie, and how long they
    are.
               An address is of lanes, uint8, 16, 32 or 64, and a multiple of 8; the caller holds the memory
    lane       a tuple of as many zeros as a lane has bytes: its length is known to the compiler
    form       uint64 [4]: shift and mask that give a lane's class, bits of a lane, bits to flip if negative
    rows       hazards uint32 [SCALES, classes]; group uint16 [classes]
    planes     uint16 [SCALES, 64], window: what context_vectors.wide takes; window is -1 if it cannot be had
    curve      uint32 [514]: C at multiples of 1,024, the last twice; finder uint16
               [4096]: a node at or before each 2^19th value
    pace       int64 [2, SCALES]: weights of exposure, and thresholds between scales
    sums       uint32 [65], tallies uint64 [16]: room to work in. It comes from the caller, since numba frees what it
               made itself as soon as only pointers to it are in use

An entry takes all blocks of a batch: to go in and out of compiled code takes as long as coding a small block, and
threads that do it for each wait for the interpreter's lock most of the time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from numba import int64 as i64
from numba import uint32, uint64

from weightvc_kernels.context_vectors import (
    WIDE,
    at_address,
    changes_of,
    compiled,
    inlined,
    lowest_bit,
    offset,
    pointer,
    prefetch,
    wide_32,
    wide_128,
)

# A copy of the constants in context_tables: numba freezes globals into the cached code, so they stay literal here,
# and a test holds both equal.
UNIT = 4096
TOP = 8 << 16
MARK_BITS = 31
STEP_BITS = 12
MIDDLE = 40
SCALES = 81
BUCKETS_PLAIN = 8
FLAG_CONTEXTS = 8
LOWEST = 1 << 31
FIRST = (1 << 32) - 1
CALM = 16 << 16
CROWDED = 160 << 16

OK = 0
CUT_SHORT = 1
WRONG_STATE = 2
WRONG_BUCKET = 3
LEFT_OVER = 4


@inlined
def differ(x, y, first, lanes, piece):
    """Whether some of `lanes` lanes differ, whole pieces of 64 bytes. Asks memory for those of the next unit."""
    for j in range(first, first + uint64(lanes), uint64(piece)):
        prefetch(x, j + uint64(lanes))
        prefetch(y, j + uint64(lanes))
        if changes_of(x, y, j) != uint64(0):
            return True
    return False


@inlined
def _hazard(x, at, count, row, shift, mask):
    """The sum of the hazards of `count` lanes. Narrow, so that it adds in 32 bits: at most 256 × 8 × 65,536."""
    total = uint32(0)
    for j in range(uint64(count)):
        total = uint32(total + row[(x[at + j] >> shift) & mask])
    return i64(total)


@inlined
def _running(x, at, count, row, shift, mask, sums):
    """sums[k] becomes the sum of the hazards of the first k of `count` lanes."""
    total = uint32(0)
    sums[uint64(0)] = total
    for j in range(uint64(count)):
        total = uint32(total + row[(x[at + j] >> shift) & mask])
        sums[j + uint64(1)] = total


@inlined
def _curve(curve, hazard):
    node = uint64(hazard >> 10)
    low = i64(curve[node])
    return low + (((i64(curve[node + uint64(1)]) - low) * (hazard & 1023)) >> 10)


@inlined
def _limit(curve, finder, u):
    """The smallest hazard whose C is over u; one over TOP if there is none."""
    if u >= i64(curve[512]):
        return i64(TOP + 1)
    node = uint64(finder[uint64(u >> 19)])
    while i64(curve[node + uint64(1)]) <= u:
        node += uint64(1)
    low = i64(curve[node])
    rise = uint64(i64(curve[node + uint64(1)]) - low)
    return (i64(node) << 10) + i64((uint64((u + 1 - low) << 10) + rise - uint64(1)) // rise)


@inlined
def _scale(changes, expected, scale, pace):
    ratio = ((changes + CALM) << 16) // (expected + CALM)
    while scale < SCALES - 1 and ratio >= pace[SCALES + scale]:
        scale += 1
    while scale > 0 and ratio < pace[SCALES + scale - 1]:
        scale -= 1
    return scale


@inlined
def step_of(before, after, bits, flip):
    """2 × (distance - 1) + sign of the step between two lanes."""
    top = bits - uint64(1)
    ones = (((uint64(1) << top) - uint64(1)) << uint64(1)) | uint64(1)
    a = before ^ (flip * (before >> top))
    b = after ^ (flip * (after >> top))
    s = (b - a) & ones
    sign = s >> top
    if sign:
        s = (uint64(0) - s) & ones
    return ((s - uint64(1)) << uint64(1)) | sign


@inlined
def bucket_of(u):
    """Bucket of a distance - 1, and how many raw bits follow."""
    if u < uint64(BUCKETS_PLAIN):
        return u, uint64(0)
    high = uint64(3)
    while (u >> (high + uint64(1))) != uint64(0):
        high += uint64(1)
    raw = high - uint64(2)
    return uint64(BUCKETS_PLAIN) + (high - uint64(3)) * uint64(4) + ((u >> raw) & uint64(3)), raw


@compiled
def scan(
    table, lane, form, rows, planes, window, group, curve, pace, sums, flags, marks, steps, groups, was, ends
):  # fmt: skip
    """Forward pass of the encoder: what is to be coded of each block, in the decoder's order.

    table: addresses of old and new lanes, and how many there are. Fills flags uint8 [units]; marks uint64: bit 63 for
    a rest, 31 bits of start, 32 of width; and for every mark that is a change steps and was (old lanes), of the type
    of the lanes, and groups uint16; block after block. Fills ends, int64 [blocks, 2], with the marks and the changes
    up to each block's end. Room for 2 × lanes marks and lanes changes is always enough.
    """
    unit = UNIT // len(lane)
    piece = 64 // len(lane)
    word = 8 // len(lane)
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    blocks = table.shape[0]
    table, ends = pointer(table), pointer(ends)
    rows, planes, group, curve, pace = pointer(rows), pointer(planes), pointer(group), pointer(curve), pointer(pace)
    flags, marks, steps, groups = pointer(flags), pointer(marks), pointer(steps), pointer(groups)
    was, sums = pointer(was), pointer(sums)
    one = uint64(1)
    classes = i64(mask) + 1
    narrow = WIDE and window >= 0
    count, found, unit_of = uint64(0), uint64(0), uint64(0)
    for block in range(uint64(blocks)):
        place = uint64(3) * block
        x, y = at_address(table[place], was), at_address(table[place + one], was)
        xw, yw = at_address(table[place], marks), at_address(table[place + one], marks)
        n = i64(table[place + uint64(2)])
        units = (n + unit - 1) // unit
        scale = MIDDLE
        row, plane = offset(rows, scale * classes), offset(planes, scale * 64)
        changes, expected, passed = i64(0), i64(0), i64(0)
        for b in range(units):
            begin, end = b * unit, min(n, b * unit + unit)
            if end - begin == unit:
                dirty = differ(x, y, uint64(begin), unit, piece)
            else:
                dirty = False
                for j in range(uint64(begin), uint64(end)):
                    dirty |= x[j] != y[j]
            flags[unit_of + uint64(b)] = dirty
            if not dirty:
                continue
            exposed, met = i64(0), i64(0)
            ahead = end + unit <= n
            p = begin
            while p < end:
                w = uint64(p // word)
                if ahead:
                    prefetch(xw, w + uint64(UNIT // 8))
                    prefetch(yw, w + uint64(UNIT // 8))
                length = min(end, p + piece) - p
                first = uint64(p)
                p += length
                if length == piece:
                    different = changes_of(x, y, first)
                    if different == uint64(0):
                        if narrow:
                            total = wide_32(x, first, plane, window, shift, mask)
                        else:
                            total = _hazard(x, first, piece, row, shift, mask)
                        if passed + total <= TOP:
                            passed += total
                            exposed += total
                            continue
                    # Running sums and a bit for each change: the branches of a walk lane by lane cost more than both.
                    _running(x, first, piece, row, shift, mask, sums)
                else:
                    different = uint64(0)
                    for j in range(uint64(length)):
                        different |= uint64(x[first + j] != y[first + j]) << j
                    _running(x, first, length, row, shift, mask, sums)
                base, k = i64(0), uint64(0)
                while True:
                    j = lowest_bit(different) if different != uint64(0) else uint64(length)
                    reach = i64(sums[j + one]) if different != uint64(0) else i64(sums[j])
                    while passed + reach - base > TOP:
                        while passed + i64(sums[k + one]) - base <= TOP:
                            k += one
                        start = _curve(curve, passed + i64(sums[k]) - base)
                        marks[count] = (one << uint64(63)) | (uint64(start) << uint64(32)) | uint64(LOWEST - start)
                        count += one
                        passed, base = i64(0), i64(sums[k])
                    if different == uint64(0):
                        break
                    different &= different - one
                    gone = passed + i64(sums[j]) - base
                    start = _curve(curve, gone)
                    hazard = reach - i64(sums[j])
                    marks[count] = (uint64(start) << uint64(32)) | uint64(_curve(curve, gone + hazard) - start)
                    count += one
                    passed, base = i64(0), reach
                    old = uint64(x[first + j])
                    steps[found] = step_of(old, uint64(y[first + j]), bits, flip)
                    groups[found] = group[(old >> shift) & mask]
                    was[found] = old
                    found += one
                    met += 1
                    exposed += (hazard >> 1) - hazard
                total = i64(sums[uint64(length)])
                passed += total - base
                exposed += total
            expected += ((exposed * pace[scale]) >> 16) - (expected >> 4)
            changes += (met << 16) - (changes >> 4)
            scale = _scale(changes, expected, scale, pace)
            row, plane = offset(rows, scale * classes), offset(planes, scale * 64)
        unit_of += uint64(units)
        ends[uint64(2) * block] = i64(count)
        ends[uint64(2) * block + one] = i64(found)


@inlined
def _push(x, out, at, start, width, bits):
    if x >= (width << (uint64(63) - bits)):
        at -= 1
        out[at] = uint32(x & uint64(0xFFFFFFFF))
        x >>= uint64(32)
    quotient = x // width
    return (quotient << bits) + (x - quotient * width) + start, at


@inlined
def _push_raw(x, out, at, value, bits):
    if x >= (uint64(1) << (uint64(63) - bits)):
        at -= 1
        out[at] = uint32(x & uint64(0xFFFFFFFF))
        x >>= uint64(32)
    return (x << bits) | value, at


@inlined
def most_words(count, found, units, lane):
    """Words that the payload of a block with so many marks, changes and units can take."""
    return (31 * count + found * (32 + 8 * lane) + 12 * units) // 32 + 8


@inlined
def _begin(tallies):
    for k in range(uint64(2 * FLAG_CONTEXTS)):
        tallies[k] = uint64(1)


@compiled
def pack(
    table, lane, flags, tallies, marks, steps, groups, ends, chances, index_bits, widths, starts, out, spans
):  # fmt: skip
    """Backward pass of the encoder: rANS over what scan found, block after block.

    Fills spans, int64 [blocks, 2], with where in out, uint32, each block's words begin and end: nowhere if nothing
    changed. Room for most_words() of each block is always enough. chances is room for as many uint64 as a block has
    units. widths and starts: uint32 [groups, buckets + 1] in twelve bits, the last the escape's; width 0: not listed.
    """
    unit = UNIT // len(lane)
    blocks = table.shape[0]
    last, buckets = uint64(widths.shape[1] - 1), uint64(widths.shape[1])
    table, flags, tallies, marks, steps = (
        pointer(table),
        pointer(flags),
        pointer(tallies),
        pointer(marks),
        pointer(steps),
    )
    groups, ends, chances, spans = pointer(groups), pointer(ends), pointer(chances), pointer(spans)
    widths, starts, out = pointer(widths), pointer(starts), pointer(out)
    one, zero, two = uint64(1), uint64(0), uint64(2)
    step_bits, mark_bits = uint64(STEP_BITS), uint64(MARK_BITS)
    first_mark, first_change, unit_of, room = i64(0), i64(0), i64(0), i64(0)
    for block in range(uint64(blocks)):
        units = (i64(table[uint64(3) * block + two]) + unit - 1) // unit
        count, found = ends[two * block], ends[two * block + one]
        if found == first_change:
            spans[two * block], spans[two * block + one] = room, room
            unit_of += units
            continue
        room += most_words(count - first_mark, found - first_change, units, len(lane))
        x, at, k = uint64(FIRST), room, found
        for i in range(count - 1, first_mark - 1, -1):
            mark = marks[i]
            if (mark >> uint64(63)) == zero:
                k -= 1
                g = uint64(groups[k]) * buckets
                sign = uint64(steps[k]) & one
                u = uint64(steps[k]) >> one
                bucket, raw = bucket_of(u)
                while raw > zero:
                    # Pieces of 16 bits; the lowest is decoded first, so it is coded last.
                    size = (raw - one) & uint64(15)
                    size += one
                    raw -= size
                    x, at = _push_raw(x, out, at, (u >> raw) & ((one << size) - one), size)
                width = uint64(widths[g + bucket])
                if width == zero:
                    x, at = _push_raw(x, out, at, (bucket << one) | sign, index_bits + one)
                    x, at = _push(x, out, at, uint64(starts[g + last]), uint64(widths[g + last]), step_bits)
                else:
                    x, at = _push(x, out, at, uint64(starts[g + bucket]) + width * sign, width, step_bits)
            x, at = _push(x, out, at, (mark >> uint64(32)) & uint64(0x7FFFFFFF), mark & uint64(0xFFFFFFFF), mark_bits)
        # Flags are decoded before all else. Their chances depend on earlier flags: forward first.
        _begin(tallies)
        past = zero
        for b in range(units):
            width, flag = _chance(tallies, past), flags[unit_of + b]
            if flag:
                chances[b] = (uint64(4096) - width) << uint64(32) | width
            else:
                chances[b] = uint64(4096) - width
            past = _turn(tallies, past, uint64(flag))
        for b in range(units - 1, -1, -1):
            x, at = _push(x, out, at, chances[b] >> uint64(32), chances[b] & uint64(0xFFFFFFFF), step_bits)
        at -= 1
        out[at] = uint32(x & uint64(0xFFFFFFFF))
        at -= 1
        out[at] = uint32(x >> uint64(32))
        spans[two * block], spans[two * block + one] = at, room
        first_mark, first_change = count, found
        unit_of += units


@inlined
def _chance(tallies, past):
    """The chance of a set flag, in 4,096ths."""
    no, yes = tallies[uint64(2) * past], tallies[uint64(2) * past + uint64(1)]
    return min(uint64(4095), max(uint64(1), (yes << uint64(12)) // (no + yes)))


@inlined
def _turn(tallies, past, flag):
    tallies[uint64(2) * past + flag] += uint64(2)
    return ((past << uint64(1)) | flag) & uint64(FLAG_CONTEXTS - 1)


@inlined
def _refill(x, words, final, at):
    """Bring the state back above its least value. Past the final word that is read again: `at` tells of it."""
    short = x < uint64(LOWEST)
    more = (x << uint64(32)) | uint64(words[min(at, final)])
    # Half the states are short, at random: a choice without a branch.
    return more if short else x, at + uint64(short)


@inlined
def _unflag(words, tallies, flags, units, x, final, at):
    """Decode the flags of a block from its words. Returns the state, and the word that comes next."""
    _begin(tallies)
    past = uint64(0)
    for b in range(units):
        width = _chance(tallies, past)
        z = x & uint64(4095)
        flag = uint64(z >= uint64(4096) - width)
        if flag:
            x = width * (x >> uint64(12)) + z - (uint64(4096) - width)
        else:
            x = (uint64(4096) - width) * (x >> uint64(12)) + z
        x, at = _refill(x, words, final, at)
        flags[b] = flag
        past = _turn(tallies, past, flag)
    return x, at


@inlined
def _apply(
    x, n, units, lane, form, rows, planes, window, group, curve, finder, pace, sums,
    flags, words, s, ip, final, index_bits, last, slots, widths, starts,
):  # fmt: skip
    """Decode one block, whose flags are decoded. Returns a status; unless it is OK, x is left half-way."""
    unit = UNIT // len(lane)
    piece = 64 // len(lane)
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    top = bits - uint64(1)
    ones = (((uint64(1) << top) - uint64(1)) << uint64(1)) | uint64(1)
    one, zero = uint64(1), uint64(0)
    lowest = uint64(LOWEST)
    buckets = last + one
    classes = i64(mask) + 1
    scale = MIDDLE
    row, plane = offset(rows, scale * classes), offset(planes, scale * 64)
    narrow = WIDE and window >= 0
    changes, expected, passed = i64(0), i64(0), i64(0)
    u = i64(s & (lowest - one))
    limit = _limit(curve, finder, u)
    for b in range(units):
        if not flags[b]:
            continue
        begin, end = b * unit, min(n, b * unit + unit)
        exposed, met = i64(0), i64(0)
        crowded = changes > CROWDED
        p = begin
        while p < end:
            if not crowded and (p & (4 * piece - 1)) == 0 and p + 4 * piece <= end:
                if narrow:
                    total = wide_128(x, uint64(p), plane, window, shift, mask)
                else:
                    # In four: what is short enough gets unrolled.
                    total = i64(0)
                    for k in range(4):
                        total += _hazard(x, uint64(p + k * piece), piece, row, shift, mask)
                if passed + total < limit:
                    passed += total
                    exposed += total
                    p += 4 * piece
                    continue
            first = uint64(p)
            length = min(end, p + piece) - p
            p += length
            if length == piece:
                if narrow:
                    total = wide_32(x, first, plane, window, shift, mask)
                else:
                    total = _hazard(x, first, piece, row, shift, mask)
            else:
                total = _hazard(x, first, length, row, shift, mask)
            exposed += total
            if passed + total < limit:
                passed += total
                continue
            # A change or a rest lies in here: where, a count of the running sums below the limit tells.
            if length == piece:
                _running(x, first, piece, row, shift, mask, sums)
            else:
                for k in range(uint64(piece)):
                    sums[k + one] = uint32(LOWEST)
                _running(x, first, length, row, shift, mask, sums)
            base = i64(0)
            while passed + total - base >= limit:
                need = uint32(limit - passed + base)
                below = uint32(0)
                for k in range(uint64(piece)):
                    below = uint32(below + uint32(sums[k + one] < need))
                j = uint64(below)
                before = i64(sums[j])
                hazard = i64(sums[j + one]) - before
                gone = passed + before - base
                start = _curve(curve, gone)
                passed = i64(0)
                base = before
                if gone + hazard > TOP:
                    s = uint64(i64(lowest) - start) * (s >> uint64(MARK_BITS)) + uint64(u - start)
                    s, ip = _refill(s, words, final, ip)
                    u = i64(s & (lowest - one))
                    limit = _limit(curve, finder, u)
                    continue
                base += hazard
                j += first
                s = uint64(_curve(curve, gone + hazard) - start) * (s >> uint64(MARK_BITS)) + uint64(u - start)
                s, ip = _refill(s, words, final, ip)
                old = uint64(x[j])
                c = (old >> shift) & mask
                g = uint64(group[c]) * buckets
                z = s & uint64(4095)
                width = uint64(widths[g])
                if z < (width << one):
                    sign = uint64(z >= width)
                    s = width * (s >> uint64(STEP_BITS)) + z - width * sign
                    distance = one
                    s, ip = _refill(s, words, final, ip)
                else:
                    bucket = uint64(slots[uint64(group[c]) * uint64(4096) + z])
                    width = uint64(widths[g + bucket])
                    z -= uint64(starts[g + bucket])
                    sign = zero
                    if bucket != last and z >= width:
                        sign = one
                        z -= width
                    s = width * (s >> uint64(STEP_BITS)) + z
                    s, ip = _refill(s, words, final, ip)
                    if bucket == last:
                        sign = s & one
                        bucket = (s >> one) & ((one << index_bits) - one)
                        s >>= index_bits + one
                        if bucket >= last:
                            return WRONG_BUCKET
                        s, ip = _refill(s, words, final, ip)
                    distance = bucket + one
                    if bucket >= uint64(BUCKETS_PLAIN):
                        raw = ((bucket - uint64(BUCKETS_PLAIN)) >> uint64(2)) + one
                        distance = ((uint64(4) + (bucket & uint64(3))) << raw) + one
                        place = zero
                        while place < raw:
                            take = min(uint64(16), raw - place)
                            distance += (s & ((one << take) - one)) << place
                            s >>= take
                            place += take
                            s, ip = _refill(s, words, final, ip)
                value = old ^ (flip * (old >> top))
                value = (value + (distance ^ (zero - sign)) + sign) & ones
                x[j] = value ^ (flip * (value >> top))
                met += 1
                exposed += (hazard >> 1) - hazard
                u = i64(s & (lowest - one))
                limit = _limit(curve, finder, u)
            passed += total - base
        expected += ((exposed * pace[scale]) >> 16) - (expected >> 4)
        changes += (met << 16) - (changes >> 4)
        scale = _scale(changes, expected, scale, pace)
        row, plane = offset(rows, scale * classes), offset(planes, scale * 64)
    if ip > final + one:
        return CUT_SHORT
    if s != uint64(FIRST):
        return WRONG_STATE
    return OK if ip == final + one else LEFT_OVER


@compiled
def apply(
    table, lane, like, form, rows, planes, window, group, curve, finder, pace, sums, tallies, flags, words,
    index_bits, slots, widths, starts,
):  # fmt: skip
    """Decode into lanes that hold the old ones, block after block: their addresses and how many there are, and where
    the payload begins and ends in words, at least two of them. `like` is an array of such lanes, flags room for the
    units of a block.

    Returns how many blocks were decoded, and a status: unless that is OK the next one is left half-way, and those
    behind it are as they were. Writes those lanes and nothing else, ends after at most one pass over them, and reads
    words within bounds.
    """
    unit = UNIT // len(lane)
    blocks, last = table.shape[0], uint64(widths.shape[1] - 1)
    table, like, flags, words, tallies = (
        pointer(table),
        pointer(like),
        pointer(flags),
        pointer(words),
        pointer(tallies),
    )
    group, curve, rows, planes, finder = (
        pointer(group),
        pointer(curve),
        pointer(rows),
        pointer(planes),
        pointer(finder),
    )
    pace, slots, widths, starts, sums = pointer(pace), pointer(slots), pointer(widths), pointer(starts), pointer(sums)
    one, four = uint64(1), uint64(4)
    for block in range(uint64(blocks)):
        place = four * block
        x, n = at_address(table[place], like), i64(table[place + one])
        begin, final = table[place + uint64(2)], table[place + uint64(3)] - one
        units = (n + unit - 1) // unit
        state = (uint64(words[begin]) << uint64(32)) | uint64(words[begin + one])
        if state < uint64(LOWEST) or (state >> uint64(63)) != uint64(0):
            return i64(block), WRONG_STATE
        state, ip = _unflag(words, tallies, flags, units, state, final, begin + uint64(2))
        status = _apply(
            x, n, units, lane, form, rows, planes, window, group, curve, finder, pace, sums,
            flags, words, state, ip, final, index_bits, last, slots, widths, starts,
        )  # fmt: skip
        if status != OK:
            return i64(block), status
    return i64(blocks), OK
