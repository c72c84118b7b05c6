"""The RICE codec: positions that decode without the old lanes, in groups that decode without each other.

    payload, was = encode_patch(old, new, dtype)
    decode_into(payload, target, lane)              in place, checked before the first write
    changes = Changes(payload, count, lane)         changes.at: positions; changes.values(old_at): the new lanes there

Gaps between changes, and the lengths of steps, are Rice codes with long tails, whose parameters each group of 256
changes, or the old lane's exponent, gives. Larger than the context codec's payloads, and several times as fast:
only changed lanes are looked at. docs/patch.md has the layout. The compiled passes are in `rice_kernels`; they, and
numba, are imported at the first call.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightvc_kernels import lanes, streams
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes, Positions

GROUP = 256
"""Changes of a group."""
GAP_BITS = 26
"""Bits of the largest gap."""
BORDER_LIMIT = 4096
BLOCK_LIMIT = 1 << 26
"""Bytes of the largest block."""

_EXPONENT = {
    "BF16": 7,
    "F16": 10,
    "F32": 23,
    "F64": 52,
    "F8_E4M3": 3,
    "F8_E4M3FNUZ": 3,
    "F8_E5M2": 2,
    "F8_E5M2FNUZ": 2,
}
"""Bits below the exponent, of dtypes that have one. Others are integers, all of one class."""
_PLAIN = 64
_RUN_LIMIT = 15
_ROOM = 16 << 20
_local = threading.local()
_EXTRA = (4, 7, 14, 20, *range(25, 300, 4))


def prepare() -> None:
    """Have all of the codec compiled, as context.prepare does for that one."""
    for lane in (1, 2, 4, 8):
        old = np.zeros(4096, np.uint8)
        new = old.copy()
        new[lane - 1] = 1
        positions_values(encode(old, new, "", lane), old, lane)
        decode_into(encode(old, new, "", lane), old, lane)


def encode(old: Buffer, new: Buffer, dtype: str, lane: int) -> bytes:
    """The payload that turns `old` into `new`. Raises CodecError as encode_patch does."""
    return encode_patch(old, new, dtype, lane)[0]


def encode_patch(old: Buffer, new: Buffer, dtype: str, lane: int) -> tuple[bytes, Lanes]:
    """The payload that turns `old` into `new`, and the old lanes [changes] that change, as encode_batch has them."""
    return encode_batch([(old, new)], dtype, lane)[0]


def encode_batch(pairs: Sequence[tuple[Buffer, Buffer]], dtype: str, lane: int) -> list[tuple[bytes, Lanes]]:
    """Of each pair of an old and a new block the payload, and the old lanes [changes] that change.

    Empty if the blocks are equal, and the same whatever other blocks are in the batch. `dtype` is a safetensors name:
    what a lane's class is; any other is taken for integers. Raises CodecError if lengths differ, or are over
    BLOCK_LIMIT or not a whole number of lanes.
    """
    rows, held, n = [], [], 0
    for old, new in pairs:
        before, after = _block(old, lane), _block(new, lane)
        if before.size != after.size:
            raise CodecError(f"old has {before.nbytes} bytes, new {after.nbytes}: a patch needs blocks of one length")
        before, after = (side if side.flags.aligned else side.copy() for side in (before, after))
        held += [before, after]
        rows.append((lanes.address(before), lanes.address(after), before.size))
        n += before.size
    kernels, kind = _kernels(), lanes.dtype_of(lane)
    where, was, now = _room(0, n, np.uint32), _room(1, n, kind), _room(2, n, kind)
    ends = np.zeros(len(rows), np.int64)
    kernels.scan(np.array(rows, np.uint64).reshape(-1, 3), _size(lane), where, was, now, ends)
    del held
    count = int(ends[-1]) if rows else 0
    if not count:
        return [(b"", was[:0])] * len(rows)
    form = _form(lane, *form_of(dtype, lane))
    most = -(-int(np.diff(ends, prepend=0).max()) // GROUP)
    # A gap, a sign, a run and a step take 42, 1, 42 and 80 bits at most; of the index a group takes 59.
    out = _room(3, count * 21 + 9 * (count // GROUP) + 64 * len(rows), np.uint8)
    spans = np.empty((len(rows), 2), np.int64)
    kernels.pack(
        *(ends, where, was, now, form, prices(8 * lane - 1), prices(GAP_BITS)),
        *(np.zeros((int(form[1]) + 1, 8 * lane), np.uint32), np.empty(GAP_BITS + 2, np.uint32)),
        *(np.empty(GROUP + 1, np.uint64), np.empty((most, 2), np.uint64), out, spans),
    )
    whole, first, made = was[:count].copy(), 0, []
    for (begin, end), last in zip(spans.tolist(), ends.tolist(), strict=True):
        made.append((out[begin:end].tobytes(), whole[first:last]))
        first = last
    return made


class Head(NamedTuple):
    """How a payload begins."""

    changes: int = 0
    shift: int = 0
    plain: bool = False
    run_bits: int = 0
    border: int = 0
    span_bits: int = 0
    size_bits: int = 0
    nbytes: int = 0
    """Its own bytes: where the index begins."""

    def pack(self) -> npt.NDArray[np.uint64]:
        """As the kernels take it."""
        fields = self.changes, self.shift, self.plain, self.run_bits, self.border, self.span_bits, self.size_bits
        return np.array([*fields, self.nbytes], np.uint64)

    @classmethod
    def parse(cls, data: Bytes, count: int, lane: int) -> "Head":
        """The head of a payload for `count` lanes of `lane` bytes. Raises CodecError for a malformed one."""
        if not 0 <= count * lane <= BLOCK_LIMIT:
            raise CodecError(f"block of {count} lanes of {lane} bytes: the limit is {BLOCK_LIMIT} bytes, split it")
        if not data.size:
            return cls()
        reader = streams.Reader(data)
        changes = reader.varint("the number of changes")
        form, run_bits, low, high = reader.take(4, "the parameters")
        border = low | high << 8
        # A change takes one bit at least: what a payload claims is no more than eight times its bytes.
        if not 1 <= changes <= min(count, 8 * data.size):
            raise CodecError(f"patch changes {changes} of {count} lanes: not of this block, or changed")
        shift = form & (_PLAIN - 1)
        if form >= 2 * _PLAIN or shift >= 8 * lane or run_bits > _RUN_LIMIT or border > BORDER_LIMIT:
            raise CodecError(f"form {form}, {run_bits}, {border} of lanes of {lane} bytes: it was changed")
        widths = reader.take(2, "the index") if changes > GROUP else b"\0\0"
        if widths[0] > GAP_BITS + 1 or widths[1] > 32:
            raise CodecError(f"index of {widths[0]} and {widths[1]} bits: the payload was changed")
        return cls(changes, shift, bool(form & _PLAIN), run_bits, border, widths[0], widths[1], reader.at)


class Changes:
    """What a payload changes in a block of `count` lanes. Decodes positions at once, new lanes when asked."""

    def __init__(self, payload: Buffer, count: int, lane: int) -> None:
        """Raises CodecError for a malformed payload: all that can be told without the old lanes is checked."""
        lanes.dtype_of(lane)
        data = lanes.as_bytes(payload)
        self.lane = lane
        self.where: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """Positions as uint32 [changes]."""
        head = Head.parse(data, count, lane)
        if not data.size:
            return
        kernels = _kernels()
        self._head = head.pack()
        self._data = np.concatenate([data, np.zeros(kernels.SLACK, np.uint8)])
        self._bounds = np.empty((-(-head.changes // GROUP) + 1, 3), np.uint64)
        where = np.empty(head.changes, np.uint32)
        _check(kernels.positions(self._data, data.size, self._head, count, self._bounds, where))
        self.where = where

    @property
    def at(self) -> Positions:
        """Ascending lane positions [changes], int64."""
        return self.where.astype(np.int64)

    def values(self, old_at: Lanes) -> Lanes:
        """The new lanes [changes] where the old ones are `old_at` [changes], unsigned integers of the lane's bytes.

        Raises CodecError for another number of lanes, or a malformed payload.
        """
        out = np.array(lanes.as_lanes(old_at, self.lane))
        if out.size != self.where.size:
            raise CodecError(f"{out.size} old lanes for a patch of {self.where.size} changes: gather them anew")
        if out.size:
            _check(_kernels().values(self._data, self._head, _size(self.lane), self._bounds, out))
        return out


def decode(payload: Buffer, old: Buffer, lane: int) -> Bytes:
    """The new block, uint8 [bytes], a fresh array. Raises CodecError as decode_into does."""
    after = _block(old, lane).copy()
    decode_into(payload, after, lane)
    return after.view(np.uint8)


def decode_into(payload: Buffer, target: Buffer, lane: int) -> None:
    """Turn `target`, which holds the old block, into the new one, in place. Raises CodecError as decode_batch
    does."""
    decode_batch([(payload, target)], lane)


def decode_batch(jobs: Sequence[tuple[Buffer, Buffer]], lane: int) -> None:
    """Of each payload and its target turn the target, which holds the old block, into the new one, in place.

    All of a block is decoded and checked before the first write to it. Raises CodecError for a malformed payload or a
    target that cannot be written to, with its number in `job`: that target and those behind it are untouched, those
    before it are decoded or untouched too. Steps are relative: check digests before and after.
    """
    rows: list[tuple[int, int, int, int]] = []
    parts, numbers, copies, most, at = [], [], [], 0, 0
    for job, (payload, target) in enumerate(jobs):
        block = _block(target, lane)
        if not block.flags.writeable:
            raise CodecError("target is read-only: pass a writable buffer, or use decode", job)
        data = lanes.as_bytes(payload)
        if not data.size:
            continue
        x = block
        if not block.flags.aligned:
            x = block.copy()
            copies.append((len(rows), block, x))
        rows.append((lanes.address(x), x.size, at, at + data.size))
        numbers.append(job)
        parts.append(data)
        # A change takes one bit at least.
        most, at = max(most, min(x.size, 8 * data.size)), at + data.size
    if not rows:
        return
    kernels = _kernels()
    done, status = kernels.decode(
        *(np.array(rows, np.uint64), _size(lane)),
        *(np.concatenate([*parts, np.zeros(kernels.SLACK, np.uint8)]), np.empty(kernels.FIELDS, np.uint64)),
        np.empty((-(-most // GROUP) + 1, 3), np.uint64),
        *(_room(0, most, np.uint32), _room(1, most, lanes.dtype_of(lane))),
    )
    for row, block, x in copies:
        if row < done:
            block[:] = x
    if status:
        job = numbers[done]
        if status == kernels.WRONG_HEAD:
            _malformed(parts[done], rows[done][1], lane, job)
        raise CodecError(reason(status), job)


def _malformed(data: Bytes, count: int, lane: int, job: int) -> None:
    """Raise what is wrong with a payload's head."""
    try:
        Head.parse(data, count, lane)
    except CodecError as error:
        raise CodecError(str(error), job) from None
    raise AssertionError("a head that is refused, and parses")


def positions_values(payload: Buffer, old: Buffer, lane: int) -> tuple[Positions, Lanes]:
    """What a payload changes: ascending lane positions [changes], int64, and the new lanes there [changes].

    Raises CodecError as decode_into does.
    """
    block = _block(old, lane)
    changes = Changes(payload, block.size, lane)
    return changes.at, changes.values(block[changes.where])


def _room(which: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Room to work in, [count], that this thread keeps: the system takes as long to give it as all is to write.

    What is never written to takes no memory, so room for the worst case costs nothing.
    """
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes > _ROOM:
        return np.empty(count, dtype)
    if not hasattr(_local, "room"):
        _local.room = [np.empty(_ROOM, np.uint8) for _ in range(4)]
    kept: Bytes = _local.room[which]
    return kept[:nbytes].view(dtype)


def _kernels() -> Any:
    from weightvc_kernels import rice_kernels

    return rice_kernels


def _check(status: int) -> None:
    if status:
        raise CodecError(reason(status))


def reason(status: int) -> str:
    """What is wrong, for a status of the kernels."""
    kernels = _kernels()
    wrong = {
        kernels.WRONG_INDEX: "an index that is not that of its groups",
        kernels.WRONG_GAP: "a position past its group or the block",
        kernels.WRONG_STEP: "a step that is too long",
        kernels.WRONG_SIZE: "a group that does not end where the index says",
        kernels.WRONG_END: "an end too early or too late",
    }[status]
    return f"RICE payload has {wrong}: changed, or not of this block"


def form_of(dtype: str, lane: int) -> tuple[int, bool]:
    """The shift that gives the class of a lane of `dtype`, and whether it is plain."""
    return (_EXPONENT[dtype], False) if dtype in _EXPONENT else (8 * lane - 1, True)


def put_head(changes: int, shift: int, plain: bool, border: int, run_bits: int) -> bytes:
    """What a payload begins with, up to the index."""
    return streams.put_varint(changes) + bytes([shift + _PLAIN * plain, run_bits]) + border.to_bytes(2, "little")


def put_index(bounds: npt.NDArray[np.uint64]) -> bytes:
    """Spans and sizes [groups - 1, 2], in as many bits as they need, and before them how many those are."""
    if not bounds.size:
        return b""
    widths = [int(column.max()).bit_length() for column in bounds.T]
    columns = [(bounds[:, i, None] >> np.arange(widths[i], dtype=np.uint64)) & np.uint64(1) for i in (0, 1)]
    bits = np.concatenate(columns, axis=1).astype(np.uint8)
    return bytes(widths) + np.packbits(bits, bitorder="little").tobytes()


def _block(data: Buffer, lane: int) -> Lanes:
    block = lanes.as_lanes(data, lane)
    if block.nbytes > BLOCK_LIMIT:
        raise CodecError(f"block of {block.nbytes} bytes: the limit is {BLOCK_LIMIT}, split it")
    return block


def _size(lane: int) -> tuple[int, ...]:
    """As the kernels take it: the length of a tuple is known when they are compiled."""
    return (0,) * lane


@lru_cache(64)
def _form(lane: int, shift: int, plain: bool) -> npt.NDArray[np.uint64]:
    bits = 8 * lane
    return np.array([shift, (1 << (bits - 1 - shift)) - 1, bits, 0 if plain else (1 << (bits - 1)) - 1], np.uint64)


@lru_cache(8)
def prices(limit: int) -> npt.NDArray[np.uint32]:
    """About twice the bits of a number's code, uint32 [parameter, bit length of the number]."""
    sizes = range(limit + 2)

    def price(k: int, length: int) -> int:
        return 2 * (1 + k) if length <= k else min(2 * k + _EXTRA[length - 1 - k], 2 * (16 + limit))

    return np.array([[price(k, length) for length in sizes] for k in range(limit + 1)], np.uint32)
