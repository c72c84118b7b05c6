"""The stock: where the bytes of lost objects, or the weights of lost versions, may be found again."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from weightvc.cache import Cache, Flat
from weightvc.errors import BadFile, Corrupt
from weightvc.objects import frame, key, layout, manifest
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.protocol.state import read_chunks
from weightvc.sources.base import Layout, Source, TensorInfo


class FlatSource:
    """A tree in a cache, as something to store again. Nothing is checked here: the tree's digest is, at the end."""

    layout: Layout | None = None

    def __init__(self, schema: Schema, flat: Flat) -> None:
        self.tensors: Sequence[TensorInfo] = schema.tensors
        self._schema = schema
        self._flat = flat

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Canonical bytes [start, stop) of one tensor."""
        at = self._schema.offset[index]
        return self._flat.read(at + start, at + stop)

    def check(self) -> None:
        """It is checked by its digest."""

    def close(self) -> None:
        """Nothing to release."""


class Stock:
    """Where lost bytes may be found: caches, copies of a repository, checkouts and files."""

    def __init__(self, cache: Cache | None, places: Iterable[Path]) -> None:
        """Raises Refused for a place that is none of these."""
        self._stack = ExitStack()
        self._own = cache
        self._caches = [cache] if cache is not None else []
        self._copies: list[Path] = []
        self._sources: list[tuple[Path, Source]] = []
        self._trees: dict[str, Source] = {}
        self._hashed = 0
        for place in places:
            if not place.exists():
                raise BadFile(f"{place} does not exist: name a checkout, a file, a cache or a copy of the repository")
            if (place / "objects").is_dir() or (place / "trees").is_dir():
                self._caches.append(Cache(place))
                self._copies.append(place / "objects")
            elif any((place / name).exists() for name in ("root", "manifest", "pack", "segment")):
                self._copies.append(place)
            else:
                self._sources.append((place, self._open(place)))

    def _open(self, place: Path) -> Source:
        from weightvc.sources import open_source

        source = open_source(place)
        self._stack.callback(source.close)
        return source

    def close(self) -> None:
        """Close the sources."""
        self._stack.close()

    def object(self, name: str) -> frame.Buffer | None:
        """An object's own bytes, or None."""
        if self._own is not None and (held := self._own.get(name)) is not None:
            return held
        for copy in self._copies:
            try:
                data = (copy / name).read_bytes()
                key.check(name, data)
            except (OSError, Corrupt):
                continue
            return data
        return None

    def source(self, tree: str) -> Source | None:
        """What has the weights of a tree, by its digest, or None. Reads all sources when it is first asked."""
        while tree not in self._trees and self._hashed < len(self._sources):
            _, source = self._sources[self._hashed]
            self._hashed += 1
            self._trees[digest_of(source)] = source
        return self._trees.get(tree)

    def cached(self, tree: str, schema: Schema) -> Source | None:
        """A tree from a cache, unchecked, or None."""
        for cache in self._caches:
            flat = cache.open_tree(tree, schema)
            if flat is not None:
                return FlatSource(schema, flat)
        return None

    def made(self) -> dict[str, bytes]:
        """Schemas, layouts and file objects as a commit of the checkouts and files would store them, by digest.

        They are the lost ones' bytes only where the same zstd wrote those: else a version is stored anew with them.
        """
        out: dict[str, bytes] = {}
        for _, source in self._sources:
            bodies = [Schema(source.tensors).encode()]
            if source.layout is not None:
                data, files = layout.encode(layout.make(source.layout))
                bodies += [data, *files.values()]
            out.update((frame.digest(body).hex(), body) for body in bodies)
        return out


def digest_of(source: Source) -> str:
    """The digest of the tree that a source holds; reads all of it."""
    schema = Schema(source.tensors)
    digests = [
        frame.digests(read_chunks(source, schema, low, high), schema.cuts(low, high))
        for low, high in manifest.blocks(schema, None)
    ]
    return Tree(schema, b"".join(digests)).digest
