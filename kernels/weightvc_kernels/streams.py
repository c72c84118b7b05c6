"""The parts that payloads are made of: varints, sections and number streams.

varint    an unsigned integer below 2^63, seven bits a byte, least significant first, the high bit set on
          all bytes but the last (LEB128, at most 9 bytes).

section   a run of bytes whose length N the reader already knows:
              varint   2 × (bytes that follow) + (1 if they are a zstd frame, 0 if they are plain)
              bytes    N plain bytes, or exactly one zstd frame that states its content size, N

numbers   N unsigned integers of W bits, N and W known to the reader:
              byte     low: bits of each number that are kept apart
              section  only if low > 0: low bit planes of ceil(N / 8) bytes, plane j holding bit j of every
                       number, the first number in the lowest bit of the first byte
              section  N bytes: min(number >> low, 255) of each number
              byte     only if E > 0, E being how many of those are 255: K, at most W / 8
              section  K of them, E bytes each: byte planes, least significant first, of the E numbers
                       (number >> low) - 255

What the low bits of a gap are is close to chance, so they stay plain, and what is above them fits the
Huffman coder of zstd: within 3 % of the entropy of the gaps.
"""

import threading

import numpy as np
import zstandard

from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes, as_bytes, dtype_of, rotate

# Weights and their changes repeat nothing, so matches that zstd finds by chance only crowd out its Huffman coder.
# The smallest hash table and the longest shortest match: against level 1, bf16 exponents take 10 % less at
# more than twice the speed, and steps 8 % less. Runs are still found. Any zstd decoder reads the frames.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=22,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_checksum=False,
)
_ESCAPE = 255
# Of fewer numbers no bits are kept apart: a bit plane takes whole bytes, which would be mostly padding.
_FEW = 8
# Lanes that are taken apart at once: few enough to stay in a processor's own cache.
_PIECE = 1 << 15
_MERGED = 1 << 18
"""Bytes of lanes that are put together at once: as many as the calls are worth."""
_MAGIC = b"\x28\xb5\x2f\xfd"
_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor: they keep state, so threads cannot share one."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def put_varint(value: int) -> bytes:
    """`value` as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_section(data: Bytes) -> bytes:
    """`data`, uint8 [bytes], contiguous, as a section: zstd where that is smaller."""
    return b"".join(section_of(data))


def section_of(data: Bytes) -> tuple[bytes, bytes | memoryview]:
    """The same in two parts, of which the second may be `data` itself."""
    # Under 16 bytes the frame's own header outweighs any gain.
    if data.size >= 16:
        frame = _compressor().compress(data.data)
        if len(frame) < data.size:
            return put_varint(2 * len(frame) + 1), frame
    return put_varint(2 * data.size), data.data


def put_numbers(values: Lanes) -> bytes:
    """`values`, unsigned [n], as a number stream."""
    if values.size < _FEW:
        return _put_few(values.tolist())
    low = _low_bits(values)
    parts = [bytes([low])]
    if low:
        planes = [np.packbits(_bit(values, j), bitorder="little") for j in range(low)]
        parts.append(put_section(np.concatenate(planes)))
    high = values >> low
    symbols = np.minimum(high, _ESCAPE).astype(np.uint8)
    parts.append(put_section(symbols))
    rest = high[symbols == _ESCAPE] - values.dtype.type(_ESCAPE)
    if rest.size:
        depth = (int(rest.max()).bit_length() + 7) // 8
        parts.append(bytes([depth]))
        planes = split(rest)
        parts.extend(put_section(planes[j]) for j in range(depth))
    return b"".join(parts)


def _put_few(values: list[int]) -> bytes:
    """The same of so few that nothing of it is squeezed: blocks with as few changes are many."""
    out = bytearray([0, 2 * len(values), *(min(value, _ESCAPE) for value in values)])
    rest = [value - _ESCAPE for value in values if value >= _ESCAPE]
    if rest:
        depth = (max(rest).bit_length() + 7) // 8
        out.append(depth)
        for j in range(depth):
            out.append(2 * len(rest))
            out += bytes(value >> 8 * j & 255 for value in rest)
    return bytes(out)


def _low_bits(values: Lanes) -> int:
    """Leave the median of a sample four bits of symbol, so that gaps of any mean get a few dozen symbols."""
    sample = np.sort(values[:: max(1, values.size // 1024)])
    return max(0, int(sample[sample.size // 2]).bit_length() - 4)


def _bit(values: Lanes, j: int) -> Bytes:
    return ((values >> j) & 1).astype(np.uint8)


def split(values: Lanes, left: int = 0) -> list[Bytes]:
    """Byte planes [lane bytes][n] of `values` [n], rotated to the left by `left` bits; least significant first."""
    if values.itemsize == 1:
        return [np.ascontiguousarray(values).view(np.uint8)]
    planes = [np.empty(values.size, np.uint8) for _ in range(values.itemsize)]
    for at in range(0, values.size, _PIECE):
        part = values[at : at + _PIECE]
        if left:
            part = rotate(part, left)
        for j, plane in enumerate(planes):
            plane[at : at + _PIECE] = part >> 8 * j if j else part
    return planes


def merge(planes: list[Bytes], count: int, lane: int, left: int = 0, out: Lanes | None = None) -> Lanes:
    """`count` lanes from at most `lane` planes, rotated to the left by `left` bits; absent high planes are zero.
    `out` [count] is where to put them, if not into a fresh array."""
    if out is None:
        out = np.empty(count, dtype_of(lane))
    if not planes:
        out[:] = 0
        return out
    number, step = out.dtype.type, _MERGED // lane
    room = np.empty(min(step, count) if left else 0, out.dtype)
    for at in range(0, count, step):
        part = out[at : at + step]
        part[:] = planes[-1][at : at + step]
        # numpy multiplies and divides with all of a processor's width, and shifts more slowly.
        for plane in planes[-2::-1]:
            np.multiply(part, number(256), out=part)
            np.add(part, plane[at : at + step], out=part)
        if left:
            low = room[: part.size]
            np.multiply(part, number(1 << left), out=low)
            np.floor_divide(part, number(1 << 8 * lane - left), out=part)
            np.bitwise_or(part, low, out=part)
    return out


class Reader:
    """A cursor over one payload. Every method raises CodecError rather than read past its end."""

    def __init__(self, payload: Buffer) -> None:
        self._data = as_bytes(payload).data
        self._at = 0

    def _take(self, size: int, what: str) -> memoryview:
        if size > len(self._data) - self._at:
            raise CodecError(f"payload of {len(self._data)} bytes ends inside {what}: cut short or changed")
        view = self._data[self._at : self._at + size]
        self._at += size
        return view

    def byte(self, what: str) -> int:
        """One byte."""
        return int(self._take(1, what)[0])

    def take(self, size: int, what: str) -> bytes:
        """So many bytes."""
        return bytes(self._take(size, what))

    def varint(self, what: str) -> int:
        """One varint."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte(what)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise CodecError(f"varint of {what} is longer than 9 bytes: the payload was changed")

    def section(self, size: int, what: str) -> Bytes:
        """A section of `size` bytes, uint8 [size], read-only. Never allocates more than `size` bytes."""
        head = self.varint(what)
        stored = self._take(head >> 1, what)
        if head & 1:
            return np.frombuffer(_inflate(stored, size, what), np.uint8)
        if len(stored) != size:
            raise CodecError(f"{what} has {len(stored)} bytes, {size} were expected: the payload was changed")
        return as_bytes(stored)

    def numbers(self, count: int, lane: int, what: str) -> Lanes:
        """A number stream of `count` integers of `lane` bytes [count], a fresh array."""
        dtype = dtype_of(lane)
        low = self.byte(what)
        if low >= 8 * lane:
            raise CodecError(f"{what} keeps {low} bits apart of {8 * lane}: the payload was changed")
        width = (count + 7) // 8
        bits = self.section(low * width, what) if low else np.empty(0, np.uint8)
        symbols = self.section(count, what)
        limit = ((1 << 8 * lane) - 1) >> low
        if limit < _ESCAPE and count and int(symbols.max()) > limit:
            raise CodecError(f"{what} holds a number of more than {8 * lane} bits: the payload was changed")
        out: Lanes = symbols.astype(dtype)
        escaped = np.flatnonzero(symbols == _ESCAPE)
        if escaped.size:
            out[escaped] += self._rest(escaped.size, lane, limit - _ESCAPE, what)
        if low:
            out <<= dtype.type(low)
            for j in range(low):
                plane = np.unpackbits(bits[j * width : (j + 1) * width], count=count, bitorder="little")
                out |= plane.astype(dtype) << dtype.type(j)
        return out

    def _rest(self, count: int, lane: int, limit: int, what: str) -> Lanes:
        depth = self.byte(what)
        if depth > lane:
            raise CodecError(f"{what} has {depth} byte planes of at most {lane}: the payload was changed")
        rest = merge([self.section(count, what) for _ in range(depth)], count, lane)
        if int(rest.max()) > limit:
            raise CodecError(f"{what} holds a number of more than {8 * lane} bits: the payload was changed")
        return rest

    @property
    def at(self) -> int:
        """Bytes read so far."""
        return self._at

    def end(self) -> None:
        """Raise CodecError unless the whole payload was read."""
        if self._at != len(self._data):
            raise CodecError(f"{len(self._data) - self._at} bytes follow the payload's end: it was changed")


def _inflate(frame: memoryview, size: int, what: str) -> bytes:
    """The content of exactly one zstd frame that states `size` bytes and fills `frame`."""
    if not size:
        # Nothing is stored plain; and the library would not look behind a frame of nothing.
        raise CodecError(f"{what}: a zstd frame of nothing: the payload was changed")
    try:
        # The stated size is checked before anything of that size is allocated.
        if bytes(frame[:4]) != _MAGIC or zstandard.get_frame_parameters(frame).content_size != size:
            raise CodecError(f"{what}: its zstd frame does not state {size} bytes: the payload was changed")
        data = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"{what}: its zstd frame is broken ({error}): the payload was changed") from None
    if len(data) != size:
        raise CodecError(f"{what}: its zstd frame held {len(data)} bytes of {size}: the payload was changed")
    return data
