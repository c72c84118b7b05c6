"""A store in this process's memory, for tests and experiments: it is gone when the process ends."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from weightvc.errors import KeyExists, KeyNotFound, PreconditionFailed
from weightvc.stores.base import Got, Listed, Stats, check_key, check_prefix, check_range


class _Bucket:
    """What all stores of one name share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clock = time.time
        self.objects: dict[str, tuple[bytes, str, float]] = {}  # key: bytes, ETag, time of the write
        self.numbers = itertools.count(1)  # never repeated, so that an ETag never recurs


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()


class MemoryStore:
    """Objects in a dictionary. Stores of the same `name` in one process share it; without a name it is private."""

    conditional = True

    def __init__(self, name: str | None = None) -> None:
        self.url = self.address = f"memory://{name or ''}"
        self.stats = Stats()
        if name is None:
            self._bucket = _Bucket()
        else:
            with _buckets_lock:
                self._bucket = _buckets.setdefault(name, _Bucket())

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Have all stores of this name tell the time (seconds since the epoch) by `clock`."""
        self._bucket.clock = clock

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.url} lives in one process and cannot be pickled: use a local directory instead")

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
        with self._bucket.lock:
            self.stats.reads += 1
            if key not in self._bucket.objects:
                raise KeyNotFound(f"no object {key!r} in {self.url}")
            data, etag, _ = self._bucket.objects[key]
            if etag == unless_etag:
                return None
            part = data[first:] if count is None else data[first : first + count]
            self.stats.bytes_read += len(part)
        return Got(part, etag, len(data))

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._bucket.lock:
            return self._write(key, data)

    def create(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._bucket.lock:
            if key in self._bucket.objects:
                self.stats.writes += 1
                raise KeyExists(f"{key!r} exists already in {self.url}")
            return self._write(key, data)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        with self._bucket.lock:
            if key not in self._bucket.objects or self._bucket.objects[key][1] != etag:
                self.stats.writes += 1
                raise PreconditionFailed(f"{key!r} in {self.url} is not the object that was read: read it again")
            return self._write(key, data)

    def _write(self, key: str, data: bytes) -> str:
        etag = f"m{next(self._bucket.numbers)}"
        self._bucket.objects[key] = (bytes(data), etag, self._bucket.clock())
        self.stats.writes += 1
        self.stats.bytes_written += len(data)
        return etag

    def list(self, prefix: str = "") -> Iterator[Listed]:
        check_prefix(prefix)
        with self._bucket.lock:
            self.stats.lists += 1
            found = [
                Listed(key, len(data), modified)
                for key, (data, _, modified) in self._bucket.objects.items()
                if key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda one: one.key))

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        names = [check_key(key) for key in keys]
        with self._bucket.lock:
            self.stats.deletes += 1
            for name in names:
                self._bucket.objects.pop(name, None)
        return {}

    def close(self) -> None:
        """Nothing to release; the objects stay as long as the process."""
