"""Compiled passes over a sample, for the writer: counts, and step tables merged. Imports numba.

What they find decides how small a payload gets, never what it means.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from math import log2

import numpy as np
from numba import int64 as i64
from numba import uint32, uint64

from weightvc_kernels.context_kernels import UNIT, bucket_of, differ, step_of
from weightvc_kernels.context_vectors import at_address, changes_of, compiled, inlined, lowest_bit, pointer


@compiled
def tally(table, lane, like, form, stride, seen, changed, histogram):
    """Count lanes and changes by class, and steps by class and bucket, in every stride-th unit that changed.

    table uint64 [blocks, 3]: addresses of old and new lanes of the type of `like`, and how many there are. Adds to
    seen and changed, int64 [classes], and histogram, int64 [classes, buckets].
    """
    unit = UNIT // len(lane)
    piece = 64 // len(lane)
    shift, mask, bits, flip = form[0], form[1], form[2], form[3]
    one = uint64(1)
    # Neighbours often share a class: by turns, so that no count waits for the one before.
    parts = np.zeros((4, 2048), np.uint32)
    counts, like = pointer(parts), pointer(like)
    for block in range(table.shape[0]):
        x, y = at_address(table[block, 0], like), at_address(table[block, 1], like)
        n = i64(table[block, 2])
        units = (n + unit - 1) // unit
        for b in range((min(stride, max(1, units)) - 1) // 2, units, stride):
            begin, end = b * unit, min(n, b * unit + unit)
            if end - begin == unit and not differ(x, y, uint64(begin), unit, piece):
                continue
            some = False
            for p in range(begin, end, piece):
                different = uint64(0)
                if p + piece <= end:
                    different = changes_of(x, y, uint64(p))
                else:
                    for j in range(uint64(end - p)):
                        different |= uint64(x[uint64(p) + j] != y[uint64(p) + j]) << j
                some |= different != uint64(0)
                while different != uint64(0):
                    j = uint64(p) + lowest_bit(different)
                    different &= different - one
                    c = (uint64(x[j]) >> shift) & mask
                    changed[c] += 1
                    bucket, _ = bucket_of(step_of(uint64(x[j]), uint64(y[j]), bits, flip) >> one)
                    histogram[c, bucket] += 1
            if some:
                for j in range(uint64(begin), uint64(end)):
                    place = ((j & uint64(3)) << uint64(11)) | ((uint64(x[j]) >> shift) & mask)
                    counts[place] += uint32(1)
    for c in range(seen.size):
        for k in range(4):
            seen[c] += parts[k, c]


@inlined
def _price(rows, i, j):
    """Bits to code the steps of rows i to j together by their own entropy, and some ten a bucket for its table."""
    total, bits = 0.0, 10.0
    for k in range(rows.shape[1]):
        v = rows[i, k]
        if j != i:
            v += rows[j, k]
        if v > 0:
            total += v
            bits += 10.0 - v * log2(v)
    if total > 0.0:
        bits += total * log2(total)
    return bits


@compiled
def merge(histogram, owner, most):
    """Merge neighbouring rows of int64 [rows, buckets] while that saves bits, or there are over `most`.

    owner int64 [rows] says which row each went to. Returns how many are left, the first of histogram.
    """
    # Scalars only: whole rows in one expression take numba three times as long to compile.
    rows, buckets = histogram.shape
    price, gain = np.empty(rows), np.empty(rows)
    for i in range(rows):
        owner[i] = i
        price[i] = _price(histogram, i, i)
    for i in range(rows - 1):
        gain[i] = price[i] + price[i + 1] - _price(histogram, i, i + 1)
    while rows > 1:
        best = 0
        for i in range(rows - 1):
            if gain[i] > gain[best]:
                best = i
        if gain[best] <= 0.0 and rows <= most:
            break
        for k in range(buckets):
            histogram[best, k] += histogram[best + 1, k]
        for i in range(best + 1, rows - 1):
            for k in range(buckets):
                histogram[i, k] = histogram[i + 1, k]
            price[i] = price[i + 1]
            if i < rows - 2:
                gain[i] = gain[i + 1]
        rows -= 1
        for i in range(owner.size):
            if owner[i] > best:
                owner[i] -= 1
        price[best] = _price(histogram, best, best)
        for i in range(max(0, best - 1), min(rows - 1, best + 1)):
            gain[i] = price[i] + price[i + 1] - _price(histogram, i, i + 1)
    return rows
