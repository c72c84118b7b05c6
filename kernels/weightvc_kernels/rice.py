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
_NOTHING = np.empty(0, np.uint8)
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
    """The payload that turns `old` into `new`, and the old lanes [changes] that change.

    Empty if the blocks are equal. `dtype` is a safetensors name: what a lane's class is; any other is taken for
    integers. Raises CodecError if the lengths differ, or are over BLOCK_LIMIT or not a whole number of lanes.
    """
    before, after = _block(old, lane), _block(new, lane)
    if before.size != after.size:
        raise CodecError(f"old has {before.nbytes} bytes, new {after.nbytes}: a patch needs blocks of one length")
    kernels, n = _kernels(), before.size
    where, was, now = _room(0, n, np.uint32), _room(1, n, before.dtype), _room(2, n, before.dtype)
    count = int(kernels.scan(_frozen(before), _frozen(after), _size(lane), where, was, now))
    if not count:
        return b"", was[:0]
    shift, plain = form_of(dtype, lane)
    form = _form(lane, shift, plain)
    counts = np.zeros((int(form[1]) + 1, 8 * lane), np.uint32)
    kernels.tally(was, now, count, form, counts)
    border, run_bits = kernels.settle(counts, prices(8 * lane - 1))
    groups = -(-count // GROUP)
    bounds = np.empty((groups, 2), np.uint64)
    # A gap, a sign, a run and a step take 42, 1, 42 and 80 bits at most.
    out = _room(3, count * 21 + groups + 16, np.uint8)
    bits = kernels.pack(
        *(where, was, now, count, form, border, run_bits, prices(GAP_BITS)),
        *(np.empty(GAP_BITS + 2, np.uint32), np.empty(GROUP + 1, np.uint64), bounds, out),
    )
    head = put_head(count, shift, plain, int(border), int(run_bits)) + put_index(bounds[:-1])
    return head + out[: (bits + 7) // 8].tobytes(), was[:count].copy()


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

    def __init__(self, payload: Buffer, count: int, lane: int, ahead: Lanes | None = None) -> None:
        """`ahead`, the block, if it is at hand: memory is asked for what changes, in time.

        Raises CodecError for a malformed payload: all that can be told without the old lanes is checked."""
        lanes.dtype_of(lane)
        data = lanes.as_bytes(payload)
        self.lane = lane
        self.where: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """Positions as uint32 [changes]."""
        head = Head.parse(data, count, lane)
        if not data.size:
            return
        self._border, self._run_bits = head.border, head.run_bits
        self._form = _form(lane, head.shift, head.plain)
        groups = -(-head.changes // GROUP)
        kernels = _kernels()
        self._data = np.zeros(data.size + kernels.SLACK, np.uint8)
        self._data[: data.size] = data
        self._bounds = np.empty((groups + 1, 3), np.uint64)
        where = np.empty(head.changes, np.uint32)
        block = _NOTHING if ahead is None else ahead.view(np.uint8)
        status = kernels.positions(
            *(self._data, data.size, head.nbytes, head.span_bits, head.size_bits, head.changes),
            *(count, self._bounds, where, _frozen(block), lane),
        )
        _check(status)
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
        self._apply(out)
        return out

    def _apply(self, was: Lanes) -> None:
        if was.size:
            status = _kernels().values(
                *(self._data, was.size, _size(self.lane), self._form, self._border, self._run_bits),
                *(self._bounds, was),
            )
            _check(status)

    def gather(self, block: Lanes) -> Lanes:
        """The lanes [changes] of `block` [lanes] that change."""
        if not block.flags.aligned:
            return block[self.where]
        was = np.empty(self.where.size, block.dtype)
        _kernels().gather(_frozen(block), self.where, was)
        return was

    def apply(self, block: Lanes) -> None:
        """Change `block` [lanes], in place. Raises CodecError for a malformed payload, before the first write."""
        now = self.gather(block)
        self._apply(now)
        if block.flags.aligned:
            _kernels().scatter(block, self.where, now)
        else:
            block[self.where] = now


def decode(payload: Buffer, old: Buffer, lane: int) -> Bytes:
    """The new block, uint8 [bytes], a fresh array. Raises CodecError as decode_into does."""
    after = _block(old, lane).copy()
    decode_into(payload, after, lane)
    return after.view(np.uint8)


def decode_into(payload: Buffer, target: Buffer, lane: int) -> None:
    """Turn `target`, which holds the old block, into the new one, in place.

    Everything is decoded and checked before the first write. Raises CodecError, target untouched, for a malformed
    payload or a target that cannot be written to. Steps are relative: check digests before and after.
    """
    block = _block(target, lane)
    if not block.flags.writeable:
        raise CodecError("target is read-only: pass a writable buffer, or use decode")
    changes = Changes(payload, block.size, lane, block)
    if changes.where.size:
        changes.apply(block)


def positions_values(payload: Buffer, old: Buffer, lane: int) -> tuple[Positions, Lanes]:
    """What a payload changes: ascending lane positions [changes], int64, and the new lanes there [changes].

    Raises CodecError as decode_into does.
    """
    block = _block(old, lane)
    changes = Changes(payload, block.size, lane, block)
    values = changes.gather(block)
    changes._apply(values)
    return changes.at, values


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


def _frozen(block: Lanes) -> Lanes:
    """A read-only view, of a copy if it is not aligned: one type for the compiler, whatever the caller holds."""
    view = block.view() if block.flags.aligned else block.copy()
    view.flags.writeable = False
    return view


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
