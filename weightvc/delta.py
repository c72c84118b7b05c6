"""A delta directory of slime's layout as a source: the weights that it makes of another source."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weightvc.errors import BadFile, BadTensor
from weightvc.objects import slime
from weightvc.objects.frame import Buffer
from weightvc.objects.schema import CHUNK
from weightvc.pool import Pool
from weightvc.protocol import parallel
from weightvc.protocol.spool import Reader, Spool
from weightvc.protocol.stored import VersionSource
from weightvc.sources.base import Layout, Source, TensorInfo
from weightvc.sources.header import MAX_HEADER, read_header, shown, strict_json
from weightvc.sources.local import LocalFiles


class Frame(NamedTuple):
    """Where the delta of a tensor lies: a file, its bytes there; and the checksum that the new bytes should have."""

    file: str
    begin: int
    end: int
    wanted: str


class DeltaFiles:
    """The files of a delta directory, their headers read and checked; no tensor's delta yet."""

    def __init__(self, files: LocalFiles, index: slime.Delta) -> None:
        """Raises BadFile, BadTensor for shards that are not what `index` says. Takes the files over."""
        self.index = index
        self.frames: dict[str, Frame] = {}
        self._files = files
        found = files.walk(lambda path: path not in index.files)
        files.keep(found)
        for file in index.files:
            if file not in found:
                raise BadFile(f"{files.where(file)}: is not there, and the index names it")
        for file, names in index.files.items():
            self._read(file, names)

    def _read(self, file: str, names: frozenset[str]) -> None:
        files, where = self._files, self._files.where(file)
        header = read_header(lambda start, stop: files.read(file, start, stop), files.sizes[file], where)
        if {name for name, *_ in header.tensors} != names:
            raise BadFile(f"{where}: its tensors are not those that the index says are in it")
        for name, dtype, shape, begin, end in header.tensors:
            wanted = (header.metadata or {}).get(name)
            if dtype != "U8" or len(shape) != 1:
                raise BadTensor(
                    f"{where}: the delta of {shown(name)} is {dtype} {list(shape)!s:.100}, not U8 [bytes]"
                )
            if wanted is None:
                raise BadFile(f"{where}: has no checksum of {shown(name)}")
            self.frames[name] = Frame(file, begin, end, wanted)

    def frame(self, name: str) -> bytes:
        """The zstd frame of a tensor."""
        frame = self.frames[name]
        return self._files.read(frame.file, frame.begin, frame.end)

    def check(self) -> None:
        """Raise BadFile if a file is not the one that was opened."""
        self._files.check()

    def close(self) -> None:
        """Close the files; idempotent."""
        self._files.close()


def open_delta(path: str | os.PathLike[str]) -> DeltaFiles | None:
    """The delta in a directory, or None if something else is there. Raises BadFile, BadTensor for a malformed one."""
    files = LocalFiles(os.fspath(path))
    try:
        if files.is_directory and slime.INDEX in files.walk(lambda path: path != slime.INDEX):
            files.keep([slime.INDEX])
            size, where = files.sizes[slime.INDEX], files.where(slime.INDEX)
            if size > MAX_HEADER:
                raise BadFile(f"{where}: an index of {size} bytes, {MAX_HEADER} at most")
            index = strict_json(files.read(slime.INDEX, 0, size), where)
            if slime.is_delta(index):
                return DeltaFiles(files, slime.from_json(index, where))
    except BaseException:
        files.close()
        raise
    files.close()
    return None


class DeltaSource:
    """What a delta makes of its base. All of it is decoded, and seen to have the right checksums, before it can be
    read; changed tensors lie in memory, or beyond 64 MiB in an unlinked file."""

    def __init__(self, base: Source | VersionSource, delta: DeltaFiles, directory: Path | None) -> None:
        """`directory` is where the unlinked file goes; None for the system's place. Takes both sources over.

        Raises BadFile for a delta that is malformed, or does not make of `base` what its checksums say.
        """
        self.tensors: Sequence[TensorInfo] = base.tensors
        self.layout: Layout | None = base.layout
        self._base = base
        self._delta = delta
        self._spool = Spool(directory)
        self._made: dict[int, list[Reader]] = {}
        try:
            if any(tensor.component for tensor in base.tensors):
                raise BadFile("a delta has no components, and its base has: it was not made on this one")
            numbers = {tensor.name: i for i, tensor in enumerate(base.tensors)}
            for name in delta.frames:
                if name not in numbers:
                    raise BadFile(f"the delta has a tensor {shown(name)}, and its base has none of that name")
            with Pool(parallel.workers(), "weightvc-delta") as pool:
                changed = sorted(numbers[name] for name in delta.frames)
                made = parallel.ordered(pool, self._decoded, changed, parallel.workers() + 1)
                self._made = dict(zip(changed, made))
            delta.check()
        except BaseException:
            self.close()
            raise

    def _decoded(self, number: int) -> list[Reader]:
        info, index = self.tensors[number], self._delta.index
        name, nbytes = info.name, info.nbytes

        def old(start: int, stop: int) -> Buffer:
            return self._base.read(number, start, stop)

        try:
            data = self._delta.frame(name)
            wanted = self._delta.frames[name].wanted
            chunks = slime.decode(index.encoding, index.checksum, data, nbytes, old, wanted)
            return [self._spool.keep(chunk) for chunk in chunks]
        except BadFile as error:
            raise BadFile(f"tensor {shown(name)}: {error}") from None

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of `tensors[index]`."""
        made = self._made.get(index)
        if made is None:
            return self._base.read(index, start, stop)
        pieces = []
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            at = chunk * CHUNK
            pieces.append(bytes(made[chunk](max(start - at, 0), min(stop - at, CHUNK))))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def check(self) -> None:
        """What was decoded cannot change any more; its base may, if that is in files. Raises BadFile."""
        self._base.check()

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._spool.close()
        self._delta.close()
        self._base.close()
