"""The local cache: what this host fetched or committed, by content.

    DIR/objects/KIND/NAME     immutable objects, as the store holds them
    DIR/trees/DIGEST          a tree's canonical stream, whole

It is only ever an optimisation. Everything read from it is checked against a digest by whoever uses it, a bad
entry is thrown away, and a full or read-only disk turns it off without an error. No file is locked, so that it works
where locks do not.
"""

import contextlib
import os
import random
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from weightvc import claims
from weightvc.errors import Corrupt, WeightvcWarning
from weightvc.objects import expect, frame, key
from weightvc.objects.schema import Schema

TREES: Final = 8
"""Trees kept at most: the baseline of the next commit, and a few to go back to."""
OBJECTS: Final = 2 << 30
"""Bytes of objects kept, about; a quarter of the limit if that is less."""
ABANDONED: Final = 60.0
"""Seconds since a tree in work was last written to, after which nobody is at work on it."""
LEAST: Final = 1 << 20
"""The smallest limit, in bytes."""
_HOLE: Final = 1 << 20


def default_directory() -> Path:
    """Where the cache lies unless the caller says otherwise."""
    return Path.home() / ".cache" / "weightvc"


class Cache:
    """A directory that any number of processes may share: entries appear by rename and never change."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        trees: int = TREES,
        objects: int = OBJECTS,
        limit: int | None = None,
    ) -> None:
        """`limit` is how many bytes it takes at most, about; half of the disk that it lies on unless given."""
        self.directory = Path(directory)
        self.limit = limit
        self._trees = trees
        self._objects = objects
        self._warned = False

    def _bounds(self) -> tuple[int, int]:
        """Bytes of objects, and of trees."""
        limit = _half_of_disk(self.directory) if self.limit is None else self.limit
        objects = min(self._objects, limit // 4)
        return objects, limit - objects

    def get(self, name: str) -> frame.Buffer | None:
        """The object stored under a key, checked, or None. Raises Corrupt for what is no key.

        It is read and not mapped: another process may cut a file short, and a mapped one then kills this process.
        """
        path = self._object(name)
        try:
            with open(_open(path), "rb") as file:
                data = file.read()
        except OSError:
            return None
        try:
            key.check(name, data)
        except Corrupt:
            self._discard(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def fetched(self, name: str, fetch: Callable[[], frame.Buffer]) -> frame.Buffer:
        """The object under a key, checked: from here, or else by `fetch`, which one process of this host calls for
        all. Raises Corrupt for what is no key, and what `fetch` raises."""
        path = self._object(name)

        def work() -> frame.Buffer:
            data = fetch()
            self.put(name, data)
            return data

        return claims.once(path.with_name(f".claim-{path.name}"), lambda: self.get(name), work)

    def put(self, name: str, data: frame.Buffer) -> None:
        """Keep an object. Raises Corrupt for what is no key."""
        path = self._object(name)
        bound, _ = self._bounds()
        if len(data) > bound:
            return
        with contextlib.suppress(OSError), self._temporary(path) as temporary:
            with temporary.open("wb") as file:
                file.write(data)
            temporary.rename(path)
        # A sweep of the directory costs more than a write, so one comes by chance, once in bound / 8 bytes written
        # by whatever processes: most of them are too short-lived to write so much. It makes room for twice that.
        if random.random() * (bound // 8) < len(data):
            self._sweep("objects", bound * 3 // 4)

    def discard(self, name: str) -> None:
        """Forget an object that turned out to be bad. Raises Corrupt for what is no key."""
        self._discard(self._object(name))

    def has_tree(self, digest: str) -> bool:
        """Whether a tree's stream is here (right or wrong: that is seen when it is read)."""
        return os.path.exists(self._tree(digest))  # Path.exists() raises where another user lets us not look

    def trees(self) -> frozenset[str]:
        """The digests of all trees whose streams are here."""
        try:
            return frozenset(name for name in os.listdir(self.directory / "trees") if not name.startswith("."))
        except OSError:
            return frozenset()

    def open_tree(self, digest: str, schema: Schema) -> "Flat | None":
        """The canonical stream of a tree, or None. Raises Corrupt for what is no digest."""
        path = self._tree(digest)
        try:
            descriptor = _open(path)
        except OSError:
            return None
        if os.fstat(descriptor).st_size != schema.nbytes:
            os.close(descriptor)
            self._discard(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return Flat(descriptor, path)

    def lacks(self, nbytes: int) -> str:
        """What is wrong with the limit if no tree of so many bytes fits in; else empty."""
        objects, bound = self._bounds()
        if nbytes <= bound:
            return ""
        limit = "half of its disk" if self.limit is None else "its limit"
        # As _bounds() divides it: objects get a quarter, and at most so much.
        need = min(4 * (nbytes - 1) // 3 + 1, nbytes + self._objects)
        return (
            f"the cache {self.directory} keeps no weights, so they are fetched again each time: a version "
            f"has {nbytes} bytes, and {limit} of {objects + bound} leaves {bound} for them; "
            f"cache_limit (--cache-limit, WEIGHTVC_CACHE_LIMIT) has to be {need} or more"
        )

    def write_tree(self, schema: Schema, digest: str | None = None) -> "TreeWriter | None":
        """Begin to keep a tree; None where the disk or the limit does not let us, or where another process is writing
        that very tree, if its digest is known by now. Warns, once, of a limit that no such tree fits in."""
        if lacks := self.lacks(schema.nbytes):
            if not self._warned:
                self._warned = True
                warnings.warn(lacks, WeightvcWarning, stacklevel=2)
            return None
        # The newest one stays: it may be what this one is made from, and this one may come to nothing.
        self._sweep("trees", self._bounds()[1] - schema.nbytes, self._trees, least=1)
        try:
            return TreeWriter(self, schema.nbytes, digest)
        except OSError:
            return None

    def _object(self, name: str) -> Path:
        # Names come out of stored objects: none may lead out of this directory.
        key.parse(name)
        return self.directory / "objects" / name

    def _tree(self, digest: str) -> Path:
        try:
            return self.directory / "trees" / expect.digest(digest, "a tree's digest")
        except ValueError as error:
            raise Corrupt(f"{digest!r:.100}: {error}") from None

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _discard(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _sweep(self, what: str, limit: int, count: int | None = None, *, least: int = 0) -> None:
        """Remove the entries that were used longest ago, until at most `limit` bytes and `count` of them are left."""
        found = []
        for parent, _, names in os.walk(self.directory / what):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(parent, name))
                    found.append((status.st_mtime, status.st_size, Path(parent) / name))
        size = 0
        for i, (_, nbytes, path) in enumerate(sorted(found, reverse=True)):
            size += nbytes
            if i >= least and (size > limit or (count is not None and i >= count)):
                self._discard(path)


def _half_of_disk(directory: Path) -> int:
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(place)
            return status.f_frsize * status.f_blocks // 2
    return 0


def _open(path: Path) -> int:
    """Open a regular file to read. Raises OSError, and never waits, for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


class Flat:
    """A tree's canonical stream in a file. Nothing is checked here."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); shorter if the file is."""
        return os.pread(self._descriptor, stop - start, start)

    def discard(self) -> None:
        """Forget the entry: its bytes are not what its name says."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class TreeWriter:
    """A tree being kept: write() from any thread, then commit() under its digest, or drop()."""

    def __init__(self, cache: Cache, nbytes: int, digest: str | None = None) -> None:
        """Raises OSError, also where another process has the tree of this digest in work."""
        self._cache = cache
        directory = cache.directory / "trees"
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f".tmp-{secrets.token_hex(8) if digest is None else cache._tree(digest).name}"
        if digest is not None:
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - os.stat(self._path).st_mtime) > ABANDONED:
                    self._path.unlink()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._failed = False
        try:
            os.truncate(self._descriptor, nbytes)
        except OSError:
            self.drop()
            raise

    def write(self, at: int, data: frame.Buffer) -> None:
        """Put bytes in their place, once. The file begins as zeros, so a long run of zeros is left a hole."""
        if len(data) >= _HOLE and not any(memoryview(data)[:64]) and data == bytes(len(data)):
            return
        if self._failed:
            return
        try:
            view = memoryview(data)
            while view:
                done = os.pwrite(self._descriptor, view, at)
                view, at = view[done:], at + done
        except OSError:
            self._failed = True

    def commit(self, digest: str) -> None:
        """Keep what was written under `digest`, and let go of the oldest trees. Raises Corrupt for no digest."""
        path = self._cache._tree(digest)
        if self._descriptor < 0:
            return
        if self._failed:
            self.drop()
            return
        with contextlib.suppress(OSError):
            if self._ours():
                self._path.rename(path)
        os.close(self._descriptor)
        self._descriptor = -1
        self._cache._sweep("trees", self._cache._bounds()[1], self._cache._trees)

    def drop(self) -> None:
        """Throw away what was written."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                if self._ours():
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1

    def _ours(self) -> bool:
        """Whether nobody took us for dead and began anew under the same name. Raises OSError."""
        return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
