"""Payloads one after the other: several made into one, or turned around, on one block.

    apply      blocks in place, many at once
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
from weightvc_kernels import context, lanes, rice
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


def apply(jobs: Sequence[tuple[Payload, Buffer]], lane: int) -> None:
    """Turn each target, a block that its payload is of, into the new one, in place; those of one codec all at once.

    Raises CodecError for a malformed payload, or a codec that is not known, with its number in `job`: its target is
    then neither the old block nor the new, and others may be either.
    """
    several: dict[int, list[int]] = {}
    models: dict[int, context.Model] = {}
    for job, ((codec, data, model), target) in enumerate(jobs):
        if codec == CONTEXT:
            if model is None:
                text = "a CONTEXT payload without its model: pass the model of the patch that it is from"
                raise CodecError(text, job)
            models[id(model)] = model
            several.setdefault(id(model), []).append(job)
        elif codec == plain.RICE:
            several.setdefault(0, []).append(job)
        elif codec != SAME:
            try:
                plain.decode_patch_into(codec, data, target, lane)
            except CodecError as error:
                raise CodecError(str(error), job) from None
        elif lanes.as_bytes(data).size:
            raise CodecError(f"a payload of {lanes.as_bytes(data).size} bytes where nothing changes", job)
    for which, numbers in several.items():
        batch = [(jobs[job][0].data, jobs[job][1]) for job in numbers]
        try:
            if which:
                context.decode_batch(models[which], batch)
            else:
                rice.decode_batch(batch, lane)
        except CodecError as error:
            raise CodecError(str(error), numbers[error.job]) from None


def replay(payloads: Sequence[Payload], old: Buffer, lane: int) -> Bytes:
    """The block that `payloads`, applied to `old` in turn, lead to: uint8 [bytes], a fresh array.

    Raises CodecError for a malformed payload, or a codec that is not known.
    """
    block = lanes.as_bytes(old).copy()
    for payload in payloads:
        apply([(payload, block)], lane)
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
