"""Commit: diff a source against the parent, upload what is new, and publish the version by one swap.

The order is the protocol: the root is read (its sequence number is the transaction's begin), packs and the manifest
go up under fresh names, and only then is the root swapped. Killed anywhere before, the branch is as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

from weightvc.errors import BadFile, Corrupt, Expired
from weightvc.objects import catalogue, dtypes, frame, key, layout, manifest, version
from weightvc.objects.catalogue import Entry, Place
from weightvc.objects.manifest import Manifest, Patch, Stream
from weightvc.objects.root import Root
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.objects.version import Edge, Version
from weightvc.pool import Pool
from weightvc.protocol import coder, parallel, state, swap
from weightvc.protocol.refs import Refs, check_epoch, moved
from weightvc.protocol.shelf import Shelf
from weightvc.sources.base import Source
from weightvc.stores.base import MISSING

Progress = Callable[[int, int], None]
SAMPLE: Final = 256 << 10
"""Bytes of a block of many small chunks that the tables are made from, about: a sixteenth of the largest."""
BLOCKS: Final = 256
"""Blocks, some 1 GiB, that are enough to make tables from where only whole ones can be read."""
SCHEMA_CHANGES: Final = 8
"""How often the schema may change between two bases."""


@dataclass(slots=True)
class Labels:
    """What a commit says of itself."""

    message: str
    step: int | None
    run: str | None
    metadata: Mapping[str, Any] | None
    author: str


@dataclass(slots=True)
class Baseline:
    """The parent: its entry, its tree, and its bytes (each read is checked)."""

    entry: Entry
    tree: Tree
    manifest: Manifest
    bytes: state.Verified


class Packer:
    """Collects a stream's payloads in order; what outgrows the manifest goes up as packs, beside the encoding."""

    def __init__(self, shelf: Shelf, transaction: key.Transaction, pool: Pool) -> None:
        self.stream = Stream()
        self._shelf = shelf
        self._transaction = transaction
        self._pool = pool
        self._held: list[bytes] = []
        self._size = 0
        self._packs: list[tuple[Future[str], int]] = []

    def add(self, count: int, codec: int, payload: bytes, check: int = 0) -> None:
        """Append one block."""
        if self._size and self._size + len(payload) > manifest.PACK:
            self._flush()
        self.stream.counts.append(count)
        self.stream.codecs.append(codec)
        self.stream.lengths.append(len(payload))
        self.stream.checks.append(check)
        self._held.append(payload)
        self._size += len(payload)

    def add_pack(self, blocks: "Sequence[Coded]", name: str, nbytes: int) -> None:
        """Append blocks whose payloads somebody has put into a pack."""
        if self._size:
            self._flush()
        for block in blocks:
            self.stream.counts.append(block.chunks)
            self.stream.codecs.append(block.codec)
            self.stream.lengths.append(block.length)
            self.stream.checks.append(block.check)
        there: Future[str] = Future()
        there.set_result(name)
        self._packs.append((there, nbytes))

    def _flush(self) -> None:
        # At most two packs wait for the network: memory stays flat however slow it is.
        if len(self._packs) >= 2:
            self._packs[-2][0].result()
        data = frame.header(frame.PACK) + b"".join(self._held)
        self._packs.append((self._pool.submit(self._put, data), self._size))
        self._held, self._size = [], 0

    def _put(self, data: bytes) -> str:
        return self._shelf.put(self._transaction, "pack", data, keep=False)

    def finish(self) -> Stream:
        """The sealed stream; raises what an upload raised."""
        if self._packs or self._size > manifest.INLINE:
            if self._size:
                self._flush()
            self.stream.packs = [(future.result(), size) for future, size in self._packs]
        else:
            self.stream.inline = b"".join(self._held)
        self._held = []
        return self.stream.seal()


class Coded(NamedTuple):
    """A block of a stream, without its payload."""

    chunks: int
    codec: int
    length: int
    check: int


class Maker(Protocol):
    """What turns a source into uploaded streams: a Build, or all ranks of a job."""

    def run(self) -> tuple[Tree, Stream | None, Patch | None]:
        """The tree, its base and its patch; all packs are uploaded."""
        ...


class Keeper(Protocol):
    """Where the weights that are committed are kept, to be the baseline of the next commit."""

    def write(self, at: int, data: frame.Buffer) -> None:
        """Keep bytes of the canonical stream."""
        ...

    def commit(self, digest: str) -> None:
        """The version is published: the tree has this digest."""
        ...

    def drop(self) -> None:
        """It is not."""
        ...


@dataclass(slots=True)
class Block:
    """A block as it was encoded: chunks [low, high)."""

    low: int
    high: int
    digests: bytes
    codec: int
    payload: bytes
    check: int
    changed: int
    changed_float32: int
    base: tuple[int, bytes] | None


class Build:
    """One attempt to turn a source into uploaded objects, against one parent."""

    def __init__(
        self,
        shelf: Shelf,
        source: Source,
        schema: Schema,
        parent: Baseline | None,
        transaction: key.Transaction,
        *,
        base: bool,
        codec: str,
        progress: Progress | None,
        keep: Keeper | None = None,
    ) -> None:
        """`keep` is where the new weights are kept, if not in the cache."""
        self._shelf = shelf
        self._input = source
        self._schema = schema
        self._parent = parent
        self._transaction = transaction
        self._base = base or parent is None
        self._progress = progress
        self._moved: dict[int, int] = {}
        self._coder = coder.Coder(codec)
        self._map: list[int] | None = None
        self._keep = keep or (shelf.cache.write_tree(schema) if shelf.cache is not None else None)
        self.changed = 0
        self.changed_float32 = 0
        self.unread: list[str] = []
        """Why parts of the parent could not be read; they were stored whole."""

    def drop(self) -> None:
        """Let go of what was kept locally; uploads stay, for the collector."""
        if self._keep is not None:
            self._keep.drop()

    def run(self) -> tuple[Tree, Stream | None, Patch | None]:
        """Diff, encode, hash, upload the packs. Returns the tree, its base and its patch."""
        schema = self._schema
        if self._parent is not None:
            if schema.tensors != self._parent.tree.schema.tensors:
                self._moved = _renamed(self._parent.tree, schema, self._input)
            self._map = state.chunk_map(schema, self._parent.tree.schema, self._moved)
        if self._base:
            from weightvc_kernels import planes

            planes.load(schema.nbytes)
        blocks = manifest.blocks(schema, self._map)
        runs = manifest.runs(schema, blocks)
        window = 2 * parallel.workers() + 2
        digests: list[bytes] = []
        stored: dict[bytes, int] = {}
        with (
            Pool(parallel.workers(), "weightvc-encode") as pool,
            Pool(2, "weightvc-upload") as uploads,
        ):
            patch = Packer(self._shelf, self._transaction, uploads) if self._parent is not None else None
            base = Packer(self._shelf, self._transaction, uploads) if self._base else None
            if self._parent is not None and self._coder.learns(schema.nbytes):
                from weightvc_kernels import context

                # A sixteenth of what is there, to make the tables from; of small trees more, of large ones less.
                whole, stride = sampled(blocks), context.stride_of(schema.nbytes)
                samples = parallel.ordered(pool, lambda run: self._sample(run, whole, stride), runs, 64)
                self._coder.learn(samples)
            for block in chain.from_iterable(parallel.ordered(pool, self._encode, runs, window)):
                count = block.high - block.low
                digests.append(block.digests)
                twin = stored.get(block.digests) if count == 1 else None
                refer = None if twin is None else (manifest.REF, twin.to_bytes(4, "little"))
                if count == 1:
                    stored.setdefault(block.digests, block.low)
                if patch is not None:
                    same = block.codec == manifest.SAME
                    if same or refer is None:
                        patch.add(count, block.codec, block.payload, block.check)
                    else:
                        patch.add(count, *refer)
                if base is not None:
                    assert block.base is not None
                    base.add(count, *(refer or block.base))
                self.changed += block.changed
                self.changed_float32 += block.changed_float32
                if self._progress is not None:
                    self._progress(schema.position(block.high), schema.nbytes)
            self._input.check()
            tree = Tree(schema, b"".join(digests))
            base_stream = base.finish() if base is not None else None
            patch_stream = patch.finish() if patch is not None else None
        made = None
        if patch_stream is not None and self._parent is not None:
            made = Patch(self._parent.entry.new or "", patch_stream, self._moved, self.changed, self._coder.tables)
        return tree, base_stream, made

    def keep(self, made: Version) -> None:
        """The version is published: its bytes become this host's baseline."""
        if self._keep is not None:
            self._keep.commit(made.tree)

    def _encode(self, run: list[tuple[int, int]]) -> list[Block]:
        import weightvc_kernels as kernels

        low, high = run[0][0], run[-1][1]
        schema = self._schema
        # A copy of what is in memory: digest and payload have to be of the same bits, whatever the caller does.
        new = bytes(self._read(low, high))
        if self._keep is not None:
            self._keep.write(schema.position(low), new)
        cuts = schema.cuts(low, high)
        if len(new) != cuts[-1]:
            raise BadFile(f"the source gave {len(new)} bytes where {cuts[-1]} were asked for: commit again")
        joined, view = frame.digests(new, cuts), memoryview(new)
        dtype = schema.tensors[schema.tensor_of(low)].dtype
        lane = dtypes.lane(dtype)
        made: list[Block] = []
        for a, b in run:
            data = view[cuts[a - low] : cuts[b - low]]
            base = kernels.encode_whole(data, lane) if self._base else None
            made.append(Block(a, b, joined[32 * (a - low) : 32 * (b - low)], manifest.SAME, b"", 0, 0, 0, base))
        differ = [] if self._parent is None else [block for block in made if self._differs(block)]
        pairs: list[tuple[frame.Buffer, frame.Buffer]] = []
        coded: list[Block] = []
        for block, old in zip(differ, self._olds(differ), strict=True):
            data = view[cuts[block.low - low] : cuts[block.high - low]]
            if old is None:
                block.codec, block.payload = kernels.encode_whole(data, lane)
                block.changed = len(data) // lane
            else:
                pairs.append((old, data))
                coded.append(block)
        for block, found in zip(coded, self._coder.patches(dtype, lane, pairs), strict=True):
            block.codec, block.payload, was = found
            block.changed = was.size
            if block.codec in (kernels.SPARSE, kernels.DENSE, manifest.CONTEXT, manifest.RICE):
                block.check = manifest.check(was.tobytes())
        for block in made:
            block.changed_float32 = block.changed if dtype == "F32" else 0
        return made

    def _differs(self, block: Block) -> bool:
        """Whether the parent has other bytes there, or none."""
        assert self._parent is not None
        source = self._source(block.low)
        end = source + block.high - block.low
        return source < 0 or block.digests != self._parent.tree.digests[32 * source : 32 * end]

    def _olds(self, blocks: list[Block]) -> list[frame.Buffer | None]:
        """The parent's bytes of each block; None where it has none, or where they cannot be read."""
        out: list[frame.Buffer | None] = []
        while blocks:
            count, first = 1, self._source(blocks[0].low)
            end = first + blocks[0].high - blocks[0].low
            while first >= 0 and count < len(blocks) and self._source(blocks[count].low) == end:
                end += blocks[count].high - blocks[count].low
                count += 1
            out += [None] if first < 0 else self._old(blocks[:count], first, end)
            blocks = blocks[count:]
        return out

    def _old(self, blocks: list[Block], first: int, end: int) -> list[frame.Buffer | None]:
        """The same of blocks that are side by side there too, as chunks [first, end)."""
        assert self._parent is not None
        try:
            data = memoryview(self._parent.bytes.read(first, end))
        except (Corrupt, *MISSING) as error:
            if len(blocks) > 1:
                return [old for block in blocks for old in self._olds([block])]
            # Stored whole, it no longer needs what cannot be read: the branch heals.
            self.unread.append(str(error))
            return [None]
        cuts = self._parent.tree.schema.cuts(first, end)
        at, out = 0, []
        for block in blocks:
            stop = at + block.high - block.low
            out.append(data[cuts[at] : cuts[stop]])
            at = stop
        return [*out]

    def _sample(self, run: list[tuple[int, int]], whole: set[tuple[int, int]], stride: int) -> tuple[str, Any]:
        """Statistics of blocks: of one in `stride` units where they are at hand, or of runs of many small chunks;
        else of those blocks that are in `whole`."""
        from weightvc_kernels import CodecError, context

        dtype = self._schema.tensors[self._schema.tensor_of(run[0][0])].dtype
        if not context.supports(dtype):
            return dtype, None
        pairs = [pair for block in run if (pair := self._sampled(*block, block in whole, stride))]
        try:
            return dtype, context.sample_batch(pairs, dtype, 1) if pairs else None
        except CodecError:
            return dtype, None

    def _sampled(self, low: int, high: int, whole: bool, stride: int) -> tuple[frame.Buffer, frame.Buffer] | None:
        from weightvc_kernels import context

        assert self._parent is not None
        schema = self._schema
        tensor, start, stop = schema.span(low)
        source = self._source(low)
        if source < 0:
            return None
        try:
            if high - low == 1 and not getattr(self._input, "remote", False):
                at = self._parent.tree.schema.position(source)
                first = min(stride // 2 * context.UNIT, (stop - start) // 2 // context.UNIT * context.UNIT)
                olds, news = [], []
                for unit in range(first, stop - start, stride * context.UNIT):
                    end = min(unit + context.UNIT, stop - start)
                    old = self._parent.bytes.peek(at + unit, at + end)
                    if old is None:
                        break
                    olds.append(old)
                    news.append(self._input.read(tensor, start + unit, start + end))
                else:
                    return b"".join(olds), b"".join(news)
            count, nbytes = high - low, schema.position(high) - schema.position(low)
            if count > 1 and nbytes > SAMPLE:
                count = max(1, count * SAMPLE // nbytes)
            elif not whole:
                return None
            skip = (high - low - count) // 2
            old = self._parent.bytes.read(source + skip, source + skip + count)
            return old, self._read(low + skip, low + skip + count)
        except (Corrupt, *MISSING):
            return None

    def _read(self, low: int, high: int) -> frame.Buffer:
        return state.read_chunks(self._input, self._schema, low, high)

    def _source(self, low: int) -> int:
        """The source of a block's first chunk, -1 for none: those of its other chunks follow it side by side."""
        return low if self._map is None else self._map[low]


def sampled(blocks: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """A sixteenth of the blocks that are there, to make the tables from; of small trees more."""
    from weightvc_kernels import context

    return set(blocks[:: max(1, min(context.STRIDE, len(blocks) // context.STRIDE), len(blocks) // BLOCKS)])


def outgrown(refs: Refs, parent: Baseline, schema: Schema) -> bool:
    """Whether the schema changes, and has changed often since the last base: a base is due then.

    Where it changes, blocks are cut anew, and a reader has to take more of the levels below apart.
    """
    if parent.tree.schema.digest == schema.digest:
        return False
    changes, entry = 0, parent.entry
    while changes < SCHEMA_CHANGES:
        assert entry.place is not None
        sources = [edge.source for way in entry.place.all_ways for edge in way.edges]
        if None in sources or not sources:
            return False
        below = refs.find(str(sources[0]))
        if below is None or below.place is None:
            return False
        changes += below.place.schema != entry.place.schema
        entry = below
    return True


def _renamed(old: Tree, new: Schema, source: Source) -> dict[int, int]:
    """Tensors whose name is new but whose bytes the parent has under a name that is gone: coded against that one.

    Only names that vanished are looked at, so an ordinary commit hashes nothing twice.
    """
    gone = [i for i, t in enumerate(old.schema.tensors) if (t.component, t.name) not in new.index]
    fresh = [i for i, t in enumerate(new.tensors) if (t.component, t.name) not in old.schema.index]
    if not gone or not fresh:
        return {}
    by_first: dict[tuple[str, int, bytes], int] = {}
    for i in gone:
        tensor = old.schema.tensors[i]
        if tensor.nbytes:
            by_first.setdefault((tensor.dtype, tensor.nbytes, old.chunk(old.schema.first_chunk[i])), i)
    shapes = {(dtype, nbytes) for dtype, nbytes, _ in by_first}
    moved = {}
    for i in fresh:
        tensor = new.tensors[i]
        if (tensor.dtype, tensor.nbytes) in shapes:
            _, start, stop = new.span(new.first_chunk[i])
            found = by_first.get((tensor.dtype, tensor.nbytes, frame.digest(source.read(i, start, stop))))
            if found is not None:
                moved[i] = found
    return moved


def upload(
    shelf: Shelf,
    build: Maker,
    source: Source,
    transaction: key.Transaction,
    *,
    branch: str | None,
    parents: Sequence[Version],
    parent: Baseline | None,
    labels: Labels,
    head: str | None,
) -> Entry:
    """Everything but the swap: packs, schema and layout where they are new, the manifest. Returns the entry."""
    before = shelf.store.stats.bytes_written
    tree, base, patch = build.run()
    schema = tree.schema
    if parent is not None and parent.tree.schema.digest == schema.digest:
        assert parent.entry.place is not None
        schema_key = parent.entry.place.schema
    else:
        schema_key = shelf.put(transaction, "schema", schema.encode())
    layout_key, layout_digest, files = _layout(shelf, source, transaction, parent)
    made = version.make(
        tree=tree.digest,
        layout=layout_digest,
        parents=parents,
        step=labels.step,
        run=labels.run,
        message=labels.message,
        author=labels.author,
        metadata=labels.metadata,
        elements=schema.elements,
        nbytes=schema.nbytes,
    )
    manifest_key = shelf.put(
        transaction,
        "manifest",
        manifest.encode(
            Manifest(made, branch, schema_key, schema.digest, layout_key, files, tree.digests, base, patch)
        ),
    )
    edges = []
    if patch is not None:
        edges.append(Edge(patch.source, patch.stream.nbytes, patch.changed))
    if base is not None:
        edges.append(Edge(None, base.nbytes, schema.elements))
    packs = (len(base.packs) if base else 0) + (len(patch.stream.packs) if patch else 0)
    place = Place(
        manifest=manifest_key,
        schema=schema_key,
        layout=layout_key,
        files=tuple(files.values()),
        packs=packs,
        edges=tuple(edges),
        nbytes=shelf.store.stats.bytes_written - before,
    )
    return Entry(catalogue.COMMIT, 0, made.time, made.author, branch, head, made.id, made.message, made, place)


def _layout(
    shelf: Shelf, source: Source, transaction: key.Transaction, parent: Baseline | None
) -> tuple[str | None, str | None, dict[str, str]]:
    """(key, digest, file objects) of the source's layout; what the parent has is referred to, not written again."""
    if source.layout is None:
        return None, None, {}
    stored = layout.make(source.layout)
    known: dict[str, str] = {}
    if parent is not None and parent.manifest.layout is not None:
        known = parent.manifest.files
        if parent.manifest.version.layout == stored.digest:
            return parent.manifest.layout, stored.digest, known
    data, files = layout.encode(stored)
    keys = {content: known.get(content) or shelf.put(transaction, "file", body) for content, body in files.items()}
    return shelf.put(transaction, "layout", data), stored.digest, keys


def publish(
    shelf: Shelf,
    entry: Entry,
    transaction: key.Transaction,
    seen: swap.Seen | None,
    *,
    expected: str | None,
    epoch: int | None,
) -> tuple[Entry, swap.Seen]:
    """Swap the root so that it catalogues `entry`, and its branch (if it has one) has it as head. Returns the entry
    as it stands there, and the root.

    Raises Fenced if the branch is claimed by another writer than the one with this epoch, BranchMoved if its head is
    not `expected`; the versions of other branches may come and go.
    """
    placed = entry

    def make(root: Root) -> Root:
        nonlocal placed
        branches = dict(root.branches)
        placed = replace(entry, sequence=root.sequence + 1)
        # What its patch builds on must still be there: a branch's head always is, another version may have expired.
        known = shelf.catalogue(root)
        for edge in entry.place.edges if entry.place is not None else ():
            source = known.find(edge.source) if edge.source is not None else None
            if edge.source is not None and (source is None or source.place is None):
                raise Expired(f"version {edge.source[:12]} has expired meanwhile: commit against another one")
        if entry.name is not None:
            check_epoch(shelf, root, entry.name, epoch)
            head = root.branches.get(entry.name)
            if head != expected:
                raise moved(entry.name, expected, head)
            assert entry.new is not None
            branches[entry.name] = entry.new
        return root.next(branches=branches, tail=(*root.tail, placed))

    landed = swap.change(shelf, make, transaction, seen)
    return placed, landed
