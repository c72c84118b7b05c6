"""The files of a version: which there are, and writing them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightvc.errors import Corrupt, Refused
from weightvc.objects import frame
from weightvc.objects.layout import Stored
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.pool import Pool
from weightvc.protocol import parallel
from weightvc.protocol.state import Verified
from weightvc.sources import header, paths

_ZERO_CHUNK: Final = frame.digest(bytes(CHUNK))

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class File:
    """A file to write: its first bytes, its whole size, and where tensors go (by number in the schema)."""

    path: str
    size: int
    content: frame.Buffer
    places: list[tuple[int, int]]


def files(schema: Schema, stored: Stored | None) -> list[File]:
    """The files of a version: as they lay, or one model.safetensors a component if it came from memory.

    Raises Corrupt, BadName or BadFile for paths that must not be written, alone or together.
    """
    with header.collector_paused():
        return _files(schema, stored)


def _files(schema: Schema, stored: Stored | None) -> list[File]:
    if stored is None:
        components: dict[str, list[TensorInfo]] = {}
        for tensor in schema.tensors:
            components.setdefault(tensor.component, []).append(tensor)
        out = [single(schema, tensors, paths.weights_of(name)) for name, tensors in (components or {"": []}).items()]
        paths.check_files([file.path for file in out])
        return out
    paths.check_files([entry.path for entry in stored.entries])
    out = []
    placed: set[int] = set()
    for entry in stored.entries:
        content = stored.contents[entry.content]
        if len(content) != entry.length or (not entry.weights and entry.length != entry.size):
            raise Corrupt(f"the layout's {entry.path!r} has {len(content)} bytes where {entry.length} are promised")
        places = []
        if entry.weights:
            component = entry.path.rpartition("/")[0]
            try:
                tensors = header.read_header(_reader(content), entry.size, entry.path).tensors
            except Refused as error:
                raise Corrupt(f"the layout's {entry.path!r} has a header that cannot be read: {error}") from None
            for name, dtype, shape, begin, _ in tensors:
                i = schema.index.get((component, name), -1)
                if i < 0 or (schema.tensors[i].dtype, schema.tensors[i].shape) != (dtype, shape):
                    raise Corrupt(f"the layout's {entry.path!r} has a tensor {name[:200]!r} that the tree has not")
                if i in placed:
                    raise Corrupt(f"the layout has the tensor {name[:200]!r} twice")
                placed.add(i)
                places.append((i, begin))
        out.append(File(entry.path, entry.size, content, places))
    if len(placed) != len(schema.tensors):
        raise Corrupt(f"the layout places {len(placed)} tensors of {len(schema.tensors)}")
    return out


def _reader(content: frame.Buffer) -> Callable[[int, int], bytes]:
    return lambda start, stop: bytes(content[start:stop])


def single(schema: Schema, tensors: Sequence[TensorInfo], path: str) -> File:
    """One safetensors file of some tensors, as the safetensors library would write it."""
    prefix = header.build_header(tensors)
    places, at = [], len(prefix)
    for tensor in header.order(tensors):
        places.append((schema.index[tensor.component, tensor.name], at))
        at += tensor.nbytes
    return File(path, at, prefix, places)


def write(
    verified: Verified,
    plan: Sequence[File],
    directory: Path,
    *,
    also: Callable[[int, frame.Buffer], None] | None,
    progress: Progress | None,
) -> None:
    """Write all files below `directory`, which is empty, and sync them. `also` is given the canonical stream.

    Raises OSError, Corrupt, or what the store raises.
    """
    target: dict[int, tuple[int, int]] = {}
    descriptors: list[int] = []
    with contextlib.ExitStack() as stack:
        for file in plan:
            path = directory / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                opened.callback(os.close, descriptor)
                _write_all(descriptor, file.content, 0)
                os.ftruncate(descriptor, file.size)
                if file.places:
                    # Only these stay open: side files may be more than a process may have open.
                    stack.enter_context(opened.pop_all())
                    descriptors.append(descriptor)
                else:
                    os.fsync(descriptor)
            with header.collector_paused():
                target |= {tensor: (descriptor, at) for tensor, at in file.places}
        _fill(verified, target, also, progress)
        with verified.meter.part("apply"):
            for descriptor in descriptors:
                os.fsync(descriptor)


def _fill(
    verified: Verified,
    target: dict[int, tuple[int, int]],
    also: Callable[[int, frame.Buffer], None] | None,
    progress: Progress | None,
) -> None:
    schema = verified.tree.schema

    def work(block: tuple[int, int]) -> int:
        low, high = block
        data = memoryview(verified.read(low, high))
        with verified.meter.part("apply"):
            if also is not None:
                also(schema.position(low), data)
            # A chunk of zeros stays a hole in the file, which reads the same and takes no disk.
            if high - low > 1 or len(data) < CHUNK or verified.tree.chunk(low) != _ZERO_CHUNK:
                for descriptor, to, start, stop in _runs(schema, target, low, high):
                    _write_all(descriptor, data[start:stop], to)
        return len(data)

    done = 0
    with Pool(parallel.workers(), "weightvc-checkout") as pool:
        for size in parallel.ordered(pool, work, verified.runs(), 2 * parallel.workers() + 2):
            done += size
            if progress is not None:
                progress(done, schema.nbytes)


def _runs(
    schema: Schema, target: dict[int, tuple[int, int]], low: int, high: int
) -> Iterator[tuple[int, int, int, int]]:
    """(descriptor, where to, start, stop): the pieces of a block that lie together in a file, as few as can be."""
    tensor, first, _ = schema.span(low)
    last = schema.tensor_of(high - 1)
    origin, end = schema.positions[low], schema.positions[high]
    descriptor, to = target[tensor]
    to += first
    start = at = 0
    for t in range(tensor, last + 1):
        d, position = target[t] if t > tensor else (descriptor, to)
        if (d, position) != (descriptor, to + at - start):
            yield descriptor, to, start, at
            descriptor, to, start = d, position, at
        at = min(schema.offset[t + 1], end) - origin
    yield descriptor, to, start, at


def _write_all(descriptor: int, data: frame.Buffer, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done
