"""Files at an fsspec URL: listed afresh, read by exact ranges, checked for changes."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from weightvc.errors import AccessDenied, BadFile, Unavailable

_ATTEMPTS = 3
_STAMPS = (
    "ETag",
    "etag",
    "VersionId",
    "version_id",
    "generation",
    "md5",
    "LastModified",
    "mtime",
    "updated",
    "created",
)


class RemoteFiles:
    """The files below `root`, a URL, or `root` itself under the path "" if it is a file.

    Threads may read at once. `sizes` (bytes) is by relative path, after keep().
    """

    is_remote = True

    def __init__(self, root: str) -> None:
        """Raises BadFile if there is nothing at `root`; AccessDenied, Unavailable."""
        import fsspec

        self.root = root
        self.sizes: dict[str, int] = {}
        self._stamps: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        try:
            self._fs, base = fsspec.core.url_to_fs(root)
        except (ValueError, ImportError) as error:
            raise BadFile(f"{root}: not a URL that can be read: {error}") from None
        self._base: str = base.rstrip("/")
        info = self._info()
        self.is_directory: bool = info["type"] == "directory"
        self._listed: dict[str, dict[str, Any]] = {} if self.is_directory else {"": info}

    def where(self, path: str) -> str:
        """`path` as a user would name it."""
        return f"{self.root.rstrip('/')}/{path}" if path else self.root

    def walk(self, left_out: Callable[[str], bool]) -> list[str]:
        """Relative paths of all files that `left_out` does not match, sorted."""
        self._listed = {path: info for path, info in self._find().items() if not left_out(path)}
        return sorted(self._listed)

    def keep(self, paths: Iterable[str]) -> None:
        """Note size and stamp (ETag or time of change) of the files that will be read."""
        for path in paths:
            info = self._listed[path]
            if type(info["size"]) is not int:
                raise BadFile(f"{self.where(path)}: its server does not tell its size: download it first")
            self.sizes[path] = info["size"]
            self._stamps[path] = _stamp(info)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a kept file, exactly. Raises AccessDenied, Unavailable, BadFile (gone)."""
        if start == stop:
            return b""
        got = 0
        for _ in range(_ATTEMPTS):
            with self._errors(path):
                data: bytes = self._fs.cat_file(self._key(path), start=start, end=stop)
            got = len(data)
            if got == stop - start:
                return data
        # Short without an error, or the whole object where a range was asked for.
        raise Unavailable(f"{self.where(path)}: {stop - start} bytes asked for, {got} came: try again")

    def check(self) -> None:
        """Raise BadFile if a kept file's size or stamp differs from when it was kept."""
        now = self._find() if self.is_directory else {"": self._info()}
        for path, stamp in self._stamps.items():
            if path not in now or _stamp(now[path]) != stamp:
                raise BadFile(f"{self.where(path)}: changed while it was read: commit again when it is complete")

    def close(self) -> None:
        """Nothing to release: fsspec shares its connections."""

    def _key(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _info(self) -> dict[str, Any]:
        with self._lock, self._errors(""):
            # Listings are cached by the file system object, which is shared in the process.
            self._fs.invalidate_cache()
            info: dict[str, Any] = self._fs.info(self._base)
            return info

    def _find(self) -> dict[str, dict[str, Any]]:
        with self._lock, self._errors(""):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._fs.find(self._base, detail=True)
        result = {}
        for key, info in found.items():
            # Some tools mark a folder with an empty object.
            if info.get("type") != "file" or (key.endswith("/") and not info["size"]):
                continue
            if key.rstrip("/") == self._base and not info["size"]:
                continue
            if not key.startswith(f"{self._base}/"):
                raise BadFile(f"{self.root}: its listing has {key!r}, which is not below it: give another URL")
            result[key[len(self._base) + 1 :]] = info
        return result

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise BadFile(f"{self.where(path)}: there is nothing here: check the URL") from None
        except PermissionError as error:
            raise AccessDenied(f"{self.where(path)}: {error}: check the credentials") from None
        except OSError as error:
            raise Unavailable(f"{self.where(path)}: {error}: try again") from error


def _stamp(info: dict[str, Any]) -> tuple[Any, ...]:
    return info["size"], *((key, info[key]) for key in _STAMPS if key in info)
