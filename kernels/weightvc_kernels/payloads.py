"""Payloads one after the other: several made into one, or turned around, on one block.

    replay     the block that payloads lead to
    compose    A → B and B → C make A → C
    invert     A → B makes B → A, given A

What a payload means depends on the old lanes, so both need the block that the first one was made from, and nothing
else: the blocks between are never there side by side. The result is coded from what really changed, so steps that
undo each other cost nothing, and it is never larger than the block.

A CONTEXT result is coded with the model that the caller gives. Tables are for a whole patch, and those of a step
suit neither a longer span nor always the way back: sample old and new blocks (`replay` gives the new one), make
tables, then compose or invert. Without a model the result is of a plain codec.
"""

from collections.abc import Sequence
from typing import NamedTuple

from weightvc_kernels import codec as plain
from weightvc_kernels import context, lanes
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import Buffer, Bytes, Lanes

SAME = 0
"""Nothing changes; no payload."""
CONTEXT = 6
"""Coded by the context codec, with a model."""


class Payload(NamedTuple):
    """What turns one block into another."""

    codec: int
    data: Buffer = b""
    model: context.Model | None = None
    """What a CONTEXT payload was coded with; else None."""


def replay(payloads: Sequence[Payload], old: Buffer, lane: int) -> Bytes:
    """The block that `payloads`, applied to `old` in turn, lead to: uint8 [bytes], a fresh array.

    Raises CodecError for a malformed payload, or a codec that is not known.
    """
    block = lanes.as_bytes(old).copy()
    for codec, data, model in payloads:
        if codec == CONTEXT:
            if model is None:
                raise CodecError("a CONTEXT payload without its model: pass the model of the patch that it is from")
            context.decode_into(model, data, block)
        elif codec != SAME:
            plain.decode_patch_into(codec, data, block, lane)
        elif lanes.as_bytes(data).size:
            raise CodecError(f"a payload of {lanes.as_bytes(data).size} bytes where nothing changes")
    return block


def compose(
    payloads: Sequence[Payload], old: Buffer, lane: int, model: context.Model | None = None
) -> tuple[Payload, Lanes]:
    """One payload for all of `payloads`, and the old lanes [changes] that change.

    Raises CodecError as replay does.
    """
    return _smallest(old, replay(payloads, old, lane), lane, model)


def invert(
    payloads: Sequence[Payload], old: Buffer, lane: int, model: context.Model | None = None
) -> tuple[Payload, Lanes]:
    """The payload that leads back to `old` from where `payloads` lead, and the lanes [changes] that change there.

    Raises CodecError as replay does.
    """
    return _smallest(replay(payloads, old, lane), old, lane, model)


def _smallest(old: Buffer, new: Buffer, lane: int, model: context.Model | None) -> tuple[Payload, Lanes]:
    codec, data, was = plain.encode_patch(old, new, lane)
    if not was.size:
        return Payload(SAME), was
    if model is not None:
        coded = context.encode(model, old, new)
        if len(coded) < len(data):
            return Payload(CONTEXT, coded, model), was
    return Payload(codec, data), was
