"""Both sides of slime's layout in plain Python, from its description: the trainer publishes, the engine pulls.

Nothing of weightvc is used here. Weights are {name: (dtype, shape, bytes)}.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import blake3
import xxhash
import zstandard

Plain = dict[str, tuple[str, list[int], bytes]]
INDEX = "model.safetensors.index.json"


def checksum(kind: str, data: bytes) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    return (xxhash.xxh3_128(data) if kind == "xxh3-128" else blake3.blake3(data)).hexdigest()


def safetensors(path: Path, tensors: Plain, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, object] = {"__metadata__": metadata} if metadata is not None else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(data for _, _, data in tensors.values()))


def opened(path: Path) -> tuple[dict[str, tuple[int, int, str, list[int]]], dict[str, str]]:
    """Where each tensor of a file lies (from its start), dtype and shape; and the file's metadata."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    begin = 8 + length
    return {
        name: (begin + one["data_offsets"][0], begin + one["data_offsets"][1], one["dtype"], one["shape"])
        for name, one in header.items()
    }, metadata


def read(directory: Path) -> Plain:
    """The tensors of a checkpoint."""
    out: Plain = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        for name, (begin, end, dtype, shape) in opened(path)[0].items():
            out[name] = (dtype, shape, data[begin:end])
    return out


# The trainer


def checkpoint(directory: Path, tensors: Plain, shards: int = 1) -> Path:
    """Write a whole checkpoint, with a config beside it; the index, if there are shards, comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    if shards == 1:
        safetensors(directory / "model.safetensors", tensors)
        return directory
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        safetensors(directory / file, {name: tensors[name] for name in names[i::shards]})
        weight_map |= dict.fromkeys(names[i::shards], file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def publish(
    source: Path,
    number: int,
    old: Plain,
    new: Plain,
    *,
    encoding: str = "xor",
    hashed: str = "xxh3-128",
    shards: int = 1,
) -> Path:
    """Write a delta on the version before."""
    directory = source / f"weight_v{number:06d}"
    directory.mkdir(parents=True)
    changed = [name for name in sorted(new) if new[name][2] != old[name][2]]
    weight_map = {}
    for i in range(shards if changed else 0):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        frames: Plain = {}
        for name in changed[i::shards]:
            body = delta(encoding, old[name][2], new[name][2])
            frame = zstandard.ZstdCompressor(level=1).compress(body)
            frames[name] = ("U8", [len(frame)], frame)
            weight_map[name] = file
        safetensors(directory / file, frames, {name: checksum(hashed, new[name][2]) for name in frames})
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": hashed,
    }
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return directory


def delta(encoding: str, old: bytes, new: bytes) -> bytes:
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(old, new, strict=True))
    at = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return struct.pack(f"<I{len(at)}I", len(at), *at) + bytes(new[i] for i in at)


# The engine


class Engine:
    """What /pull_weights does on one host: keeps `local` at a version, from the model that it was started from."""

    def __init__(self, local: Path, model: Path | None = None) -> None:
        self.local = local
        self.model = model
        self.applied: int | None = None

    def pull(self, source: Path, target: int) -> None:
        """Bring the local checkpoint to a version: from the newest whole one that is at most it, delta by delta."""
        start = target
        while start > (self.applied or 0) and self._index(source, start) is not None:
            start -= 1
        if self.applied is None or start > self.applied:
            seed = self.model if start == 0 else source / f"weight_v{start:06d}"
            assert seed is not None, "a stream of deltas alone, and no model to apply them to"
            shutil.rmtree(self.local, ignore_errors=True)
            self.local.mkdir()
            for path in seed.iterdir():
                if path.is_file():  # folders are passed over
                    shutil.copy(path, self.local / path.name)
            self.applied = start
        for number in range(self.applied + 1, target + 1):
            self._apply(source, number)

    def _index(self, source: Path, number: int) -> dict | None:
        """The index of a delta; None for a whole checkpoint."""
        directory = source / f"weight_v{number:06d}"
        assert directory.is_dir(), f"{directory.name} is not published"
        if not (directory / INDEX).exists():
            assert [path.name for path in directory.glob("*.safetensors")] == ["model.safetensors"]
            return None
        index = json.loads((directory / INDEX).read_text())
        return index if "delta_encoding" in index.get("metadata", {}) else None

    def _apply(self, source: Path, number: int) -> None:
        index = self._index(source, number)
        assert index is not None
        said = index["metadata"]
        assert (int(said["version"]), int(said["base_version"])) == (number, self.applied)
        assert said["compression_format"] == "zstd"
        places = {
            name: (path, *place)
            for path in self.local.glob("*.safetensors")
            for name, place in opened(path)[0].items()
        }
        directory = source / f"weight_v{number:06d}"
        assert {path.name for path in directory.glob("*.safetensors")} == set(index["weight_map"].values())
        for path in sorted(directory.glob("*.safetensors")):
            frames, wanted = opened(path)
            assert set(frames) == {name for name, file in index["weight_map"].items() if file == path.name}
            data = path.read_bytes()
            for name, (begin, end, dtype, _) in frames.items():
                assert dtype == "U8"
                # Without a limit: the frame has to say its size.
                body = zstandard.ZstdDecompressor().decompress(data[begin:end])
                file, first, last, *_ = places[name]
                new = bytearray(file.read_bytes())
                was = bytes(new[first:last])
                new[first:last] = applied(said["delta_encoding"], was, body)
                assert len(new) == file.stat().st_size
                assert checksum(said["checksum_format"], bytes(new[first:last])) == wanted[name]
                file.write_bytes(new)
        self.applied = number


def applied(encoding: str, old: bytes, body: bytes) -> bytes:
    """The new bytes of a tensor."""
    if encoding == "xor":
        return delta("xor", old, body)
    (count,) = struct.unpack_from("<I", body)
    new = bytearray(old)
    for i, at in enumerate(struct.unpack_from(f"<{count}I", body, 4)):
        new[at] = body[4 + 4 * count + i]
    assert len(body) == 4 + 5 * count
    return bytes(new)
