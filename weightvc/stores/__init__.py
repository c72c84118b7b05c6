"""Object stores: `open_store(url)` picks the one for a URL."""

import inspect
import os
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from weightvc.errors import BadName, Refused
from weightvc.stores.base import Got, Listed, Stats, Store

__all__ = ["Got", "Listed", "Stats", "Store", "open_store"]


def open_store(url: str | os.PathLike[str], **options: Any) -> Store:
    """Open the store at `url`; nothing is read or written yet.

    - `memory://NAME`: in this process, shared by all that use the name
    - a path, or `file:///path`: a local directory
    - `s3://BUCKET/PREFIX`: S3 through boto3; options are those of `S3Store` (endpoint_url, region, profile,
      access_key, ...), and may also stand in the URL as `?endpoint_url=...&region=...`
    - any other scheme: through fsspec; read-only unless `single_writer=True`; other options go to fsspec

    Raises BadName for a URL that cannot be used and Refused for an option that the store does not have.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _make("a local directory", _local(), text, options)
    scheme = scheme.lower()
    if scheme == "memory":
        name = rest.strip("/")
        if not name:
            raise BadName(f"{text!r} has no name: write memory://NAME")
        from weightvc.stores.memory import MemoryStore

        return _make("memory://", MemoryStore, name, options)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise BadName(f"{text!r} is not a local file URL: write file:///path, with three slashes")
        return _make("file://", _local(), unquote(parts.path), options)
    if scheme == "s3":
        from weightvc.stores.s3 import S3Store

        place, _, query = rest.partition("?")
        for name, value in parse_qsl(query, keep_blank_values=True):
            options.setdefault(name, value)
        return _make("s3://", S3Store, f"s3://{place}", options)
    from weightvc.stores.remote import RemoteStore

    return RemoteStore(text, **options)


def _local() -> Any:
    from weightvc.stores.local import LocalStore

    return LocalStore


def _make(kind: str, store: Any, place: str, options: dict[str, Any]) -> Store:
    known = list(inspect.signature(store).parameters)[1:]
    for name in options:
        if name not in known:
            raise Refused(
                f"option {name!r} is not known for {kind}: "
                + (f"the options are {', '.join(known)}" if known else "it has none; leave it out")
            )
    made: Store = store(place, **options)
    return made
