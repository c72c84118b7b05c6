"""The context codec: a block's changes, coded by what the old lanes tell of them.

    stats = sum of sample(old, new, dtype) over a patch's blocks
    shared = tables(stats, dtype)                   carried once by the patch
    model = Model(shared, dtype)
    payload = encode(model, old, new)               each block by itself, in any order, in any thread
    decode_into(model, payload, target)
    prepare()                                       before all that, where compiling would come at a bad time

How often a weight changes, and how far, depends on its exponent before all else, and both sides hold the old
weights. docs/patch.md explains the codec and gives the layout. Everything that both sides must agree on is computed
in integers. The compiled passes are in `context_kernels`; they, and numba, are imported at the first call.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightvc_kernels import context_tables, lanes
from weightvc_kernels.context_tables import FORMS, Array, Form, Tables
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes, Positions

UNIT = 4096
"""Bytes that a flag stands for: set if any of them changed."""

BLOCK_LIMIT = 1 << 26
"""Bytes of the largest block."""

STRIDE = 16
"""Of so many units, sample looks at one."""

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


def sample(old: Buffer, new: Buffer, dtype: str, stride: int = STRIDE) -> Stats:
    """Count what changed between two blocks, in every `stride`-th unit: 1 for all of a small patch.

    Raises CodecError for a dtype that the codec does not code, or blocks that are not of one length.
    """
    form = context_tables.form(dtype)
    before, after = _pair(old, new, form)
    stats = Stats(
        np.zeros(form.classes, np.int64),
        np.zeros(form.classes, np.int64),
        np.zeros((form.classes, form.buckets), np.int64),
    )
    if stride < 1:
        raise CodecError(f"stride of {stride} units: it must be at least 1")
    first = (min(stride, max(1, _units(before.nbytes))) - 1) // 2
    x, y = _frozen(before), _frozen(after)
    from weightvc_kernels.context_sample import tally

    tally(x, y, _words(x), _words(y), _size(form), form.pack(), first, stride, stats.seen, stats.changed, stats.steps)
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
    """The payload that turns `old` into `new`, and the old lanes [changes] that change.

    The payload is whole 32-bit words, or nothing if the blocks are equal. The old lanes are what a reader that writes
    in place can check its target by, before it writes. Takes some 20 to 40 bytes of memory for every lane that
    changed. Raises CodecError if the lengths differ, or are over BLOCK_LIMIT or not a whole number of lanes.
    """
    form = model.form
    before, after = _pair(old, new, form)
    n, units = before.size, _units(before.nbytes)
    kernels = _kernels()
    flags, marks, groups, steps, was = _room(
        (units, np.uint8), (2 * n + units, np.uint64), (n, np.uint16), (n, before.dtype), (n, before.dtype)
    )
    x, y = _frozen(before), _frozen(after)
    count, found = kernels.scan(
        *(x, y, _words(x), _words(y), _size(form), model.shape, model.rows, model.planes, model.window, model.group),
        *(model.curve, model.pace, np.empty(65, np.uint32), flags, marks, steps, groups, was),
    )
    if not found:
        return b"", was[:0].copy()
    room = (31 * count + found * (32 + 8 * form.lane) + 12 * units) // 32 + 8
    out = np.empty(room, np.uint32)
    at = kernels.pack(
        *(flags, _tallies(), marks, count, steps, groups, found),
        *(model.index_bits, model.widths, model.starts, out),
    )
    return out[at:].tobytes(), was[:found].copy()


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
    """Turn `target`, which holds the old block, into the new one, in place.

    Raises CodecError for a malformed payload: `target` is then neither the old block nor the new. Whatever the
    payload, nothing else is written to, and it ends after one pass. Steps are relative: a payload decoded onto a
    block that it was not made from gives garbage, often without
    an error. Check digests before and after.
    """
    form = model.form
    block = _block(target, form)
    if not block.flags.writeable:
        raise CodecError("target is read-only: pass a writable buffer, or use decode")
    data = lanes.as_bytes(payload)
    if not data.size:
        return
    if data.size % 4 or data.size < 8:
        raise CodecError(f"context payload of {data.size} bytes is not whole words, at least two: cut short")
    if not block.size:
        raise CodecError(f"context payload of {data.size} bytes for an empty block: not of this block")
    kernels = _kernels()
    words = _frozen(data if data.ctypes.data % 4 == 0 else data.copy()).view(np.uint32)
    x = block if block.ctypes.data % 8 == 0 else _aligned(block)
    flags = np.empty(_units(block.nbytes), np.uint8)
    status, state, used = kernels.unflag(words, _tallies(), flags)
    if status == kernels.OK:
        status = kernels.apply(
            *(x, _size(form), model.shape, model.rows, model.planes, model.window, model.group),
            *(model.curve, model.finder, model.pace, np.empty(65, np.uint32)),
            *(flags, words, state, used, model.index_bits, model.slots, model.widths, model.starts),
        )
    if x is not block:
        block[:] = x
    if status != kernels.OK:
        reason = {
            kernels.CUT_SHORT: "ends too early",
            kernels.WRONG_STATE: "does not end in the state that it began in",
            kernels.WRONG_BUCKET: "holds a step that is too long",
            kernels.LEFT_OVER: "has words left over",
        }[status]
        raise CodecError(f"context payload of {data.size} bytes {reason}: changed, or not of this block")


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


def _tallies() -> Array:
    return np.ones(16, np.uint64)


def _units(nbytes: int) -> int:
    return (nbytes + UNIT - 1) // UNIT


def _block(data: Buffer, form: Form) -> Array:
    block = lanes.as_lanes(data, form.lane)
    if block.nbytes > BLOCK_LIMIT:
        raise CodecError(f"block of {block.nbytes} bytes: the limit is {BLOCK_LIMIT}, split it")
    return block


def _pair(old: Buffer, new: Buffer, form: Form) -> tuple[Array, Array]:
    before, after = _block(old, form), _block(new, form)
    if before.size != after.size:
        raise CodecError(f"old has {before.nbytes} bytes, new {after.nbytes}: a patch needs blocks of one length")
    return before, after


def _aligned(block: Array) -> Array:
    """A copy that lies at a multiple of 8."""
    return block.copy()


def _frozen(block: Array) -> Array:
    """A read-only view at a multiple of 8, or of a copy: one type for the compiler, whatever the caller holds."""
    view = block.view() if block.ctypes.data % 8 == 0 else _aligned(block)
    view.flags.writeable = False
    return view


def _words(block: Array) -> Array:
    """The whole 64-bit words of a block."""
    return block.view(np.uint8)[: block.nbytes // 8 * 8].view(np.uint64)


def _size(form: Form) -> tuple[int, ...]:
    """As the kernels take it: the length of a tuple is known when they are compiled."""
    return (0,) * form.lane
