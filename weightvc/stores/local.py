"""A store in a local directory: lock, compare, write beside, fsync, rename."""

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightvc.errors import (
    AccessDenied,
    BadName,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    StateUnknown,
    StoreError,
    Unavailable,
    UnsafeStore,
)
from weightvc.stores.base import (
    Got,
    Listed,
    Stats,
    check_key,
    check_prefix,
    check_range,
    content_etag,
    is_key,
)

_SMALL = 1 << 20
"""Up to this many bytes an ETag is the content's digest; above, it is the file's identity (see _etag)."""

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class LocalStore:
    """Objects as files under `root`, which the first write makes.

    Safe among threads and processes of one host, and of several hosts where the file system's flock reaches
    across them. A killed writer leaves at most a file named .tmp-*, which is never listed or read.
    """

    conditional = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = self.address = str(self.root)
        self.stats = Stats()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LocalStore.__init__(self, state["root"])

    def get(
        self,
        key: str,
        *,
        start: int | None = None,
        length: int | None = None,
        unless_etag: str | None = None,
    ) -> Got | None:
        path = self._path(key)
        first, count = check_range(start, length)
        self._count(reads=1)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._reading(key, error) from error
        try:
            stat = os.fstat(fd)
            size = stat.st_size
            if size <= _SMALL:
                whole = _pread(fd, 0, size)
                etag = content_etag(whole)
            else:
                whole = None
                etag = _etag(stat)
            if etag == unless_etag:
                return None
            stop = size if count is None else min(size, first + count)
            data = _pread(fd, first, max(0, stop - first)) if whole is None else whole[first:stop]
        except OSError as error:
            raise self._reading(key, error) from error
        finally:
            os.close(fd)
        if len(data) != max(0, stop - first):
            raise Unavailable(f"{path} became shorter while it was read: read it again")
        self._count(bytes_read=len(data))
        return Got(data, etag, size)

    def put(self, key: str, data: bytes) -> str:
        return self._write(key, data, self._path(key), None)

    def create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._exclusive(key):
            try:
                os.lstat(path)
            except FileNotFoundError:
                return self._write(key, data, path, "create")
            except OSError as error:
                raise self._writing(key, error) from error
            self._count(writes=1)
            raise KeyExists(f"{key!r} exists already in {self.url}")

    def swap(self, key: str, data: bytes, etag: str) -> str:
        path = self._path(key)
        with self._exclusive(key):
            try:
                stat = os.stat(path)
                found = content_etag(path.read_bytes()) if stat.st_size <= _SMALL else _etag(stat)
            except FileNotFoundError:
                found = None
            except OSError as error:
                raise self._writing(key, error) from error
            if found != etag:
                self._count(writes=1)
                raise PreconditionFailed(f"{key!r} in {self.url} is not the object that was read: read it again")
            return self._write(key, data, path, "swap")

    def sweep(self, before: float, *, dry_run: bool = False) -> list[int]:
        """Delete .tmp-* files that were last written before a time; their sizes in bytes."""
        gone = []
        for folder, _, names in os.walk(self.root):
            for name in names:
                if name.startswith(".tmp-"):
                    path = Path(folder, name)
                    try:
                        stat = path.stat()
                        if stat.st_mtime < before:
                            if not dry_run:
                                path.unlink()
                            gone.append(stat.st_size)
                    except OSError:
                        continue  # it was renamed meanwhile, or is somebody else's
        return gone

    def list(self, prefix: str = "") -> Iterator[Listed]:
        check_prefix(prefix)
        self._count(lists=1)
        folder, _, begin = prefix.rpartition("/")
        return self._walk(self.root / folder, f"{folder}/" if folder else "", begin, top=True)

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        failed: dict[str, Exception] = {}
        paths = {key: self._path(key) for key in keys}
        self._count(deletes=1)
        for key, path in paths.items():
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                failed[key] = self._writing(key, error)
        return failed

    def close(self) -> None:
        """Nothing to release."""

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)

    @contextmanager
    def _exclusive(self, key: str) -> Iterator[None]:
        """Hold the directory's lock. The kernel drops it when a holder dies, so it is never left behind."""
        try:
            _make_folder(self.root)
            fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._writing(key, error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    raise UnsafeStore(
                        f"the file system of {self.url} has no locks ({error.strerror}): "
                        "keep the repository on a local disk or in an object store"
                    ) from error
                raise self._writing(key, error) from error
            try:
                yield
            finally:
                # Said aloud, since a child forked meanwhile would keep the lock by its copy of the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _write(self, key: str, data: bytes, path: Path, condition: str | None) -> str:
        """Write beside and rename over `path`: a reader sees the old object or the new one, never a part."""
        self._count(writes=1)
        temp = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _make_folder(path.parent)
            try:
                fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                    os.fsync(fd)
                    stat = os.fstat(fd)
                finally:
                    os.close(fd)
                os.replace(temp, path)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._writing(key, error) from error
        try:
            _sync_folder(path.parent)
        except OSError as error:
            # The rename is done but may not survive a power cut.
            if condition is None:
                raise self._writing(key, error) from error
            raise StateUnknown(f"{condition} of {key!r} in {self.url}: {error.strerror}: read it again") from error
        self._count(bytes_written=len(data))
        return content_etag(data) if len(data) <= _SMALL else _etag(stat)

    def _walk(self, folder: Path, parent: str, begin: str, *, top: bool) -> Iterator[Listed]:
        """Files in `folder`, whose keys start with `parent`, if their names start with `begin`; then below."""
        found: dict[str, Listed | None] = {}
        try:
            with os.scandir(folder) as entries:
                for one in entries:
                    key = parent + one.name
                    if not one.name.startswith(begin) or not is_key(key):
                        continue
                    if one.is_dir():
                        # "a-b" sorts before "a/b", so a folder is compared with its slash.
                        found[f"{key}/"] = None
                        continue
                    try:
                        stat = one.stat()
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    found[key] = Listed(key, stat.st_size, stat.st_mtime)
        except OSError as error:
            if top and error.errno in (errno.ENOENT, errno.ENOTDIR):
                return  # nothing was ever written there
            raise self._failed("list", parent, error) from error
        for name in sorted(found):
            listed = found[name]
            if listed is not None:
                yield listed
            else:
                yield from self._walk(self.root / name, name, "", top=False)

    def _reading(self, key: str, error: OSError) -> Exception:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            return KeyNotFound(f"no object {key!r} in {self.url}")
        return self._failed("read", key, error)

    def _writing(self, key: str, error: OSError) -> Exception:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG):
            return BadName(f"{key!r} cannot be a file in {self.url} ({error.strerror}): choose another name")
        return self._failed("write", key, error)

    def _failed(self, verb: str, key: str, error: OSError) -> StoreError:
        what = f"cannot {verb} {key!r} in {self.url}: {error.strerror or error}"
        if error.errno in _DENIED:
            return AccessDenied(f"{what}: give this user the right to {verb} there")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Unavailable(f"{what}: make space and try again")
        return Unavailable(f"{what}: try again")


def _etag(stat: os.stat_result) -> str:
    """The ETag of a large file, from its identity: hashing 64 MiB for a read of some bytes would cost too much.

    An inode number may be reused, and the clock ticks in milliseconds; but a large file takes longer than that
    to write, and only the root, which is small, is ever swapped.
    """
    return f"f{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}"


def _pread(fd: int, start: int, length: int) -> bytes:
    """Up to `length` bytes from `start`; shorter only at the end of the file."""
    data = os.pread(fd, length, start) if length else b""
    if len(data) == length or not data:
        return data
    parts = [data]  # one call returns at most 2 GiB
    done = len(data)
    while done < length and (more := os.pread(fd, length - done, start + done)):
        parts.append(more)
        done += len(more)
    return b"".join(parts)


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents so that they survive a power cut."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(fd)
