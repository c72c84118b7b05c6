"""The context codec: a block's changes, coded by what the old lanes tell of them.

    stats = sum of sample(old, new, dtype) over a patch's blocks
    shared = tables(stats, dtype)                   carried once by the patch
    model = Model(shared, dtype)
    payload = encode(model, old, new)               each block by itself, in any order, in any thread
    decode_into(model, payload, target)
    sample_batch, encode_batch, decode_batch        the same of many blocks at once, for where they are small
    prepare()                                       before all that, where compiling would come at a bad time

How often a weight changes, and how far, depends on its exponent before all else, and both sides hold the old
weights. docs/patch.md explains the codec and gives the layout. Everything that both sides must agree on is computed
in integers. The compiled passes are in `context_kernels`; they, and numba, are imported at the first call.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from weightvc_kernels import context_tables, lanes
from weightvc_kernels.context_tables import FORMS, Array, Form, Tables
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes, Positions

Pair: TypeAlias = tuple[Buffer, Buffer]
"""An old block and a new one, of one length."""

UNIT = 4096
"""Bytes that a flag stands for: set if any of them changed."""

BLOCK_LIMIT = 1 << 26
"""Bytes of the largest block."""

STRIDE = 16
"""Of so many units, sample looks at one."""
SAMPLED = 4 << 20
"""Bytes of a model that are enough to make tables from: with more, they hardly get better."""

_KEPT = 128 << 20
_kept = threading.local()


def supports(dtype: str) -> bool:
    """Whether the codec codes tensors of this safetensors dtype."""
    return dtype in FORMS


def lane(dtype: str) -> int:
    """Bytes of the lanes in which the codec sees `dtype`. Raises CodecError for a dtype it does not code."""
    return context_tables.form(dtype).lane


def prepare(dtypes: Iterable[str] = FORMS) -> None:
    """Have all that codes and decodes tensors of `dtypes` compiled, so that no later call waits for it.

    Else each part is compiled when it is first called with lanes of a width: by the first commit or read of such a
    patch, and by a later one again if lanes of another width begin to change. That takes some seconds of a processor
    a width, once a machine, and room on disk for it (NUMBA_CACHE_DIR says where); then it is loaded, in milliseconds.
    Dtypes that the codec does not code are passed over.
    """
    for size, dtype in {lane(dtype): dtype for dtype in dtypes if supports(dtype)}.items():
        old, new = np.zeros(UNIT, np.uint8), np.zeros(UNIT, np.uint8)
        new[size - 1] = 1
        model = Model(tables(sample(old, new, dtype, 1), dtype), dtype)
        decode(model, encode(model, old, new), old)
        lanes.changed(*np.zeros((2, lanes.MANY), lanes.dtype_of(size)))


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """Counts of lanes, changes and steps in a sample. Add those of several blocks of one dtype together."""

    seen: Array
    """Lanes in units that changed, int64 [classes]."""
    changed: Array
    """Changed lanes, int64 [classes]."""
    steps: Array
    """Steps, int64 [classes, buckets]."""

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(self.seen + other.seen, self.changed + other.changed, self.steps + other.steps)


def stride_of(nbytes: int) -> int:
    """Of so many units of a model of `nbytes` bytes, a writer looks at one."""
    return max(STRIDE, nbytes // SAMPLED)


def sample(old: Buffer, new: Buffer, dtype: str, stride: int = STRIDE) -> Stats:
    """Count what changed between two blocks. Raises CodecError as sample_batch does."""
    return sample_batch([(old, new)], dtype, stride)


def sample_batch(pairs: Sequence[Pair], dtype: str, stride: int = STRIDE) -> Stats:
    """Count what changed between old and new blocks, in every `stride`-th unit of each: 1 for all of a small patch.

    Raises CodecError for a dtype that the codec does not code, or blocks that are not of one length.
    """
    form = context_tables.form(dtype)
    table, held = _places(pairs, form)
    stats = Stats(
        np.zeros(form.classes, np.int64),
        np.zeros(form.classes, np.int64),
        np.zeros((form.classes, form.buckets), np.int64),
    )
    if stride < 1:
        raise CodecError(f"stride of {stride} units: it must be at least 1")
    from weightvc_kernels.context_sample import tally

    tally(table, _size(form), _like(form), form.pack(), stride, stats.seen, stats.changed, stats.steps)
    del held
    return stats


def tables(stats: Stats, dtype: str) -> bytes:
    """The tables, a few hundred bytes, that suit what was counted. Empty counts give tables too.

    Raises CodecError for a dtype that the codec does not code.
    """
    form = context_tables.form(dtype)
    first, last = context_tables.listed_classes(stats.seen, form)
    odds: list[int] = []
    for changed, seen in zip(stats.changed[first : last + 1].tolist(), stats.seen[first : last + 1].tolist()):
        # A class that was not seen gets the odds of the one before.
        odds.append(context_tables.odds_of(changed, seen) if seen or not odds else odds[-1])
    used = np.flatnonzero(stats.changed)
    starts: list[int] = []
    widths: list[tuple[int, ...]] = [()]
    if used.size:
        histogram, owner = stats.steps[used], np.empty(used.size, np.int64)
        from weightvc_kernels.context_sample import merge

        groups = int(merge(histogram, owner, context_tables.GROUP_LIMIT))
        starts = [int(used[np.argmax(owner == g)]) for g in range(1, groups)]
        widths = [context_tables.widths_of(row) for row in histogram[:groups].tolist()]
    return Tables(first, tuple(odds), tuple(starts), tuple(widths)).pack()


class Model:
    """Tables made ready to code with. Immutable: share one between threads."""

    def __init__(self, data: Buffer, dtype: str) -> None:
        """Raises CodecError for tables that were changed, or a dtype that the codec does not code."""
        form = context_tables.form(dtype)
        shared = Tables.unpack(data, form)
        odds = context_tables.spread_odds(shared, form)
        self.form = form
        self.shape = form.pack()
        self.rows = context_tables.hazards()[odds + np.arange(context_tables.SCALES)[:, None]]
        self.planes, self.window = context_tables.narrow(self.rows, odds, form)
        self.group = context_tables.spread_groups(shared, form)
        self.widths, self.starts, self.slots = context_tables.spread_widths(shared, form)
        self.curve, self.finder = context_tables.curve()
        self.pace = context_tables.pace()
        self.index_bits = np.uint64((form.buckets - 1).bit_length())


def encode(model: Model, old: Buffer, new: Buffer) -> bytes:
    """The payload that turns `old` into `new`. Raises CodecError as encode_patch does."""
    return encode_patch(model, old, new)[0]


def encode_patch(model: Model, old: Buffer, new: Buffer) -> tuple[bytes, Lanes]:
    """The payload that turns `old` into `new`, and the old lanes [changes] that change, as encode_batch has them."""
    return encode_batch(model, [(old, new)])[0]


def encode_batch(model: Model, pairs: Sequence[Pair]) -> list[tuple[bytes, Lanes]]:
    """Of each pair of an old and a new block the payload, and the old lanes [changes] that change.

    A payload is whole 32-bit words, or nothing if the blocks are equal, and the same whatever other blocks are in the
    batch: many small ones at once save their threads the waiting for each other. The old lanes are what a reader that
    writes in place can check its target by, before it writes. Takes some 20 to 40 bytes of memory for every lane that
    changed. Raises CodecError if lengths differ, or are over BLOCK_LIMIT or not a whole number of lanes.
    """
    form = model.form
    table, held = _places(pairs, form)
    kernels, size, blocks = _kernels(), _size(form), len(pairs)
    n, lane, dtype = int(table[:, 2].sum()), form.lane, lanes.dtype_of(form.lane)
    each = -(-lane * table[:, 2].astype(np.int64) // UNIT)
    units, most = int(each.sum()), int(each.max(initial=0))
    flags, chances, marks, groups, steps, was = _room(
        (units, np.uint8), (most, np.uint64), (2 * n, np.uint64), (n, np.uint16), (n, dtype), (n, dtype)
    )
    ends = np.zeros((blocks, 2), np.int64)
    kernels.scan(
        *(table, size, model.shape, model.rows, model.planes, model.window, model.group),
        *(model.curve, model.pace, np.empty(65, np.uint32), flags, marks, steps, groups, was, ends),
    )
    del held
    count, found = ends[-1].tolist() if blocks else (0, 0)
    if not found:
        return [(b"", np.empty(0, dtype))] * blocks
    out = np.empty((31 * count + found * (32 + 8 * lane) + 12 * units) // 32 + 8 * blocks, np.uint32)
    spans = np.empty((blocks, 2), np.int64)
    kernels.pack(
        *(table, size, flags, np.empty(16, np.uint64), marks, steps, groups, ends, chances),
        *(model.index_bits, model.widths, model.starts, out, spans),
    )
    whole, first, made = was[:found].copy(), 0, []
    for (begin, end), (_, last) in zip(spans.tolist(), ends.tolist(), strict=True):
        made.append((out[begin:end].tobytes(), whole[first:last]))
        first = last
    return made


def decode(model: Model, payload: Buffer, old: Buffer) -> Bytes:
    """The new block, uint8 [bytes], a fresh array. Raises CodecError as decode_into does."""
    after = _block(old, model.form).copy()
    decode_into(model, payload, after)
    return after.view(np.uint8)


def positions_values(model: Model, payload: Buffer, old: Buffer) -> tuple[Positions, Lanes]:
    """What a payload changes: ascending lane positions [changes], int64, and the new lanes there [changes].

    Raises CodecError as decode_into does.
    """
    before = _block(old, model.form)
    after = decode(model, payload, old).view(before.dtype)
    at = lanes.changed(before, after)
    return at, after[at]


def decode_into(model: Model, payload: Buffer, target: Buffer) -> None:
    """Turn `target`, which holds the old block, into the new one, in place. Raises CodecError as decode_batch
    does."""
    decode_batch(model, [(payload, target)])


def decode_batch(model: Model, jobs: Sequence[tuple[Buffer, Buffer]]) -> None:
    """Of each payload and its target turn the target, which holds the old block, into the new one, in place.

    Raises CodecError for a malformed payload, with its number in `job`: its target is then neither the old block nor
    the new, those before it are decoded or as they were, those behind it as they were. Whatever the payload, nothing
    else is written to, and it ends after one pass. Steps are relative: a payload decoded onto a block that it was not
    made from gives garbage, often without an error. Check digests before and after.
    """
    form = model.form
    rows: list[tuple[int, int, int, int]] = []
    parts, numbers, copies, most, at = [], [], [], 0, 0
    for job, (payload, target) in enumerate(jobs):
        block = _block(target, form)
        if not block.flags.writeable:
            raise CodecError("target is read-only: pass a writable buffer, or use decode", job)
        data = lanes.as_bytes(payload)
        if not data.size:
            continue
        if data.size % 4 or data.size < 8:
            raise CodecError(f"context payload of {data.size} bytes is not whole words, at least two: cut short", job)
        if not block.size:
            raise CodecError(f"context payload of {data.size} bytes for an empty block: not of this block", job)
        place = lanes.address(block)
        if place % 8:
            copies.append((len(rows), block, block.copy()))
            place = lanes.address(copies[-1][2])
        rows.append((place, block.size, at, at + data.size // 4))
        numbers.append(job)
        parts.append(data)
        most, at = max(most, block.nbytes), at + data.size // 4
    if not rows:
        return
    # Joined they lie at a multiple of 4, wherever each lay.
    words = (parts[0].copy() if len(parts) == 1 else np.concatenate(parts)).view(np.uint32)
    kernels = _kernels()
    done, status = kernels.apply(
        *(np.array(rows, np.uint64), _size(form), _like(form)),
        *(model.shape, model.rows, model.planes, model.window, model.group),
        *(model.curve, model.finder, model.pace, np.empty(65, np.uint32), np.empty(16, np.uint64)),
        *(np.empty(_units(most), np.uint8), words, model.index_bits, model.slots, model.widths, model.starts),
    )
    for row, block, copy in copies:
        if row <= done:
            block[:] = copy
    if status != kernels.OK:
        reason = {
            kernels.CUT_SHORT: "ends too early",
            kernels.WRONG_STATE: "does not end in the state that it began in",
            kernels.WRONG_BUCKET: "holds a step that is too long",
            kernels.LEFT_OVER: "has words left over",
        }[status]
        text = f"context payload of {parts[done].size} bytes {reason}: changed, or not of this block"
        raise CodecError(text, numbers[done])


def _kernels() -> Any:
    from weightvc_kernels import context_kernels

    return context_kernels


def _room(*wanted: tuple[int, Any]) -> list[Array]:
    """Arrays of these lengths and dtypes, to work in until this thread's next call.

    Memory that is not written to is not taken, so room for the worst case costs nothing. But what numpy gets from the
    system comes in huge pages, zeroed: several of them anew for every block took longer than reading the block.
    """
    spans, end = [], 0
    for length, dtype in wanted:
        size = length * np.dtype(dtype).itemsize
        spans.append((end, end + size, dtype))
        end += (size + 63) // 64 * 64
    room = getattr(_kept, "room", None)
    if room is None or room.size < end:
        room = np.empty(end, np.uint8)
        # Blocks that a commit cuts are far below that. Others are not to leave a thread with so much.
        if end <= _KEPT:
            _kept.room = room
    return [room[a:b].view(dtype) for a, b, dtype in spans]


def _units(nbytes: int) -> int:
    return (nbytes + UNIT - 1) // UNIT


def _block(data: Buffer, form: Form) -> Array:
    block = lanes.as_lanes(data, form.lane)
    if block.nbytes > BLOCK_LIMIT:
        raise CodecError(f"block of {block.nbytes} bytes: the limit is {BLOCK_LIMIT}, split it")
    return block


def _places(pairs: Sequence[Pair], form: Form) -> tuple[Array, list[Array]]:
    """Where old and new blocks lie, and how many lanes they have, uint64 [blocks, 3]; and what must not go before."""
    rows, held = [], []
    for old, new in pairs:
        before, after = _block(old, form), _block(new, form)
        if before.size != after.size:
            raise CodecError(f"old has {before.nbytes} bytes, new {after.nbytes}: a patch needs blocks of one length")
        row = []
        for side in (before, after):
            place = lanes.address(side)
            if place % 8:
                side = side.copy()
                place = lanes.address(side)
            held.append(side)
            row.append(place)
        rows.append((*row, before.size))
    return np.array(rows, np.uint64).reshape(-1, 3), held


@lru_cache(4)
def _like(form: Form) -> Array:
    """No lanes: their type, for the compiler."""
    return np.empty(0, lanes.dtype_of(form.lane))


def _size(form: Form) -> tuple[int, ...]:
    """As the kernels take it: the length of a tuple is known when they are compiled."""
    return (0,) * form.lane
