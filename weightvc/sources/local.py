"""Files below a local path: listed without leaving it, read by pread, checked for changes."""

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weightvc.errors import BadFile

MAX_OPEN = 64
"""Descriptors that are kept open between reads."""

_Identity = tuple[int, int, int, int]


@dataclass(slots=True)
class _Open:
    descriptor: int
    readers: int = 0


class LocalFiles:
    """The regular files below `root`, or `root` itself under the path "" if it is a file.

    Threads may read at once. `sizes` (bytes) is by relative path, after keep().
    """

    is_remote = False

    def __init__(self, root: str) -> None:
        """Raises BadFile if there is nothing at `root`."""
        self.root = root
        self.sizes: dict[str, int] = {}
        self._identities: dict[str, _Identity] = {}
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        # The user named the root itself, so a link there is followed; below it none leads out.
        self._real = os.path.realpath(root)
        mode = self._stat("").st_mode
        self.is_directory = stat.S_ISDIR(mode)
        if not self.is_directory and not stat.S_ISREG(mode):
            raise BadFile(f"{root}: is neither a file nor a directory: give one of them")

    def where(self, path: str) -> str:
        """`path` as a user would name it."""
        return os.path.join(self.root, path) if path else self.root

    def walk(self, left_out: Callable[[str], bool]) -> list[str]:
        """Relative paths of all regular files that `left_out` does not match, sorted.

        Raises BadFile for links that lead out or to a folder, and for devices, sockets and pipes.
        """
        found: list[str] = []
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self._real, folder)) as entries:
                    listed = list(entries)
            except OSError as error:
                raise BadFile(f"{self.where(folder)}: cannot be listed: {error.strerror}") from None
            for entry in listed:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if left_out(path):
                    continue
                if entry.is_symlink():
                    self._check_link(path)
                    found.append(path)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    found.append(path)
                else:
                    raise BadFile(f"{self.where(path)!r}: is a device, socket or pipe: remove or exclude it")
        return sorted(found)

    def _check_link(self, path: str) -> None:
        real = os.path.realpath(os.path.join(self._real, path))
        if os.path.commonpath([real, self._real]) != self._real:
            raise BadFile(f"{self.where(path)!r}: is a link out of the directory: copy the directory with `cp -rL`")
        if not os.path.isfile(real):
            raise BadFile(f"{self.where(path)!r}: is a link to no file: remove or exclude it, or copy by `cp -rL`")

    def keep(self, paths: Iterable[str]) -> None:
        """Note size and identity of the files that will be read. Raises BadFile if one is gone."""
        for path in paths:
            status = self._stat(path)
            self._identities[path] = _identity(status)
            self.sizes[path] = status.st_size

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a kept file. Raises BadFile if it has changed or cannot be read."""
        if start == stop:
            return b""
        held = self._acquire(path)
        try:
            data = os.pread(held.descriptor, stop - start, start)
            while len(data) < stop - start:
                more = os.pread(held.descriptor, stop - start - len(data), start + len(data))
                if not more:
                    raise BadFile(f"{self.where(path)}: became shorter while it was read: commit again")
                data += more
            return data
        except OSError as error:
            raise BadFile(f"{self.where(path)}: cannot be read: {error.strerror}") from None
        finally:
            self._release(held)

    def check(self) -> None:
        """Raise BadFile if a kept file's size, time of change or inode differs from when it was kept."""
        for path, identity in self._identities.items():
            if _identity(self._stat(path)) != identity:
                raise BadFile(f"{self.where(path)}: changed while it was read: commit again when it is complete")

    def close(self) -> None:
        """Close all descriptors that nobody is reading from; idempotent."""
        with self._lock:
            self._shrink(0)

    def _stat(self, path: str) -> os.stat_result:
        try:
            return os.stat(os.path.join(self._real, path) if path else self._real)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BadFile(f"{self.where(path)}: cannot be read: {reason}") from None

    def _acquire(self, path: str) -> _Open:
        with self._lock:
            held = self._open.get(path)
            if held is None:
                held = self._open[path] = _Open(self._descriptor(path))
            held.readers += 1
            self._open.move_to_end(path)
            self._shrink(MAX_OPEN)
            return held

    def _release(self, held: _Open) -> None:
        with self._lock:
            held.readers -= 1

    def _shrink(self, limit: int) -> None:
        # A descriptor that a reader holds stays: closing it could hand its number to another file.
        if len(self._open) <= limit:
            return
        for path in [path for path, held in self._open.items() if not held.readers]:
            if len(self._open) <= limit:
                return
            os.close(self._open.pop(path).descriptor)

    def _descriptor(self, path: str) -> int:
        try:
            # O_NONBLOCK: a pipe that took the file's place must not hang us before the check below.
            descriptor = os.open(
                os.path.join(self._real, path) if path else self._real,
                os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK,
            )
        except OSError as error:
            raise BadFile(f"{self.where(path)}: cannot be opened: {error.strerror}") from None
        if _identity(os.fstat(descriptor)) != self._identities[path]:
            os.close(descriptor)
            raise BadFile(f"{self.where(path)}: changed while it was read: commit again when it is complete")
        return descriptor


def _identity(status: os.stat_result) -> _Identity:
    return status.st_size, status.st_mtime_ns, status.st_ino, stat.S_IFMT(status.st_mode)
