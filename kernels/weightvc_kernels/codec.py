"""Codecs for a block of up to 64 MiB: RAW and PLANES hold it whole, SPARSE and DENSE against an old one.

RICE is against an old one too: the module `rice` has it, and what reads patches here reads it as well.

A block is a number of lanes: little-endian unsigned integers of 1, 2, 4 or 8 bytes. Varints, sections and
number streams are laid out as the `streams` module says; W is the bits of a lane.

RAW       the block's bytes.

PLANES    W / 8 sections, one for each byte plane of the lanes, least significant first, each of as many bytes
          as there are lanes. Lanes of 2 bytes and more are rotated left by one bit before: the sign goes to
          the bottom, and the top plane of bf16 and f32 is the whole exponent, the only part that compresses.

SPARSE    empty if nothing changed, else
              byte     mode: 0 steps, 1 XOR
              varint   C: changed lanes, at least 1
              numbers  C gaps of 64 bits: position - previous position - 1, the one before the first being -1
              numbers  C deltas of W bits, none of them 0

DENSE         byte     mode: 0 steps, 1 XOR
              numbers  a delta of W bits for every lane, 0 where nothing changed

A delta turns the old bits into the new. XOR: new = old ^ delta. Steps: let m(x) be x if its top bit is clear
and x ^ (2^(W-1) - 1) if it is set (m is its own inverse); then m(new) = m(old) + s modulo 2^W, where s is
delta / 2 for even deltas and -(delta + 1) / 2 for odd ones.

Decoders check everything before they write, and allocate no more than a few times the block. Deltas are
relative on the wire, so apply a patch only to what it was made from: a block that already has it would move
again. The caller holds the digest that tells.
"""

import numpy as np

from weightvc_kernels import lanes, planes, rice, streams
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes, Positions

RAW = 1
PLANES = 2
SPARSE = 3
DENSE = 4
RICE = 7

BLOCK_LIMIT = 1 << 26
"""Bytes of the largest block."""

_STEPS = 0
_XOR = 1


def encode_whole(new: Buffer, lane: int) -> tuple[int, bytes]:
    """Code a block by itself: RAW or PLANES, whichever is smaller, and its payload.

    Raises CodecError for a block over BLOCK_LIMIT or not a whole number of lanes.
    """
    block = _block(new, lane)
    payload = planes.encode(block)
    return (PLANES, payload) if len(payload) < block.nbytes else (RAW, block.tobytes())


def decode_whole(codec: int, payload: Buffer, nbytes: int, lane: int) -> Bytes:
    """The block of `nbytes` bytes that encode_whole made `payload` of: uint8 [nbytes], fresh and writable.

    Raises CodecError for a malformed payload or another codec.
    """
    lanes.dtype_of(lane)
    if nbytes < 0 or nbytes > BLOCK_LIMIT or nbytes % lane:
        raise CodecError(f"block of {nbytes} bytes in lanes of {lane}: not one that an encoder makes")
    out = np.empty(nbytes, np.uint8)
    decode_whole_into(codec, payload, out, lane)
    return out


def decode_whole_into(codec: int, payload: Buffer, target: Buffer, lane: int) -> None:
    """The same into `target`, whatever that holds.

    Raises CodecError as decode_whole does, or for a target that cannot be written to; it may then hold anything.
    """
    out = _block(target, lane)
    if not out.flags.writeable:
        raise CodecError("target is read-only: pass a writable buffer, or use decode_whole")
    if codec == RAW:
        data = lanes.as_bytes(payload)
        if data.size != out.nbytes:
            raise CodecError(f"raw block has {data.size} bytes, {out.nbytes} were expected: payload changed")
        out.view(np.uint8)[:] = data
    elif codec == PLANES:
        planes.decode_into(payload, out)
    else:
        raise CodecError(f"codec {codec} does not hold a whole block (known: {RAW}, {PLANES}): upgrade weightvc")


def encode_patch(old: Buffer, new: Buffer, lane: int) -> tuple[int, bytes, Lanes]:
    """Code what turns `old` into `new`: the codec, its payload, and the old lanes [changes] that change.

    The old lanes are what a reader that writes in place can check its target by, before it writes.

    The smallest of SPARSE, DENSE, PLANES and RAW; what cannot win is not tried. Equal blocks give SPARSE with
    an empty payload. Raises CodecError if the lengths differ, or as encode_whole does.
    """
    before, after = _block(old, lane), _block(new, lane)
    at = lanes.diff_lanes(before, after, lane)
    if not at.size:
        return SPARSE, b"", before[:0]
    raw = after.nbytes
    density = at.size / after.size
    best, codec = b"", RAW
    if density <= 1 / 4:
        best, codec = _put_sparse(before[at], after[at], at), SPARSE
    if density >= 1 / 8 or len(best) > raw // 2:
        best, codec = _smaller(best, codec, _put_dense(before, after, at), DENSE)
    if len(best) > raw // 2:
        best, codec = _smaller(best, codec, planes.encode(after), PLANES)
    if len(best) >= raw:
        best, codec = after.tobytes(), RAW
    return codec, best, before[at]


def decode_patch(codec: int, payload: Buffer, old: Buffer, lane: int) -> Bytes:
    """The new block, uint8 [bytes], a fresh array. PLANES and RAW do not look at `old` but for its length.

    Raises CodecError for a malformed payload or a codec that is not known.
    """
    before = _block(old, lane)
    if codec == SPARSE:
        at, values = _get_sparse(payload, before)
        out = before.copy()
        out[at] = values
        return out.view(np.uint8)
    if codec == RICE:
        return rice.decode(payload, before, lane)
    if codec == DENSE:
        return _get_dense(payload, before).view(np.uint8)
    return decode_whole(codec, payload, before.nbytes, lane)


def decode_patch_into(codec: int, payload: Buffer, target: Buffer, lane: int) -> None:
    """Turn `target`, which holds the old block, into the new one, in place.

    Everything is decoded and checked before the first write, and every write is of a final value.
    Raises CodecError, target untouched, for a malformed payload or a target that cannot be written to.
    """
    before = _block(target, lane)
    if not before.flags.writeable:
        raise CodecError("target is read-only: pass a writable buffer, or use decode_patch")
    if codec == SPARSE:
        at, values = _get_sparse(payload, before)
        before[at] = values
    elif codec == RICE:
        rice.decode_into(payload, before, lane)
    else:
        before[:] = decode_patch(codec, payload, before, lane).view(before.dtype)


def positions_values(codec: int, payload: Buffer, old: Buffer, lane: int) -> tuple[Positions, Lanes]:
    """What a patch changes: ascending lane positions [changes], int64, and the new lanes there [changes].

    Raises CodecError as decode_patch does.
    """
    before = _block(old, lane)
    if codec == SPARSE:
        return _get_sparse(payload, before)
    if codec == RICE:
        return rice.positions_values(payload, before, lane)
    after = decode_patch(codec, payload, before, lane).view(before.dtype)
    at = lanes.changed(before, after)
    return at, after[at]


def _block(data: Buffer, lane: int) -> Lanes:
    block = lanes.as_lanes(data, lane)
    if block.nbytes > BLOCK_LIMIT:
        raise CodecError(f"block of {block.nbytes} bytes: the limit is {BLOCK_LIMIT}, split it")
    return block


def _smaller(best: bytes, codec: int, payload: bytes, its: int) -> tuple[bytes, int]:
    return (payload, its) if not best or len(payload) < len(best) else (best, codec)


def _put_sparse(old: Lanes, new: Lanes, at: Positions) -> bytes:
    stepped, xor = streams.put_numbers(lanes.steps(old, new)), streams.put_numbers(old ^ new)
    deltas, mode = _smaller(stepped, _STEPS, xor, _XOR)
    gaps = at.copy()
    gaps[1:] -= at[:-1] + 1
    return b"".join([bytes([mode]), streams.put_varint(at.size), streams.put_numbers(gaps.view(np.uint64)), deltas])


def _get_sparse(payload: Buffer, old: Lanes) -> tuple[Positions, Lanes]:
    if not lanes.as_bytes(payload).size:
        return np.empty(0, np.int64), np.empty(0, old.dtype)
    reader = streams.Reader(payload)
    mode = _mode(reader)
    count = reader.varint("the number of changes")
    if not 1 <= count <= old.size:
        raise CodecError(f"patch changes {count} of {old.size} lanes: not of this block, or changed")
    gaps = reader.numbers(count, 8, "gaps")
    deltas = reader.numbers(count, old.itemsize, "deltas")
    reader.end()
    # With every gap below the block's length the sum cannot wrap, and positions ascend by construction.
    at = np.cumsum(gaps, dtype=np.int64) if int(gaps.max()) < old.size else None
    if at is None or int(at[-1]) + count > old.size:
        raise CodecError(f"patch reaches past lane {old.size}, the block's end: not of this block")
    at += np.arange(count)
    if not deltas.all():
        raise CodecError("patch holds a change that changes nothing: the payload was changed")
    return at, _apply(mode, old[at], deltas)


def _put_dense(old: Lanes, new: Lanes, at: Positions) -> bytes:
    sample = at[:: max(1, at.size >> 14)]
    some_old, some_new = old[sample], new[sample]
    xor, stepped = streams.put_numbers(some_old ^ some_new), streams.put_numbers(lanes.steps(some_old, some_new))
    if len(xor) < len(stepped):
        return bytes([_XOR]) + streams.put_numbers(old ^ new)
    return bytes([_STEPS]) + streams.put_numbers(lanes.steps(old, new))


def _get_dense(payload: Buffer, old: Lanes) -> Lanes:
    reader = streams.Reader(payload)
    mode = _mode(reader)
    deltas = reader.numbers(old.size, old.itemsize, "deltas")
    reader.end()
    return _apply(mode, old, deltas)


def _mode(reader: streams.Reader) -> int:
    mode = reader.byte("the mode")
    if mode not in (_STEPS, _XOR):
        raise CodecError(f"delta mode {mode} is not known: the payload was changed, or upgrade weightvc")
    return mode


def _apply(mode: int, old: Lanes, deltas: Lanes) -> Lanes:
    return old ^ deltas if mode == _XOR else lanes.unstep(old, deltas)
