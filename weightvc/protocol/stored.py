"""A version as a source: what can be committed again, compared, or read tensor by tensor."""

from contextlib import ExitStack

from weightvc.objects.catalogue import Entry
from weightvc.objects.tensor import TensorInfo
from weightvc.protocol import resolve
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.sources.base import Layout, LayoutFile


class VersionSource:
    """Reads a version's tensors from the cache and the store; every chunk is checked. Close it after use."""

    def __init__(self, shelf: Shelf, refs: Refs, entry: Entry, *, whole: bool) -> None:
        self._stack = ExitStack()
        self._shelf = shelf
        self.manifest, self.verified = self._stack.enter_context(resolve.opened(shelf, refs, entry, whole=whole))
        self.tree = self.verified.tree
        self.tensors: list[TensorInfo] = self.tree.schema.tensors

    @property
    def layout(self) -> Layout | None:
        """How the version's files lay, or None."""
        stored = resolve.layout_of(self._shelf, self.manifest)
        if stored is None:
            return None
        return Layout(
            tuple(
                LayoutFile(entry.path, entry.size, bytes(stored.contents[entry.content]), entry.weights)
                for entry in stored.entries
            )
        )

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of one tensor."""
        if start >= stop:
            return b""
        schema = self.tree.schema
        origin = schema.offset[index]
        low = schema.chunk_at(index, start)
        high = schema.chunk_at(index, stop - 1) + 1
        at = schema.position(low)
        return memoryview(self.verified.read(low, high))[origin + start - at : origin + stop - at]

    def read_run(self, first: int, last: int) -> memoryview | bytes:
        """Canonical bytes of several tensors, one after the other."""
        chunks = self.tree.schema.first_chunk
        return memoryview(self.verified.read(chunks[first], chunks[last]))

    def check(self) -> None:
        """A version never changes."""

    def close(self) -> None:
        """Release what reads it."""
        self._stack.close()

    def __enter__(self) -> "VersionSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
