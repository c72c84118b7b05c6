"""A store at any URL that fsspec can open: for reading, and for writing where the caller accepts one writer."""

import posixpath
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import fsspec

from weightvc.errors import (
    AccessDenied,
    BadName,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    StateUnknown,
    Unavailable,
    UnsafeStore,
    WeightvcError,
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
"""Up to this many bytes an ETag is the content's digest; above, it is what the file system says of the file."""


class RemoteStore:
    """Objects of an fsspec file system under `url`; other options go to that file system.

    Few of these have an atomic create or replace, so create() and swap() raise UnsafeStore, unless the
    caller promises by `single_writer` that no other process writes here: then they look first and
    write after, and `conditional` is true by that promise.
    """

    def __init__(self, url: str, *, single_writer: bool = False, **options: Any) -> None:
        self.conditional = single_writer
        self.stats = Stats()
        self._made_of = (url, single_writer, options)
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except (ValueError, ImportError) as error:
            raise BadName(f"no store for the URL scheme {url.partition('://')[0]!r}: {error}") from error
        except OSError as error:  # some connect at once
            parts = urlsplit(url)
            raise Unavailable(
                f"{parts.scheme}://{parts.hostname or ''} does not answer ({error}): check the URL, then try again"
            ) from error
        self._root: str = root.rstrip("/")
        # Without the credentials that a URL may hold.
        self.url = self.address = str(self._fs.unstrip_protocol(root))
        self._lock = threading.Lock()
        self._writer = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def __reduce__(self) -> Any:
        return _remake, self._made_of

    def get(
        self,
        key: str,
        *,
        start: int | None = None,
        length: int | None = None,
        unless_etag: str | None = None,
    ) -> Got | None:
        check_key(key)
        first, count = check_range(start, length)
        path = self._path(key)
        with self._errors("read", key):
            self._count(reads=1)
            info = self._fs.info(path)
            if info["type"] == "directory":
                raise KeyNotFound(f"no object {key!r} in {self.url}")
            size: int | None = info["size"]
            if size is None or size <= _SMALL:
                whole: bytes = self._fs.cat_file(path)
                if size is not None and len(whole) < size:
                    raise Unavailable(f"{len(whole)} of {size} bytes of {key!r} came from {self.url}: try again")
                etag, size = content_etag(whole), len(whole)
                data = whole[first:] if count is None else whole[first : first + count]
                self._count(bytes_read=len(whole))
                return None if etag == unless_etag else Got(data, etag, size)
            etag = f"u{self._fs.ukey(path)}"
            if etag == unless_etag:
                return None
            stop = size if count is None else min(size, first + count)
            wanted = max(0, stop - first)
            data = self._fs.cat_file(path, start=first, end=stop) if wanted else b""
            self._count(bytes_read=len(data))
        if len(data) == size != wanted:
            data = data[first:stop]  # the range was ignored
        if len(data) != wanted:
            raise Unavailable(f"{len(data)} of {wanted} bytes of {key!r} came from {self.url}: try again")
        return Got(data, etag, size)

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._errors("write", key):
            return self._write(key, data)

    def create(self, key: str, data: bytes) -> str:
        check_key(key)
        self._promised("create")
        with self._writer, self._errors("create", key):
            if self._fs.exists(self._path(key)):
                self._count(writes=1)
                raise KeyExists(f"{key!r} exists already in {self.url}")
            return self._write(key, data, conditional=True)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        self._promised("swap")
        with self._writer:
            try:
                found = self.get(key, unless_etag=etag)
            except KeyNotFound as error:
                raise PreconditionFailed(f"{key!r} is no longer in {self.url}: read it again") from error
            if found is not None:
                raise PreconditionFailed(f"{key!r} in {self.url} is not the object that was read: read it again")
            with self._errors("swap", key):
                return self._write(key, data, conditional=True)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # fsspec's find() leaves out folders that cannot be listed, so they are walked here.
        check_prefix(prefix)
        if {"http", "https"} & set(_protocols(self._fs)):
            raise Unavailable(f"{self.url} cannot be listed over HTTP: open the bucket or directory itself")
        folder, _, begin = prefix.rpartition("/")
        with self._errors("list", prefix):
            found = list(self._walk(folder, begin))
        return iter(sorted(found, key=lambda one: one.key))

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        failed: dict[str, Exception] = {}
        names = [check_key(key) for key in keys]
        self._count(deletes=1)
        for name in names:
            try:
                with self._errors("delete", name):
                    self._fs.rm_file(self._path(name))
            except KeyNotFound:
                pass
            except WeightvcError as error:
                failed[name] = error
        return failed

    def close(self) -> None:
        """Nothing to release: fsspec shares and keeps its file systems."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)

    def _promised(self, verb: str) -> None:
        if not self.conditional:
            raise UnsafeStore(
                f"{self.url} has no atomic {verb}: use s3:// or a local directory, "
                "or open it with single_writer=True if nobody else writes there"
            )

    def _write(self, key: str, data: bytes, *, conditional: bool = False) -> str:
        path = self._path(key)
        try:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        except NotImplementedError:
            pass  # nothing to make: keys are not in folders
        self._count(writes=1, bytes_written=len(data))
        try:
            self._fs.pipe_file(path, bytes(data))
            if len(data) <= _SMALL:
                return content_etag(data)
            return f"u{self._fs.ukey(path)}"
        except (PermissionError, NotImplementedError):
            raise
        except Exception as error:
            if not conditional:
                raise
            raise StateUnknown(f"write of {key!r} in {self.url}: {error!r}: read it again") from error

    def _walk(self, folder: str, begin: str) -> Iterator[Listed]:
        """Everything below `folder` (relative to the root, "" for itself) whose name there starts with `begin`."""
        waiting = [(folder, begin)]
        while waiting:
            parent, start = waiting.pop()
            self._count(lists=1)
            where = self._path(parent) if parent else self._root
            try:
                entries = self._fs.ls(where, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                if parent == folder:
                    return  # nothing was ever written there
                raise Unavailable(f"folder {parent!r} of {self.url} vanished while it was listed") from None
            for entry in entries:
                name = entry["name"].rstrip("/").rpartition("/")[2]
                key = f"{parent}/{name}" if parent else name
                if not name.startswith(start) or not is_key(key) or entry["name"].rstrip("/") == where:
                    continue
                if entry["type"] == "directory":
                    waiting.append((key, ""))
                else:
                    yield Listed(key, entry["size"], _modified(entry))

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Name what an fsspec file system raises; the kinds differ from one to the next."""
        what = f"cannot {verb} {key!r} in {self.url}"
        try:
            yield
        except WeightvcError:
            raise
        except NotImplementedError as error:
            raise Unavailable(f"{what}: this kind of URL cannot do it: use s3:// or a local directory") from error
        except Exception as error:
            status = _status(error)
            if isinstance(error, PermissionError) or status in (401, 403):
                raise AccessDenied(f"{what}: check the credentials") from error
            if status in (404, 410) or (status is None and _is_missing(error)):
                raise KeyNotFound(f"no object {key!r} in {self.url}") from error
            told = error.__cause__ or error
            raise Unavailable(f"{what}: {type(told).__name__}: {told}: try again") from error


def _remake(url: str, single_writer: bool, options: dict[str, Any]) -> RemoteStore:
    return RemoteStore(url, single_writer=single_writer, **options)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error or behind its cause, as the client libraries keep it."""
    for one in (error, error.__cause__):
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(one, name, None), int):
                return status
        response: Any = getattr(one, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    return None


def _is_missing(error: Exception) -> bool:
    """Whether the object is not there; over HTTP, fsspec says "file not found" of every failure."""
    cause = error.__cause__
    return isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) and (
        cause is None or isinstance(cause, FileNotFoundError | LookupError)
    )


def _modified(entry: dict[str, Any]) -> float:
    """When an entry was written; where that is not told, now, so that it never looks old to the collector."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value: Any = entry.get(name)
        if hasattr(value, "timestamp"):
            return float(value.timestamp())
        if isinstance(value, int | float):
            return float(value)
    return time.time()
