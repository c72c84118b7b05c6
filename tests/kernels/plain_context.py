"""A second context codec, written from docs/patch.md alone: slow, plain Python, one lane at a time.

It shares no line with the kernels, and derives the tables in floating point, so what both agree on is as documented.
Decoder and encoder walk the lanes alike; what differs is the coder, which is read from or written to.
"""

from itertools import pairwise
from math import floor, log2
from typing import Any

from tests.kernels.plain_codec import varint

DTYPES = {
    "BF16": (16, 7, 256, True),
    "F16": (16, 10, 32, True),
    "F32": (32, 23, 256, True),
    "F64": (64, 52, 2048, True),
    "F8_E4M3": (8, 0, 256, True),
    "F8_E5M2": (8, 0, 256, True),
    "F8_E4M3FNUZ": (8, 0, 256, True),
    "F8_E5M2FNUZ": (8, 0, 256, True),
    "F8_E8M0": (8, 0, 256, False),
    "F4": (8, 0, 256, False),
    "F6_E2M3": (8, 0, 256, False),
    "F6_E3M2": (8, 0, 256, False),
    "BOOL": (8, 0, 256, False),
    "U8": (8, 0, 256, False),
    "I8": (8, 0, 256, False),
}
REST = 1 << 19


def nearest(value: float) -> int:
    return floor(value + 0.5)


def hazard(q: int, scale: int) -> int:
    return min(REST, max(1, nearest(65536 * log2(1 + 2 ** ((q + scale - 200) / 8)))))


SPREAD = 2**31 - 2**19
NODES = [SPREAD - nearest(SPREAD * 2 ** (-i / 64)) + 1024 * i for i in range(513)]
WEIGHTS = [nearest(45426 * 2 ** ((40 - s) / 8)) for s in range(81)]
THRESHOLDS = [nearest(65536 * 2 ** ((2 * (i - 40) + 1) / 16)) for i in range(80)]


def curve(h: int) -> int:
    i = h >> 10
    return NODES[i] + ((NODES[i + 1] - NODES[i]) * (h & 1023) >> 10) if h & 1023 else NODES[i]


class Tables:
    """Odds and group by class, widths by group."""

    def __init__(self, data: bytes, dtype: str) -> None:
        self.rest = data
        self.bits, self.shift, classes, self.signed = DTYPES[dtype]
        first, listed = self.varint(), self.varint()
        odds = [self.varint()]
        for _ in range(listed - 1):
            code = self.varint()
            odds.append(odds[-1] + (code // 2 if code % 2 == 0 else -(code + 1) // 2))
        self.odds = [odds[min(max(c - first, 0), listed - 1)] for c in range(classes)]
        starts = [0]
        groups = self.varint()
        for _ in range(groups - 1):
            starts.append(starts[-1] + self.varint())
        self.group = [max(g for g in range(groups) if starts[g] <= c) for c in range(classes)]
        self.widths = [[self.varint() for _ in range(self.varint())] for _ in range(groups)]
        assert not self.rest

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte, self.rest = self.rest[0], self.rest[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value


class Decoder:
    """The rANS state of one payload."""

    def __init__(self, payload: bytes) -> None:
        self.words = [int.from_bytes(payload[i : i + 4], "little") for i in range(0, len(payload), 4)]
        self.x = self.words.pop(0) << 32
        self.x += self.words.pop(0)
        assert 2**31 <= self.x < 2**63

    def refill(self) -> None:
        if self.x < 2**31:
            self.x = self.x << 32 | self.words.pop(0)

    def below(self, n: int, bound: int, said: bool | None = None) -> bool:
        """Whether the number of n bits that comes next is below a bound."""
        return self.x % 2**n < bound

    def take(self, n: int, start: int, width: int) -> None:
        z = self.x % 2**n
        assert start <= z < start + width
        self.x = width * (self.x >> n) + z - start
        self.refill()

    def raw(self, n: int, value: int = 0) -> int:
        value = self.x % 2**n
        self.x >>= n
        self.refill()
        return value


class Encoder:
    """Notes what is coded. A decoder gives first what was put in last, so the payload is made backwards."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int, int]] = []

    def below(self, n: int, bound: int, said: bool | None = None) -> bool:
        assert said is not None
        return said

    def take(self, n: int, start: int, width: int) -> None:
        assert width > 0
        self.noted.append((n, start, width))

    def raw(self, n: int, value: int = 0) -> int:
        self.noted.append((n, value, 1))
        return value

    def payload(self) -> bytes:
        x, words = 2**32 - 1, []
        for n, start, width in reversed(self.noted):
            if x >= width << (63 - n):
                words.append(x % 2**32)
                x >>= 32
            x = (x // width << n) + start + x % width
        return b"".join(word.to_bytes(4, "little") for word in [x >> 32, x % 2**32, *reversed(words)])


def flags_of(coder: Any, units: int, said: list[bool] | None) -> list[bool]:
    counts = [[1, 1] for _ in range(8)]
    flags = [False, False, False]
    for i in range(units):
        count = counts[flags[-1] + 2 * flags[-2] + 4 * flags[-3]]
        width = min(4095, max(1, 4096 * count[1] // (count[0] + count[1])))
        flag = not coder.below(12, 4096 - width, None if said is None else not said[i])
        coder.take(12, 4096 - width if flag else 0, width if flag else 4096 - width)
        count[flag] += 2
        flags.append(flag)
    return flags[3:]


def bucket_of(u: int) -> tuple[int, int, int]:
    """The bucket of a distance, its raw bits, and how many there are."""
    if u < 8:
        return u, 0, 0
    k = u.bit_length() - 1
    return 8 + 4 * (k - 3) + (u >> (k - 2) & 3), u % 2 ** (k - 2), k - 2


def step_of(coder: Any, widths: list[int], bits: int, said: int | None) -> int:
    wanted, rest, _ = (None, 0, 0) if said is None else bucket_of(abs(said) - 1)
    goes_down = None if said is None else said < 0
    start = bucket = 0
    while bucket < len(widths):
        here = None if wanted is None else wanted == bucket and widths[bucket] > 0
        if coder.below(12, start + 2 * widths[bucket], here):
            break
        start += 2 * widths[bucket]
        bucket += 1
    if bucket < len(widths):
        down = not coder.below(12, start + widths[bucket], None if goes_down is None else not goes_down)
        coder.take(12, start + widths[bucket] * down, widths[bucket])
    else:
        coder.take(12, start, 4096 - start)
        code = coder.raw((4 * bits - 9).bit_length() + 1, 0 if wanted is None else 2 * wanted + bool(goes_down))
        down, bucket = code % 2 == 1, code // 2
        assert bucket < 4 * bits - 8
    distance = bucket
    if bucket >= 8:
        left = (bucket - 8) // 4 + 1
        distance = (4 + (bucket - 8) % 4) << left
        place = 0
        while left:
            size = min(16, left)
            distance += coder.raw(size, rest >> place & 2**size - 1) << place
            place, left = place + size, left - size
    return -distance - 1 if down else distance + 1


def walk(coder: Any, data: bytes, dtype: str, old: bytes, new: bytes | None) -> bytes:
    """Say to the coder what makes `new` of `old`, or ask it; the new block."""
    tables = Tables(data, dtype)
    bits, wide = tables.bits, tables.bits // 8

    def mirror(x: int) -> int:
        return x ^ (2 ** (bits - 1) - 1) if tables.signed and x >> (bits - 1) else x

    def lanes_of(block: bytes) -> list[int]:
        return [int.from_bytes(block[i : i + wide], "little") for i in range(0, len(block), wide)]

    lanes, after = lanes_of(old), None if new is None else lanes_of(new)
    unit, units = 4096 // wide, -(-len(old) // 4096)
    pages = [slice(4096 * b, 4096 * (b + 1)) for b in range(units)]
    flags = flags_of(coder, units, None if new is None else [old[page] != new[page] for page in pages])
    passed = changes = expected = 0
    scale = 40
    for b, flag in enumerate(flags):
        if not flag:
            continue
        exposed = met = 0
        for i in range(b * unit, min(len(lanes), (b + 1) * unit)):
            c = lanes[i] >> tables.shift & len(tables.odds) - 1
            h = hazard(tables.odds[c], scale)
            if passed + h > REST:
                coder.take(31, curve(passed), 2**31 - curve(passed))
                passed = 0
            if coder.below(31, curve(passed + h), None if after is None else after[i] != lanes[i]):
                coder.take(31, curve(passed), curve(passed + h) - curve(passed))
                said = None
                if after is not None:
                    said = (mirror(after[i]) - mirror(lanes[i]) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
                step = step_of(coder, tables.widths[tables.group[c]], bits, said)
                lanes[i] = mirror((mirror(lanes[i]) + step) % 2**bits)
                passed = 0
                met += 1
                exposed += h // 2
            else:
                passed += h
                exposed += h
        expected += (exposed * WEIGHTS[scale] >> 16) - (expected >> 4)
        changes += (met << 16) - (changes >> 4)
        ratio = ((changes + 2**20) << 16) // (expected + 2**20)
        scale = sum(threshold <= ratio for threshold in THRESHOLDS)
    return b"".join(x.to_bytes(wide, "little") for x in lanes)


def decode(data: bytes, dtype: str, payload: bytes, old: bytes) -> bytes:
    """The new block that `payload` makes of `old` with the tables in `data`."""
    if not payload:
        return old
    coder = Decoder(payload)
    new = walk(coder, data, dtype, old, None)
    assert coder.x == 2**32 - 1
    assert not coder.words
    return new


def encode(data: bytes, dtype: str, old: bytes, new: bytes) -> bytes:
    """The payload that makes `new` of `old` with the tables in `data`."""
    if old == new:
        return b""
    coder = Encoder()
    assert walk(coder, data, dtype, old, new) == new
    return coder.payload()


def tables_of(dtype: str, old: bytes, new: bytes) -> bytes:
    """Tables that suit a pair: all classes in one group, the odds of each by how many of its lanes change."""
    bits, shift, classes, signed = DTYPES[dtype]
    wide, seen = bits // 8, [[1, 1] for _ in range(classes)]
    counts: list[int] = []
    for i in range(0, len(old), wide):
        x, y = (int.from_bytes(block[i : i + wide], "little") for block in (old, new))
        seen[x >> shift & classes - 1][x != y] += 1
        if x != y:
            if signed:
                x, y = (lane ^ (2 ** (bits - 1) - 1) if lane >> (bits - 1) else lane for lane in (x, y))
            step = (y - x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
            bucket, *_ = bucket_of(abs(step) - 1)
            counts += [0] * (bucket + 1 - len(counts))
            counts[bucket] += 1
    odds = [min(255, max(0, 160 + nearest(8 * log2(changed / kept)))) for kept, changed in seen]
    steps = [b - a for a, b in pairwise(odds)]
    widths = [2000 * count // sum(counts) for count in counts]
    numbers = [0, classes, odds[0], *(2 * s if s >= 0 else -2 * s - 1 for s in steps), 1, len(widths), *widths]
    return b"".join(varint(number) for number in numbers)
