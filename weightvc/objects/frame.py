"""The frame around every stored object, canonical JSON, and digests (docs/format.md, "Frames").

    0   4  b"WVC" and the format version, 1
    4   1  kind, one ASCII letter
    5   3  zero
    8   …  body

Every kind but the pack has the body  u32 n (little-endian), n bytes: one zstd frame of the head (canonical
JSON), then the sections, whose lengths the head lists. The root has a blake3 of what follows in front.
"""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import blake3 as _blake3
import zstandard

from weightvc.errors import Corrupt, Refused, Unsupported
from weightvc.objects import expect

if TYPE_CHECKING:
    import numpy
    import numpy.typing

MAGIC: Final = b"WVC"
FORMAT: Final = 1
HEADER_SIZE: Final = 8
DIGEST_SIZE: Final = 32

ROOT: Final = "R"
SEGMENT: Final = "S"
PAGE: Final = "P"
MANIFEST: Final = "M"
PACK: Final = "K"
SCHEMA: Final = "C"
LAYOUT: Final = "L"
FILE: Final = "F"

HEAD_LIMITS: Final = {
    ROOT: 16 << 20,
    SEGMENT: 64 << 20,
    PAGE: 16 << 20,
    MANIFEST: 32 << 20,
    SCHEMA: 64 << 20,
    LAYOUT: 32 << 20,
    FILE: 64 << 10,
}
"""Most bytes that a head may have, by kind. Parsed, it takes up to some 25 times as much memory: that, and no more,
is what a hostile object of a few KiB can make a reader allocate."""
_NAMES: Final = {
    ROOT: "the root",
    SEGMENT: "a segment",
    PAGE: "the page of tags",
    MANIFEST: "the manifest",
    SCHEMA: "the schema",
    LAYOUT: "the layout",
    FILE: "a file object",
}
_SHORTEN: Final = {
    ROOT: "delete branches that are not needed",
    SEGMENT: "have fewer large side files",
    PAGE: "delete tags that are not needed",
    MANIFEST: "have fewer tensors or large side files in one version",
    SCHEMA: "have fewer tensors, or shorter names",
    LAYOUT: "have fewer files in one version",
    FILE: "leave it out",
}

EMPTY_LIMIT: Final = 32
"""Bytes that a zstd frame of nothing can have, and more."""

_MANY: Final = 1000
"""Pieces from which it is asked whether a compiled pass is at hand."""

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """blake3 of `data`, 32 bytes."""
    return _blake3.blake3(data).digest()


def digests(data: Buffer, cuts: "Sequence[int] | numpy.typing.NDArray[numpy.int64]") -> bytes:
    """blake3 of each piece of `data` between two neighbouring `cuts`, one after the other."""
    if len(cuts) > _MANY:
        from weightvc_kernels import hashes

        if hashes.worth(len(cuts) - 1):
            return hashes.digests(data, cuts)
    view, new = memoryview(data), _blake3.blake3
    return b"".join([new(view[a:b]).digest() for a, b in pairwise(map(int, cuts))])


def canonical(value: Any) -> bytes:
    """Canonical JSON: UTF-8, keys sorted by code point, no spaces, no NaN; floats in their shortest form.

    Identity is always the digest of bytes as they were written: a reader hashes what it read and never
    encodes again. Raises ValueError for what JSON cannot say.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def compress(data: Buffer, level: int = 3) -> bytes:
    """One zstd frame with its content size in the header."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(data: Buffer, limit: int, what: str) -> bytes:
    """The content of exactly one zstd frame that fills `data` and says its size, at most `limit` bytes."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) or size > limit:
            raise Corrupt(f"{what}: a zstd frame without a size, or over {limit} bytes")
        if size:
            out = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        else:
            out = _nothing(data, what)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{what}: {error}") from None
    if len(out) != size:
        raise Corrupt(f"{what}: a zstd frame of {len(out)} bytes says {size}")
    return out


def _nothing(data: Buffer, what: str) -> bytes:
    """An empty frame, looked at to its end: the library's decompress() returns without a look if the size is 0."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    if len(data) > EMPTY_LIMIT or reader.decompress(data) or not reader.eof or reader.unused_data:
        raise Corrupt(f"{what}: an empty zstd frame that is damaged, or has something behind it")
    return b""


def header(kind: str) -> bytes:
    """The 8 bytes that every object of `kind` begins with."""
    return MAGIC + bytes([FORMAT]) + kind.encode("ascii") + b"\0\0\0"


def check_header(data: Buffer, kind: str, what: str) -> None:
    """Raise Corrupt unless `data` begins as an object of `kind` in a format that this reader knows."""
    start = bytes(data[:HEADER_SIZE])
    if len(start) < HEADER_SIZE or start[:3] != MAGIC:
        raise Corrupt(f"{what} is corrupt: {len(data)} bytes that do not begin as a weightvc object")
    if start[3] != FORMAT:
        raise Unsupported(f"{what} has format {start[3]}; this weightvc reads format {FORMAT}: upgrade weightvc")
    if start != header(kind):
        raise Corrupt(f"{what} is corrupt: its kind is {start[4:]!r}, not {kind!r}")


def encode(kind: str, head: dict[str, Any], sections: Sequence[Buffer] = ()) -> bytes:
    """An object of `kind`; `head` gains the key "sections" where there are any.

    Raises Refused if the head is larger than readers accept, saying what to shorten.
    """
    if sections:
        head = {**head, "sections": [len(section) for section in sections]}
    text = canonical(head)
    if len(text) > HEAD_LIMITS[kind]:
        raise Refused(
            f"{_NAMES[kind]} would have a head of {len(text)} bytes, {HEAD_LIMITS[kind]} at most: {_SHORTEN[kind]}"
        )
    packed = compress(text)
    body = b"".join([struct.pack("<I", len(packed)), packed, *sections])
    if kind == ROOT:
        body = digest(body) + body
    return header(kind) + body


def decode(kind: str, data: Buffer, what: str) -> tuple[dict[str, Any], list[memoryview]]:
    """Head and sections of an object of `kind`. Raises Corrupt, naming `what`."""
    check_header(data, kind, what)
    body = memoryview(data)[HEADER_SIZE:]
    if kind == ROOT:
        if len(body) < DIGEST_SIZE or digest(body[DIGEST_SIZE:]) != bytes(body[:DIGEST_SIZE]):
            raise Corrupt(f"{what} is corrupt: its bytes are not what its digest says")
        body = body[DIGEST_SIZE:]
    if len(body) < 4:
        raise Corrupt(f"{what} is corrupt: cut short")
    (length,) = struct.unpack("<I", body[:4])
    if len(body) < 4 + length:
        raise Corrupt(f"{what} is corrupt: cut short")
    try:
        head = expect.parse(decompress(body[4 : 4 + length], HEAD_LIMITS[kind], what).decode())
    except expect.MALFORMED as error:
        raise Corrupt(f"{what} is corrupt: {error}") from None
    if not isinstance(head, dict):
        raise Corrupt(f"{what} is corrupt: its head is not an object")
    lengths = head.get("sections", [])
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise Corrupt(f"{what} is corrupt: its sections have no lengths")
    rest = body[4 + length :]
    if sum(lengths) != len(rest):
        raise Corrupt(f"{what} is corrupt: {len(rest)} bytes of sections where {sum(lengths)} are promised")
    sections, at = [], 0
    for n in lengths:
        sections.append(rest[at : at + n])
        at += n
    return head, sections


def check_type(found: object, wanted: str, what: str) -> None:
    """Raise Unsupported unless an object says that it is what this reader knows, such as "manifest 1"; Corrupt if it
    says nothing."""
    if not isinstance(found, str):
        raise Corrupt(f"{what} is corrupt: it does not say what it is, where {wanted!r} is expected")
    if found != wanted:
        raise Unsupported(f"{what} is a {found!r:.100}, and this weightvc reads {wanted!r}: upgrade weightvc")


def corrupt(what: str, error: Exception) -> Corrupt:
    """`error`, met while the object `what` was read, as a fault of that object, if it does not name it already."""
    if isinstance(error, Corrupt) and str(error).startswith(what):
        return error
    return Corrupt(f"{what} is corrupt: {error!r:.300}")
