"""A second reader of repositories, written from docs/format.md alone: plain Python that holds everything in memory.

It shares no line with weightvc, so what both read alike is as documented. It checks every digest, and little else:
what is malformed otherwise ends in an AssertionError, or in whatever Python makes of it.
"""

import json
import struct
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from blake3 import blake3

from tests.kernels import plain_codec, plain_context, plain_rice

CHUNK = 4 << 20
SAME, RAW, PLANES, SPARSE, DENSE, REF, CONTEXT, RICE = range(8)
# In the order in which the tensors of a file without a layout lie.
BITS = {"U64": 64, "I64": 64, "F64": 64, "C64": 64, "F32": 32, "U32": 32, "I32": 32, "BF16": 16, "F16": 16, "U16": 16}
BITS |= {"I16": 16, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8}
BITS |= {"F6_E3M2": 6, "F6_E2M3": 6, "F4": 4, "BOOL": 8}


def digest(data: bytes | str) -> str:
    return blake3(data if isinstance(data, bytes) else data.encode()).hexdigest()


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def unpack(frame: bytes) -> bytes:
    """What one zstd frame holds, which states its size; zstandard refuses others, but for what follows no bytes."""
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def read(text: bytes | str, what: str | None) -> dict[str, Any]:
    """An object in JSON that says what it is."""
    value: dict[str, Any] = json.loads(text)
    assert value.get("weightvc") == what
    return value


def parse(data: bytes, letter: str, what: str | None) -> tuple[dict[str, Any], list[bytes]]:
    """Head and sections of any object but a pack."""
    assert data[:8] == b"WVC\1" + letter.encode() + bytes(3)
    data = data[8:]
    if letter == "R":
        assert blake3(data[32:]).digest() == data[:32]
        data = data[32:]
    end = 4 + int.from_bytes(data[:4], "little")
    head, sections = read(unpack(data[4:end]), what), []
    for size in head.get("sections", []):
        sections.append(data[end : end + size])
        end += size
    assert end == len(data)
    return head, sections


class Tensor(NamedTuple):
    component: str
    name: str
    dtype: str
    shape: list[int]

    def sizes(self) -> list[int]:
        """Bytes of each chunk."""
        nbytes = BITS[self.dtype] * prod(self.shape) // 8
        return [min(CHUNK, nbytes - at) for at in range(0, nbytes, CHUNK)]

    def lane(self) -> int:
        return max(1, BITS[self.dtype] // 8)


Tree = list[tuple[Tensor, list[bytes]]]  # tensors in order, each with its chunks
Plan = list[tuple[Tensor, int, bytes | None]]  # of each chunk its tensor, its bytes, and its source


def tensors_of(schema: str) -> list[Tensor]:
    components = read(schema, "schema 1")["components"]
    return [Tensor(component, *rest) for component, listed in sorted(components.items()) for rest in listed]


def by_tensor(tensors: list[Tensor], chunks: list[bytes]) -> Tree:
    """All chunks, or their digests, tensor by tensor."""
    rest = iter(chunks)
    tree = [(tensor, list(islice(rest, len(tensor.sizes())))) for tensor in tensors]
    assert sum(len(parts) for _, parts in tree) == len(chunks)
    return tree


def tree_digest(schema: str, digests: list[bytes]) -> str:
    """From the digests of all chunks."""
    tree = blake3(compact(["tree 1", digest(schema)]) + b"\n")
    for tensor, parts in by_tensor(tensors_of(schema), digests):
        tree.update(blake3(compact(["tensor 1", tensor.dtype, tensor.shape]) + b"\n" + b"".join(parts)).digest())
    return tree.hexdigest()


def plan_of(tensors: list[Tensor], old: Tree, moved: dict[int, int]) -> Plan:
    """What a patch against `old` is made of; without an old tree, what a base is."""
    numbers = {(tensor.component, tensor.name): j for j, (tensor, _) in enumerate(old)}
    plan: Plan = []
    for i, tensor in enumerate(tensors):
        j = moved.get(i, numbers.get((tensor.component, tensor.name), -1))
        chunks = old[j][1] if j >= 0 else []
        for k, size in enumerate(tensor.sizes()):
            plan.append((tensor, size, chunks[k] if k < len(chunks) and len(chunks[k]) == size else None))
    return plan


def replaced(old: bytes, new: bytes, tensor: Tensor) -> bytes:
    """The old lanes that change."""
    before, after = (np.frombuffer(data, f"<u{tensor.lane()}") for data in (old, new))
    return bytes(before[before != after])


def chunks_of(index: bytes, payloads: bytes, plan: Plan, tables: dict[str, bytes]) -> list[bytes]:
    """All chunks of a stream, block by block."""
    n = int.from_bytes(index[:4], "little")
    fields = struct.unpack(f"<{n}I{n}B{n}I" + n * "4s", index[4:])
    chunks: list[bytes] = []
    for count, codec, size, check in (fields[i::n] for i in range(n)):
        payload, payloads = payloads[:size], payloads[size:]
        here = plan[len(chunks) : len(chunks) + count]
        tensor, whole = here[0][0], codec in (RAW, PLANES, REF)
        old = b"".join(source or bytes(nbytes) for _, nbytes, source in here)  # of what is whole its length counts
        assert whole or all(source is not None for _, _, source in here)
        if codec == SAME:
            block = old
        elif codec == REF:
            block = chunks[int.from_bytes(payload, "little")]
        elif codec == CONTEXT:
            block = plain_context.decode(tables[tensor.dtype], tensor.dtype, payload, old)
        elif codec == RICE:
            block = plain_rice.decode(payload, tensor.lane(), old)
        else:
            block = plain_codec.decode(codec, payload, old, tensor.lane())
        assert whole or not payload or blake3(replaced(old, block, tensor)).digest()[:4] == check
        for _, nbytes, _ in here:
            chunks.append(block[:nbytes])
            block = block[nbytes:]
        assert not block
    assert not payloads
    return chunks


class Repository:
    """What a directory holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root, _ = parse((path / "root").read_bytes(), "R", "root 1")
        page = self.root["tags"]
        self.tags = self.get(page, "P", "tags 1")[0]["tags"] if page else {}
        segments = [self.get(key, "S", "segment 1")[0]["entries"] for key, _ in self.root["segments"]]
        self.catalogue = [entry for entries in [*segments, self.root["tail"]] for entry in entries]
        self.commits = {digest(entry["record"]): entry for entry in self.catalogue if entry["op"] == "commit"}
        self._trees: dict[str, Tree] = {}

    def object(self, key: str) -> bytes:
        data = (self.path / key).read_bytes()
        assert digest(data) == key.partition("/")[2].partition(".")[0], key
        return data

    def get(self, key: str, letter: str, what: str | None = None) -> tuple[dict[str, Any], list[bytes]]:
        return parse(self.object(key), letter, what)

    def tree(self, version: str) -> Tree:
        """By the entry's own manifest, which always leads to a base."""
        if version not in self._trees:
            self._trees[version], _ = next(self.ways(version, self.commits[version]["manifest"]))
        return self._trees[version]

    def ways(self, version: str, manifest: str) -> Iterator[tuple[Tree, list[Any]]]:
        """The tree by the base and by the patch of a manifest, each with its edge; all digests are checked."""
        head, (joined, *sections) = self.get(manifest, "M", "manifest 1")
        schema = self.get(head["schema"][1], "C")[0]["schema"]
        record, tensors = read(head["record"], "version 1"), tensors_of(schema)
        digests = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        assert [digest(head["record"]), digest(schema)] == [version, head["schema"][0]]
        assert tree_digest(schema, digests) == record["tree"]
        for stream in [head[way] for way in ("base", "patch") if way in head]:
            index, inline, *sections = sections  # what is left are the patch's two, then its tables
            source = stream.get("from")
            if source and source not in self.commits:
                continue  # it has expired, and there is a base
            plan = plan_of(tensors, self.tree(source) if source else [], dict(stream.get("moved", [])))
            payloads = inline + b"".join(self.object(key)[8:] for key, _ in stream["packs"])
            new = chunks_of(unpack(index), payloads, plan, dict(zip(stream.get("tables", []), sections)))
            assert [blake3(chunk).digest() for chunk in new] == digests
            differ = sum(len(b if a is None else replaced(a, b, t)) // t.lane() for (t, _, a), b in zip(plan, new))
            assert differ == stream.get("changed", differ)
            yield by_tensor(tensors, new), [source, len(payloads), differ if source else record["elements"]]

    def files(self, version: str) -> dict[str, bytes]:
        """The files of a checkpoint, by path."""
        entry, tree = self.commits[version], self.tree(version)
        held = {(tensor.component, tensor.name): b"".join(chunks) for tensor, chunks in tree}
        if entry["layout"] is None:
            return files_without_layout([tensor for tensor, _ in tree], held)
        head, sections = self.get(entry["layout"], "L")
        assert digest(head["layout"]) == json.loads(entry["record"])["layout"]
        sections += [self.get(key, "F", "file 1")[1][0] for key in entry["files"]]
        contents = {digest(content): content for content in map(unpack, sections)}
        files = {}
        for path, kind, size, _, content in read(head["layout"], "layout 1")["files"]:
            files[path] = contents[content]
            if kind == "weights":
                header = json.loads(files[path][8:])
                order = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
                files[path] += b"".join(held[path.rpartition("/")[0], name] for name in order)
            assert len(files[path]) == size
        return files


def files_without_layout(tensors: list[Tensor], held: dict[tuple[str, str], bytes]) -> dict[str, bytes]:
    """A file for each component."""
    files = {}
    for component in {tensor.component for tensor in tensors} or {""}:
        mine = [tensor for tensor in tensors if tensor.component == component]
        header, body = {}, b""
        for _, name, dtype, shape in sorted(mine, key=lambda tensor: (list(BITS).index(tensor.dtype), tensor.name)):
            begin, body = len(body), body + held[component, name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(body)]}
        text = compact(header)
        text += b" " * (-len(text) % 8)
        files[f"{component}/model.safetensors".lstrip("/")] = len(text).to_bytes(8, "little") + text + body
    return files
