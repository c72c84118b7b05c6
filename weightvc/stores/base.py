"""What weightvc asks of a store: eight operations, and a typed error for each outcome.

Keys are "/"-separated ASCII relative to the repository's prefix. All a store must promise is atomic
create and swap of one small key, read-after-write, and complete listings.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from weightvc.errors import AccessDenied, BadName, KeyNotFound, Refused

MISSING: Final = (KeyNotFound, AccessDenied)
"""What a store says of an object that has gone: to an identity that may not list, S3 denies a key that is not there.
Whoever catches it looks whether the root has moved on, or for another way; what is denied indeed is told as that."""

# Printable ASCII without the space and the backslash.
_KEY: Final = re.compile(r"[!-\[\]-~]+")
_PART: Final = re.compile(r"[!-\-0-\[\]-~][!-.0-\[\]-~]{0,254}")


def check_key(key: str) -> str:
    """Return `key` if every store can keep it, else raise BadName: one rule, so that repositories can be moved.

    Parts between "/" are printable ASCII without spaces and backslashes, at most 255 bytes each, 900 in
    all, none empty. None begins with a dot: that keeps ".." out, and dot names free for the stores' own files.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key) > 900:
        raise BadName(
            f"key {_short(key)} cannot be used: use 1 to 900 printable ASCII characters, no space, no backslash"
        )
    for part in key.split("/"):
        if not part or part[0] == "." or len(part) > 255:
            raise BadName(
                f"key {_short(key)} cannot be used: each part between '/' has 1 to 255 characters "
                "and does not begin with a dot"
            )
    return key


def is_key(name: str) -> bool:
    """Whether check_key would accept `name`; listings leave out what is not, since it is not ours."""
    return len(name) <= 900 and all(map(_PART.fullmatch, name.split("/")))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some key could begin with it, else raise BadName. "" is every key."""
    if prefix:
        check_key(prefix + "x" if prefix.endswith("/") else prefix)
    return prefix


def check_range(start: int | None, length: int | None) -> tuple[int, int | None]:
    """The first byte and the byte count (None: to the end) of a read. Raises Refused if one is negative."""
    if (start is not None and start < 0) or (length is not None and length < 0):
        raise Refused(f"range start={start}, length={length} is negative: count bytes from the object's first")
    return start or 0, length


def content_etag(data: bytes) -> str:
    """The ETag of stores that compare contents: blake3, 64 hexadecimal digits."""
    from blake3 import blake3

    return blake3(data).hexdigest()


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Got:
    """What a read returned: the bytes, the object's ETag and its full size in bytes."""

    data: bytes
    etag: str
    size: int


class Listed(NamedTuple):
    """One object of a listing; `modified` is the store's clock, in seconds since the epoch."""

    key: str
    size: int
    modified: float


@dataclass(slots=True)
class Stats:
    """Requests and bytes of one store object since it was made, for `--stats` and for tests."""

    reads: int = 0
    writes: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@runtime_checkable
class Store(Protocol):
    """An object store under one prefix. Safe to use from several threads."""

    url: str
    """Where it lies, as a user would write it; never with credentials in it."""

    address: str
    """What opens it again later: its URL, with the server and others of its options that are no secrets."""

    stats: Stats

    conditional: bool
    """Whether create() and swap() are promised atomic by construction (no probe needed)."""

    def get(
        self,
        key: str,
        *,
        start: int | None = None,
        length: int | None = None,
        unless_etag: str | None = None,
    ) -> Got | None:
        """Read an object, or `length` bytes of it from `start`; None if its ETag is `unless_etag`.

        Retries what is safe. The result has exactly the bytes asked for (fewer only where the object
        ends before `start + length`), whatever the server did with the range.
        Raises KeyNotFound, AccessDenied, Unavailable.
        """
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write an object under a fresh name and return its ETag; repeating it is harmless, so it retries.

        Raises AccessDenied, Unavailable.
        """
        ...

    def create(self, key: str, data: bytes) -> str:
        """Write if there is nothing under `key`: one attempt. Returns the ETag.

        Raises KeyExists, AccessDenied, Unavailable (surely not written), StateUnknown (perhaps written).
        """
        ...

    def swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object whose ETag is `etag`: one attempt. Returns the new ETag.

        Raises PreconditionFailed, AccessDenied, Unavailable (surely not written), StateUnknown.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Every object whose key starts with `prefix`, in byte order of the keys.

        A listing that cannot be completed raises; it never ends early. Raises AccessDenied, Unavailable.
        """
        ...

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        """Delete objects, in batches where the store can; absent keys count as deleted.

        Returns the error of each key that could not be deleted.
        """
        ...

    def close(self) -> None:
        """Release connections. The store may not be used afterwards."""
        ...


@runtime_checkable
class Sweeps(Protocol):
    """A store that may keep files which are no objects, left by writers that were killed."""

    def sweep(self, before: float, *, dry_run: bool = False) -> list[int]:
        """Delete those that were last written before a time (the store's clock, seconds); their sizes in bytes.

        `dry_run` only looks. What cannot be looked at or deleted is left. Raises AccessDenied, Unavailable.
        """
        ...
