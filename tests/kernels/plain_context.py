"""A second decoder of the context codec, written from docs/patch.md alone: slow, plain Python, one lane at a time.

It shares no line with the kernels, and derives the tables in floating point, so what both agree on is as documented.
"""

from math import floor, log2

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


class Coder:
    """The rANS state of one payload."""

    def __init__(self, payload: bytes) -> None:
        self.words = [int.from_bytes(payload[i : i + 4], "little") for i in range(0, len(payload), 4)]
        self.x = self.words.pop(0) << 32
        self.x += self.words.pop(0)
        assert 2**31 <= self.x < 2**63

    def refill(self) -> None:
        if self.x < 2**31:
            self.x = self.x << 32 | self.words.pop(0)

    def peek(self, n: int) -> int:
        return self.x % 2**n

    def take(self, n: int, start: int, width: int) -> None:
        z = self.peek(n)
        assert start <= z < start + width
        self.x = width * (self.x >> n) + z - start
        self.refill()

    def raw(self, n: int) -> int:
        value = self.peek(n)
        self.x >>= n
        self.refill()
        return value


def flags_of(coder: Coder, units: int) -> list[bool]:
    counts = [[1, 1] for _ in range(8)]
    flags = [False, False, False]
    for _ in range(units):
        count = counts[flags[-1] + 2 * flags[-2] + 4 * flags[-3]]
        width = min(4095, max(1, 4096 * count[1] // (count[0] + count[1])))
        flag = coder.peek(12) >= 4096 - width
        coder.take(12, 4096 - width if flag else 0, width if flag else 4096 - width)
        count[flag] += 2
        flags.append(flag)
    return flags[3:]


def step_of(coder: Coder, widths: list[int], bits: int) -> int:
    z, start = coder.peek(12), 0
    bucket = 0
    while bucket < len(widths) and z >= start + 2 * widths[bucket]:
        start += 2 * widths[bucket]
        bucket += 1
    if bucket < len(widths):
        down = z >= start + widths[bucket]
        coder.take(12, start + widths[bucket] * down, widths[bucket])
    else:
        coder.take(12, start, 4096 - start)
        code = coder.raw((4 * bits - 9).bit_length() + 1)
        down, bucket = code % 2 == 1, code // 2
        assert bucket < 4 * bits - 8
    distance = bucket
    if bucket >= 8:
        left = (bucket - 8) // 4 + 1
        distance = (4 + (bucket - 8) % 4) << left
        place = 0
        while left:
            size = min(16, left)
            distance += coder.raw(size) << place
            place, left = place + size, left - size
    return -distance - 1 if down else distance + 1


def decode(data: bytes, dtype: str, payload: bytes, old: bytes) -> bytes:
    """The new block that `payload` makes of `old` with the tables in `data`."""
    if not payload:
        return old
    tables = Tables(data, dtype)
    coder = Coder(payload)
    bits, wide = tables.bits, tables.bits // 8

    def mirror(x: int) -> int:
        return x ^ (2 ** (bits - 1) - 1) if tables.signed and x >> (bits - 1) else x

    lanes = [int.from_bytes(old[i : i + wide], "little") for i in range(0, len(old), wide)]
    unit = 4096 // wide
    flags = flags_of(coder, -(-len(old) // 4096))
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
            if coder.peek(31) < curve(passed + h):
                coder.take(31, curve(passed), curve(passed + h) - curve(passed))
                step = step_of(coder, tables.widths[tables.group[c]], bits)
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
    assert coder.x == 2**32 - 1
    assert not coder.words
    return b"".join(x.to_bytes(wide, "little") for x in lanes)
