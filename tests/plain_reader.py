"""A plain reader of repositories, written from docs/format.md and nothing else.

It shares no code with weightvc, so what both read alike is what the document says. It is slow, holds whole versions
in memory and checks all it meets, the chunks of versions in between too.
"""

import json
import math
import re
import struct
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from tests.kernels.plain_context import decode as decode_context
from tests.kernels.plain_rice import decode as decode_rice

MIB = 2**20
CHUNK = 4 * MIB
KEY = re.compile(r"([a-z]+)/([0-9a-f]{64})\.[0-9]{1,19}-[0-9a-f]{32}-[0-9]{1,9}")
KINDS = {"segment": "S", "page": "P", "manifest": "M", "pack": "K", "schema": "C", "layout": "L", "file": "F"}
HEADS = {"R": "root 1", "S": "segment 1", "M": "manifest 1", "F": "file 1"}
LANES = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2", 2: "F16 BF16 I16 U16"}
LANES |= {4: "F32 I32 U32", 8: "F64 I64 U64 C64"}
LANE = {dtype: lane for lane, dtypes in LANES.items() for dtype in dtypes.split()}
BITS = {dtype: 8 * lane for dtype, lane in LANE.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
FILE_ORDER = (
    "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 "
    "F6_E3M2 F6_E2M3 F4 BOOL"
)
SAME, RAW, PLANES, SPARSE, DENSE, REF, CONTEXT, RICE = range(8)
Array = npt.NDArray[Any]


class Damaged(Exception):
    """What was read is not what the format allows; the message names the object."""


def need(condition: object, message: str) -> None:
    """Refuse what was read unless the condition holds."""
    if not condition:
        raise Damaged(message)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Name what was being read in every error that it causes."""
    try:
        yield
    except Exception as error:  # whatever goes wrong, what was read is to blame
        known = isinstance(error, Damaged | zstandard.ZstdError)
        raise Damaged(f"{what}: {error if known else repr(error)}") from error


def digest(data: bytes | str) -> str:
    """The blake3 of bytes, or of a text's UTF-8, in hexadecimal."""
    return blake3(data.encode() if isinstance(data, str) else data).hexdigest()


def canonical(value: Any) -> bytes:
    """Canonical JSON of plain ASCII, as digests begin with it."""
    return json.dumps(value, separators=(",", ":")).encode()


def unzstd(frame: bytes, least: int, most: int) -> bytes:
    """The content of exactly one zstd frame that states a size between `least` and `most`."""
    need(frame[:4] == b"\x28\xb5\x2f\xfd", "no zstd frame")
    size = zstandard.get_frame_parameters(frame).content_size
    need(size != zstandard.CONTENTSIZE_UNKNOWN and least <= size <= most, "a zstd frame of another size")
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    content = decompressor.decompress(frame)
    need(decompressor.eof and not decompressor.unused_data and len(content) == size, "not exactly one zstd frame")
    return content


def parse(data: bytes, letter: str) -> tuple[dict[str, Any], list[bytes]]:
    """The head and the sections of an object."""
    need(data[:8] == b"WVC\x01" + letter.encode() + bytes(3), "another magic, format or kind")
    at = 8
    if letter == "R":
        need(blake3(data[40:]).digest() == data[8:40], "not what its digest says")
        at = 40
    begin, at = at + 4, at + 4 + int.from_bytes(data[at : at + 4], "little")
    head = json.loads(unzstd(data[begin:at], 0, (16 if letter == "R" else 256) * MIB).decode())
    need(letter not in HEADS or head["weightvc"] == HEADS[letter], "another `weightvc`")
    sections = []
    for length in head.get("sections", []):
        need(length >= 0, "a section of negative length")
        sections.append(data[at : at + length])
        at += length
    need(at == len(data), "sections that do not add up")
    return head, sections


def check_paths(paths: list[str]) -> None:
    """Refuse paths that are unsafe to write."""
    folded = {}
    for path in paths:
        need(len(path.encode()) <= 1024 and "\\" not in path, f"the path {path!r}")
        need(not any(unicodedata.category(letter) == "Cc" for letter in path), f"the path {path!r}")
        for part in path.split("/"):  # an empty or absolute path has an empty part
            named = part.lower() in ("", ".", "..", ".weightvc")
            unsafe = named or re.match("[A-Za-z]:", part) or len(part.encode()) > 255
            need(not unsafe, f"the path {path!r}")
        folded[unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())] = path
    need(len(folded) == len(paths), "paths that are the same to some file systems")
    folders = {path[:at] for path in folded for at, letter in enumerate(path) if letter == "/"}
    need(folders.isdisjoint(folded), "a path that is the folder of another")


class Payload:
    """The payload of a block, read from its begin to its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self.at += size
        need(self.at <= len(self.data), "a payload that ends early")
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        """Seven bits a byte, least significant first."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise Damaged("a varint of more than 9 bytes")

    def section(self, size: int) -> Array:
        """A section of `size` bytes."""
        stored, compressed = divmod(self.varint(), 2)
        need(compressed or stored == size, "a plain section of another size")
        data = self.take(stored)
        return np.frombuffer(unzstd(data, size, size) if compressed else data, np.uint8)

    def numbers(self, n: int, bits: int) -> Array:
        """A stream of n unsigned integers, as u64."""
        low = self.take(1)[0]
        need(low < bits, "too many low bits")
        numbers = np.zeros(n, np.uint64)
        if low:
            for j, plane in enumerate(self.section(low * ((n + 7) // 8)).reshape(low, -1)):
                numbers |= np.unpackbits(plane, count=n, bitorder="little").astype(np.uint64) << j
        high = self.section(n).astype(np.uint64)
        large = np.flatnonzero(high == 255)
        most = 2 ** (bits - low) - 1
        need((high <= most).all(), "a number over its bits")
        if len(large):
            extra = np.zeros(len(large), np.uint64)
            planes = self.take(1)[0]
            need(planes <= bits // 8, "too many byte planes")
            for k in range(planes):
                extra |= self.section(len(large)).astype(np.uint64) << 8 * k
            need((extra <= most - 255).all(), "a number over its bits")
            high[large] += extra
        return numbers | high << low


def change(old: Array, delta: Array, mode: int) -> Array:
    """The new lanes for old ones and their deltas."""
    bits = 8 * old.itemsize
    if mode == 1:
        return old ^ delta
    need(mode == 0, f"the mode {mode}, which this reader does not know")

    def m(x: Array) -> Array:
        return np.where(x >> (bits - 1) != 0, x ^ (2 ** (bits - 1) - 1), x)

    return m(m(old) + ((delta >> 1) ^ -(delta & 1)))


def need_check(old: Array, new: Array, check: int) -> None:
    """Refuse a block whose check is not of the old lanes that change."""
    found = blake3(old[old != new].tobytes()).digest()[:4]
    need(found == check.to_bytes(4, "little"), "old lanes are not as checked")


def decode(codec: int, data: bytes, size: int, lane: int, old: bytes | None, check: int = 0) -> bytes:
    """The bytes of a block of any codec but REF; `old` are those of its sources, None if it lacks one."""
    payload, bits, dtype = Payload(data), 8 * lane, np.dtype(f"<u{lane}")
    n = size // lane
    if codec == RAW:
        new = payload.take(size)
    elif codec == PLANES:
        lanes = np.zeros(n, dtype)
        for plane in range(lane):
            lanes |= payload.section(n).astype(dtype) << 8 * plane
        new = (lanes if lane == 1 else lanes >> 1 | lanes << (bits - 1)).tobytes()
    elif codec == RICE:
        need(old is not None and len(old) == size, "a block without its sources")
        assert old is not None
        try:
            new = decode_rice(payload.take(len(data)), lane, old)
        except (AssertionError, IndexError) as error:
            raise Damaged(f"a RICE payload that is none: {error!r}") from None
        need_check(np.frombuffer(old, dtype), np.frombuffer(new, dtype), check)
    elif codec in (SAME, SPARSE, DENSE):
        need(old is not None and len(old) == size, "a block without its sources")
        assert old is not None
        lanes = np.frombuffer(old, dtype).copy()
        at, delta, mode = np.zeros(0, np.int64), lanes[:0], 0
        if codec == DENSE:
            mode = payload.take(1)[0]
            delta = payload.numbers(n, bits).astype(dtype)
            at = np.flatnonzero(delta)
            delta = delta[at]
        elif codec == SPARSE and data:
            mode, changed = payload.take(1)[0], payload.varint()
            need(1 <= changed <= n, "a count over the block's lanes")
            gaps = payload.numbers(changed, 64)
            need((gaps < n).all(), "a position past the block")  # first, so that the sums below cannot overflow
            at = np.cumsum(gaps.astype(np.int64) + 1) - 1
            need(at[-1] < n, "a position past the block")
            delta = payload.numbers(changed, bits).astype(dtype)
            need(delta.all(), "a SPARSE delta of 0")
        if codec != SAME:
            need(
                blake3(lanes[at].tobytes()).digest()[:4] == check.to_bytes(4, "little"),
                "old lanes are not as checked",
            )
        lanes[at] = change(lanes[at], delta, mode)
        new = lanes.tobytes()
    else:
        raise Damaged(f"the codec {codec}, which this reader does not know")
    need(payload.at == len(data), "a payload that ends late")
    return new


@dataclass(frozen=True)
class Tensor:
    """What a schema says of a tensor."""

    component: str
    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def chunks(self) -> list[int]:
        """Bytes of each of its chunks."""
        return [min(CHUNK, self.nbytes - begin) for begin in range(0, self.nbytes, CHUNK)]

    def digest(self, chunks: list[bytes]) -> bytes:
        """Its digest, of those of its chunks."""
        return blake3(canonical(["tensor 1", self.dtype, self.shape]) + b"\n" + b"".join(chunks)).digest()


def tensors_of(schema: str) -> list[Tensor]:
    """The tensors of a schema's text, in order."""
    value = json.loads(schema)
    need(value["weightvc"] == "schema 1", "another `weightvc`")
    tensors = []
    check_paths([component for component in value["components"] if component])
    for component, listed in sorted(value["components"].items()):
        names = [name for name, _, _ in listed]
        need(all(a < b for a, b in pairwise(names)), "a schema out of order, or with a name twice")
        for name, dtype, shape in listed:
            need(dtype in BITS, f"the dtype {dtype!r}, which this reader does not know")
            need(all(type(n) is int and n >= 0 for n in shape), "a shape that is none")
            need(math.prod(shape) * BITS[dtype] % 8 == 0, "a tensor that does not fill whole bytes")
            tensors.append(Tensor(component, name, dtype, shape))
    return tensors


class Version:
    """A version's manifest, checked down to the tree's digest."""

    def __init__(self, repository: "Repository", id: str, manifest: str | None = None) -> None:
        self.repository, self.id = repository, id
        self.entry = repository.commits[id]
        self.head, self.sections = repository.open(manifest or self.entry["manifest"], "manifest")
        need(digest(self.head["record"]) == id, "a record that is not what the id says")
        self.record: dict[str, Any] = json.loads(self.head["record"])
        need(self.record["weightvc"] == "version 1", "another `weightvc`")
        schema_digest, schema_key = self.head["schema"]
        schema = repository.open(schema_key, "schema")[0]["schema"]
        need(digest(schema) == schema_digest, "a schema that is not what its digest says")
        self.tensors = tensors_of(schema)
        self.ways: list[str] = [way for way in ("base", "patch") if way in self.head]
        named = self.head.get("patch", {}).get("tables", [])
        need(self.ways and len(self.sections) == 1 + 2 * len(self.ways) + len(named), "sections that do not add up")
        self.tables = dict(zip(named, self.sections[1 + 2 * len(self.ways) :]))
        # (tensor's number, number in the tensor, bytes) of each chunk
        self.chunks = [(i, k, size) for i, tensor in enumerate(self.tensors) for k, size in enumerate(tensor.chunks)]
        need(len(self.sections[0]) == 32 * len(self.chunks), "another number of chunk digests")
        self.digests = [self.sections[0][at : at + 32] for at in range(0, len(self.sections[0]), 32)]
        tree = canonical(["tree 1", schema_digest]) + b"\n"
        tree += b"".join(t.digest(self.split(self.digests, i)) for i, t in enumerate(self.tensors))
        need(digest(tree) == self.record["tree"], "a tree that is not what its digest says")

    @cached_property
    def first(self) -> list[int]:
        """The number of each tensor's first chunk, and of the end."""
        return list(accumulate((len(tensor.chunks) for tensor in self.tensors), initial=0))

    def split(self, chunks: list[bytes], i: int) -> list[bytes]:
        """Of a list of something for every chunk, the part of tensor i."""
        return chunks[self.first[i] : self.first[i + 1]]

    def sources(self, old: "Version") -> list[int | None]:
        """Of every chunk, the number of its source in an older version."""
        names = {(tensor.component, tensor.name): j for j, tensor in enumerate(old.tensors)}
        was = [names.get((tensor.component, tensor.name), -1) for tensor in self.tensors]
        for i, j in self.head["patch"]["moved"]:
            need(0 <= i < len(was) and -1 <= j < len(old.tensors), "a moved tensor that is none")
            was[i] = j
        numbers = {(j, k, size): number for number, (j, k, size) in enumerate(old.chunks)}
        return [numbers.get((was[i], k, size)) for i, k, size in self.chunks]

    def blocks(self, way: str) -> Iterator[tuple[int, int, bytes, int]]:
        """Chunks, codec, payload and check of every block of the base or the patch."""
        at = 1 + 2 * self.ways.index(way)
        index, stream = unzstd(self.sections[at], 4, 4 + 13 * len(self.chunks)), self.sections[at + 1]
        n = int.from_bytes(index[:4], "little")
        need(len(index) == 4 + 13 * n, "an index of another length")
        values = struct.unpack(f"<{n}I{n}B{n}I{n}I", index[4:])
        counts, codecs, sizes, checks = (values[k * n : (k + 1) * n] for k in range(4))
        need(all(counts) and sum(counts) == len(self.chunks), "blocks that do not cover all chunks")
        ends, end = set(np.cumsum(sizes, dtype=np.int64).tolist()), 0
        packs = self.head[way]["packs"]
        need(not packs or not stream, "inline bytes beside packs")
        for key, size in packs:
            pack = self.repository.load(key, "pack")
            end += size
            need(pack[:8] == b"WVC\x01K" + bytes(3) and len(pack) == 8 + size, f"{key}: another kind or length")
            need(end in ends, f"{key}: a pack that ends inside a block")
            stream += pack[8:]
        need(len(stream) == sum(sizes), "payloads that do not add up")
        at = 0
        for count, codec, size, check in zip(counts, codecs, sizes, checks):
            yield count, codec, stream[at : at + size], check
            at += size

    def context(self, dtype: str, payload: bytes, old: bytes, check: int) -> bytes:
        """A CONTEXT block, by the plain decoder of docs/patch.md."""
        need(dtype in self.tables, f"no tables for {dtype}")
        try:
            new = decode_context(self.tables[dtype], dtype, payload, old)
        except (AssertionError, IndexError) as error:
            raise Damaged(f"a context payload that is none: {error!r}") from None
        kind = np.dtype(f"<u{LANE[dtype]}")
        need_check(np.frombuffer(old, kind), np.frombuffer(new, kind), check)
        return new

    def read(self, way: str, old: "Version | None", old_chunks: list[bytes]) -> list[bytes]:
        """All chunks, checked, by the base or by the patch against an older version's chunks."""
        sources = self.sources(old) if old else [None] * len(self.chunks)
        chunks: list[bytes] = []
        for count, codec, payload, check in self.blocks(way):
            first, last = len(chunks), len(chunks) + count
            lengths = [size for _, _, size in self.chunks[first:last]]
            lanes = {LANE[self.tensors[i].dtype] for i, _, _ in self.chunks[first:last]}
            need(len(lanes) == 1 and sum(lengths) <= 64 * MIB, "a block of several lane widths, or too large")
            need(check == 0 or codec in (SPARSE, DENSE, CONTEXT, RICE), "a check where there is none")
            if codec == REF:
                need(count == 1 and len(payload) == 4, "a REF of more than a chunk, or of another length")
                earlier = int.from_bytes(payload, "little")
                need(earlier < first, "a REF that does not point backwards")
                data = chunks[earlier]
            else:
                known = [old_chunks[source] for source in sources[first:last] if source is not None]
                joined = b"".join(known) if old and len(known) == count else None
                if codec == CONTEXT:
                    dtypes = {self.tensors[i].dtype for i, _, _ in self.chunks[first:last]}
                    need(joined is not None and len(dtypes) == 1, "a CONTEXT block of several dtypes, or no sources")
                    assert joined is not None
                    data = self.context(dtypes.pop(), payload, joined, check)
                else:
                    data = decode(codec, payload, sum(lengths), lanes.pop(), joined, check)
            for length in lengths:
                chunks.append(data[:length])
                need(
                    blake3(chunks[-1]).digest() == self.digests[len(chunks) - 1], f"chunk {len(chunks) - 1} is wrong"
                )
                data = data[length:]
            need(not data, "a REF to a longer chunk")
        return chunks


class Repository:
    """A repository in a local directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with about("root"):
            self.root, _ = parse((path / "root").read_bytes(), "R")
            tags = self.root["tags"]
            self.tags: dict[str, str] = self.page(tags, "tags")["tags"] if tags else {}
            self.entries: list[dict[str, Any]] = []
            for key, count in self.root["segments"]:
                entries = self.open(key, "segment")[0]["entries"]
                need(len(entries) == count, f"{key}: another number of entries")
                self.entries += entries
            self.entries += self.root["tail"]
            # the last entry of a version counts
            self.commits = {digest(entry["record"]): entry for entry in self.entries if entry["op"] == "commit"}

    def load(self, key: str, kind: str) -> bytes:
        """An object's bytes, checked against its key."""
        with about(key):
            match = KEY.fullmatch(key)
            need(match and match[1] == kind, "another kind of key")
            data = (self.path / key).read_bytes()
            need(match and digest(data) == match[2], "not what its key says")
        return data

    def open(self, key: str, kind: str) -> tuple[dict[str, Any], list[bytes]]:
        """An object's head and sections."""
        data = self.load(key, kind)
        with about(key):
            return parse(data, KINDS[kind])

    def page(self, path: str, kind: str) -> dict[str, Any]:
        """The head of a page, or of a pin, whose key is no digest."""
        with about(path):
            data = self.load(path, "page") if path.startswith("page/") else (self.path / path).read_bytes()
            head, _ = parse(data, "P")
            need(head["weightvc"] == f"{kind} 1", "another `weightvc`")
            return head

    def read(self, id: str, prefer: str = "base") -> tuple[Version, list[bytes]]:
        """A version and its tensors' bytes, in order. What has a base and a patch is read by the preferred one."""
        with about(f"version {id}"):
            version = first = Version(self, id)
            chain: list[tuple[Version, str]] = []
            while True:
                # The source of a patch may have expired where there is a base as well.
                lost = "patch" in version.ways and version.head["patch"]["from"] not in self.commits
                way = prefer if prefer in version.ways and not (prefer == "patch" and lost) else version.ways[0]
                chain.append((version, way))
                if way == "base":
                    break
                need(len(chain) <= len(self.commits), "patches that go round in a circle")
                version = Version(self, version.head["patch"]["from"])
            old, chunks = None, list[bytes]()
            for version, way in reversed(chain):
                with about(f"by the {way} of {version.id}"):
                    chunks = version.read(way, old, chunks)
                old = version
            return first, [b"".join(first.split(chunks, i)) for i in range(len(first.tensors))]

    def read_by(self, id: str, manifest: str) -> list[list[bytes]]:
        """A version's tensors' bytes, by each stream of one of its manifests; what a patch is against by read()."""
        out = []
        version = Version(self, id, manifest)
        for way in version.ways:
            old, chunks = None, list[bytes]()
            if way == "patch":
                old, tensors = self.read(version.head["patch"]["from"])
                for tensor, data in zip(old.tensors, tensors):
                    chunks += [data[at : at + 4 * MIB] for at in range(0, tensor.nbytes, 4 * MIB)]
            with about(f"by the {way} of {manifest}"):
                made = version.read(way, old, chunks)
            out.append([b"".join(version.split(made, i)) for i in range(len(version.tensors))])
        return out

    def files(self, version: Version, data: list[bytes]) -> dict[str, bytes]:
        """The files of a version, from its tensors' bytes."""
        with about(f"version {version.id}"):
            tensors = {(tensor.component, tensor.name): i for i, tensor in enumerate(version.tensors)}
            if version.head["layout"] is None:
                need(version.record["layout"] is None, "a layout that is missing")
                return self._without_layout(version, data)
            head, sections = self.open(version.head["layout"], "layout")
            need(digest(head["layout"]) == version.record["layout"], "a layout that is not what its digest says")
            layout = json.loads(head["layout"])
            need(layout["weightvc"] == "layout 1", "another `weightvc`")
            need(len(sections) == len(head["inline"]), "another number of inline contents")
            inline = dict(zip(head["inline"], sections))
            check_paths([path for path, *_ in layout["files"]])
            files = {}
            for path, kind, size, length, content_digest in layout["files"]:
                if content_digest in inline:
                    need(length <= 65536, f"{path}: a large content inline")
                    content = unzstd(inline[content_digest], length, length)
                else:
                    key = version.head["files"][content_digest]
                    (section,) = self.open(key, "file")[1]
                    content = unzstd(section, length, length)
                need(digest(content) == content_digest, f"{path}: not what its digest says")
                if kind == "weights":
                    listed = json.loads(content[8:].decode())
                    listed.pop("__metadata__", None)
                    need(len(content) == 8 + int.from_bytes(content[:8], "little"), f"{path}: another header length")
                    component = path.rpartition("/")[0]
                    for name, said in sorted(listed.items(), key=lambda item: item[1]["data_offsets"]):
                        i = tensors.pop((component, name))
                        tensor = version.tensors[i]
                        need(
                            (said["dtype"], said["shape"]) == (tensor.dtype, tensor.shape), f"{path}: not the tree's"
                        )
                        begin, end = (length + offset for offset in said["data_offsets"])
                        need((begin, end - begin) == (len(content), tensor.nbytes), f"{path}: tensors with gaps")
                        content += data[i]
                else:
                    need(kind == "file", f"{path}: another kind of file")
                need(len(content) == size, f"{path}: another size")
                files[path] = content
            need(not tensors, "tensors that no file has")
            return files

    def _without_layout(self, version: Version, data: list[bytes]) -> dict[str, bytes]:
        files = {}
        for component in {tensor.component for tensor in version.tensors} or {""}:
            mine = [i for i, tensor in enumerate(version.tensors) if tensor.component == component]
            mine.sort(
                key=lambda i: FILE_ORDER.split().index(version.tensors[i].dtype)
            )  # stable: they are sorted by name
            header, end = {}, 0
            for i in mine:
                tensor = version.tensors[i]
                offsets = [end, end := end + tensor.nbytes]
                header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text += b" " * (-len(text) % 8)
            content = len(text).to_bytes(8, "little") + text + b"".join(data[i] for i in mine)
            files[f"{component}/model.safetensors" if component else "model.safetensors"] = content
        return files
