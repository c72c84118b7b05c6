"""States: places from which the chunks of a tree can be read.

A chain starts from a base in the store, or from a tree that this host holds, and applies patches to it chunk by
chunk, so that a model of any size passes through a bounded window. Nothing that a state returns has been checked;
`Verified` checks it against the tree's digests, and falls back to another state where it is wrong.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

from weightvc.cache import Flat
from weightvc.errors import Corrupt, Refused, StoreError, Unsupported, WeightvcError
from weightvc.objects import dtypes, frame, manifest
from weightvc.objects.manifest import CONTEXT, REF, RICE, SAME, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.protocol.meter import Meter
from weightvc.protocol.payloads import BasePayloads, Payloads
from weightvc.sources.base import ReadsRuns, Source
from weightvc.stores.base import MISSING

BLOCKS_HELD: Final = 128 << 20
"""Bytes of blocks that a chain keeps where blocks are cut differently from level to level."""
KNOWN: Final = range(RICE + 1)
"""Codecs that this reader knows."""
Buffer = frame.Buffer


class State(Protocol):
    """Chunks of one tree."""

    def read(self, low: int, high: int) -> Buffer:
        """Bytes of chunks [low, high), one after the other; a bytearray is the caller's own. From any thread."""
        ...


class Held:
    """A tree in the local cache."""

    def __init__(self, schema: Schema, flat: Flat) -> None:
        self._schema = schema
        self._flat = flat

    def read(self, low: int, high: int) -> Buffer:
        schema = self._schema
        return self._flat.read(schema.position(low), schema.position(high))

    def peek(self, start: int, stop: int) -> Buffer:
        """Bytes [start, stop) of the canonical stream."""
        return self._flat.read(start, stop)

    def discard(self) -> None:
        """The entry is bad: forget it."""
        self._flat.discard()


def read_chunks(source: Source, schema: Schema, low: int, high: int) -> Buffer:
    """Chunks [low, high) of a source that has the very tensors of `schema`: many small ones at once, if it can."""
    if isinstance(source, ReadsRuns) and (run := schema.whole(low, high)) is not None:
        return source.read_run(*run)
    pieces = [source.read(*schema.span(chunk)) for chunk in range(low, high)]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Lying:
    """A tree that lies in a source: a checked-out directory, or tensors in memory."""

    def __init__(self, schema: Schema, source: Source) -> None:
        self._schema = schema
        self._source = source
        self._same = list(source.tensors) == schema.tensors
        self._at: list[int] = []
        if not self._same:
            # A tensor is what it was if all of it is: name, dtype and shape.
            index = {tensor: i for i, tensor in enumerate(source.tensors)}
            self._at = [index.get(tensor, -1) for tensor in schema.tensors]

    def read(self, low: int, high: int) -> Buffer:
        if self._same:
            return self._of_source(read_chunks, self._source, self._schema, low, high)
        pieces = []
        for chunk in range(low, high):
            tensor, start, stop = self._schema.span(chunk)
            if self._at[tensor] < 0:
                raise Corrupt(f"tensor {self._schema.tensors[tensor].name!r} is not there")
            pieces.append(self._of_source(self._source.read, self._at[tensor], start, stop))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _of_source(self, read: Callable[..., Buffer], *where: Any) -> Buffer:
        try:
            return read(*where)
        except Refused as error:
            # Files that changed, ended early or cannot be read: another way has the bytes.
            raise Corrupt(str(error)) from None


@dataclass(slots=True)
class Level:
    """One step of a chain: a base's stream, or a patch's and the chunk map to the level below."""

    schema: Schema
    stream: Stream
    payloads: Payloads
    what: str
    writer: str = ""
    source_of: list[int] | None = None
    models: "Models | None" = None
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


class Models:
    """A patch's tables, each made ready when the first block asks for it."""

    def __init__(self, tables: dict[str, bytes], what: str) -> None:
        self._tables = tables
        self._what = what
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def of(self, dtype: str) -> Any:
        """The model of a dtype. Raises Corrupt if the patch has no tables for it, or bad ones."""
        from weightvc_kernels import CodecError, context

        with self._lock:
            if dtype not in self._made:
                if dtype not in self._tables:
                    raise Corrupt(f"{self._what} is corrupt: it has no tables for {dtype}")
                try:
                    self._made[dtype] = context.Model(self._tables[dtype], dtype)
                except CodecError as error:
                    raise Corrupt(f"{self._what} is corrupt: {error}") from None
            return self._made[dtype]


class Chain:
    """`start` (None for a base as the first level) and the levels above it, applied in turn."""

    def __init__(self, start: State | None, levels: Sequence[Level]) -> None:
        self._start = start
        self._levels = levels
        self._blocks: OrderedDict[tuple[int, int], Buffer] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def discard(self) -> None:
        """What comes out is wrong: forget the cached tree that it starts from, which may be to blame."""
        if isinstance(self._start, Held):
            self._start.discard()

    def expect(self, runs: Sequence[tuple[int, int]]) -> None:
        """Say which chunks will be read, once each: of a base only what they need is then fetched, and that once."""
        payloads = self._levels[0].payloads if self._levels else None
        if self._start is None and isinstance(payloads, BasePayloads):
            payloads.expect(self._uses(runs))

    def _uses(self, runs: Sequence[tuple[int, int]]) -> Counter[int]:
        """How often each block of the base is read for chunks of the top."""
        import numpy as np

        import weightvc_kernels as kernels

        uses = np.zeros(self._levels[-1].schema.chunks, np.int64)
        for low, high in runs:
            uses[low:high] = 1
        for level, below in zip(self._levels[:0:-1], self._levels[-2::-1], strict=True):
            stream = level.stream
            if not {REF, kernels.RAW, kernels.PLANES}.isdisjoint(stream.codecs):
                # From the end, since a chunk refers to one before it.
                for block in range(len(stream.codecs) - 1, -1, -1):
                    low, high = stream.first[block : block + 2]
                    if stream.codecs[block] == REF and uses[low]:
                        # Who reads it will tell what is wrong.
                        with suppress(WeightvcError):
                            uses[self._referred(level, block, low, high)] += uses[low]
                    if stream.codecs[block] in (REF, kernels.RAW, kernels.PLANES):
                        uses[low:high] = 0
            if level.source_of is not None:
                source = np.array(level.source_of, np.int64)
                # Blocks are read whole.
                wanted = np.repeat(_most(uses, stream), stream.counts)
                uses = np.zeros(below.schema.chunks, np.int64)
                np.add.at(uses, source[source >= 0], wanted[source >= 0])
        counts = _most(uses, self._levels[0].stream)
        return Counter({int(block): int(counts[block]) for block in np.flatnonzero(counts)})

    def read(self, low: int, high: int) -> Buffer:
        top = len(self._levels) - 1
        data = self._in_place(low, high) if self._start is not None else self._whole(low, high)
        if data is not None:
            return data
        stream = self._levels[top].stream
        first, last = stream.block_of(low), stream.block_of(high - 1) + 1
        if (stream.first[first], stream.first[last]) != (low, high) or last - first == 1:
            return self._read(top, low, high)
        return b"".join([self._read(top, *stream.first[block : block + 2]) for block in range(first, last)])

    def _in_place(self, low: int, high: int) -> Buffer | None:
        """Chunks that are whole blocks of every level, none of them stored whole: read at once from what the chain
        starts from, and all blocks of a level applied at once, in place. None where that is not so."""
        import weightvc_kernels as kernels

        assert self._start is not None
        applied = SAME, kernels.SPARSE, kernels.DENSE, CONTEXT, RICE
        steps: list[tuple[Level, int, int, int]] = []
        for level in reversed(self._levels):
            stream = level.stream
            first, last = stream.block_of(low), stream.block_of(high - 1) + 1
            if (stream.first[first], stream.first[last]) != (low, high):
                return None
            if any(codec not in applied for codec in stream.codecs[first:last]):
                return None
            steps.append((level, first, last, low))
            if level.source_of is not None:
                sources = level.source_of[low:high]
                if sources[0] < 0 or any(b != a + 1 for a, b in pairwise(sources)):
                    return None
                low, high = sources[0], sources[-1] + 1
        data = self._start.read(low, high)
        if all(codec == SAME for level, first, last, _ in steps for codec in level.stream.codecs[first:last]):
            return data
        view = memoryview(data if isinstance(data, bytearray) else bytearray(data))
        for level, first, last, low in reversed(steps):
            schema, stream, origin = level.schema, level.stream, level.schema.position(low)
            dtype = schema.tensors[schema.tensor_of(low)].dtype
            changed = [block for block in range(first, last) if stream.codecs[block] != SAME]
            jobs = []
            for block in changed:
                codec, model = stream.codecs[block], None
                if codec == CONTEXT and level.models is not None:
                    model = level.models.of(dtype)
                start, stop = (schema.position(chunk) - origin for chunk in stream.first[block : block + 2])
                jobs.append((kernels.payloads.Payload(codec, level.payloads.block(block), model), view[start:stop]))
            try:
                kernels.payloads.apply(jobs, dtypes.lane(dtype))
            except kernels.CodecError as error:
                raise Corrupt(f"{level.what}: block {changed[error.job]}: {error}") from None
        return view

    def _whole(self, low: int, high: int) -> Buffer | None:
        """Chunks that are whole blocks of a base with nothing above it, each decoded into its place. None where that
        is not so, or one refers to another."""
        import numpy as np

        import weightvc_kernels as kernels

        level, stream = self._levels[0], self._levels[0].stream
        first, last = stream.block_of(low), stream.block_of(high - 1) + 1
        if len(self._levels) > 1 or (stream.first[first], stream.first[last]) != (low, high):
            return None
        if any(codec not in (kernels.RAW, kernels.PLANES) for codec in stream.codecs[first:last]):
            return None
        schema, origin = level.schema, level.schema.position(low)
        data = np.empty(schema.position(high) - origin, np.uint8)
        lane = dtypes.lane(schema.tensors[schema.tensor_of(low)].dtype)
        for block in range(first, last):
            start, stop = (schema.position(chunk) - origin for chunk in stream.first[block : block + 2])
            self._decode(level, block, data[start:stop], lane)
        return data.data

    def _decode(self, level: Level, block: int, target: Any, lane: int) -> None:
        """A block that is stored whole, into `target`."""
        import weightvc_kernels as kernels

        payload = level.payloads.block(block)
        try:
            kernels.decode_whole_into(level.stream.codecs[block], payload, target, lane)
        except kernels.CodecError as error:
            raise Corrupt(f"{level.what}: block {block}: {error}") from None

    def _read(self, at: int, low: int, high: int) -> Buffer:
        """Chunks [low, high) of a level. Walks down while they are one block with one source, then up again; it calls
        itself only where blocks are cut differently a level below, that is, where the schema changed."""
        import numpy as np

        import weightvc_kernels as kernels

        pending: list[tuple[int, Buffer, int, str, Any]] = []
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
            if codec not in KNOWN:
                raise Unsupported(
                    f"{level.what}: codec {codec} of {level.writer} is not known here: upgrade weightvc"
                )
            if codec == REF:
                low = self._referred(level, block, low, high)
                high = low + 1
                continue
            dtype = level.schema.tensors[level.schema.tensor_of(low)].dtype
            lane = dtypes.lane(dtype)
            if codec in (kernels.RAW, kernels.PLANES):
                whole = np.empty(level.schema.position(high) - level.schema.position(low), np.uint8)
                self._decode(level, block, whole, lane)
                data = whole.data
                break
            if codec != SAME:
                payload = level.payloads.block(block)
                model = level.models.of(dtype) if codec == CONTEXT and level.models is not None else None
                pending.append((codec, payload, lane, f"{level.what}: block {block}", model))
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
        for codec, payload, lane, what, model in reversed(pending):
            try:
                if model is None:
                    data = kernels.decode_patch(codec, payload, memoryview(data), lane).data
                else:
                    data = kernels.context.decode(model, payload, memoryview(data)).data
            except kernels.CodecError as error:
                raise Corrupt(f"{what}: {error}") from None
        return data

    def _referred(self, level: Level, block: int, low: int, high: int) -> int:
        payload = bytes(level.payloads.block(block))
        target = int.from_bytes(payload, "little")
        if len(payload) != 4 or high - low != 1 or target >= low:
            raise Corrupt(f"{level.what}: block {block} refers to chunk {target}, which is not before it")
        if level.schema.sizes(target, target + 1) != level.schema.sizes(low, high):
            raise Corrupt(f"{level.what}: block {block} refers to chunk {target}, which has another size")
        return target

    def _pieces(self, at: int, low: int, high: int) -> Buffer:
        """Chunks that are not exactly one block: cut from the blocks that cover them, which are kept a while."""
        level = self._levels[at]
        schema, stream = level.schema, level.stream
        pieces = []
        while low < high:
            block = stream.block_of(low)
            first, last = stream.first[block], stream.first[block + 1]
            with self._lock:
                data = self._blocks.get((at, block))
            if data is None:
                data = self._read(at, first, last)
                self._keep((at, block), data)
            origin, stop = schema.position(first), min(last, high)
            pieces.append(memoryview(data)[schema.position(low) - origin : schema.position(stop) - origin])
            low = stop
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _keep(self, name: tuple[int, int], data: Buffer) -> None:
        with self._lock:
            if name in self._blocks:
                return
            self._blocks[name] = data
            self._held += len(data)
            while self._held > BLOCKS_HELD and len(self._blocks) > 1:
                self._held -= len(self._blocks.popitem(last=False)[1])


def _most(uses: Any, stream: Stream) -> Any:
    """The most uses [blocks], int64, of each block's chunks."""
    import numpy as np

    return np.maximum.reduceat(uses, stream.first[:-1]) if stream.counts else uses[:0]


class Verified:
    """Reads a tree from the first of several states that gives the right bytes; the others are made on demand."""

    def __init__(
        self, tree: Tree, ways: Sequence[Callable[[], State | None]], what: str, meter: Meter | None = None
    ) -> None:
        self.tree = tree
        self.meter = meter or Meter()
        self._ways = list(ways)
        self._what = what
        self._state: State | None = None
        self._error: WeightvcError | None = None
        self._lock = threading.Lock()
        self._expected: list[tuple[int, int]] | None = None
        self.failures: list[str] = []

    def read(self, low: int, high: int) -> Buffer:
        """Bytes of chunks [low, high), checked. Raises Corrupt, or what the last way raised."""
        while True:
            state = self._current()
            try:
                with self.meter.part("decode"):
                    data = state.read(low, high)
                with self.meter.part("verify"):
                    self._check(data, low, high)
                return data
            except (Corrupt, *MISSING) as error:
                self._next(state, error)
            except RecursionError:
                self._next(state, Corrupt(f"{self._what}: patches lead from one to another without an end"))
            except StoreError:
                # The store has retried already; what this host holds is as good as it was.
                raise
            except OSError as error:
                self._next(state, Corrupt(f"{self._what}: {error}"))

    def peek(self, start: int, stop: int) -> Buffer | None:
        """Bytes [start, stop) of the canonical stream, unchecked, where that costs a small read; else None."""
        state = self._current()
        return state.peek(start, stop) if isinstance(state, Held) else None

    def blocks(self) -> list[tuple[int, int]]:
        """All chunks, cut into blocks to read: as commits cut them, so that a block is decoded once."""
        return manifest.blocks(self.tree.schema, None)

    def runs(self, blocks: Sequence[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
        """`blocks`, or all of them, to be read, each once: joined where small ones lie side by side."""
        made = manifest.runs(self.tree.schema, self.blocks() if blocks is None else blocks)
        self._expected = [(run[0][0], run[-1][1]) for run in made]
        return self._expected

    def _check(self, data: Buffer, low: int, high: int) -> None:
        cuts = self.tree.schema.cuts(low, high)
        if len(data) != cuts[-1]:
            raise Corrupt(f"{self._what}: chunks {low} to {high} have {len(data)} bytes, not {cuts[-1]}")
        found = frame.digests(data, cuts)
        if found == self.tree.digests[32 * low : 32 * high]:
            return
        chunk = next(i for i in range(low, high) if not found.startswith(self.tree.chunk(i), 32 * (i - low)))
        tensor, start, stop = self.tree.schema.span(chunk)
        name = self.tree.schema.tensors[tensor].name
        raise Corrupt(f"{self._what}: tensor {name[:200]!r}, bytes {start} to {stop}: not what its digest says")

    def _current(self) -> State:
        with self._lock:
            if self._state is None:
                self._state = self._advance()
            if self._state is None:
                raise self._error or Corrupt(f"{self._what}: no way to read it")
            return self._state

    def _advance(self) -> State | None:
        """The next state that can be made, or None: `_error` then says why the last one could not."""
        while self._ways:
            try:
                state = self._ways.pop(0)()
                if isinstance(state, Chain) and self._expected is not None:
                    state.expect(self._expected)
            except WeightvcError as error:
                self.failures.append(str(error))
                self._error = error
            else:
                if state is not None:
                    return state
        return None

    def _next(self, state: State, error: WeightvcError) -> None:
        with self._lock:
            if self._state is not state:
                return
            self.failures.append(str(error))
            if isinstance(state, Held | Chain) and isinstance(error, Corrupt):
                state.discard()
            self._error = error
            following = self._advance()
            if following is None:
                # What it has that is not wrong can still be read.
                raise self._error
            self._state = following
