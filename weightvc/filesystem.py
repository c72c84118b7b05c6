"""The fsspec file system weightvc://: the files of one version, read where they lie.

    weightvc://REPOSITORY@REF/PATH      weightvc://s3://bucket/policy@main~3/model.safetensors
    weightvc://PATH::REPOSITORY         weightvc://model.safetensors::s3://bucket/policy

REPOSITORY is what weightvc.open() takes, up to the first "@". REF goes on to the next "/"; in a ref, "/" is written
%2F, "::" %3A%3A and "%" %25. What is left is the path of a file of the version. What stands in no URL is given as an
option: repo, ref, and those of weightvc.open(). Files are named as they are asked for: by URLs, or by PATH alone.
Nothing else may import this module: fsspec is slow to load.
"""

import builtins
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from weightvc import worktree
from weightvc.errors import BadName, Refused
from weightvc.history import HEAD
from weightvc.objects.frame import Buffer
from weightvc.objects.schema import CHUNK
from weightvc.objects.version import Version
from weightvc.protocol.files import File
from weightvc.protocol.refs import Refs
from weightvc.protocol.stored import VersionSource
from weightvc.repository import open

PROTOCOL: Final = "weightvc"
_SCHEME: Final = "weightvc://"
BUILT: Final = 8
"""Blocks of up to 4 MiB that are kept built: readers ask for pieces of some KB, one after the other."""
_FSSPEC: Final = ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous")
"""Options that fsspec gives to every file system."""


class Location(NamedTuple):
    """A URL taken apart; None for what it does not say."""

    repo: str | None
    ref: str | None
    path: str


def locate(text: str) -> Location:
    """Take a URL apart; a name without weightvc:// is a path."""
    rest = text.removeprefix(_SCHEME)
    repo, at, more = rest.partition("@")
    if rest == text or not at:
        return Location(None, None, rest.strip("/"))
    ref, _, path = more.partition("/")
    return Location(repo or None, unquote(ref) or None, path.strip("/"))


class _View:
    """One version: its files, and the way to their bytes."""

    def __init__(self, repo: str, options: dict[str, Any], ref: str) -> None:
        self._made_of = repo, options
        self._connect()
        found = Refs(self._repository._shelf, self._repository.refresh()).resolve(ref)
        assert found.entry.version is not None
        self.version: Version = found.entry.version

    def _connect(self) -> None:
        repo, options = self._made_of
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._repository = open(repo, lazy=True, **options)
        self._source: VersionSource | None = None
        self._files: dict[str, File] = {}
        self._blocks: list[tuple[int, int]] = []
        self._built: OrderedDict[int, Buffer] = OrderedDict()

    @property
    def files(self) -> dict[str, File]:
        """What a checkout would write, by path."""
        self._opened()
        return self._files

    def _opened(self) -> VersionSource:
        if self._pid != os.getpid():
            self._connect()  # a fork took neither threads nor connections along
        with self._lock:
            if self._source is None:
                # Not `whole`: of packs, only the blocks that somebody reads are fetched.
                source = self._repository.source(self.version.id)
                files = worktree.plan(self._repository._shelf, source)
                for file in files:
                    file.places.sort(key=lambda place: place[1])
                self._files = {file.path: file for file in files}
                self._blocks = source.verified.blocks()
                self._source = source
            return self._source

    def read(self, file: File, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, each checked."""
        tensors = self._opened().tensors
        stop = min(stop, file.size)
        pieces: list[Buffer] = []
        if start < len(file.content):
            pieces.append(file.content[start : min(stop, len(file.content))])
        first = max(0, bisect_right(file.places, start, key=lambda place: place[1]) - 1)
        for tensor, at in file.places[first:]:
            if at >= stop:
                break
            low, high = max(start - at, 0), min(stop - at, tensors[tensor].nbytes)
            while low < high:
                piece = self._piece(tensor, low, high)
                pieces.append(piece)
                low += len(piece)
        return b"".join(pieces)

    def _piece(self, tensor: int, start: int, stop: int) -> Buffer:
        """The first of some bytes of a tensor, as far as one block has them."""
        source = self._opened()
        schema = source.tree.schema
        number = bisect_right(self._blocks, schema.chunk_at(tensor, start), key=lambda block: block[0]) - 1
        low, high = self._blocks[number]
        with self._lock:
            data = self._built.get(number)
        if data is None:
            data = source.verified.read(low, high)
            with self._lock:
                self._built[number] = data
                while len(self._built) > BUILT:
                    self._built.popitem(last=False)
        origin = schema.position(low) - schema.offset[tensor]
        return memoryview(data)[start - origin : stop - origin]

    def stream(self, path: str) -> Iterator[bytes]:
        """All of a file, in pieces: packs are fetched whole, and ahead."""
        self._opened()
        return self._repository.file_bytes(self.version.id, path, piece=CHUNK)


class WeightvcFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of one version, to read. `ref` is resolved once, when something is first asked for: all that one
    instance reads, and all that unpickled copies of it read, is of one version. Threads may share it.

    A file that is not there is FileNotFoundError; all else that goes wrong is a WeightvcError, as weightvc.open()
    and Repository.load() raise it.
    """

    protocol = PROTOCOL
    root_marker = ""
    # An instance stands for the version that it resolved. Were it shared by all who name the branch later on in this
    # process, they would read an old version.
    cachable = False

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        ref: str = HEAD,
        *,
        version: str | None = None,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`version` is the id that `ref` was found to mean; `options` are those of weightvc.open(), and fsspec's own.
        fo, target_protocol and target_options are what fsspec gives where a URL chains to another.
        Raises Refused without a repository, BadName."""
        super().__init__(**{name: options.pop(name) for name in _FSSPEC if name in options})
        if repo is None and fo is not None:
            repo = fo if target_protocol in (None, "file", "local") or "://" in fo else f"{target_protocol}://{fo}"
            options = {**(target_options or {}), **options}
        if repo is None or repo == "":
            raise Refused(
                "weightvc:// needs a repository: write weightvc://REPOSITORY@REF/PATH, or give the option repo"
            )
        if not isinstance(ref, str):
            raise BadName(f"{ref!r:.200} is not a ref: name a branch, a tag or a version id")
        self.repo = _absolute(os.fspath(repo))
        self.ref = ref or HEAD
        self._options = options
        self._known = version
        self._view: _View | None = None
        self._view_lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        # With a repository or a ref in it a URL is a name of its own, as with HTTP: whoever lists with one instance
        # and opens with another, in another process perhaps, has all that it takes.
        text = os.fspath(path).rstrip("/")
        return text if "@" in text else text.removeprefix(_SCHEME)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        found = locate(path)
        named = {"repo": found.repo, "ref": found.ref}
        return {name: value for name, value in named.items() if value is not None}

    def _parts(self, name: str) -> tuple[str, str]:
        """What stands before a file's path in the name that it is asked for by, and its path in the version."""
        found = locate(name)
        if not name.startswith(_SCHEME) or "@" not in name:
            return "", found.path
        here = found.repo is None or _absolute(found.repo) == self.repo
        if not here or (found.ref or HEAD) not in (self.ref, self.version.id):
            raise Refused(f"{name:.300} is not in {self.repo}@{self.ref}, which this file system reads: open it anew")
        return name.rstrip("/").removesuffix(found.path).rstrip("/") + "/", found.path

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a file of this very version."""
        return f"{_SCHEME}{self.repo}@{self.version.id}/{self._parts(name)[1]}"

    def __reduce__(self) -> Any:
        return _remake, (type(self), self.repo, self.ref, self.version.id, self._options)

    @property
    def version(self) -> Version:
        """The version that is read. Raises as Repository.resolve() does."""
        return self._opened().version

    def invalidate_cache(self, path: str | None = None) -> None:
        """Resolve the ref anew at the next use. Files that are open go on reading their version."""
        with self._view_lock:
            self._known = self._view = None

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """What makes this instance again, at this very version."""
        made = super().to_dict(include_password=include_password)
        kept = {name: made[name] for name in ("cls", "protocol")}
        return {**kept, "args": (), "repo": self.repo, "ref": self.ref, "version": self.version.id, **self._options}

    def _opened(self) -> _View:
        with self._view_lock:
            if self._view is None:
                self._view = _View(self.repo, self._options, self._known or self.ref)
            return self._view

    # Listing

    def _info(self, view: _View, path: str, size: int | None) -> dict[str, Any]:
        return {
            "name": path,
            "size": 0 if size is None else size,
            "type": "directory" if size is None else "file",
            "version": view.version.id,
            "tree": view.version.tree,
            "mtime": view.version.time / 1e6,
        }

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size and kind, with the version's id, its tree's digest and its time."""
        view = self._opened()
        before, inner = self._parts(path)
        if inner in view.files:
            return self._info(view, before + inner, view.files[inner].size)
        if inner and not any(name.startswith(f"{inner}/") for name in view.files):
            raise self._absent(view, inner)
        return self._info(view, (before + inner).rstrip("/"), None)

    def ls(self, path: str, detail: bool = True, **unused: Any) -> Any:
        """What lies in a directory, or the file itself."""
        view = self._opened()
        before, inner = self._parts(path)
        if inner in view.files:
            found: dict[str, int | None] = {before + inner: view.files[inner].size}
        else:
            found, folder = {}, f"{inner}/" if inner else ""
            before += folder
            for name, file in view.files.items():
                if name.startswith(folder):
                    below, _, deeper = name.removeprefix(folder).partition("/")
                    found[before + below] = None if deeper else file.size
            if not found and inner:
                raise self._absent(view, inner)
        if not detail:
            return sorted(found)
        return [self._info(view, name, found[name]) for name in sorted(found)]

    def walk(self, path: str, *arguments: Any, **options: Any) -> Any:
        """What fsspec says, but that a store which cannot be reached is no empty directory: all is read first."""
        _ = self._opened().files
        return super().walk(path, *arguments, **options)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether the version has such a file. Raises where that cannot be known."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """Whether it is a file of the version."""
        return self.exists(path) and self.info(path)["type"] == "file"

    def isdir(self, path: str) -> bool:
        """Whether files of the version lie below it."""
        return self.exists(path) and self.info(path)["type"] == "directory"

    def created(self, path: str) -> datetime:
        """When the version was committed."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    modified = created

    def ukey(self, path: str) -> str:
        """Never changes, and is of no other bytes."""
        return f"{self.version.id}/{self._parts(path)[1]}"

    checksum = ukey

    def _absent(self, view: _View, path: str) -> FileNotFoundError:
        names = ", ".join(list(view.files)[:8])
        return FileNotFoundError(f"version {view.version.short} has no file {path!r:.200}; it has {names}")

    def _file(self, view: _View, path: str) -> File:
        inner = self._parts(path)[1]
        if inner in view.files:
            return view.files[inner]
        self.info(path)
        raise IsADirectoryError(f"{inner!r:.200} of version {view.version.short} is a directory")

    # Reading

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            self._refuse()
        view = self._opened()
        options = {name: options[name] for name in ("cache_type", "cache_options") if options.get(name) is not None}
        return _File(self, path, view, self._file(view, path), block_size or CHUNK, options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **unused: Any) -> bytes:
        """A file's bytes, or those from `start` to `end`, counted from the end where negative."""
        view = self._opened()
        file = self._file(view, path)
        if start is None and end is None:
            return b"".join(view.stream(file.path))
        low, high, _ = slice(start, end).indices(file.size)
        return view.read(file, low, high)

    def get_file(
        self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **_: Any
    ) -> None:
        """Copy a file, every byte checked. One that is cut short by an error is removed."""
        view = self._opened()
        if outfile is None and not hasattr(lpath, "write") and self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        file = self._file(view, rpath)
        callback.set_size(file.size)
        target = outfile if outfile is not None else lpath if hasattr(lpath, "write") else None
        if target is not None:
            _copy(view, file, target, callback)
            return
        os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        with builtins.open(lpath, "wb") as made:
            try:
                _copy(view, file, made, callback)
            except BaseException:
                os.unlink(lpath)
                raise

    # Writing

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Refused(f"weightvc:// is read-only: `weightvc commit -r {self.repo}` makes a version")

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file of a version, open to read. It keeps its version, whatever becomes of the file system."""

    def __init__(
        self, fs: WeightvcFileSystem, path: str, view: _View, file: File, block_size: int, options: dict[str, Any]
    ) -> None:
        self._view = view
        self._file = file
        super().__init__(fs, path, "rb", block_size, size=file.size, **options)
        self.details = fs._info(view, path, file.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._view.read(self._file, start, end)

    def __reduce__(self) -> Any:
        fs = self.fs
        return _reopen, (type(fs), fs.repo, fs.ref, self._view.version.id, fs._options, self.path, self.loc)


def _absolute(repo: str) -> str:
    """A repository's place, for whoever works in another directory."""
    return repo if "://" in repo else os.path.abspath(repo)


def _copy(view: _View, file: File, target: Any, callback: Any) -> None:
    for piece in view.stream(file.path):
        target.write(piece)
        callback.relative_update(len(piece))


def _remake(
    kind: type[WeightvcFileSystem], repo: str, ref: str, version: str, options: dict[str, Any]
) -> WeightvcFileSystem:
    return kind(repo, ref, version=version, **options)


def _reopen(
    kind: type[WeightvcFileSystem], repo: str, ref: str, version: str, options: dict[str, Any], path: str, at: int
) -> Any:
    made = kind(repo, ref, version=version, **options).open(path)
    made.seek(at)
    return made
