"""What is fuzzed. A target takes any bytes, and raises only where a decoder is wrong: by another error than its own,
a write outside of its block, or a value that does not survive being written and read again.

To add one: a function from bytes, with @target and the inputs to begin from. Inputs are cut by `parts`, so that what
a fuzzer changes reaches the decoder behind checksums and compression.
"""

import json
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import weightvc_kernels as wk
from weightvc.errors import BadFile, BadName, BadTensor, Corrupt, Refused, Unsupported
from weightvc.objects import catalogue, dtypes, frame, key, layout, manifest, root, schema, slime, version
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.protocol import state
from weightvc.protocol.state import Chain, Level, Models
from weightvc.sources import header, paths
from weightvc.sources.base import Layout, LayoutFile
from weightvc_kernels import context, context_tables, payloads, rice, streams

Array = npt.NDArray[np.uint8]
Seeds = Callable[[], list[bytes]]
GUARD = 4096
LANES = 3000


class Target(NamedTuple):
    """`run` raises on a defect; `seeds` are inputs to begin from."""

    run: Callable[[bytes], None]
    seeds: Seeds


TARGETS: dict[str, Target] = {}


def target(seeds: Seeds) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Add a function to the targets, under its name."""

    def add(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run, seeds)
        return run

    return add


def parts(data: bytes, count: int) -> list[bytes]:
    """`count` pieces: each but the last with its length before it, in two bytes. What is missing is empty."""
    out = []
    for _ in range(count - 1):
        size = int.from_bytes(data[:2], "little")
        out.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*out, data]


def joined(*pieces: bytes) -> bytes:
    """The inverse of parts."""
    return b"".join(struct.pack("<H", len(piece)) + piece for piece in pieces[:-1]) + pieces[-1]


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def read(decode: Callable[..., Any], *arguments: Any) -> Any:
    """What a decoder of objects gives; None where it refuses, by an error of its own that names the object."""
    try:
        return decode(*arguments, "the object")
    except (Corrupt, Unsupported) as error:
        if "the object" not in str(error):
            raise AssertionError(f"{error!r} does not name the object") from error
        return None


# The kernels


@cache
def pair(lane: int, density: float) -> tuple[Array, Array]:
    """Lanes like float weights, and the same after about `density` of them changed by steps of all sizes."""
    rng = np.random.default_rng(lane)
    bits = rng.normal(0, 0.02, LANES).view(np.uint64) >> np.uint64(64 - 8 * lane)
    old = bits.astype(f"u{lane}")
    new = old.copy()
    at = rng.random(LANES) < density
    new[at] += (2.0 ** rng.uniform(0, 8 * lane - 1, int(at.sum()))).astype(old.dtype)
    return old.view(np.uint8), new.view(np.uint8)


DTYPES = sorted(context_tables.FORMS)
DENSITIES = (0.004, 0.1, 1.0)


@cache
def tables(dtype: str, density: float = 0.1) -> bytes:
    return context.tables(context.sample(*pair(context.lane(dtype), density), dtype, 1), dtype)


def context_seeds() -> list[bytes]:
    out = []
    for i, dtype in enumerate(DTYPES):
        for density in DENSITIES:
            model = context.Model(tables(dtype, density), dtype)
            old, new = pair(context.lane(dtype), density)
            out.append(
                joined(
                    bytes([i]) + LANES.to_bytes(2, "little"), tables(dtype, density), context.encode(model, old, new)
                )
            )
            out.append(joined(bytes([i]) + b"\x40\0", b"", context.encode(model, old[:512], new[:512])))
    return out


@target(context_seeds)
def context_block(data: bytes) -> None:
    """Tables (the usual ones where none are given) and a payload, on a block between guards."""
    head, shared, payload = parts(data, 3)
    dtype = DTYPES[(head or b"\0")[0] % len(DTYPES)]
    lane = context.lane(dtype)
    lanes = int.from_bytes(head[1:3], "little") % (LANES + 1)
    old = pair(lane, 0.0)[0][: lane * lanes]
    store = np.full(old.size + 2 * GUARD, 0xA5, np.uint8)
    block = store[GUARD : GUARD + old.size]
    block[:] = old
    try:
        model = context.Model(shared or tables(dtype), dtype)
    except wk.CodecError:
        return
    try:
        context.decode_into(model, payload, block)
    except wk.CodecError:
        # Refused or not, what is in the block can be coded with these tables.
        pass
    assert (store[:GUARD] == 0xA5).all()
    assert (store[GUARD + old.size :] == 0xA5).all()
    back = context.decode(model, context.encode(model, old, block), old)
    assert back.tobytes() == block.tobytes()


def block_seeds() -> list[bytes]:
    out = []
    for i, (lane, dtype) in enumerate(((1, "F8_E4M3"), (2, "BF16"), (4, "F32"), (8, "I64"))):
        for density in (0.0, *DENSITIES):
            old, new = pair(lane, density)
            for size in (64, LANES):
                before, after = old[: size * lane], new[: size * lane]
                coded = wk.RICE, rice.encode(before, after, dtype, lane)
                for codec, payload in (wk.encode_patch(before, after, lane)[:2], wk.encode_whole(after, lane), coded):
                    out.append(bytes([codec, i]) + size.to_bytes(2, "little") + payload)
    # A change that changes nothing.
    idle = (
        bytes([1, 1]) + streams.put_numbers(np.array([2], np.uint64)) + streams.put_numbers(np.array([0], np.uint16))
    )
    return [*out, bytes([wk.SPARSE, 1, 9, 0]) + idle]


@target(block_seeds)
def plain_block(data: bytes) -> None:
    """A payload of a codec that needs no tables: whole or refused, and refused it leaves its target alone."""
    codec, lane = (data + b"\0\0")[0] % 8, (1, 2, 4, 8)[(data + b"\0\0")[1] % 4]
    lanes = int.from_bytes(data[2:4], "little") % (LANES + 1)
    old, payload = pair(lane, 0.0)[0][: lane * lanes], data[4:]
    block = old.copy()
    try:
        wk.decode_patch_into(codec, payload, block, lane)
    except wk.CodecError:
        assert block.tobytes() == old.tobytes()
        for decode in (wk.decode_patch, wk.positions_values):
            try:
                decode(codec, payload, old, lane)
            except wk.CodecError:
                continue
            raise AssertionError(f"codec {codec}: refused in place, but not by {decode.__name__}") from None
        return
    assert wk.decode_patch(codec, payload, old, lane).tobytes() == block.tobytes()
    at, values = wk.positions_values(codec, payload, old, lane)
    before = old.view(values.dtype).copy()
    assert (before[at] != values).all()
    before[at] = values
    assert before.tobytes() == block.tobytes()
    assert (np.diff(at) > 0).all()
    step = payloads.Payload(codec, payload)
    back, _ = payloads.invert([step], old, lane)
    assert payloads.replay([step, back], old, lane).tobytes() == old.tobytes()


def number_seeds() -> list[bytes]:
    out = []
    for i, lane in enumerate((1, 2, 4, 8)):
        values = pair(lane, 1.0)[1].view(f"u{lane}")
        for n in (0, 3, 40):
            out.append(bytes([i]) + n.to_bytes(2, "little") + streams.put_numbers(values[:n]))
    return out


@target(number_seeds)
def numbers(data: bytes) -> None:
    """A number stream."""
    lane, count = (1, 2, 4, 8)[(data or b"\0")[0] % 4], int.from_bytes(data[1:3], "little")
    reader = streams.Reader(data[3:])
    try:
        values = reader.numbers(count, lane, "numbers")
        reader.end()
    except wk.CodecError:
        return
    again = streams.Reader(streams.put_numbers(values)).numbers(count, lane, "numbers")
    assert again.tobytes() == values.tobytes()


# Streams of blocks


@cache
def shapes() -> Schema:
    """A chunk a tensor, and several lane widths."""
    kinds = [*["BF16"] * 5, "F32", "F32", "I64", "U8", "F8_E4M3"]
    infos = [
        TensorInfo("", f"{i:02}", dtype, (n,), dtypes.nbytes(dtype, (n,)))
        for i, (dtype, n) in enumerate(zip(kinds, [300, 300, 7, 1000, 1, 64, 64, 40, 100, 500], strict=True))
    ]
    return Schema(infos)


class Bytes:
    """A tree whose bytes are at hand."""

    def __init__(self, made: Schema, data: bytes) -> None:
        self._schema = made
        self._data = data

    def read(self, low: int, high: int) -> bytes:
        return self._data[self._schema.position(low) : self._schema.position(high)]


class Inline:
    """The payloads of a stream without packs."""

    def __init__(self, stream: manifest.Stream) -> None:
        self._stream = stream

    def block(self, block: int) -> frame.Buffer:
        start, stop = self._stream.offsets[block : block + 2]
        return memoryview(self._stream.inline)[start:stop]


def index_of(counts: list[int], codecs: list[int], lengths: list[int]) -> bytes:
    n = len(counts)
    return struct.pack(f"<I{n}I", n, *counts) + bytes(codecs) + struct.pack(f"<{2 * n}I", *lengths, *[0] * n)


def stream_seeds() -> list[bytes]:
    made = shapes()
    old = pair(8, 0.0)[0][: made.nbytes].tobytes()
    out = []
    for density in DENSITIES:
        new = pair(8, density)[1][: made.nbytes].tobytes()
        for base in (False, True):
            codecs, bodies = [], []
            blocks = manifest.blocks(made, None)
            for low, high in blocks:
                start, stop = made.position(low), made.position(high)
                dtype = made.tensors[low].dtype
                lane = dtypes.lane(dtype)
                if base:
                    codec, body = wk.encode_whole(new[start:stop], lane)
                elif context.supports(dtype) and low % 2:
                    model = context.Model(tables(dtype), dtype)
                    codec, body = manifest.CONTEXT, context.encode(model, old[start:stop], new[start:stop])
                else:
                    codec, body, _ = wk.encode_patch(old[start:stop], new[start:stop], lane)
                codecs.append(codec)
                bodies.append(body)
            index = index_of([b - a for a, b in blocks], codecs, [*map(len, bodies)])
            out.append(joined(bytes([base]), index, b"".join(bodies)))
    # The first chunk again, where it fits and where it does not; a chunk that is itself, and one that is a later one.
    again = index_of([1] * made.chunks, [1, 5, 5, *[0] * 7], [600, 4, 4, *[0] * 7])
    rounds = index_of([1] * made.chunks, [5, 5, *[0] * 8], [4, 4, *[0] * 8])
    return [*out, joined(b"\0", again, bytes(608)), joined(b"\0", rounds, b"\0\0\0\0\2\0\0\0")]


@target(stream_seeds)
def stream(data: bytes) -> None:
    """An index and the payloads behind it, read block by block: the right number of bytes, or Corrupt."""
    kind, index, inline = parts(data, 3)
    made, base = shapes(), kind[:1] == b"\1"
    old = pair(8, 0.0)[0][: made.nbytes].tobytes()

    name = "base" if base else "patch"
    head = {"packs": [], "from": ID, "moved": [], "changed": 0}
    whole = framed(
        frame.MANIFEST,
        packed(manifest_head() | {name: head}),
        [bytes(32 * made.chunks), frame.compress(index), inline],
    )
    decoded = read(manifest.decode, whole)
    if decoded is None:
        return
    found = decoded.base if base else decoded.patch.stream
    if read(lambda what: manifest.check_blocks(found, made, what) or True) is None:
        return
    assert min(found.counts) > 0
    assert (sum(found.counts), sum(found.lengths)) == (made.chunks, len(inline))
    models = Models({dtype: tables(dtype) for dtype in ("BF16", "F32", "U8")}, "the object")
    level = Level(made, found, Inline(found), "the object", "", None, models)
    chain = Chain(None if base else Bytes(made, old), [level])
    for low in range(made.chunks):
        for high in (low + 1, made.chunks):
            data = read(lambda _, low=low, high=high: chain.read(low, high))
            assert data is None or len(data) == made.position(high) - made.position(low)


# Objects

ID = "a" * 64
MADE = {"step": 1, "run": "r", "message": "m", "author": "me", "metadata": {"lr": 0.5}, "now": 5}


def name_of(kind: str) -> str:
    return f"{kind}/{ID}.1-{'b' * 32}-0"


def record() -> str:
    return version.make(tree=ID, layout=ID, parents=[], elements=4, nbytes=16, **MADE).record  # type: ignore[arg-type]


def commit_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {"op": "commit", "seq": 3, "name": "main", "old": ID, "record": record(), "packs": 0}
    fields |= {kind: name_of(kind) for kind in ("manifest", "schema", "layout")}
    return fields | {"files": [name_of("file")], "edges": [[ID, 5, 2], [None, 9, 4]], "bytes": 10}


MOVE = {"op": "reset", "seq": 3, "name": "main", "old": ID, "new": ID, "time": 5, "author": "me", "message": "m"}


def framed(kind: str, head: bytes, sections: list[bytes]) -> bytes:
    """An object with any head; the lengths of its sections are put in where it is an object."""
    try:
        fields = json.loads(head)
        if type(fields) is dict and sections and "sections" not in fields:
            head = json.dumps({**fields, "sections": [*map(len, sections)]}).encode()
    except (ValueError, RecursionError):
        pass
    compressed = frame.compress(head)
    body = b"".join([struct.pack("<I", len(compressed)), compressed, *sections])
    return frame.header(kind) + (frame.digest(body) if kind == frame.ROOT else b"") + body


@cache
def manifest_head() -> dict[str, Any]:
    head: dict[str, Any] = {"record": record(), "branch": "main", "schema": [ID, name_of("schema")], "layout": None}
    return head | {"files": {ID: name_of("file")}, "weightvc": "manifest 1", "writer": "weightvc 0.1.0"}


def manifest_seeds() -> list[bytes]:
    head = manifest_head()
    patch = {"packs": [], "from": ID, "moved": [[0, 0], [1, -1]], "changed": 2, "tables": ["BF16"]}
    index = index_of([1, 1], [1, 0], [4, 0])
    packs = {"packs": [[name_of("pack"), 3], [name_of("pack"), 1]]}
    return [
        joined(packed(head | {"patch": patch}), b"\2", index, b"1234", tables("BF16")),
        joined(packed(head | {"base": {"packs": []}}), b"\2", index, b"1234", b""),
        joined(packed(head | {"base": packs}), b"\2", index_of([1, 1], [1, 2], [3, 1]), b"", b""),
        joined(packed(head | {"base": {"packs": []}, "patch": patch}), b"\2", index, b"1234", b"x"),
    ]


@target(manifest_seeds)
def manifest_object(data: bytes) -> None:
    """A manifest's head, with the same index for base and patch, its inline bytes, and tables."""
    head, chunks, index, inline, shared = parts(data, 5)
    sections = [bytes(32 * (chunks or b"\0")[0])]
    for name in (b'"base"', b'"patch"'):
        if name in head:
            sections += [frame.compress(index), inline]
    if b'"tables"' in head:
        sections.append(shared)
    made = read(manifest.decode, framed(frame.MANIFEST, head, sections))
    if made is None:
        return
    assert manifest.decode(manifest.encode(made), "it") == made
    if made.patch is not None:
        try:
            state.chunk_map(shapes(), shapes(), made.patch.moved)
        except Corrupt:
            pass


def schema_seeds() -> list[bytes]:
    rows = [["a", "BF16", [2, 2]], ["b", "U8", []], ["c", "F4", [0, 4]], ["d", "F64", [1 << 40]]]
    return [packed({"components": {"": rows, "draft": rows[:1]}, "weightvc": "schema 1"})]


@target(schema_seeds)
def schema_object(data: bytes) -> None:
    """A schema's text. Its shapes may promise anything, so nothing may be made by their size."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        made = schema.decode(framed(frame.SCHEMA, packed({"schema": text}), []), "the object")
    except (Corrupt, Unsupported, BadTensor):
        return
    assert made.digest == frame.digest(text.encode()).hex()
    if made.chunks < 1000:
        tree = Tree(made, bytes(32 * made.chunks))
        assert len(tree.tensors) == len(made.tensors)
        assert Schema(made.tensors).tensors == schema.decode(Schema(made.tensors).encode(), "it").tensors
        for low, high in manifest.blocks(made, None):
            assert made.position(high) > made.position(low)


def root_seeds() -> list[bytes]:
    fields: dict[str, Any] = {"repository": "b" * 32, "sequence": 3, "created": 5, "default": "main"}
    fields |= {"branches": {"main": ID}, "tags": name_of("page"), "tail": [commit_fields(), MOVE]}
    fields |= {"segments": [[name_of("segment"), 4]], "ring": ["c" * 32], "horizon": 0, "probe": {"lock": True}}
    return [packed(fields | {"weightvc": "root 1", "later": 1})]


@target(root_seeds)
def root_object(data: bytes) -> None:
    """A root's head: what is read is written again by whoever changes the root."""
    made = read(root.decode, framed(frame.ROOT, data, []))
    assert made is None or root.decode(root.encode(made), "it") == made


@target(lambda: [packed({"entries": [commit_fields(), MOVE], "weightvc": "segment 1"})])
def segment_object(data: bytes) -> None:
    """A segment's head."""
    made = read(catalogue.decode_segment, framed(frame.SEGMENT, data, []))
    assert made is None or catalogue.decode_segment(catalogue.encode_segment(made), "it") == made


@target(lambda: [packed(commit_fields()), packed(MOVE)])
def entry_fields(data: bytes) -> None:
    """One entry of the catalogue."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return
    made = read(catalogue.from_json, fields)
    assert made is None or catalogue.from_json(catalogue.to_json(made), "it") == made


@target(lambda: [record().encode()])
def version_record(data: bytes) -> None:
    """A version's record."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        made = version.read(text)
    except (Corrupt, Unsupported):
        return
    assert made.id == frame.digest(data).hex()


def layout_seeds() -> list[bytes]:
    files = [LayoutFile("config.json", 3, b"abc"), LayoutFile("a/x.safetensors", 20, bytes(8), True)]
    made = layout.make(Layout(tuple(files)))
    inline = sorted(made.contents)
    return [joined(made.record.encode(), packed(inline), *[bytes(made.contents[one]) for one in inline])]


@target(layout_seeds)
def layout_object(data: bytes) -> None:
    """A layout's text, which of its contents are inline, and two of those."""
    text, inline, *contents = parts(data, 4)
    try:
        head = packed({"layout": text.decode(), "inline": json.loads(inline)})
    except (ValueError, RecursionError):
        return
    made = read(layout.decode, framed(frame.LAYOUT, head, [frame.compress(one) for one in contents]))
    if made is None:
        return
    for entry in made.entries:
        assert frame.digest(made.contents.get(entry.content, b"")).hex() == entry.content or (
            entry.content not in made.contents
        )
    try:
        paths.check_files([entry.path for entry in made.entries])
    except (BadName, BadFile):
        pass


def header_seeds() -> list[bytes]:
    infos = shapes().tensors
    small = [TensorInfo("", "a", "U8", (4,), 4), TensorInfo("", "é", "F4", (2,), 1)]
    return [header.build_header(some, meta)[8:] for some in (infos, small, []) for meta in (None, {"format": "pt"})]


@target(header_seeds)
def safetensors_header(data: bytes) -> None:
    """The JSON of a file's header, the file as long as its tensors say."""
    for size in (0, 5, shapes().nbytes):
        whole = len(data).to_bytes(8, "little") + data + bytes(size)
        try:
            made = header.read_header(lambda start, stop, whole=whole: whole[start:stop], len(whole), "x")
        except (BadFile, BadTensor):
            continue
        assert sum(end - begin for *_, begin, end in made.tensors) == size


def slime_seeds() -> list[bytes]:
    out = []
    old, new = b"123456789", b"123406780"
    for encoding in slime.ENCODINGS:
        made = slime.Encoder(encoding, "adler32", len(old))
        made.add(old, new)
        data, _ = made.finish()
        index = slime.Delta(2, 1, encoding, "adler32", {"a.safetensors": frozenset("bc")}, made_of="d" * 64)
        out.append(joined(index.to_json(), frame.decompress(data, 99, "it"), data))
    return out


@target(slime_seeds)
def slime_delta(data: bytes) -> None:
    """The index of a delta; and a tensor's delta, whose frame is whole, and as it comes."""
    index, body, raw = parts(data, 3)
    try:
        found = header.strict_json(index, "x")
        if slime.is_delta(found):
            made = slime.from_json(found, "x")
            assert slime.from_json(json.loads(made.to_json()), "x") == made
    except BadFile as error:
        if not str(error).startswith("x: "):
            raise AssertionError(f"{error!r} does not name the file") from error
    for encoding in slime.ENCODINGS:
        for blob in (frame.compress(body), raw):
            try:
                chunks = slime.decode(encoding, "adler32", blob, 9, lambda a, b: b"123456789"[a:b], "")
                assert sum(map(len, chunks)) <= 9
            except BadFile:
                continue
            raise AssertionError("no bytes have the checksum ''")


def raw_seeds() -> list[bytes]:
    out = [framed(kind, b'{"x":[1,2]}', [b"ab", b""]) for kind in frame.HEAD_LIMITS]
    whole = header.build_header(shapes().tensors) + bytes(shapes().nbytes)
    return [*out, frame.compress(b"abc" * 50), frame.compress(b""), whole, root_seeds()[0], name_of("pack").encode()]


@target(raw_seeds)
def raw_bytes(data: bytes) -> None:
    """The same bytes as an object of any kind, a zstd frame, a safetensors file, and a key."""
    for kind in frame.HEAD_LIMITS:
        read(frame.decode, kind, data)
    try:
        assert len(frame.decompress(data, 1 << 16, "it")) <= 1 << 16
    except Corrupt:
        pass
    try:
        header.read_header(lambda start, stop: data[start:stop], len(data), "x")
    except (BadFile, BadTensor):
        pass
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    try:
        assert str(key.checked(text, "pack")).startswith("pack/")
    except (ValueError, Corrupt, Refused):
        pass


def seeds() -> Iterator[tuple[str, bytes]]:
    """Every target's seeds."""
    for name, one in TARGETS.items():
        for seed in one.seeds():
            yield name, seed
