"""The tables that a patch's blocks share: what is transmitted, and what both sides derive from it, in integers.

    varint   F: the first class listed
    varint   N: classes listed, at least 1
    varint   N of them: odds of a change, the first as it is, the others zigzag of the difference to the one before
    varint   G: groups of classes that share a step table, 1 to 32
    varint   G - 1 of them: first class of every group but the first, less that of the group before
    then for each group
    varint   L: buckets listed
    varint   L of them: widths; they add up to at most 2,047

Classes before the first listed have its odds, those after the last have the last's. docs/patch.md says what it
all means. Varints are those of `streams`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer
from weightvc_kernels.streams import Reader, put_varint

Array: TypeAlias = npt.NDArray[Any]

SCALES = 81
MIDDLE = 40
EVEN_ODDS = 160
TOP = 8 << 16
TOTAL = 1 << 31
STEP_BITS = 12
GROUP_LIMIT = 32
LN2 = 45426


@dataclass(frozen=True, slots=True)
class Form:
    """How the codec sees the lanes of a dtype."""

    lane: int
    """Bytes of a lane."""
    shift: int
    """A lane's class is lane >> shift & (classes - 1)."""
    classes: int
    """Number of classes, a power of two."""
    signed: bool
    """Sign and magnitude (floats), whose bits below the sign are flipped if it is set; else plain integers."""

    @property
    def buckets(self) -> int:
        """Buckets that steps fall into."""
        return 32 * self.lane - 8

    @property
    def flip(self) -> int:
        """Bits to flip in lanes with the top bit set, to get integers in the order of the numbers."""
        return (1 << (8 * self.lane - 1)) - 1 if self.signed else 0

    def pack(self) -> Array:
        """uint64 [4], as the kernels take it."""
        return np.array([self.shift, self.classes - 1, 8 * self.lane, self.flip], np.uint64)


_BYTE = Form(1, 0, 256, signed=False)
_FLOAT8 = Form(1, 0, 256, signed=True)
FORMS: dict[str, Form] = {
    "BF16": Form(2, 7, 256, signed=True),
    "F16": Form(2, 10, 32, signed=True),
    "F32": Form(4, 23, 256, signed=True),
    "F64": Form(8, 52, 2048, signed=True),
    "F8_E5M2": _FLOAT8,
    "F8_E4M3": _FLOAT8,
    "F8_E4M3FNUZ": _FLOAT8,
    "F8_E5M2FNUZ": _FLOAT8,
    "F8_E8M0": _BYTE,
    "F4": _BYTE,
    "F6_E2M3": _BYTE,
    "F6_E3M2": _BYTE,
    "BOOL": _BYTE,
    "U8": _BYTE,
    "I8": _BYTE,
}
"""The dtypes that this codec codes, by their safetensors names. Wider integers have no class worth knowing."""


def form(dtype: str) -> Form:
    """The form of `dtype`. Raises CodecError for one that the codec does not code."""
    try:
        return FORMS[dtype]
    except KeyError:
        raise CodecError(f"dtype {dtype!r} has no context codec: use encode_patch of its lanes") from None


def rounded_power(factor: int, numerator: int, root: int) -> int:
    """factor × 2^(numerator / root), rounded to nearest, halves up, exactly; root is a power of two."""
    doubled: int = (2 * factor) ** root
    value = doubled << numerator if numerator >= 0 else doubled >> -numerator
    while root > 1:
        value = isqrt(value)
        root //= 2
    return (value + 1) // 2


def _rounded_log2(value: int, point: int, bits: int) -> int:
    """2^bits × log2(value / 2^point), rounded to nearest; value at least 2^point."""
    whole = value.bit_length() - 1 - point
    value >>= whole
    result = whole
    for _ in range(bits + 1):
        value = value * value >> point
        result *= 2
        if value >> (point + 1):
            value >>= 1
            result += 1
    return (result + 1) // 2


@lru_cache(1)
def hazards() -> Array:
    """Hazard of odds 2^((t - 200) / 8), uint32 [336]: 2^16 log2(1 + odds), rounded, within 1 and TOP."""
    point = 80
    values = [
        _rounded_log2((1 << point) + rounded_power(1 << point, t - EVEN_ODDS - MIDDLE, 8), point, 16)
        for t in range(256 + SCALES - 1)
    ]
    return np.clip(np.array(values, np.int64), 1, TOP).astype(np.uint32)


@lru_cache(1)
def curve() -> tuple[Array, Array]:
    """C at every 1,024th hazard, uint32 [514], and for every 2^19th value a node at or before it, uint16 [4096].

    The last node is there twice, so that interpolation at TOP itself stays within the array.
    """
    spread = TOTAL - TOP
    nodes = np.array([spread - rounded_power(spread, -i, 64) + 1024 * i for i in range(513)], np.int64)
    finder = np.searchsorted(nodes, np.arange(4096) << 19, side="right") - 1
    return np.append(nodes, nodes[-1]).astype(np.uint32), np.minimum(finder, 511).astype(np.uint16)


@lru_cache(1)
def pace() -> Array:
    """int64 [2, SCALES]: expected changes of one bit of hazard at each scale, in 2^-16, and thresholds of ratios."""
    weights = [rounded_power(LN2, MIDDLE - s, 8) for s in range(SCALES)]
    thresholds = [rounded_power(1 << 16, 2 * (s - MIDDLE) + 1, 16) for s in range(SCALES)]
    return np.array([weights, thresholds], np.int64)


@dataclass(frozen=True, slots=True)
class Tables:
    """What is transmitted."""

    first: int
    """First class listed."""
    odds: tuple[int, ...]
    """8 × log2 of the odds of a change, plus 160, by class from the first: 0 to 255."""
    starts: tuple[int, ...]
    """First class of every group but the first, ascending."""
    widths: tuple[tuple[int, ...], ...]
    """By group, the widths of buckets from the first, in 2,048ths; what is missing is the escape's."""

    def pack(self) -> bytes:
        """The tables as bytes."""
        numbers = [self.first, len(self.odds), self.odds[0]]
        numbers += [2 * d if d >= 0 else -2 * d - 1 for d in (b - a for a, b in pairwise(self.odds))]
        numbers.append(len(self.widths))
        numbers += [b - a for a, b in pairwise((0, *self.starts))]
        for widths in self.widths:
            numbers += [len(widths), *widths]
        return b"".join(map(put_varint, numbers))

    @classmethod
    def unpack(cls, data: Buffer, form: Form) -> "Tables":
        """The inverse of pack. Raises CodecError for anything that pack does not write."""
        reader = Reader(data)

        def number(what: str, least: int, most: int) -> int:
            value = reader.varint(what)
            if not least <= value <= most:
                raise CodecError(f"tables: {what} is {value}, not {least} to {most}: they were changed")
            return value

        first = number("the first class", 0, form.classes - 1)
        listed = number("the number of classes", 1, form.classes - first)
        odds = [number("odds", 0, 255)]
        for _ in range(listed - 1):
            delta = number("a difference of odds", 0, 510)
            odds.append(odds[-1] + (-(delta + 1) // 2 if delta & 1 else delta // 2))
            if not 0 <= odds[-1] <= 255:
                raise CodecError(f"tables: odds of {odds[-1]}, not 0 to 255: they were changed")
        groups = number("the number of groups", 1, GROUP_LIMIT)
        starts = [0]
        for _ in range(groups - 1):
            starts.append(starts[-1] + number("a group's first class", 1, form.classes - 1 - starts[-1]))
        tables = []
        for _ in range(groups):
            buckets = number("the number of buckets", 0, form.buckets)
            room = (1 << (STEP_BITS - 1)) - 1
            widths = [number("a width", 0, room) for _ in range(buckets)]
            if sum(widths) > room:
                raise CodecError(f"tables: widths add up to {sum(widths)}, over {room}: they were changed")
            tables.append(tuple(widths))
        reader.end()
        return cls(first, tuple(odds), tuple(starts[1:]), tuple(tables))


def spread_odds(tables: Tables, form: Form) -> Array:
    """Odds of every class, int64 [classes]."""
    odds = np.empty(form.classes, np.int64)
    end = tables.first + len(tables.odds)
    odds[: tables.first] = tables.odds[0]
    odds[tables.first : end] = tables.odds
    odds[end:] = tables.odds[-1]
    return odds


def narrow(rows: Array, odds: Array, form: Form) -> tuple[Array, int]:
    """Hazards of 32 classes if those stand for all: low and high halves, uint16 [SCALES, 64], and the first class.

    Outside of them every class must have the odds of the first, or of the last; else, and for lanes of other than
    two bytes, the first is -1.
    """
    differ = np.flatnonzero(np.diff(odds))
    first, last = (int(differ[0]), int(differ[-1]) + 1) if differ.size else (0, 0)
    planes = np.zeros((SCALES, 64), np.uint16)
    if form.lane != 2 or last - first > 31:
        return planes, -1
    first = min(first, form.classes - 32)
    planes[:, :32] = rows[:, first : first + 32] & 0xFFFF
    planes[:, 32:] = rows[:, first : first + 32] >> 16
    return planes, first


def spread_groups(tables: Tables, form: Form) -> Array:
    """The group of every class, uint16 [classes]."""
    group = np.zeros(form.classes, np.uint16)
    for start in tables.starts:
        group[start:] += 1
    return group


def spread_widths(tables: Tables, form: Form) -> tuple[Array, Array, Array]:
    """Widths and starts, uint32 [groups, buckets + 1], the escape's last; the bucket of every slot, uint16.

    Of a bucket's interval the first half, one width, is for steps up, the other for steps down.
    """
    widths = np.zeros((len(tables.widths), form.buckets + 1), np.int64)
    for g, row in enumerate(tables.widths):
        widths[g, : len(row)] = row
    spans = 2 * widths
    spans[:, -1] = (1 << STEP_BITS) - spans.sum(axis=1)
    widths[:, -1] = spans[:, -1]
    starts = np.cumsum(spans, axis=1) - spans
    names = np.arange(form.buckets + 1, dtype=np.uint16)
    slots = np.stack([np.repeat(names, row) for row in spans])
    return widths.astype(np.uint32), starts.astype(np.uint32), slots


def eighths(value: int) -> int:
    """8 × log2(value), rounded to nearest; value at least 1."""
    # log2 of the 16th power, whole, is 16 log2: halved and rounded.
    power: int = value**16
    return power.bit_length() // 2


def listed_classes(seen: Array, form: Form) -> tuple[int, int]:
    """First and last class to list odds of, for counts of lanes by class.

    All that were seen; but 32 of them in a row if only one lane in 2^17 is outside: those are had faster, and
    what the others cost more is under a hundredth of a percent of a bit a lane.
    """
    there = np.flatnonzero(seen)
    if not there.size:
        return 0, 0
    first, last = int(there[0]), int(there[-1])
    if form.lane == 2 and last - first > 31:
        sums = np.concatenate([[0], np.cumsum(seen)])
        inside = sums[32:] - sums[:-32]
        best = int(np.argmax(inside))
        if int(sums[-1] - inside[best]) <= int(sums[-1]) >> 17:
            return best, best + 31
    return first, last


def odds_of(changed: int, seen: int) -> int:
    """Odds to transmit for a class of which `changed` of `seen` lanes changed in a sample."""
    # Half a change more and half a lane more keep what was never seen to change possible.
    k, n = 2 * min(changed, seen) + 1, 2 * seen + 2
    return min(255, max(0, EVEN_ODDS + eighths(k) - eighths(n - k)))


def widths_of(histogram: Sequence[int]) -> tuple[int, ...]:
    """Widths to transmit for a histogram of buckets: at least 1 for each that was seen, and room to escape."""
    seen = sum(histogram)
    if not seen:
        return ()
    # What was seen once or twice has seen neighbours that were missed by chance.
    around = zip((histogram[0], *histogram), (*histogram[1:], 0))
    counts = [8 * v + min(4, a + b) for v, (a, b) in zip(histogram, around)]
    # Steps never seen so far come about as often as those seen once: let half of them escape.
    spare = min(128, max(1, 512 * sum(v == 1 for v in histogram) // seen))
    total, room = sum(counts), (1 << (STEP_BITS - 1)) - spare
    widths = [max(v > 0, v * room // total) for v in counts]
    left = room - sum(widths)
    if max(widths) + left > 0:
        widths[widths.index(max(widths))] += left
    else:
        # Many are rare, and many about as likely: no single one can make room for those.
        for _ in range(-left):
            widths[widths.index(max(widths))] -= 1
    while not widths[-1]:
        widths.pop()
    return tuple(int(width) for width in widths)
