"""A second decoder, written from the layout in the docstrings alone: slow, plain Python, one number at a time.

It shares no line with the kernels, so a payload that both read alike is laid out as documented.
"""

import zstandard

RAW, PLANES, SPARSE, DENSE = 1, 2, 3, 4


class Reader:
    """Varints, sections and number streams of one payload."""

    def __init__(self, payload: bytes) -> None:
        self.rest = payload

    def take(self, size: int) -> bytes:
        head, self.rest = self.rest[:size], self.rest[size:]
        assert len(head) == size
        return head

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def section(self, size: int) -> bytes:
        head = self.varint()
        data = self.take(head // 2)
        if head % 2:
            data = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        assert len(data) == size
        return data

    def numbers(self, count: int) -> list[int]:
        low = self.take(1)[0]
        width = -(-count // 8)
        bits = self.section(low * width) if low else b""
        symbols = self.section(count)
        escaped = [i for i in range(count) if symbols[i] == 255]
        high = list(symbols)
        if escaped:
            for j in range(self.take(1)[0]):
                plane = self.section(len(escaped))
                for i, byte in zip(escaped, plane):
                    high[i] += byte << (8 * j)
        return [
            (high[i] << low) | sum((bits[j * width + i // 8] >> (i % 8) & 1) << j for j in range(low))
            for i in range(count)
        ]


def decode(codec: int, payload: bytes, old: bytes, lane: int) -> bytes:
    """The new block that `payload` makes of `old` (of which RAW and PLANES use the length alone)."""
    bits = 8 * lane
    count = len(old) // lane
    before = [int.from_bytes(old[lane * i : lane * i + lane], "little") for i in range(count)]
    reader = Reader(payload)

    def mirror(x: int) -> int:
        return x ^ (2 ** (bits - 1) - 1) if x >> (bits - 1) else x

    def apply(mode: int, x: int, delta: int) -> int:
        if mode == 1:
            return x ^ delta
        step = -(delta + 1) // 2 if delta % 2 else delta // 2
        return mirror((mirror(x) + step) % 2**bits)

    if codec == RAW:
        return payload
    if codec == PLANES:
        planes = [reader.section(count) for _ in range(lane)]
        after = [sum(plane[i] << (8 * j) for j, plane in enumerate(planes)) for i in range(count)]
        if lane > 1:
            after = [x >> 1 | (x & 1) << (bits - 1) for x in after]
    elif codec == SPARSE:
        after = before
        if payload:
            mode = reader.take(1)[0]
            changes = reader.varint()
            at = -1
            gaps, deltas = reader.numbers(changes), reader.numbers(changes)
            for gap, delta in zip(gaps, deltas):
                at += gap + 1
                after[at] = apply(mode, before[at], delta)
    else:
        assert codec == DENSE
        mode = reader.take(1)[0]
        after = [apply(mode, x, delta) for x, delta in zip(before, reader.numbers(count))]
    assert not reader.rest
    return b"".join(x.to_bytes(lane, "little") for x in after)
