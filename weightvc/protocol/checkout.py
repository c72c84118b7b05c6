"""Checkout: a version's files, built beside the target, checked, and swapped in by a rename.

A directory gets the layout that was committed, byte for byte. It also gets a small file, .weightvc, that says which
version of which repository it holds.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weightvc.errors import AccessDenied, BadFile, Corrupt, Refused, Unavailable
from weightvc.objects import frame
from weightvc.objects.layout import Stored
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.version import Version
from weightvc.protocol import parallel
from weightvc.protocol.state import Verified
from weightvc.sources import header, paths

MARKER: Final = ".weightvc"
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

    Raises Corrupt, or BadName for a path that must not be written.
    """
    if stored is None:
        components: dict[str, list[TensorInfo]] = {}
        for tensor in schema.tensors:
            components.setdefault(tensor.component, []).append(tensor)
        return [
            single(schema, tensors, f"{component}/model.safetensors" if component else "model.safetensors")
            for component, tensors in (components or {"": []}).items()
        ]
    out = []
    placed = 0
    for entry in stored.entries:
        paths.check_relative(entry.path)
        if entry.path.partition("/")[0] == MARKER:
            raise Corrupt(f"the layout has a file {entry.path!r}, which is the checkout's own")
        content = stored.contents[entry.content]
        if len(content) != entry.length or (not entry.weights and entry.length != entry.size):
            raise Corrupt(f"the layout's {entry.path!r} has {len(content)} bytes where {entry.length} are promised")
        places = []
        if entry.weights:
            component = entry.path.rpartition("/")[0]
            tensors = header.read_header(_reader(content), entry.size, entry.path).tensors
            for name, dtype, shape, begin, _ in tensors:
                i = schema.index.get((component, name), -1)
                if i < 0 or (schema.tensors[i].dtype, schema.tensors[i].shape) != (dtype, shape):
                    raise Corrupt(f"the layout's {entry.path!r} has a tensor {name[:200]!r} that the tree has not")
                places.append((i, begin))
                placed += 1
        out.append(File(entry.path, entry.size, content, places))
    if placed != len(schema.tensors):
        raise Corrupt(f"the layout places {placed} tensors of {len(schema.tensors)}")
    paths.check_together([file.path for file in out])
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

    Raises Unavailable (a full disk), AccessDenied, Corrupt, or what the store raises.
    """
    try:
        target: dict[int, tuple[int, int]] = {}
        descriptors: list[int] = []
        with contextlib.ExitStack() as stack:
            for file in plan:
                path = directory / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, descriptor)
                descriptors.append(descriptor)
                _write_all(descriptor, file.content, 0)
                os.ftruncate(descriptor, file.size)
                for tensor, at in file.places:
                    target[tensor] = (descriptor, at)
            _fill(verified, target, also, progress)
            for descriptor in descriptors:
                os.fsync(descriptor)
    except OSError as error:
        raise local_error(error, str(directory)) from error


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
        if also is not None:
            also(schema.position(low), data)
        # A chunk of zeros stays a hole in the file, which reads the same and takes no disk.
        if high - low > 1 or len(data) < CHUNK or verified.tree.chunk(low) != _ZERO_CHUNK:
            for descriptor, to, start, stop in _runs(schema, target, low, high):
                _write_all(descriptor, data[start:stop], to)
        return len(data)

    done = 0
    with ThreadPoolExecutor(parallel.workers(), "weightvc-checkout") as pool:
        for size in parallel.ordered(pool, work, verified.blocks(), 2 * parallel.workers() + 2):
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


def local_error(error: OSError, what: str) -> Exception:
    """The typed error for a local file operation that failed."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(f"{what}: {error.strerror}: choose a place that may be written")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Unavailable(f"{what}: {error.strerror}: make space and run it again; what was there is as it was")
    if error.errno in (errno.EBUSY, errno.EXDEV):
        return Refused(f"{what} is a mount point, which cannot be swapped by a rename: name a directory inside it")
    return Unavailable(f"{what}: {error}")


# The marker


@dataclass(slots=True)
class Marker:
    """What .weightvc in a checked-out directory says. `files` has size and mtime (ns) of each file as written."""

    repository: str
    version: str
    branch: str | None
    files: dict[str, tuple[int, int]]


def read_marker(directory: Path) -> Marker | None:
    """The marker of a directory, or None; a marker that cannot be read counts as none."""
    try:
        fields: Any = json.loads((directory / MARKER).read_text())
        stats = {str(path): (int(size), int(mtime)) for path, (size, mtime) in fields["files"].items()}
        return Marker(str(fields["repository"]), str(fields["version"]), fields["branch"], stats)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_marker(directory: Path, url: str, made: Version, branch: str | None, plan: Sequence[File]) -> None:
    stats = {}
    for file in plan:
        status = (directory / file.path).stat()
        stats[file.path] = (status.st_size, status.st_mtime_ns)
    fields = {"repository": url, "version": made.id, "branch": branch, "files": stats}
    (directory / MARKER).write_text(json.dumps(fields, indent=1) + "\n")


# Swapping in


def to_directory(
    target: Path,
    fill: Callable[[Path], Sequence[File]],
    made: Version,
    url: str,
    branch: str | None,
    *,
    force: bool,
) -> None:
    """Build the files beside `target` with fill(), then put them in its place by a rename.

    Files in `target` that are not the version's that it holds are named and refused; with `force` they are carried
    over, and one in the way of a file of the version is replaced. Raises Refused, BadFile, Unavailable.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_dir():
        raise BadFile(f"{target} is a file, not a directory: name a directory, or a path ending in .safetensors")
    strangers = foreign(target)
    if strangers and not force:
        names = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
        raise Refused(
            f"{target} has files that no checkout put there: {names}; choose another directory, or --force to keep "
            "them beside the version's"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear(target)
        staging = _sibling(target, "new")
        staging.mkdir()
    except OSError as error:
        raise local_error(error, str(target)) from error
    try:
        plan = fill(staging)
        try:
            if target.exists():
                os.chmod(staging, target.stat().st_mode & 0o7777)
                _keep_modes(target, staging, plan)
                for path in strangers:
                    _carry(target / path, staging / path)
            _write_marker(staging, url, made, branch, plan)
            _sync_directory(staging)
            _exchange(staging, target)
        except OSError as error:
            raise local_error(error, str(target)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def to_file(target: Path, fill: Callable[[Path], Sequence[File]]) -> None:
    """Build one file beside `target` and put it in its place by a rename."""
    target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear(target)
        staging = _sibling(target, "new")
        staging.mkdir()
    except OSError as error:
        raise local_error(error, str(target)) from error
    try:
        (file,) = fill(staging)
        try:
            if target.exists():
                os.chmod(staging / file.path, target.stat().st_mode & 0o7777)
            os.replace(staging / file.path, target)
            _sync_directory(target.parent)
        except OSError as error:
            raise local_error(error, str(target)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sibling(target: Path, what: str) -> Path:
    """A name beside `target` that tells which process of which host made it."""
    host = frame.digest(socket.gethostname().encode()).hex()[:8]
    return target.parent / f".{target.name[:100]}.weightvc-{what}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _clear(target: Path) -> None:
    """Remove what checkouts into `target` left that were killed: those of this host whose process is gone."""
    prefix = _sibling(target, "new").name.rsplit("-", 2)[0] + "-"
    for name in os.listdir(target.parent):
        process = name.removeprefix(prefix).partition("-")[0]
        if name.startswith(prefix) and process.isdigit() and not _alive(int(process)):
            shutil.rmtree(target.parent / name, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def foreign(target: Path) -> list[str]:
    """Paths of files in `target` that its marker does not list."""
    if not target.is_dir():
        return []
    marker = read_marker(target)
    known = set(marker.files) if marker else set()
    found = []
    for parent, directories, names in os.walk(target):
        links = [d for d in directories if os.path.islink(os.path.join(parent, d))]
        for name in names + links:
            path = os.path.relpath(os.path.join(parent, name), target).replace(os.sep, "/")
            if path not in known and not (marker and path == MARKER):
                found.append(path)
    return sorted(found)


def _keep_modes(target: Path, staging: Path, plan: Sequence[File]) -> None:
    for file in plan:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(staging / file.path, os.stat(target / file.path).st_mode & 0o7777)


def _carry(old: Path, new: Path) -> None:
    """Give a user's file a second name in the new directory: until the swap it stands in both."""
    if os.path.lexists(new):
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _exchange(staging: Path, target: Path) -> None:
    """Put `staging` where `target` is; what was there is then at `staging`, or gone."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(staging, target)
    elif not _rename_exchange(staging, target):
        # No exchange on this file system: for an instant there is no target, never a mixed one.
        old = _sibling(target, "old")
        os.rename(target, old)
        os.rename(staging, target)
        shutil.rmtree(old, ignore_errors=True)
    _sync_directory(target.parent)


def _rename_exchange(one: Path, other: Path) -> bool:
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
