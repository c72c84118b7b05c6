"""Shares: one version from what many ranks have.

Every rank knows what each has, and so all make the same plan: each block of the version is made by one rank, that
which has most of its bytes. Where others have some of them, as where a shard ends inside a block, they give them to
it. So each rank reads, hashes, diffs and codes whole blocks, as a commit by one process does, and the digests are
those of the whole model. What it codes it uploads, in packs, where enough of it lies side by side in the version;
the rest it gives to rank 0 in its receipt. From the receipts of all, rank 0 makes the manifest, and publishes.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from weightvc.errors import BadTensor, Corrupt
from weightvc.objects import frame, key, manifest
from weightvc.objects.manifest import Patch, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.pool import Pool
from weightvc.protocol import parallel, state
from weightvc.protocol.commit import Baseline, Block, Build, Coded, Packer, sampled
from weightvc.protocol.files import files
from weightvc.protocol.shelf import Shelf
from weightvc.sources.base import Layout, LayoutFile
from weightvc.sources.header import shown
from weightvc.sources.memory import check_components
from weightvc.sources.paths import check_files
from weightvc.sources.shards import Box, Offered, Runs, runs

if TYPE_CHECKING:
    from weightvc_kernels.context import Stats

LEAST: Final = 1 << 20
"""Bytes of payloads side by side that a rank uploads itself: less costs more requests than it spares rank 0 bytes."""


class Piece(NamedTuple):
    """What a rank has, by its number there."""

    rank: int
    number: int
    runs: Runs


class Fragment(NamedTuple):
    """Bytes [start, stop) of a piece: those that lie in one chunk."""

    piece: Piece
    start: int
    stop: int


class Has(Protocol):
    """What a rank has."""

    offered: Sequence[Offered]
    files: Mapping[str, bytes]
    """By path: what lies beside the tensors."""

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of offered[index]."""
        ...


class Plan:
    """Who has which bytes of which tensor."""

    def __init__(self, offers: Sequence[Sequence[Offered]], *, replicas: bool) -> None:
        """`offers` are what each rank has. With `replicas`, ranks may have the very same part of a tensor, with the
        same bytes. Raises BadTensor where ranks differ about a tensor, and where a byte is nobody's, or is in
        different parts."""
        known: dict[tuple[str, str], TensorInfo] = {}
        holders: dict[tuple[str, str], dict[Box, list[tuple[int, int]]]] = {}
        for rank, offer in enumerate(offers):
            for index, (tensor, box) in enumerate(offer):
                name = tensor.component, tensor.name
                if (one := known.setdefault(name, tensor)) != tensor:
                    raise BadTensor(
                        f"tensor {shown(tensor.name)} is {tensor.dtype} {list(tensor.shape)} on rank {rank}, and "
                        f"{one.dtype} {list(one.shape)} on another"
                    )
                holders.setdefault(name, {}).setdefault(box, []).append((rank, index))
        check_components({component: None for component, _ in known}, "all ranks together")
        self.tensors = [known[name] for name in sorted(known)]
        self.pieces: list[list[Piece]] = []
        """Of each tensor, each byte once."""
        turn = 0
        for tensor in self.tensors:
            made = []
            for box, held in holders[tensor.component, tensor.name].items():
                if len(held) > 1 and not replicas:
                    raise BadTensor(f"tensor {shown(tensor.name)} was added by ranks {held[0][0]} and {held[1][0]}")
                # Those who have the same write it in turn.
                turn += len(held) > 1
                made.append(Piece(*held[turn % len(held)], runs(Offered(tensor, box))))
            _check_cover(tensor, made)
            self.pieces.append(made)

    def fragments(self, schema: Schema) -> list[list[Fragment]]:
        """What each chunk consists of."""
        import numpy as np

        out: list[list[Fragment]] = [[] for _ in range(schema.chunks)]
        for i, pieces in enumerate(self.pieces):
            low, high = schema.first_chunk[i], schema.first_chunk[i + 1]
            if low == high:
                continue
            cuts = np.array([*(schema.span(chunk)[1] for chunk in range(low, high)), self.tensors[i].nbytes])
            for piece in pieces:
                if not len(piece.runs.starts):
                    continue
                at = piece.runs.before(cuts).tolist()
                for chunk, start, stop in zip(range(low, high), at, at[1:]):
                    if start < stop:
                        out[chunk].append(Fragment(piece, start, stop))
        return out


def _check_cover(tensor: TensorInfo, pieces: Sequence[Piece]) -> None:
    """Raise BadTensor unless each byte of a tensor is in one of the pieces, once."""
    import numpy as np

    starts = np.concatenate([piece.runs.starts for piece in pieces])
    lengths = np.concatenate([np.full(len(piece.runs.starts), piece.runs.length) for piece in pieces])
    order = np.argsort(starts, kind="stable")
    ends = np.concatenate([[0], (starts + lengths)[order]])
    begins = np.concatenate([starts[order], [tensor.nbytes]])
    if tensor.nbytes == 0 or (ends == begins).all():
        return
    at = int(np.flatnonzero(ends != begins)[0])
    if ends[at] < begins[at]:
        raise BadTensor(f"tensor {shown(tensor.name)}: bytes {ends[at]} to {begins[at]} are on no rank")
    raise BadTensor(f"tensor {shown(tensor.name)}: byte {begins[at]} is on two ranks, in parts that differ")


class Division:
    """Which rank makes which block, and what the others give it for that. The same on all ranks."""

    def __init__(self, plan: Plan, schema: Schema, blocks: Sequence[tuple[int, int]], world: int) -> None:
        self.schema = schema
        self.blocks = blocks
        self.fragments = plan.fragments(schema)
        self.owners: list[int] = []
        """Of each block."""
        self.owned: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        """The blocks that each rank makes."""
        for low, high in blocks:
            share = [0] * world
            for fragment in chain.from_iterable(self.fragments[low:high]):
                share[fragment.piece.rank] += fragment.stop - fragment.start
            owner = share.index(max(share))
            self.owners.append(owner)
            self.owned[owner].append((low, high))

    def given(self, giver: int, owner: int) -> Iterator[tuple[int, Fragment]]:
        """What one rank gives to another, in order, each with its chunk."""
        for low, high in self.owned[owner] if giver != owner else ():
            for chunk in range(low, high):
                for fragment in self.fragments[chunk]:
                    if fragment.piece.rank == giver:
                        yield chunk, fragment

    def parcels(self, shards: Has, rank: int, world: int) -> list[bytes]:
        """What a rank gives to each."""
        return [
            b"".join([shards.read(f.piece.number, f.start, f.stop) for _, f in self.given(rank, owner)])
            for owner in range(world)
        ]


class Owned:
    """The chunks that a rank makes, as a source: from its shards, and from what others gave it."""

    def __init__(self, division: Division, shards: Has, rank: int, parcels: Sequence[bytes]) -> None:
        self.tensors: Sequence[TensorInfo] = division.schema.tensors
        self.layout: Layout | None = None
        self._division = division
        self._shards = shards
        self._rank = rank
        self._given: dict[tuple[int, int, int], memoryview] = {}
        for giver, parcel in enumerate(parcels):
            at = 0
            for chunk, fragment in division.given(giver, rank):
                size = fragment.stop - fragment.start
                self._given[chunk, giver, fragment.piece.number] = memoryview(parcel)[at : at + size]
                at += size
            if at != len(parcel):
                raise Corrupt(f"rank {giver} gave {len(parcel)} bytes where {at} were expected")

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of a tensor, which lie in one chunk."""
        schema = self._division.schema
        chunk = schema.chunk_at(index, start)
        _, first, end = schema.span(chunk)
        fragments = self._division.fragments[chunk]
        if len(fragments) == 1 and (lone := fragments[0]).piece.rank == self._rank:
            return self._shards.read(lone.piece.number, lone.start + start - first, lone.start + stop - first)
        whole = bytearray(end - first)
        for fragment in fragments:
            piece = fragment.piece
            data = (
                self._shards.read(piece.number, fragment.start, fragment.stop)
                if piece.rank == self._rank
                else self._given[chunk, piece.rank, piece.number]
            )
            piece.runs.scatter(fragment.start, data, first, whole)
        return memoryview(whole)[start - first : stop - first]

    def check(self) -> None:
        """The ranks wait while it is read."""

    def close(self) -> None:
        """Nothing to release."""


class Kept:
    """What a rank made of the last version: the baseline of the next."""

    def __init__(self) -> None:
        self.tree: str | None = None
        """The digest of the tree that it is part of."""
        self._held: dict[int, frame.Buffer] = {}
        self._new: dict[int, frame.Buffer] = {}

    def write(self, at: int, data: frame.Buffer) -> None:
        """Keep bytes of the canonical stream."""
        self._new[at] = data

    def commit(self, digest: str) -> None:
        """The version is published."""
        self.tree, self._held, self._new = digest, self._new, {}

    def drop(self) -> None:
        """It is not, or is already."""
        self._new = {}

    def of(self, schema: Schema) -> "Holding":
        """What reads it, as part of a tree of this schema."""
        return Holding(schema, self._held)


class Holding:
    """A state that has some chunks of a tree. Made by Kept.of()."""

    def __init__(self, schema: Schema, held: Mapping[int, frame.Buffer]) -> None:
        self._schema = schema
        self._held = held
        self._begins = sorted(held)

    def read(self, low: int, high: int) -> frame.Buffer:
        """Bytes of chunks [low, high). Raises Corrupt if they are not here: another way has them."""
        start, stop = self._schema.position(low), self._schema.position(high)
        i = bisect_right(self._begins, start) - 1
        data = memoryview(self._held[self._begins[i]] if i >= 0 else b"")
        at = self._begins[i] if i >= 0 else start
        if stop - at > len(data):
            raise Corrupt(f"chunks {low} to {high} are another rank's")
        return data[start - at : stop - at]


class Said(NamedTuple):
    """A block in a receipt: with its payload, unless that lies in a pack."""

    coded: Coded
    pack: int
    """The number of the pack among those of its rank and stream; -1: none."""
    payload: bytes


@dataclass(slots=True)
class Receipt:
    """What a rank has made: of each block, in order."""

    digests: list[bytes] = field(default_factory=list)
    patch: list[Said] = field(default_factory=list)
    base: list[Said] = field(default_factory=list)
    patch_packs: list[tuple[str, int]] = field(default_factory=list)
    base_packs: list[tuple[str, int]] = field(default_factory=list)
    """Key and payload bytes of each pack."""
    changed: int = 0
    changed_float32: int = 0
    tables: dict[str, bytes] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    written: int = 0
    """Bytes that the rank has uploaded."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By path: what the rank has beside its tensors."""


class _Sender:
    """Puts the payloads of one stream of a rank's blocks into packs, where enough of them lie side by side."""

    def __init__(self, shelf: Shelf, transaction: key.Transaction, pool: Pool) -> None:
        self.said: list[Said] = []
        self._shelf = shelf
        self._transaction = transaction
        self._pool = pool
        self._held: list[tuple[Coded, bytes]] = []
        self._size = self._next = 0
        self._packs: list[tuple[Future[str], int]] = []

    def add(self, low: int, high: int, codec: int, payload: bytes, check: int) -> None:
        """Append a block of chunks [low, high)."""
        if low != self._next or (self._size and self._size + len(payload) > manifest.PACK):
            self.flush()
        self._next = high
        self._held.append((Coded(high - low, codec, len(payload), check), payload))
        self._size += len(payload)

    def flush(self) -> None:
        """End what lies side by side."""
        number = -1
        if self._size >= LEAST:
            if len(self._packs) >= 2:
                self._packs[-2][0].result()
            number = len(self._packs)
            data = frame.header(frame.PACK) + b"".join([payload for _, payload in self._held])
            self._packs.append((self._pool.submit(self._put, data), self._size))
        self.said += [Said(coded, number, payload if number < 0 else b"") for coded, payload in self._held]
        self._held, self._size = [], 0

    def _put(self, data: bytes) -> str:
        return self._shelf.put(self._transaction, "pack", data, keep=False)

    def finish(self) -> list[tuple[str, int]]:
        """The packs; raises what an upload raised."""
        self.flush()
        return [(future.result(), size) for future, size in self._packs]


class Share(Build):
    """What one rank makes of a version: as a commit of the whole, of its blocks alone."""

    def take(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Say which blocks it makes. Tensors that were renamed are new ones."""
        self._blocks = blocks
        if self._parent is not None:
            self._map = state.chunk_map(self._schema, self._parent.tree.schema, {})

    def sample(self, blocks: Sequence[tuple[int, int]]) -> "list[tuple[str, Stats | None]]":
        """What the tables are made of: statistics of a part of the version's blocks, of those that it makes."""
        if self._parent is None or not self._coder.learns(self._schema.nbytes):
            return []
        from weightvc_kernels import context

        every, stride = sampled(blocks), context.stride_of(self._schema.nbytes)
        totals: dict[str, Any] = {}
        with Pool(parallel.workers(), "weightvc-encode") as pool:
            runs = manifest.runs(self._schema, self._blocks)
            for dtype, stats in parallel.ordered(pool, lambda run: self._sample(run, every, stride), runs, 64):
                if stats is not None:
                    totals[dtype] = totals[dtype] + stats if dtype in totals else stats
        return list(totals.items())

    def learn(self, samples: "Sequence[tuple[str, Stats | None]]") -> None:
        """Make the tables of the samples of all ranks."""
        if samples:
            self._coder.learn(samples)

    def make(self) -> Receipt:
        """Diff, encode, hash, upload the packs."""
        before = self._shelf.store.stats.bytes_written
        receipt = Receipt()
        runs = manifest.runs(self._schema, self._blocks)
        with (
            Pool(parallel.workers(), "weightvc-encode") as pool,
            Pool(2, "weightvc-upload") as uploads,
        ):
            patch, base = (_Sender(self._shelf, self._transaction, uploads) for _ in range(2))
            blocks: Iterator[Block] = chain.from_iterable(
                parallel.ordered(pool, self._encode, runs, 2 * parallel.workers() + 2)
            )
            for block in blocks:
                receipt.digests.append(block.digests)
                if self._parent is not None:
                    patch.add(block.low, block.high, block.codec, block.payload, block.check)
                if block.base is not None:
                    base.add(block.low, block.high, *block.base, 0)
                receipt.changed += block.changed
                receipt.changed_float32 += block.changed_float32
            receipt.patch_packs, receipt.base_packs = patch.finish(), base.finish()
        receipt.patch, receipt.base = patch.said, base.said
        receipt.tables, receipt.unread = self._coder.tables, self.unread
        receipt.written = self._shelf.store.stats.bytes_written - before
        return receipt


class Whole:
    """A version from the receipts of all ranks."""

    def __init__(
        self,
        shelf: Shelf,
        division: Division,
        receipts: Sequence[Receipt],
        parent: Baseline | None,
        transaction: key.Transaction,
    ) -> None:
        self._shelf = shelf
        self._division = division
        self._receipts = receipts
        self._parent = parent
        self._transaction = transaction

    def run(self) -> tuple[Tree, Stream | None, Patch | None]:
        """The tree, its base and its patch; what is in no pack yet is uploaded, if it does not fit the manifest."""
        turns = [iter(receipt.digests) for receipt in self._receipts]
        tree = Tree(self._division.schema, b"".join([next(turns[owner]) for owner in self._division.owners]))
        bases = [(receipt.base, receipt.base_packs) for receipt in self._receipts]
        base = self._stream(bases) if any(said for said, _ in bases) or self._parent is None else None
        if self._parent is None:
            return tree, base, None
        tables: dict[str, bytes] = {}
        for receipt in self._receipts:
            tables |= receipt.tables
        stream = self._stream([(receipt.patch, receipt.patch_packs) for receipt in self._receipts])
        changed = sum(receipt.changed for receipt in self._receipts)
        return tree, base, Patch(self._parent.entry.new or "", stream, {}, changed, dict(sorted(tables.items())))

    def _stream(self, made: Sequence[tuple[Sequence[Said], Sequence[tuple[str, int]]]]) -> Stream:
        turns = [iter(said) for said, _ in made]
        with Pool(2, "weightvc-upload") as uploads:
            packer = Packer(self._shelf, self._transaction, uploads)
            pack: list[Coded] = []
            where: tuple[int, int] | None = None

            def close() -> None:
                if where is not None:
                    packer.add_pack(pack, *made[where[0]][1][where[1]])
                    pack.clear()

            for owner in self._division.owners:
                said = next(turns[owner])
                there = (owner, said.pack) if said.pack >= 0 else None
                if there != where:
                    close()
                    where = there
                if there is not None:
                    pack.append(said.coded)
                else:
                    packer.add(said.coded.chunks, said.coded.codec, said.payload, said.coded.check)
            close()
            return packer.finish()


def layout_of(schema: Schema, receipts: Sequence[Receipt]) -> Layout | None:
    """Where the files lie that ranks have beside the tensors, and these with them; None if there are none.

    Raises BadName or BadFile for paths that cannot be written, alone or together.
    """
    beside = [LayoutFile(path, len(data), data) for receipt in receipts for path, data in receipt.files.items()]
    if not beside:
        return None
    weights = [LayoutFile(file.path, file.size, bytes(file.content), weights=True) for file in files(schema, None)]
    made = sorted(beside + weights, key=lambda file: file.path.encode())
    check_files([file.path for file in made])
    return Layout(tuple(made))


def blocks_of(schema: Schema, parent: Tree | None) -> list[tuple[int, int]]:
    """All blocks of a version, as a commit of one process cuts them."""
    return manifest.blocks(schema, None if parent is None else state.chunk_map(schema, parent.schema, {}))
