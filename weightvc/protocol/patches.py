"""Patches between any two versions: over many steps at once, or back.

The patch is made from the two trees, block by block, whatever patches lie between them. Their digests tell which
blocks differ; only those are read, and the newer one is read over the older, so that each patch between is decoded
once. What the steps did and undid costs nothing, and every byte that goes in was checked.

A schema that changed is no obstacle. A tensor is coded against the one that it came from, followed through the
renames of all the patches between; where that has no chunk of the same size, the chunk is stored whole.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from weightvc.objects import dtypes, frame, manifest
from weightvc.objects.catalogue import Entry
from weightvc.objects.manifest import Patch, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.pool import Pool
from weightvc.protocol import coder, parallel, resolve, state
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf

if TYPE_CHECKING:
    from weightvc_kernels.context import Stats

SAMPLES: Final = 16
"""Of so many blocks that differ, one is sampled for the tables."""
LEAST: Final = 16
"""Blocks of a dtype that are sampled at least, where there are as many."""


class Side(Protocol):
    """One end of a patch: a tree and its bytes, which are checked as they are read. Verified is one."""

    tree: Tree

    def read(self, low: int, high: int) -> frame.Buffer:
        """Bytes of chunks [low, high). Threads may read at once."""
        ...


class Sink(Protocol):
    """Takes a stream's blocks in order. Packer is one."""

    def add(self, count: int, codec: int, payload: bytes, check: int = 0) -> None:
        """Append one block."""
        ...

    def finish(self) -> Stream:
        """The sealed stream."""
        ...


class Recent:
    """A side that gives what a thread read last once more: the other side is read over it."""

    def __init__(self, side: Side) -> None:
        self.tree = side.tree
        self._side = side
        self._last = threading.local()

    def read(self, low: int, high: int) -> frame.Buffer:
        """Bytes of chunks [low, high)."""
        if getattr(self._last, "span", None) != (low, high):
            self._last.data = self._side.read(low, high)
            self._last.span = (low, high)
        data: frame.Buffer = self._last.data
        return data


@dataclass(frozen=True, slots=True)
class Span:
    """Two trees, and for tensors of the new one whose source is not the old one of their name, the source's number
    (-1: none), as in a manifest."""

    old: Side
    new: Side
    moved: dict[int, int] = field(default_factory=dict)

    def turned(self) -> "Span":
        """The way back."""
        return Span(self.new, self.old, turned(self.moved, self.old.tree.schema, self.new.tree.schema))


@contextmanager
def opened(shelf: Shelf, refs: Refs, old: Entry, new: Entry) -> Iterator[Span]:
    """Two versions to make a patch of. Cheapest where patches lead from `old` to `new`, but any two will do.

    Raises what resolve.opened raises.
    """
    with resolve.opened(shelf, refs, old) as (below, verified):
        start = Recent(verified)
        lying = {below.version.tree: lambda _: start}
        with resolve.opened(shelf, refs, new, lying=lying) as (_, above):
            yield Span(start, above, _between(shelf, refs, old, new, start.tree.schema, above.tree.schema))


def _between(shelf: Shelf, refs: Refs, old: Entry, new: Entry, first: Schema, last: Schema) -> dict[int, int]:
    """`moved` from `old` to `new`, as the patches between tell it; by names alone if none lead there."""
    if first.tensors == last.tensors:
        return {}
    steps: list[tuple[Schema, dict[int, int]]] = []
    entry = new
    while entry.new != old.new:
        assert entry.place is not None
        source = next((edge.source for edge in entry.place.edges if edge.source is not None), None)
        if source is None:
            return {}
        below = refs.entry(source)
        if below.place is None:
            return {}  # let go of: `new`, or what leads to it, is read from a base
        if entry.place.schema != below.place.schema:
            made = resolve.manifest_of(shelf, entry)
            if made.patch is not None:
                steps.append((shelf.schema(made.schema, made.schema_digest), made.patch.moved))
        entry = below
    return along(first, reversed(steps))


def along(first: Schema, steps: Iterable[tuple[Schema, dict[int, int]]]) -> dict[int, int]:
    """`moved` from `first` to the last of `steps`, each a schema and how it moved from the one before."""
    schema, came = first, list(range(len(first.tensors)))
    for above, moved in steps:
        sources = _sources(above, schema, moved)
        came = [came[source] if source >= 0 else -1 for source in sources]
        schema = above
    return _moved(came, schema, first)


def turned(moved: dict[int, int], old: Schema, new: Schema) -> dict[int, int]:
    """`moved` of the way back, given that from `old` to `new`."""
    back, named = [-1] * len(old.tensors), _sources(old, new, {})
    for i, source in enumerate(_sources(new, old, moved)):
        # Of several that came from one, that of its name or the first.
        if source >= 0 and (back[source] < 0 or i == named[source]):
            back[source] = i
    return _moved(back, old, new)


def _sources(new: Schema, old: Schema, moved: dict[int, int]) -> list[int]:
    """The old tensor of each new one, -1 for none."""
    return [
        moved[i] if i in moved else old.index.get((tensor.component, tensor.name), -1)
        for i, tensor in enumerate(new.tensors)
    ]


def _moved(came: Sequence[int], new: Schema, old: Schema) -> dict[int, int]:
    """What of `came`, the old tensor of each new one, names do not tell. One of a name is better than none."""
    named = _sources(new, old, {})
    return {i: source for i, source in enumerate(came) if source not in (-1, named[i])}


def patch(span: Span, sink: Sink, source: str) -> Patch:
    """The patch from span.old, the version `source`, to span.new; its blocks go to `sink`.

    Two passes: a sample of the blocks that differ is read first, and tables made of it; then all that differ are read
    and coded. The tables of the patches between would save the first pass, but their odds are for other steps:
    over longer spans more changes, by more. Memory is bounded by some blocks a thread. Raises Corrupt or NotFound
    where a side cannot be read, and what `sink` raises.
    """
    import weightvc_kernels as kernels

    old, new = span.old, span.new
    schema = new.tree.schema
    mapping = state.chunk_map(schema, old.tree.schema, span.moved)
    coded = coder.Coder()

    def sources(low: int, high: int) -> tuple[int, int] | None:
        first = low if mapping is None else mapping[low]
        return None if first < 0 else (first, first + high - low)

    def same(low: int, high: int) -> bool:
        where = sources(low, high)
        return where is not None and _digests(old.tree, *where) == _digests(new.tree, low, high)

    def sample(block: tuple[int, int]) -> tuple[str, "Stats | None"]:
        from weightvc_kernels import context

        where = sources(*block)
        assert where is not None
        dtype = _dtype(schema, block[0])
        return dtype, context.sample(old.read(*where), new.read(*block), dtype, 1)

    def encode(run: list[tuple[int, int]]) -> list[tuple[int, bytes, int, int]]:
        dtype = _dtype(schema, run[0][0])
        lane = dtypes.lane(dtype)
        made: list[tuple[int, bytes, int, int]] = [(manifest.SAME, b"", 0, 0)] * len(run)
        pairs: dict[int, tuple[frame.Buffer, frame.Buffer]] = {}
        for i, block in enumerate(run):
            where = sources(*block)
            if where is None:
                data = new.read(*block)
                made[i] = *kernels.encode_whole(data, lane), 0, len(data) // lane
            elif not same(*block):
                pairs[i] = old.read(*where), new.read(*block)
        coding = coded.patches(dtype, lane, list(pairs.values()))
        for i, (codec, payload, was) in zip(pairs, coding, strict=True):
            told = codec in (kernels.SPARSE, kernels.DENSE, manifest.CONTEXT)
            made[i] = codec, payload, manifest.check(was.tobytes()) if told else 0, was.size
        return made

    blocks = manifest.blocks(schema, mapping)
    with Pool(parallel.workers(), "weightvc-encode") as pool:
        window = 2 * parallel.workers() + 2
        if schema.nbytes >= coder.CONTEXT_FROM:
            differ = (block for block in blocks if sources(*block) is not None and not same(*block))
            coded.learn(parallel.ordered(pool, sample, _sampled(schema, differ), window))
        coding = parallel.ordered(pool, encode, manifest.runs(schema, blocks), window)
        stream, changed = _collect(new.tree, blocks, chain.from_iterable(coding), sink)
    return Patch(source, stream, span.moved, changed, coded.tables)


def base(side: Side, sink: Sink) -> Stream:
    """The base of a tree; its blocks go to `sink`. Raises what reading raises."""
    import weightvc_kernels as kernels

    schema = side.tree.schema

    def encode(block: tuple[int, int]) -> tuple[int, bytes, int, int]:
        return *kernels.encode_whole(side.read(*block), dtypes.lane(_dtype(schema, block[0]))), 0, 0

    blocks = manifest.blocks(schema, None)
    with Pool(parallel.workers(), "weightvc-encode") as pool:
        made = parallel.ordered(pool, encode, blocks, 2 * parallel.workers() + 2)
        return _collect(side.tree, blocks, made, sink)[0]


def _collect(
    tree: Tree, blocks: Sequence[tuple[int, int]], made: Iterable[tuple[int, bytes, int, int]], sink: Sink
) -> tuple[Stream, int]:
    """Blocks' codecs, payloads, checks and changed lanes into a stream; a chunk that stands twice is stored once."""
    stored: dict[bytes, int] = {}
    changed = 0
    for (low, high), (codec, payload, check, lanes) in zip(blocks, made, strict=True):
        changed += lanes
        if high - low == 1:
            twin = stored.setdefault(tree.chunk(low), low)
            if twin < low and codec != manifest.SAME:
                codec, payload, check = manifest.REF, twin.to_bytes(4, "little"), 0
        sink.add(high - low, codec, payload, check)
    return sink.finish(), changed


def _sampled(schema: Schema, blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The blocks to make tables from: of each dtype that the codec codes one in SAMPLES, or all of a few."""
    from weightvc_kernels import context

    by_dtype: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for block in blocks:
        by_dtype[_dtype(schema, block[0])].append(block)
    chosen = []
    for dtype, some in by_dtype.items():
        if context.supports(dtype):
            chosen += some[:: max(1, min(SAMPLES, len(some) // LEAST))]
    # In order, so that packs are fetched once.
    return sorted(chosen)


def _dtype(schema: Schema, chunk: int) -> str:
    return schema.tensors[schema.tensor_of(chunk)].dtype


def _digests(tree: Tree, low: int, high: int) -> bytes:
    return tree.digests[32 * low : 32 * high]
