"""A second codec, written from the layout in the docstrings alone: slow, plain Python, one number at a time.

It shares no line with the kernels, so a payload that both read alike is laid out as documented.
"""

import struct

import zstandard

RAW, PLANES, SPARSE, DENSE = 1, 2, 3, 4
LANES = {1: "B", 2: "H", 4: "I", 8: "Q"}


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
    if codec == RAW:
        return payload
    bits, count, reader = 8 * lane, len(old) // lane, Reader(payload)
    lanes = f"<{count}{LANES[lane]}"

    def mirror(x: int) -> int:
        return x ^ (2 ** (bits - 1) - 1) if x >> (bits - 1) else x

    def apply(mode: int, x: int, delta: int) -> int:
        if mode == 1:
            return x ^ delta
        step = -(delta + 1) // 2 if delta % 2 else delta // 2
        return mirror((mirror(x) + step) % 2**bits)

    after = list(struct.unpack(lanes, old))
    if codec == PLANES:
        joined = bytearray(count * lane)
        for j in range(lane):
            joined[j::lane] = reader.section(count)
        after = list(struct.unpack(lanes, joined))
        if lane > 1:
            after = [x >> 1 | (x & 1) << (bits - 1) for x in after]
    elif codec == SPARSE:
        if payload:
            mode = reader.take(1)[0]
            changes = reader.varint()
            at = -1
            gaps, deltas = reader.numbers(changes), reader.numbers(changes)
            for gap, delta in zip(gaps, deltas):
                at += gap + 1
                after[at] = apply(mode, after[at], delta)
    else:
        assert codec == DENSE
        mode = reader.take(1)[0]
        after = [apply(mode, x, delta) for x, delta in zip(after, reader.numbers(count))]
    assert not reader.rest
    return struct.pack(lanes, *after)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value >> 7)


def section(data: bytes, packed: bool) -> bytes:
    packed = packed and bool(data)  # there is no frame of nothing
    if packed:
        data = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(data)
    return varint(2 * len(data) + packed) + data


def numbers(values: list[int], low: int, packed: bool) -> bytes:
    parts = [bytes([low])]
    if low:
        width = -(-len(values) // 8)
        bits = bytearray(low * width)
        for i, value in enumerate(values):
            for j in range(low):
                bits[j * width + i // 8] |= (value >> j & 1) << (i % 8)
        parts.append(section(bytes(bits), packed))
    high = [value >> low for value in values]
    parts.append(section(bytes(min(value, 255) for value in high), packed))
    escaped = [value - 255 for value in high if value >= 255]
    if escaped:
        planes = -(-max(escaped).bit_length() // 8)
        parts.append(bytes([planes]))
        parts += [section(bytes(value >> 8 * j & 255 for value in escaped), packed) for j in range(planes)]
    return b"".join(parts)


def encode(
    codec: int, old: bytes, new: bytes, lane: int, *, xor: bool = False, low: int = 0, packed: bool = False
) -> bytes:
    """A payload of `codec` that makes `new` of `old`, as this writer chooses: the mode, how many low bits are kept
    apart, and whether sections are zstd frames."""
    bits = 8 * lane
    before, after = (
        [int.from_bytes(block[at : at + lane], "little") for at in range(0, len(block), lane)] for block in (old, new)
    )

    def mirror(x: int) -> int:
        return x ^ (2 ** (bits - 1) - 1) if x >> (bits - 1) else x

    def delta(x: int, y: int) -> int:
        if xor:
            return x ^ y
        step = (mirror(y) - mirror(x) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        return 2 * step if step >= 0 else -2 * step - 1

    if codec == RAW:
        return new
    if codec == PLANES:
        if lane > 1:
            after = [(x << 1 | x >> (bits - 1)) % 2**bits for x in after]
        return b"".join(section(bytes(x >> 8 * j & 255 for x in after), packed) for j in range(lane))
    deltas = [delta(x, y) for x, y in zip(before, after)]
    if codec == DENSE:
        return bytes([xor]) + numbers(deltas, low, packed)
    assert codec == SPARSE
    at = [i for i, value in enumerate(deltas) if value]
    if not at:
        return b""
    gaps = [i - before - 1 for i, before in zip(at, [-1, *at])]
    changes = numbers([value for value in deltas if value], low, packed)
    return bytes([xor]) + varint(len(at)) + numbers(gaps, low, packed) + changes
