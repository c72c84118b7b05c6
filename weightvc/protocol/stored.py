"""A version as a source: what can be committed again, compared, or read tensor by tensor."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from weightvc.objects.catalogue import Entry
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.pool import Pool
from weightvc.protocol import parallel, resolve
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

    def parts(self, spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, memoryview]]:
        """(tensor, where in it, bytes) of all chunks that have bytes of `spans` (tensor, start, stop), in order of
        tensors. Each block is read once, on threads; what else it has comes along."""
        schema = self.tree.schema
        wanted = bytearray(schema.chunks)
        for tensor, start, stop in spans:
            if start < stop:
                low, high = schema.chunk_at(tensor, start), schema.chunk_at(tensor, stop - 1) + 1
                wanted[low:high] = b"\x01" * (high - low)
        blocks = [(low, high) for low, high in self.verified.blocks() if wanted.find(1, low, high) >= 0]

        def read(block: tuple[int, int]) -> tuple[int, int, memoryview]:
            return *block, memoryview(self.verified.read(*block))

        with Pool(parallel.workers(), "weightvc-load") as pool:
            window = 2 * parallel.workers() + 2
            for low, high, data in parallel.ordered(pool, read, self.verified.runs(blocks), window):
                yield from parts(schema, low, high, data)

    def check(self) -> None:
        """A version never changes."""

    def close(self) -> None:
        """Release what reads it."""
        self._stack.close()

    def __enter__(self) -> "VersionSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parts(schema: Schema, low: int, high: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The tensors that chunks [low, high) have `data` of: where in the tensor a part begins, and the part."""
    positions, chunk = schema.positions, low
    tensor = schema.tensor_of(low)
    while chunk < high:
        while schema.first_chunk[tensor + 1] <= chunk:
            tensor += 1
        end = min(schema.first_chunk[tensor + 1], high)
        begin, stop = positions[chunk], positions[end]
        yield tensor, begin - schema.offset[tensor], data[begin - positions[low] : stop - positions[low]]
        chunk = end
