"""The layout in which slime and miles publish weights, and which engines with /pull_weights read; no I/O.

weight_vNNNNNN            a directory a version, NNNNNN its number in at least six digits
  full                    a checkpoint: model.safetensors, or shards with model.safetensors.index.json, in one folder
  delta                   an index whose metadata has a `delta_encoding`, and shards that it maps changed tensors to

The index of a delta has version, base_version (numbers, as texts), delta_encoding, compression_format (zstd) and
checksum_format. In its shards, each changed tensor is a U8 tensor of one zstd frame: of new ^ old, byte by byte
("xor"), or of the count of bytes that change (u4), their positions (u4 each, ascending) and their new values
("overwrite"). A shard's `__metadata__` has the checksum of each tensor's new bytes, in hex. All numbers are
little-endian.

From docs/en/advanced/delta-weight-sync.md and slime/utils/disk_delta.py of THUDM/slime, and weight_sync/
local_checkpoint.py of sgl-project/sglang, as of 2026.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from weightvc.errors import BadFile
from weightvc.objects import frame
from weightvc.objects.schema import CHUNK

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Bytes = numpy.typing.NDArray[numpy.uint8]

INDEX: Final = "model.safetensors.index.json"
ENCODINGS: Final = ("xor", "overwrite")
CHECKSUMS: Final = ("xxh3-128", "blake3", "adler32")
OVERWRITE_LIMIT: Final = 1 << 32
"""Bytes of the largest tensor whose positions u4 can say."""
LEVEL: Final = 1
"""Of zstd, as slime has it."""
VERSION: Final = "weightvc_version"
"""In a delta's metadata that we wrote: the id of the version. Engines pass over what they do not know."""

_NAME: Final = re.compile(r"weight_v([0-9]{6,18})")
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_WINDOW: Final = 128 << 20
"""Bytes that a frame may have its reader look back."""
_FED: Final = 1 << 10
"""Bytes of a frame that are decoded at once: a hostile one makes 32 MiB of them at most."""


def directory(number: int) -> str:
    """The name of a version's directory."""
    return f"weight_v{number:06d}"


def number_of(name: str) -> int | None:
    """The number in a directory's name, or None if it is no version's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and directory(int(match[1])) == name else None


# The index


@dataclass(frozen=True, slots=True)
class Delta:
    """What the index of a delta says. `files` has the tensors of each shard, `made_of` our version's id, if any."""

    version: int
    base: int
    encoding: str
    checksum: str
    files: Mapping[str, frozenset[str]]
    made_of: str | None = None

    def to_json(self) -> bytes:
        """The index as a file."""
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }
        if self.made_of is not None:
            metadata[VERSION] = self.made_of
        weight_map = {name: file for file, names in self.files.items() for name in sorted(names)}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, ensure_ascii=False).encode()


def is_delta(index: Any) -> bool:
    """Whether the JSON of an index is that of a delta, as engines tell it."""
    metadata = index.get("metadata") if type(index) is dict else None
    return type(metadata) is dict and "delta_encoding" in metadata


def from_json(index: Any, where: str) -> Delta:
    """A delta's index from its JSON. Raises BadFile naming `where`."""
    metadata, weight_map = index["metadata"], index.get("weight_map")
    texts = {name: metadata.get(name) for name in ("version", "base_version")}
    if not all(type(text) is str and _NUMBER.fullmatch(text) for text in texts.values()):
        raise BadFile(f"{where}: its version and base_version are no numbers: {texts!r:.200}")
    version, base = int(texts["version"]), int(texts["base_version"])
    if base >= version:
        raise BadFile(f"{where}: version {version} is said to be a delta on {base}, which does not come before it")
    for name, known in (
        ("delta_encoding", ENCODINGS),
        ("compression_format", ("zstd",)),
        ("checksum_format", CHECKSUMS),
    ):
        if metadata.get(name) not in known:
            raise BadFile(f"{where}: its {name} is {metadata.get(name)!r:.100}: known are {', '.join(known)}")
    if type(weight_map) is not dict or not all(type(file) is str for file in weight_map.values()):
        raise BadFile(f"{where}: has no weight_map of tensor names to file names")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not file.endswith(".safetensors") or "/" in file:
            raise BadFile(f"{where}: names {file!r:.200}, which is no safetensors file beside it")
        files.setdefault(file, set()).add(tensor)
    made_of = metadata.get(VERSION)
    return Delta(
        version,
        base,
        metadata["delta_encoding"],
        metadata["checksum_format"],
        {file: frozenset(names) for file, names in sorted(files.items())},
        made_of if type(made_of) is str else None,
    )


# Checksums


class Hasher(Protocol):
    """What hashlib's objects have."""

    def update(self, data: frame.Buffer, /) -> Any:
        """Go on with `data`."""
        ...

    def hexdigest(self) -> str:
        """Of all so far."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: frame.Buffer) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(checksum: str) -> Hasher:
    """One of CHECKSUMS, of nothing yet."""
    made: Hasher
    if checksum == "xxh3-128":
        import xxhash

        made = xxhash.xxh3_128()
    elif checksum == "blake3":
        import blake3

        made = blake3.blake3()
    else:
        made = _Adler32()
    return made


# A tensor's delta


class Encoder:
    """One changed tensor of `nbytes` bytes: takes old and new bytes piece by piece, from the first to the last."""

    def __init__(self, encoding: str, checksum: str, nbytes: int) -> None:
        """`encoding` and `checksum` are of ENCODINGS and CHECKSUMS."""
        import zstandard

        self._hasher = hasher(checksum)
        self._at = 0
        self._held: list[bytes] = []
        self._positions: list[Any] = []
        self._stream = None
        if encoding == "xor":
            # With its size in the header: some readers ask for it.
            self._stream = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)

    def add(self, old: frame.Buffer, new: frame.Buffer) -> None:
        """Go on with these bytes, equally many."""
        import numpy as np

        a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
        self._hasher.update(new if isinstance(new, bytes) else bytes(new))
        if self._stream is not None:
            self._held.append(self._stream.compress((a ^ b).data))
        else:
            changed = np.flatnonzero(a != b)
            self._positions.append((changed + self._at).astype("<u4"))
            self._held.append(b[changed].tobytes())
        self._at += len(b)

    def finish(self) -> tuple[bytes, str]:
        """The zstd frame, and the checksum of the new bytes."""
        if self._stream is not None:
            return b"".join([*self._held, self._stream.flush()]), self._hasher.hexdigest()
        import numpy as np

        positions = np.concatenate(self._positions).astype("<u4")
        body = b"".join([len(positions).to_bytes(4, "little"), positions.tobytes(), *self._held])
        return frame.compress(body, LEVEL), self._hasher.hexdigest()


Old = Callable[[int, int], frame.Buffer]
"""Gives bytes [start, stop) of the old tensor."""


def decode(encoding: str, checksum: str, blob: frame.Buffer, nbytes: int, old: Old, wanted: str) -> Iterator[bytes]:
    """The new bytes of a tensor of `nbytes` bytes, a chunk at a time; `wanted` is the checksum that they should have.

    What is wrong is raised after some or all of them: BadFile for a delta that is malformed or of another size, and
    where the new bytes have another checksum.
    """
    found = hasher(checksum)
    for chunk in (_xor if encoding == "xor" else _overwrite)(blob, nbytes, old):
        found.update(chunk)
        yield chunk
    if found.hexdigest() != wanted:
        raise BadFile(
            f"its new bytes have the {checksum} checksum {found.hexdigest()}, not {wanted!r:.100}: the delta is "
            "damaged, or was made on another base"
        )


def _xor(blob: frame.Buffer, nbytes: int, old: Old) -> Iterator[bytes]:
    import numpy as np

    at, held = 0, bytearray()
    for piece in _unpacked(blob, nbytes):
        held += piece
        while len(held) >= CHUNK or (held and at + len(held) == nbytes):
            size = min(CHUNK, len(held))
            was = np.frombuffer(old(at, at + size), np.uint8)
            yield (was ^ np.frombuffer(bytes(held[:size]), np.uint8)).tobytes()
            del held[:size]
            at += size
    if at + len(held) != nbytes:
        raise BadFile(f"its delta has {at + len(held)} bytes, where the tensor has {nbytes}")


def _overwrite(blob: frame.Buffer, nbytes: int, old: Old) -> Iterator[bytes]:
    import numpy as np

    body = b"".join(_unpacked(blob, 4 + 5 * nbytes))
    count = int.from_bytes(body[:4], "little")
    if len(body) != 4 + 5 * count:
        raise BadFile(f"its delta has {len(body)} bytes, where {count} changes take {4 + 5 * count}")
    positions = np.frombuffer(body, "<u4", count, 4).astype(np.int64)
    values = np.frombuffer(body, np.uint8, count, 4 + 4 * count)
    if count and (positions[-1] >= nbytes or (np.diff(positions) <= 0).any()):
        raise BadFile(f"its delta changes bytes that are out of order, or beyond its {nbytes}")
    for at in range(0, nbytes, CHUNK):
        end = min(at + CHUNK, nbytes)
        new = np.frombuffer(old(at, end), np.uint8).copy()
        first, last = np.searchsorted(positions, [at, end])
        new[positions[first:last] - at] = values[first:last]
        yield new.tobytes()


def _unpacked(blob: frame.Buffer, limit: int) -> Iterator[bytes]:
    """The content of exactly one zstd frame that fills `blob`, in pieces, `limit` bytes at most. Raises BadFile."""
    import zstandard

    view, done = memoryview(blob), 0
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
    try:
        for at in range(0, len(view), _FED):
            if reader.eof:
                raise BadFile("its delta goes on behind its zstd frame")
            piece = reader.decompress(view[at : at + _FED])
            done += len(piece)
            if done > limit:
                raise BadFile(f"its delta has over {limit} bytes")
            yield piece
    except zstandard.ZstdError as error:
        raise BadFile(f"its delta is no zstd frame: {error}") from None
    if not reader.eof or reader.unused_data:
        raise BadFile("its delta is a zstd frame that is cut short, or goes on behind its end")
