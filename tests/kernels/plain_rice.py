"""A second RICE codec, written from docs/patch.md alone: slow, plain Python, one bit at a time.

It shares no line with the kernels, so what both agree on is as documented. decode reads any payload; encode makes the
choices that the document recommends, and so the same bytes.
"""

from itertools import accumulate, pairwise

GROUP = 256
GAP_BITS = 26
FORMS = {
    "BF16": (16, 7, False),
    "F16": (16, 10, False),
    "F32": (32, 23, False),
    "F64": (64, 52, False),
    "F8_E4M3": (8, 3, False),
    "F8_E4M3FNUZ": (8, 3, False),
    "F8_E5M2": (8, 2, False),
    "F8_E5M2FNUZ": (8, 2, False),
}
EXTRA = [4, 7, 14, 20, *range(25, 300, 4)]


def flip(lane: int, bits: int, plain: bool) -> int:
    return lane ^ ((1 << (bits - 1)) - 1) if lane >> (bits - 1) and not plain else lane


class Bits:
    """Bits of a payload, the lowest of the first byte first."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, count: int) -> int:
        assert count <= self.left
        found = self.value & ((1 << count) - 1)
        self.value >>= count
        self.left -= count
        return found

    def code(self, k: int, limit: int) -> int:
        zeros = 0
        while zeros < 16 and not self.take(1):
            zeros += 1
        if zeros == 16:
            return self.take(limit)
        z = max(0, zeros - 4)
        value = ((min(zeros, 4) + (1 << z) - 1) << k) + self.take(k + z)
        assert value < 1 << limit
        return value


def decode(payload: bytes, lane: int, old: bytes) -> bytes:
    bits = 8 * lane
    lanes = [int.from_bytes(old[i : i + lane], "little") for i in range(0, len(old), lane)]
    if not payload:
        return old
    count = shift = at = 0
    while True:
        byte = payload[at]
        count |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    assert 1 <= count <= len(lanes)
    form, j, border = payload[at], payload[at + 1], int.from_bytes(payload[at + 2 : at + 4], "little")
    shift, plain = form & 63, bool(form & 64)
    assert max(form - 127, shift - bits + 1, j - 15, border - 4096) <= 0
    at += 4
    groups = -(-count // GROUP)
    spans, sizes = [], []
    if groups > 1:
        span_bits, size_bits = payload[at], payload[at + 1]
        assert max(span_bits - 27, size_bits - 32) <= 0
        length = ((groups - 1) * (span_bits + size_bits) + 7) // 8
        index = Bits(payload[at + 2 : at + 2 + length])
        for _ in range(groups - 1):
            spans.append(index.take(span_bits))
            sizes.append(index.take(size_bits))
        assert index.value == 0
        at += 2 + length
    stream = Bits(payload[at:])
    position = -1
    for g in range(groups):
        here = min(GROUP, count - g * GROUP)
        begin, first = stream.left, position
        k = stream.take(5)
        assert k <= GAP_BITS or k == 31
        where = []
        for _ in range(here):
            position += 1 + (0 if k == 31 else stream.code(k, GAP_BITS))
            where.append(position)
        assert position < len(lanes)
        signs = [stream.take(1) for _ in range(here)]
        run = None
        for i, down in zip(where, signs):
            size = (lanes[i] & ((1 << (bits - 1)) - 1)) >> shift
            distance = 1
            if size < border:
                distance += stream.code(min(border - 1 - size, bits - 1), bits - 1)
            else:
                if run is None:
                    run = stream.code(j, GAP_BITS)
                if run:
                    run -= 1
                else:
                    distance += 1 + stream.code(0, bits - 1)
                    run = None
            assert distance <= 1 << (bits - 1)
            step = -distance if down else distance
            lanes[i] = flip((flip(lanes[i], bits, plain) + step) % (1 << bits), bits, plain)
        if g < groups - 1:
            assert position - first == spans[g]
            assert begin - stream.left == sizes[g]
    assert stream.left < 8
    assert stream.value == 0
    return b"".join(value.to_bytes(lane, "little") for value in lanes)


def code(value: int, k: int, limit: int) -> tuple[int, int]:
    """Bits of a code, the lowest first, and how many there are."""
    q = value >> k
    z = 0 if q < 4 else (q - 3).bit_length() - 1
    zeros = q if q < 4 else 4 + z
    if zeros >= 16:
        return value << 16, 16 + limit
    raw = value - ((min(zeros, 4) + (1 << z) - 1) << k)
    return 1 << zeros | raw << (zeros + 1), zeros + 1 + k + z


def price(length: int, k: int, limit: int) -> int:
    """About twice the bits of the code of a number of this bit length."""
    return 2 * (1 + k) if length <= k else min(2 * k + EXTRA[length - 1 - k], 2 * (16 + limit))


def border_and_runs(changes: list[tuple[int, int]], bits: int) -> tuple[int, int]:
    """T and j for changes (class, u)."""
    top = bits - 1

    def calm_of(border: int) -> tuple[int, int]:
        calm = [u for size, u in changes if size >= border]
        return len(calm), sum(u > 0 for u in calm)

    def cost(border: int) -> int:
        total = 0
        for size, u in changes:
            if size < border:
                total += price(u.bit_length(), min(border - 1 - size, top), top)
            elif u:
                total += price(u.bit_length(), 0, top) - 2
        calm, exceptions = calm_of(border)
        if exceptions:
            total += exceptions * (2 * ((calm - exceptions) // exceptions).bit_length() + 2)
        return total

    last = max(size + u.bit_length() + 1 for size, u in changes)
    candidates = [0, *range(min(size for size, _ in changes) + 1, min(last, 4096) + 1)]
    border = min(candidates, key=cost)
    calm, exceptions = calm_of(border)
    if not exceptions:
        return border, 8
    return border, min(8, max(0, ((calm - exceptions) // exceptions).bit_length() - 1))


def encode(dtype: str, lane: int, old: bytes, new: bytes) -> bytes:
    bits, shift, plain = FORMS.get(dtype, (8 * lane, 8 * lane - 1, True))
    pairs = [
        (int.from_bytes(old[i : i + lane], "little"), int.from_bytes(new[i : i + lane], "little"))
        for i in range(0, len(old), lane)
    ]
    where = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not where:
        return b""
    gaps = [b - a - 1 for a, b in pairwise([-1, *where])]
    changes, signs = [], []
    for i in where:
        a, b = pairs[i]
        step = (flip(b, bits, plain) - flip(a, bits, plain)) % (1 << bits)
        down = step >> (bits - 1)
        signs.append(down)
        changes.append(((a & ((1 << (bits - 1)) - 1)) >> shift, ((1 << bits) - step if down else step) - 1))
    border, j = border_and_runs(changes, bits)

    streams = []
    for first in range(0, len(where), GROUP):
        group = slice(first, first + GROUP)
        here = gaps[group]
        k = 31
        if any(here):
            k = min(range(GAP_BITS + 1), key=lambda k: sum(price(gap.bit_length(), k, GAP_BITS) for gap in here))
        fields = [(k, 5)]
        if k != 31:
            fields += [code(gap, k, GAP_BITS) for gap in here]
        fields += [(sign, 1) for sign in signs[group]]
        calm = [u for size, u in changes[group] if size >= border]
        seen, told = 0, 0
        for size, u in changes[group]:
            if size < border:
                fields.append(code(u, min(border - 1 - size, bits - 1), bits - 1))
                continue
            if seen == told:
                run = next((i for i, v in enumerate(calm[seen:]) if v), len(calm) - seen)
                fields.append(code(run, j, GAP_BITS))
                told = seen + run + 1
            if u:
                fields.append(code(u - 1, 0, bits - 1))
            seen += 1
        value = size = 0
        for field, width in fields:
            value |= field << size
            size += width
        streams.append((value, size))

    count, header = len(where), bytearray()
    while count > 127:
        header.append(count & 127 | 128)
        count >>= 7
    header += bytes([count, shift + 64 * plain, j]) + border.to_bytes(2, "little")
    if len(streams) > 1:
        ends = list(accumulate(gap + 1 for gap in gaps))[GROUP - 1 :: GROUP][: len(streams) - 1]
        spans = [b - a for a, b in pairwise([0, *ends])]
        sizes = [size for _, size in streams[:-1]]
        span_bits, size_bits = max(spans).bit_length(), max(sizes).bit_length()
        index = width = 0
        for span, size in zip(spans, sizes):
            index |= span << width | size << (width + span_bits)
            width += span_bits + size_bits
        header += bytes([span_bits, size_bits]) + index.to_bytes((width + 7) // 8, "little")
    body = width = 0
    for value, size in streams:
        body |= value << width
        width += size
    return bytes(header) + body.to_bytes((width + 7) // 8, "little")
