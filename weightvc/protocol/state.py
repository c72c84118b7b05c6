"""States: places from which the chunks of a tree can be read.

A chain starts from a base in the store, or from a tree that this host holds, and applies patches to it chunk by
chunk, so that a model of any size passes through a bounded window. Nothing that a state returns has been checked;
`Verified` checks it against the tree's digests, and falls back to another state where it is wrong.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from weightvc.cache import Flat
from weightvc.errors import Corrupt, NotFound, StoreError, Unsupported, WeightvcError
from weightvc.objects import dtypes, frame, manifest
from weightvc.objects.manifest import REF, SAME, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.protocol.shelf import Shelf
from weightvc.sources.base import ReadsRuns, Source

PACKS_HELD: Final = 3
BLOCKS_HELD: Final = 8
KNOWN: Final = range(REF + 1)
"""Codecs that this reader knows."""
Buffer = frame.Buffer


class State(Protocol):
    """Chunks of one tree."""

    tree: Tree

    def read(self, low: int, high: int) -> Buffer:
        """Bytes of chunks [low, high), one after the other. Threads may read at once."""
        ...


class Held:
    """A tree in the local cache."""

    def __init__(self, tree: Tree, flat: Flat) -> None:
        self.tree = tree
        self._flat = flat

    def read(self, low: int, high: int) -> Buffer:
        schema = self.tree.schema
        return self._flat.read(schema.position(low), schema.position(high))

    def discard(self) -> None:
        """The entry is bad: forget it."""
        self._flat.discard()


class Lying:
    """A tree that lies in a source: a checked-out directory, or tensors in memory."""

    def __init__(self, tree: Tree, source: Source) -> None:
        self.tree = tree
        self._source = source
        self._same = list(source.tensors) == tree.schema.tensors
        index = {(t.component, t.name): i for i, t in enumerate(source.tensors)}
        self._at = [index.get((t.component, t.name), -1) for t in tree.schema.tensors]
        self._at = [
            i if i >= 0 and source.tensors[i] == t else -1 for i, t in zip(self._at, tree.schema.tensors, strict=True)
        ]

    def read(self, low: int, high: int) -> Buffer:
        if self._same and isinstance(self._source, ReadsRuns):
            run = self.tree.schema.whole(low, high)
            if run is not None:
                return self._source.read_run(*run)
        pieces = []
        for chunk in range(low, high):
            tensor, start, stop = self.tree.schema.span(chunk)
            if self._at[tensor] < 0:
                raise Corrupt(f"tensor {self.tree.schema.tensors[tensor].name!r} is not there")
            pieces.append(self._source.read(self._at[tensor], start, stop))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Payloads:
    """The bytes of a stream's blocks: from the manifest, or from packs, fetched whole or by range."""

    def __init__(self, shelf: Shelf, stream: Stream, pool: ThreadPoolExecutor, *, whole: bool, keep: bool) -> None:
        self._shelf = shelf
        self._stream = stream
        self._pool = pool
        self._whole = whole
        self._keep = keep
        self._packs: OrderedDict[int, Future[Buffer]] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, block: int) -> Buffer:
        """One block's bytes."""
        stream = self._stream
        start, stop = stream.offsets[block], stream.offsets[block + 1]
        if not stream.packs:
            return memoryview(stream.inline)[start:stop]
        if start == stop:
            return b""
        pack, at = stream.pack_of(block)
        if not self._whole:
            name = stream.packs[pack][0]
            if self._shelf.cache is not None and (held := self._shelf.cache.get(name)) is not None:
                return memoryview(held)[at : at + stop - start]
            got = self._shelf.store.get(name, start=at, length=stop - start)
            if got is None or len(got.data) != stop - start:
                raise Corrupt(f"{name} is corrupt: it ends before its blocks do")
            return got.data
        with self._lock:
            future = self._ask(pack)
            if pack + 1 < len(stream.packs):
                self._ask(pack + 1)
            self._packs.move_to_end(pack)
            while len(self._packs) > PACKS_HELD:
                self._packs.popitem(last=False)
        return memoryview(future.result())[at : at + stop - start]

    def _ask(self, pack: int) -> Future[Buffer]:
        if pack not in self._packs:
            self._packs[pack] = self._pool.submit(self._fetch, pack)
        return self._packs[pack]

    def _fetch(self, pack: int) -> Buffer:
        name, size = self._stream.packs[pack]
        data = self._shelf.get(name, keep=self._keep)
        frame.check_header(data, frame.PACK, name)
        if len(data) != frame.HEADER_SIZE + size:
            raise Corrupt(f"{name} is corrupt: {len(data) - frame.HEADER_SIZE} bytes where {size} are promised")
        return data


@dataclass(slots=True)
class Level:
    """One step of a chain: a base's stream, or a patch's and the chunk map to the level below."""

    tree: Tree
    stream: Stream
    payloads: Payloads
    what: str
    writer: str
    source_of: list[int] | None = None
    """For each chunk, its source chunk a level below (-1: none); None where all chunks keep their numbers."""


def chunk_map(new: Schema, old: Schema, moved: dict[int, int]) -> list[int] | None:
    """The source chunk of every chunk: the one of the same place in the tensor of the same name (or as `moved`
    says), if it has as many bytes; else -1. None means that every chunk is its own."""
    if not moved and (new is old or new.tensors == old.tensors):
        return None
    out: list[int] = []
    for i, tensor in enumerate(new.tensors):
        source = moved.get(i, -2)
        if source == -2:
            source = old.index.get((tensor.component, tensor.name), -1)
        if not -1 <= source < len(old.tensors):
            raise Corrupt(f"a patch names tensor {source} of a tree that has {len(old.tensors)}")
        count = new.first_chunk[i + 1] - new.first_chunk[i]
        if source < 0:
            out += [-1] * count
            continue
        first = old.first_chunk[source]
        have = old.first_chunk[source + 1] - first
        if count == 1 == have and tensor.nbytes == old.tensors[source].nbytes:
            out.append(first)
            continue
        ours = new.sizes(new.first_chunk[i], new.first_chunk[i + 1])
        theirs = old.sizes(first, first + have)
        for k in range(count):
            out.append(first + k if k < have and ours[k] == theirs[k] else -1)
    return out


class Chain:
    """`start` (None for a base as the first level) and the levels above it, applied in turn."""

    def __init__(self, start: State | None, levels: Sequence[Level]) -> None:
        self._start = start
        self._levels = levels
        self.tree = levels[-1].tree if levels else start.tree if start else None  # type: ignore[assignment]
        assert self.tree is not None
        self._blocks: OrderedDict[tuple[int, int], Buffer] = OrderedDict()
        self._lock = threading.Lock()

    tree: Tree

    def discard(self) -> None:
        """What comes out is wrong: forget the cached tree that it starts from, which may be to blame."""
        if isinstance(self._start, Held):
            self._start.discard()

    def read(self, low: int, high: int) -> Buffer:
        return self._read(len(self._levels) - 1, low, high)

    def _read(self, at: int, low: int, high: int) -> Buffer:
        """Chunks [low, high) of a level. Walks down while they are one block with one source, then up again."""
        import weightvc_kernels as kernels

        pending: list[tuple[int, Buffer, int, str]] = []
        while True:
            if at < 0:
                assert self._start is not None
                data = self._start.read(low, high)
                break
            level = self._levels[at]
            stream = level.stream
            block = stream.block_of(low)
            if (stream.first[block], stream.first[block + 1]) != (low, high):
                data = self._pieces(at, low, high)
                break
            codec = stream.codecs[block]
            schema = level.tree.schema
            if codec == REF:
                data = self._referred(at, block, low, high)
                break
            lane = dtypes.lane(schema.tensors[schema.tensor_of(low)].dtype)
            if codec not in KNOWN:
                raise Unsupported(
                    f"{level.what}: codec {codec} of {level.writer} is not known here: upgrade weightvc"
                )
            if codec != SAME:
                payload = level.payloads.block(block)
                if codec in (kernels.RAW, kernels.PLANES):
                    nbytes = schema.position(high) - schema.position(low)
                    try:
                        data = kernels.decode_whole(codec, payload, nbytes, lane).data
                    except kernels.CodecError as error:
                        raise Corrupt(f"{level.what}: block {block}: {error}") from None
                    break
                pending.append((codec, payload, lane, f"{level.what}: block {block}"))
            if at == 0 and self._start is None:
                raise Corrupt(f"{level.what}: block {block} of a base has no content")
            at -= 1
            if level.source_of is not None:
                sources = level.source_of[low:high]
                if -1 in sources:
                    raise Corrupt(f"{level.what}: block {block} has no source in the version it is a patch against")
                if any(b != a + 1 for a, b in pairwise(sources)):
                    data = b"".join([self._read(at, source, source + 1) for source in sources])
                    break
                low, high = sources[0], sources[-1] + 1
        for codec, payload, lane, what in reversed(pending):
            try:
                data = kernels.decode_patch(codec, payload, memoryview(data), lane).data
            except kernels.CodecError as error:
                raise Corrupt(f"{what}: {error}") from None
        return data

    def _referred(self, at: int, block: int, low: int, high: int) -> Buffer:
        level = self._levels[at]
        payload = bytes(level.payloads.block(block))
        target = int.from_bytes(payload, "little")
        if len(payload) != 4 or high - low != 1 or target >= low:
            raise Corrupt(f"{level.what}: block {block} refers to chunk {target}, which is not before it")
        return self._read(at, target, target + 1)

    def _pieces(self, at: int, low: int, high: int) -> Buffer:
        """Chunks that are not exactly one block: cut from the blocks that cover them, which are kept a while."""
        level = self._levels[at]
        schema, stream = level.tree.schema, level.stream
        pieces = []
        while low < high:
            block = stream.block_of(low)
            first, last = stream.first[block], stream.first[block + 1]
            with self._lock:
                data = self._blocks.get((at, block))
            if data is None:
                data = self._read(at, first, last)
                with self._lock:
                    self._blocks[at, block] = data
                    while len(self._blocks) > BLOCKS_HELD:
                        self._blocks.popitem(last=False)
            origin, stop = schema.position(first), min(last, high)
            pieces.append(memoryview(data)[schema.position(low) - origin : schema.position(stop) - origin])
            low = stop
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def level_of(
    shelf: Shelf,
    made: manifest.Manifest,
    name: str,
    below: Tree | None,
    pool: ThreadPoolExecutor,
    *,
    whole: bool,
) -> Level:
    """The level that a manifest adds to a chain: its patch onto `below`, or its base where that is None."""
    tree = Tree(shelf.schema(made.schema, made.schema_digest), made.digests)
    if below is None:
        assert made.base is not None
        return Level(tree, made.base, Payloads(shelf, made.base, pool, whole=whole, keep=False), name, made.writer)
    assert made.patch is not None
    payloads = Payloads(shelf, made.patch.stream, pool, whole=whole, keep=True)
    mapping = chunk_map(tree.schema, below.schema, made.patch.moved)
    return Level(tree, made.patch.stream, payloads, name, made.writer, mapping)


class Verified:
    """Reads a tree from the first of several states that gives the right bytes; the others are made on demand."""

    def __init__(self, tree: Tree, ways: Sequence[Callable[[], State | None]], what: str) -> None:
        self.tree = tree
        self._ways = list(ways)
        self._what = what
        self._state: State | None = None
        self._lock = threading.Lock()
        self.failures: list[str] = []

    def read(self, low: int, high: int) -> Buffer:
        """Bytes of chunks [low, high), checked. Raises Corrupt, or what the last way raised."""
        while True:
            state = self._current()
            try:
                data = state.read(low, high)
                self._check(data, low, high)
                return data
            except (Corrupt, NotFound, StoreError) as error:
                self._next(state, error)
            except OSError as error:
                self._next(state, Corrupt(f"{self._what}: {error}"))

    def blocks(self) -> list[tuple[int, int]]:
        """All chunks, cut into blocks to read: as commits cut them, so that a block is decoded once."""
        return manifest.blocks(self.tree.schema, None)

    def _check(self, data: Buffer, low: int, high: int) -> None:
        cuts = self.tree.schema.cuts(low, high)
        if len(data) != cuts[-1]:
            raise Corrupt(f"{self._what}: chunks {low} to {high} have {len(data)} bytes, not {cuts[-1]}")
        found = frame.digests(data, cuts)
        if b"".join(found) == self.tree.digests[32 * low : 32 * high]:
            return
        chunk = low + next(k for k, digest in enumerate(found) if digest != self.tree.chunk(low + k))
        tensor, start, stop = self.tree.schema.span(chunk)
        name = self.tree.schema.tensors[tensor].name
        raise Corrupt(f"{self._what}: tensor {name[:200]!r}, bytes {start} to {stop}: not what its digest says")

    def _current(self) -> State:
        with self._lock:
            while self._state is None:
                if not self._ways:
                    raise Corrupt(f"{self._what}: no way to read it")
                try:
                    self._state = self._ways.pop(0)()
                except WeightvcError as error:
                    self.failures.append(str(error))
                    if not self._ways:
                        raise
            return self._state

    def _next(self, state: State, error: WeightvcError) -> None:
        with self._lock:
            if self._state is not state:
                return
            self.failures.append(str(error))
            if isinstance(state, Held | Chain):
                state.discard()
            if not self._ways:
                raise error
            self._state = None
