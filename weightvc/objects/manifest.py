"""A manifest: a version's record, its chunk digests, and where its base or its patch lies.

Both base and patch are a stream of blocks. A block covers consecutive chunks of one lane width; the index has,
a block, how many chunks it covers, the codec, and the bytes it takes in the stream. A small stream lies in the
manifest; a large one is cut at block borders into packs.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

from weightvc import __version__
from weightvc.errors import Corrupt, Unsupported
from weightvc.objects import expect, frame, key, version
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.version import Version

SAME: Final = 0
"""Codec of a block that equals its source chunks; it takes no bytes."""
CONTEXT: Final = 6
"""Codec of a block of one dtype, coded with the patch's tables of that dtype (docs/patch.md)."""
RICE: Final = 7
"""Codec of a block that readers apply fast (docs/patch.md)."""
REF: Final = 5
"""Codec of a block of one chunk that equals an earlier chunk of the same tree: u32, that chunk's number."""
BLOCK: Final = 4 << 20
"""Bytes that a block covers at most."""
BLOCK_LIMIT: Final = 64 << 20
"""The same for any writer's blocks: a reader holds a few whole."""
PACK_LIMIT: Final = 64 << 20
"""Payload bytes of any writer's packs, at most."""
TABLES_LIMIT: Final = 64 << 10
"""Bytes of a dtype's tables at most; honest ones have a few hundred."""
LONE: Final = 16 << 10
"""A chunk of at least so many bytes has a block of its own: it can be fetched, and stored once, alone."""
INLINE: Final = 4 << 20
"""A stream of at most so many bytes lies in the manifest."""
PACK: Final = 32 << 20
"""Bytes of a pack, about: no object may pass 64 MiB, and a smaller one takes less memory at either end."""


@dataclass(slots=True)
class Stream:
    """Blocks in chunk order. `packs` has key and payload bytes of each pack; `inline` the bytes if there are none."""

    counts: list[int] = field(default_factory=list)
    codecs: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    """Of each SPARSE, DENSE, CONTEXT or RICE block: check() of the old lanes that it changes; else 0."""
    packs: list[tuple[str, int]] = field(default_factory=list)
    inline: frame.Buffer = b""
    first: list[int] = field(default_factory=list)
    """First chunk of each block, and the end."""
    offsets: list[int] = field(default_factory=list)
    """Where each block begins in the stream, and the end."""
    starts: list[int] = field(default_factory=list)
    """Where each pack begins in the stream, and the end."""

    def seal(self) -> "Stream":
        """Compute the prefix sums once everything is in."""
        self.first = [0, *accumulate(self.counts)]
        self.offsets = [0, *accumulate(self.lengths)]
        self.starts = [0, *accumulate(size for _, size in self.packs)]
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stream."""
        return self.offsets[-1]

    def block_of(self, chunk: int) -> int:
        """The block that covers `chunk`."""
        return bisect_right(self.first, chunk) - 1

    def pack_of(self, block: int) -> tuple[int, int]:
        """(pack, offset of the block's bytes in the pack object)."""
        pack = bisect_right(self.starts, self.offsets[block]) - 1
        # A block of no bytes at the very end lies past the last pack; nothing is read for it.
        pack = min(pack, len(self.packs) - 1)
        return pack, frame.HEADER_SIZE + self.offsets[block] - self.starts[pack]

    def index(self) -> bytes:
        """The index, one zstd frame: u32 n, then n each of u32 counts, u8 codecs, u32 lengths, u32 checks."""
        n = len(self.counts)
        raw = (
            struct.pack(f"<I{n}I", n, *self.counts)
            + bytes(self.codecs)
            + struct.pack(f"<{2 * n}I", *self.lengths, *self.checks)
        )
        return frame.compress(raw)


@dataclass(slots=True)
class Patch:
    """A stream against `source`, a version; `moved` maps a tensor's number to the source tensor it is coded
    against where that is not the one of its own name: -1 for none."""

    source: str
    stream: Stream
    moved: dict[int, int]
    changed: int
    tables: dict[str, bytes] = field(default_factory=dict)
    """What CONTEXT blocks of a dtype are coded with, by dtype."""


@dataclass(slots=True)
class Manifest:
    """What one GET tells of a version. At least one of `base` and `patch` is there."""

    version: Version
    branch: str | None
    schema: str
    """Key of the schema object."""
    schema_digest: str
    layout: str | None
    """Key of the layout object."""
    files: dict[str, str]
    """Keys of the file objects that the layout needs, by the digest of their content."""
    digests: bytes
    base: Stream | None
    patch: Patch | None
    writer: str = f"weightvc {__version__}"
    """What wrote it: named when a reader meets a codec that it does not know."""


def encode(manifest: Manifest) -> bytes:
    """The manifest as a stored object."""
    head: dict[str, Any] = {
        "branch": manifest.branch,
        "files": manifest.files,
        "layout": manifest.layout,
        "record": manifest.version.record,
        "schema": [manifest.schema_digest, manifest.schema],
        "weightvc": "manifest 1",
        "writer": manifest.writer,
    }
    sections: list[frame.Buffer] = [manifest.digests]
    patch = manifest.patch.stream if manifest.patch is not None else None
    for name, stream in (("base", manifest.base), ("patch", patch)):
        if stream is not None:
            head[name] = {"packs": [[k, size] for k, size in stream.packs]}
            sections += [stream.index(), stream.inline]
    if manifest.patch is not None:
        head["patch"]["changed"] = manifest.patch.changed
        head["patch"]["from"] = manifest.patch.source
        head["patch"]["moved"] = sorted(manifest.patch.moved.items())
        if manifest.patch.tables:
            head["patch"]["tables"] = list(manifest.patch.tables)
            sections += manifest.patch.tables.values()
    return frame.encode(frame.MANIFEST, head, sections)


def decode(data: frame.Buffer, what: str) -> Manifest:
    """Read a manifest. Raises Corrupt naming `what`."""
    head, sections = frame.decode(frame.MANIFEST, data, what)
    try:
        frame.check_type(head["weightvc"], "manifest 1", what)
        digests = bytes(sections.pop(0))
        if len(digests) % 32:
            raise ValueError(f"{len(digests)} bytes of digests")
        streams = {}
        for name in ("base", "patch"):
            if name in head:
                streams[name] = _stream(head[name], sections.pop(0), sections.pop(0), len(digests) // 32, what)
        patch = None
        if "patch" in head:
            fields = head["patch"]
            moved = {
                expect.integer(i, "moved"): expect.integer(j, "moved", -1)
                for i, j in expect.array(fields["moved"], "moved")
            }
            changed = expect.integer(fields["changed"], "changed")
            tables = {}
            for dtype in expect.array(fields.get("tables", []), "tables"):
                data = bytes(sections.pop(0))
                if expect.text(dtype, "tables") in tables or len(data) > TABLES_LIMIT:
                    raise ValueError(f"tables of {dtype!r:.50}: twice, or over {TABLES_LIMIT} bytes")
                tables[dtype] = data
            patch = Patch(expect.digest(fields["from"], "from"), streams["patch"], moved, changed, tables)
        if not streams:
            raise ValueError("it has neither base nor patch")
        schema_digest, schema = expect.array(head["schema"], "schema")
        return Manifest(
            version=version.read(head["record"], f"{what}: its record"),
            branch=expect.maybe_text(head["branch"], "branch"),
            schema=key.checked(schema, "schema"),
            schema_digest=expect.digest(schema_digest, "schema"),
            layout=None if head["layout"] is None else key.checked(head["layout"], "layout"),
            files={
                expect.digest(content, "files"): key.checked(name, "file")
                for content, name in expect.mapping(head["files"], "files").items()
            },
            digests=digests,
            base=streams.get("base"),
            patch=patch,
            writer=expect.text(head["writer"], "writer"),
        )
    except Unsupported:
        raise
    except (Corrupt, *expect.MALFORMED) as error:
        raise frame.corrupt(what, error) from None


def _stream(head: dict[str, Any], index: memoryview, inline: memoryview, chunks: int, what: str) -> Stream:
    # A block covers at least one chunk, so an honest index has at most 13 bytes a chunk.
    raw = frame.decompress(index, 4 + 13 * chunks, what)
    (n,) = struct.unpack_from("<I", raw)
    if len(raw) != 4 + 13 * n:
        raise Corrupt(f"{what} is corrupt: its index has {len(raw)} bytes for {n} blocks")
    counts = list(struct.unpack_from(f"<{n}I", raw, 4))
    codecs = list(raw[4 + 4 * n : 4 + 5 * n])
    lengths = list(struct.unpack_from(f"<{n}I", raw, 4 + 5 * n))
    checks = list(struct.unpack_from(f"<{n}I", raw, 4 + 9 * n))
    packs = [
        (key.checked(k, "pack"), expect.integer(size, "a pack's bytes", 0, PACK_LIMIT + 1))
        for k, size in expect.array(head["packs"], "packs")
    ]
    stream = Stream(counts, codecs, lengths, checks, packs, inline).seal()
    stored = stream.starts[-1] if packs else len(inline)
    if 0 in counts or stream.first[-1] != chunks or stored != stream.nbytes or (packs and len(inline)):
        raise Corrupt(f"{what} is corrupt: its blocks do not add up")
    if any(size and codec == SAME for size, codec in zip(lengths, codecs)):
        raise Corrupt(f"{what} is corrupt: a SAME block has a payload")
    borders = set(stream.offsets)
    if any(start not in borders for start in stream.starts):
        raise Corrupt(f"{what} is corrupt: a pack ends inside a block")
    return stream


def check_blocks(stream: Stream, schema: Schema, what: str) -> None:
    """Raise Corrupt naming `what` unless the blocks cover a schema's chunks, each having one lane width (in CONTEXT
    one dtype) and at most BLOCK_LIMIT bytes. Takes memory by the number of blocks alone: to be called before the
    schema's positions are asked for, unless Tree has seen that there is a digest a chunk."""
    if stream.first[-1] != schema.chunks:
        raise Corrupt(f"{what} is corrupt: blocks of {stream.first[-1]} chunks where its schema has {schema.chunks}")
    borders = set(stream.first)
    for chunk in schema.lane_borders:
        if chunk not in borders:
            raise Corrupt(f"{what} is corrupt: a block has lanes of two widths, at chunk {chunk}")
    if CONTEXT in stream.codecs:
        for chunk, _ in schema.dtype_runs:
            if chunk not in borders and stream.codecs[stream.block_of(chunk)] == CONTEXT:
                raise Corrupt(f"{what} is corrupt: a CONTEXT block has two dtypes, at chunk {chunk}")
    if max(stream.counts, default=0) * CHUNK > BLOCK_LIMIT:
        for low, high in pairwise(stream.first):
            if schema.position(high) - schema.position(low) > BLOCK_LIMIT:
                raise Corrupt(f"{what} is corrupt: its block of chunks {low} to {high} has over {BLOCK_LIMIT} bytes")


def check(old: frame.Buffer) -> int:
    """The first 4 bytes of the blake3 of old lanes, little-endian: tells an in-place reader a wrong target apart."""
    return int.from_bytes(frame.digest(old)[:4], "little")


def blocks(schema: Schema, sources: Sequence[int] | None) -> list[tuple[int, int]]:
    """Cut a tree's chunks into blocks [low, high) of one dtype. `sources` has the source chunk of each (-1 for
    none): a block has either all or none; None says that all have one."""
    import numpy as np

    n, positions = schema.chunks, schema.positions
    begins = np.zeros(n + 1, np.bool_)
    # A large chunk stands alone.
    lone = np.diff(schema.edges) >= LONE
    begins[:n] |= lone
    begins[1:] |= lone
    begins[[first for first, _ in schema.dtype_runs]] = True
    if sources is not None:
        source = np.array(sources)
        known = source >= 0
        # A block's sources lie side by side in the old tree, so that a reader finds them in few blocks.
        begins[1:n] |= (known[1:] != known[:-1]) | (known[1:] & (source[1:] != source[:-1] + 1))
    out: list[tuple[int, int]] = []
    for low, end in pairwise([*np.flatnonzero(begins[:n]).tolist(), n]):
        while low < end:
            high = bisect_right(positions, positions[low] + BLOCK, low + 1, end + 1) - 1
            out.append((low, high))
            low = high
    return out


def runs(schema: Schema, blocks: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Blocks that lie side by side, are of one dtype and have at most BLOCK bytes together, or one block by itself:
    what a thread reads, codes and checks at once, since of small ones each would take longer to begin than to do."""
    borders = {first for first, _ in schema.dtype_runs}
    out: list[list[tuple[int, int]]] = []
    end, room = -1, 0
    for low, high in blocks:
        nbytes = schema.position(high) - schema.position(low)
        if low == end and low not in borders and nbytes <= room:
            out[-1].append((low, high))
            room -= nbytes
        else:
            out.append([(low, high)])
            room = BLOCK - nbytes
        end = high
    return out
