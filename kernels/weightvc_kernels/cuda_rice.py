"""The RICE codec on CUDA devices: the same payloads as `rice`, from arrays there and into arrays there.

    encode(pairs, dtype)              payloads that turn old arrays into new ones
    decode_into(blocks, targets)      apply payloads in place, after everything has been checked

Payloads are bytes of the host, since that is where they come from and go to; of the arrays only what changes leaves
the device, for the checks. Both take many blocks at once: a GPU needs some thousands of groups of 256 changes to be
busy. What arrays may be is told in `cuda`.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightvc_kernels import cuda_arrays, rice
from weightvc_kernels import cuda_rice_kernels as kernels
from weightvc_kernels.cuda import check_of, find, lane_pairs, tile_bytes
from weightvc_kernels.cuda_arrays import DeviceArray, Stream, blocks, empty, fetch, lanes_of, send, stream_of
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, as_bytes

__all__ = ["Block", "decode_into", "encode"]

_CLASS_BITS = 11
"""Bits of the greatest number of classes that a dtype has: F64's."""

Rows = npt.NDArray[np.int64]


class Block(NamedTuple):
    """A payload, and what it is a patch of."""

    payload: Buffer
    """Empty if nothing changes."""
    nbytes: int
    """Bytes of the block."""
    check: int | None = None
    """The first 4 bytes of the blake3 of the old lanes that change, little-endian; None: not to be checked."""


def encode(
    pairs: Sequence[tuple[DeviceArray, DeviceArray]], dtype: str, *, block: int = 4 << 20, stream: Stream = 0
) -> list[list[Block]]:
    """The blocks that turn the old arrays of the pairs (old, new) into the new ones: a list for each pair.

    Every array is cut into blocks of `block` bytes, the last perhaps shorter. `dtype` is a safetensors name, of all
    of them. The payloads are those of `rice.encode`, bit for bit. How often the host waits for the device does not
    depend on how many pairs there are.

    Raises CodecError as `cuda.diff` does, for elements of different sizes or not that of `dtype`, and for a `block`
    over the codec's limit or not a multiple of 16 KiB.
    """
    on = stream_of(stream)
    if not 0 < block <= rice.BLOCK_LIMIT or block % tile_bytes():
        raise CodecError(f"blocks of {block} bytes: give a multiple of {tile_bytes()}, at most {rice.BLOCK_LIMIT}")
    held = lane_pairs(pairs, on)
    if len({x.dtype for x, _ in held}) > 1:
        raise CodecError(f"arrays of {dtype} have elements of different sizes: encode each kind by itself")
    if not held:
        return []
    lane = held[0][0].dtype.itemsize
    shift, _ = rice.form_of(dtype, lane)
    if not 0 < 8 * lane - shift <= _CLASS_BITS + 1:
        raise CodecError(f"arrays have elements of {lane} bytes: those of {dtype} have not as many")
    found = find(held, on)
    # A block is a number of tiles, and so are the changes of all tiles before it known.
    step = block // tile_bytes()
    edges = [t for first, end in zip(found.tiles, found.tiles[1:], strict=False) for t in range(first, end, step)]
    sizes = [min(block, x.nbytes - at) for x, _ in held for at in range(0, x.nbytes, block)]
    begins = found.starts[[*edges, found.tiles[-1]]]
    old = fetch(found.changes.old, on)
    checks = [check_of(old[a:b]) for a, b in zip(begins.tolist(), begins[1:].tolist(), strict=False)]
    bases = [at // lane for x, _ in held for at in range(0, x.nbytes, block)]
    payloads = _encode(found.changes, dtype, lane, np.diff(begins), np.array(bases, np.int64), on)
    made = [Block(*each) for each in zip(payloads, sizes, checks, strict=True)]
    counts = [blocks(x.nbytes, block) for x, _ in held]
    return [made[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _encode(
    changes: Any, dtype: str, lane: int, counts: npt.NDArray[np.int64], bases: npt.NDArray[np.int64], stream: Any
) -> list[bytes]:
    """The payloads of blocks with so many changes, that begin at the lanes `bases` of their arrays."""
    shift, plain = rice.form_of(dtype, lane)
    table, owners = _tables(counts)
    groups = owners.size
    if not groups:
        return [b""] * counts.size
    table[:, kernels.BASE] = bases
    table[:, kernels.SHIFT], table[:, kernels.FLIP] = shift, _flip(lane, plain)
    rows, whose, by_lane = send(table, stream), send(owners, stream), kernels.made(lane)
    classes, lengths = 1 << (8 * lane - 1 - shift), 8 * lane
    tallies = empty(counts.size * classes * lengths, np.uint32)
    kernels.clear[blocks(tallies.size, kernels.CLEARED), kernels.FEW, stream](tallies)
    tallies = tallies.reshape(counts.size, classes, lengths)
    grid = blocks(groups, kernels.FEW)
    by_lane.tally[grid, kernels.FEW, stream](changes.old, changes.new, rows, whose, tallies)
    chosen = empty((counts.size, 2), np.int64)
    prices = send(rice.prices(8 * lane - 1), stream)
    reach = empty((counts.size, classes), np.int32)
    kernels.settle[counts.size, kernels.FEW, stream](tallies, prices, reach, chosen)
    ks, spans = empty(groups, np.int64), empty(groups, np.int64)
    prices = send(rice.prices(rice.GAP_BITS), stream)
    kernels.parameters[grid, kernels.FEW, stream](changes.positions, rows, whose, prices, ks, spans)
    # Once to learn how long all are, and once more to write them, each block from a word's first bit.
    bounds = send(np.zeros((groups, kernels.BOUNDS), np.int64), stream)
    packed = changes.positions, changes.old, changes.new, rows, whose, chosen, ks
    by_lane.pack[grid, kernels.FEW, stream](*packed, bounds, empty(0, np.uint64), False)
    sizes, settled = fetch(bounds, stream)[:, kernels.STOP], fetch(chosen, stream)
    gaps = fetch(spans, stream)
    first, last = table[:, kernels.FIRST_GROUP], table[:, kernels.FIRST_GROUP] + table[:, kernels.GROUPS]
    before = np.concatenate([[0], np.cumsum(sizes)])
    words = (before[last] - before[first] + 63) >> 6
    word = np.concatenate([[0], np.cumsum(words)])
    begin = np.zeros((groups, kernels.BOUNDS), np.int64)
    begin[:, kernels.BEGIN] = (64 * word[:-1] - before[first])[owners] + before[:-1]
    out = empty(int(word[-1]), np.uint64)
    kernels.clear[blocks(out.size, kernels.CLEARED), kernels.FEW, stream](out)
    by_lane.pack[grid, kernels.FEW, stream](*packed, send(begin, stream), out, True)
    body = fetch(out, stream).view(np.uint8)
    payloads = []
    for b, count in enumerate(counts.tolist()):
        if not count:
            payloads.append(b"")
            continue
        low, high = int(first[b]), int(last[b])
        index = np.stack([gaps[low : high - 1], sizes[low : high - 1]], axis=1).astype(np.uint64)
        head = rice.put_head(count, shift, plain, int(settled[b, 0]), int(settled[b, 1])) + rice.put_index(index)
        at = 8 * int(word[b])
        payloads.append(head + body[at : at + (int(before[high] - before[low]) + 7) // 8].tobytes())
    return payloads


def decode_into(blocks_: Sequence[Block], targets: Sequence[DeviceArray], *, stream: Stream = 0) -> None:
    """Turn arrays that hold what the blocks are patches of into what they make of it, in place: all, or nothing.

    The targets, joined in their order, are the blocks, joined in theirs: a block may lie in several arrays, and an
    array hold several blocks. All have elements of one size. Everything is decoded, and the old lanes are compared
    with the checks, before the first write; for that the host waits once. The writes go on when this returns, in
    order with the stream.

    Raises CodecError, nothing written, for a malformed payload or one that is not of its block, old lanes that are
    not what a check says, blocks and targets of different lengths, and targets as `cuda.apply` does. Steps are
    relative: what a block without a check is applied to is for the caller to know.
    """
    on, threads = stream_of(stream), cuda_arrays.THREADS
    held = [lanes_of(target, f"target {i}", on, write=True) for i, target in enumerate(targets)]
    if len({x.dtype for x in held}) > 1:
        raise CodecError("targets have elements of different sizes: decode blocks of each size by themselves")
    if sum(x.nbytes for x in held) != sum(block.nbytes for block in blocks_):
        raise CodecError("blocks and targets have not as many bytes: they do not belong together")
    if not held:
        return
    dtype = held[0].dtype
    parsed = [
        rice.Head.parse(as_bytes(block.payload), _lanes_in(block, dtype.itemsize), dtype.itemsize)
        for block in blocks_
    ]
    table, owners = _tables(np.array([head.changes for head in parsed], np.int64))
    if not owners.size:
        return
    words = _joined(blocks_, parsed, table, dtype.itemsize)
    edges = [*table[:, kernels.FIRST_CHANGE].tolist(), int(table[:, kernels.CHANGES].sum())]
    bounds = empty((owners.size, kernels.BOUNDS), np.int64)
    flags = send(np.zeros(len(blocks_), np.int32), on)
    data, rows, whose = send(words, on), send(table, on), send(owners, on)
    positions, was, now = empty(edges[-1], np.int64), empty(edges[-1], dtype), empty(edges[-1], dtype)
    grid = blocks(owners.size, kernels.FEW)
    kernels.index[len(blocks_), kernels.FEW, on](data, rows, bounds, flags)
    kernels.places[grid, kernels.FEW, on](data, rows, whose, bounds, positions, flags)
    parts = [part for part in _parts(held, table[:, kernels.BASE], edges) if part[2] < part[3]]
    for target, base, low, high in parts:
        kernels.gather[blocks(high - low, threads), threads, on](target, base, positions, low, high, was)
    kernels.made(dtype.itemsize).values[grid, kernels.FEW, on](data, rows, whose, bounds, was, now, flags)
    for b, flag in enumerate(fetch(flags, on).tolist()):
        if flag:
            raise CodecError(f"block {b}: {rice.reason(flag)}")
    if any(block.check is not None for block in blocks_):
        old = fetch(was, on)
        for b, block in enumerate(blocks_):
            low, high = edges[b], edges[b + 1]
            if block.check is not None and low < high and check_of(old[low:high]) != block.check:
                raise CodecError(f"targets do not hold what block {b} is a patch of: nothing was written")
    for target, base, low, high in parts:
        kernels.scatter[blocks(high - low, threads), threads, on](target, base, positions, low, high, now)


def _lanes_in(block: Block, lane: int) -> int:
    if block.nbytes < 0 or block.nbytes % lane:
        raise CodecError(f"block of {block.nbytes} bytes is not a whole number of {lane}-byte lanes")
    return block.nbytes // lane


def _tables(counts: npt.NDArray[np.int64]) -> tuple[Rows, npt.NDArray[np.int32]]:
    """Rows for blocks with so many changes, and the block of each group."""
    groups = -(-counts // rice.GROUP)
    table = np.zeros((counts.size, kernels.COLUMNS), np.int64)
    table[:, kernels.CHANGES], table[:, kernels.GROUPS] = counts, groups
    table[1:, kernels.FIRST_CHANGE] = np.cumsum(counts)[:-1]
    table[1:, kernels.FIRST_GROUP] = np.cumsum(groups)[:-1]
    return table, np.repeat(np.arange(counts.size, dtype=np.int32), groups)


def _joined(blocks_: Sequence[Block], parsed: Sequence[Any], table: Rows, lane: int) -> npt.NDArray[np.uint64]:
    """All payloads in words, each from a word's first bit, and room behind; fills the table's other columns."""
    sizes = [as_bytes(block.payload).size for block in blocks_]
    words = [0, *accumulate(-(-size // 8) for size in sizes)]
    joined = np.zeros(words[-1] + kernels.SLACK_WORDS, np.uint64)
    data, base = joined.view(np.uint8), 0
    for row, block, head, size, word in zip(table, blocks_, parsed, sizes, words, strict=False):
        data[8 * word : 8 * word + size] = as_bytes(block.payload)
        lanes_ = block.nbytes // lane
        row[kernels.BASE], row[kernels.LANES] = base, lanes_
        row[kernels.BORDER], row[kernels.RUN_BITS] = head.border, head.run_bits
        row[kernels.SHIFT], row[kernels.FLIP] = head.shift, _flip(lane, head.plain)
        row[kernels.INDEX_AT], row[kernels.END] = 64 * word + 8 * head.nbytes, 64 * word + 8 * size
        row[kernels.SPAN_BITS], row[kernels.SIZE_BITS] = head.span_bits, head.size_bits
        base += lanes_
    return joined


def _parts(
    held: Sequence[Any], bases: npt.NDArray[np.int64], edges: Sequence[int]
) -> list[tuple[Any, int, int, int]]:
    """For each target the lane that it begins at, and which changes may lie in it: those of its blocks."""
    parts, base = [], 0
    for target in held:
        first = int(np.searchsorted(bases, base, side="right")) - 1
        last = int(np.searchsorted(bases, base + target.size, side="left"))
        parts.append((target, base, edges[first], edges[last]))
        base += target.size
    return parts


def _flip(lane: int, plain: bool) -> int:
    return 0 if plain else (1 << (8 * lane - 1)) - 1
