"""Payloads made into one, and turned around: the same bits as by the steps, and as small as a diff of the ends."""

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_context import DTYPES, changed

import weightvc_kernels as wk
from tests.kit.blocks import SPECIAL
from weightvc.objects import dtypes, manifest
from weightvc_kernels import codec, context, payloads, planes, rice
from weightvc_kernels.payloads import Payload

Array = npt.NDArray[np.uint8]
CODECS = ["SAME", "RAW", "PLANES", "SPARSE", "DENSE", "CONTEXT", "RICE"]


def model(old: Array, new: Array, dtype: str) -> context.Model:
    return context.Model(context.tables(context.sample(old, new, dtype, 1), dtype), dtype)


def step(old: Array, new: Array, dtype: str, kind: str) -> Payload:
    """What turns `old` into `new`, in a codec of choice; another where it cannot be that one."""
    lane = dtypes.lane(dtype)
    x, y = old.view(f"u{lane}"), new.view(f"u{lane}")
    at = np.flatnonzero(x != y)
    match kind:
        case "SAME" if not at.size:
            return Payload(payloads.SAME)
        case "PLANES":
            return Payload(wk.PLANES, planes.encode(y))
        case "SPARSE":
            return Payload(wk.SPARSE, codec._put_sparse(x[at], y[at], at) if at.size else b"")
        case "DENSE" if at.size:
            return Payload(wk.DENSE, codec._put_dense(x, y, at))
        case "RICE":
            return Payload(wk.RICE, rice.encode(old, new, dtype, lane))
        case "CONTEXT" if context.supports(dtype):
            coder = model(old, new, dtype)
            return Payload(payloads.CONTEXT, context.encode(coder, old, new), coder)
        case _:
            return Payload(wk.RAW, new.tobytes())


@st.composite
def walks(draw: st.DrawFn) -> tuple[str, list[Array], list[str]]:
    """A dtype, blocks that each change the one before, and the codec of each step."""
    dtype = draw(st.sampled_from([*DTYPES, "I64", "C64", "U32", "I16"]))
    lane = dtypes.lane(dtype)
    unit = 4096 // lane
    count = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, unit - 1, unit, unit + 1, 2 * unit + 7])))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    special = np.array(SPECIAL[lane], f"u{lane}")
    match draw(st.sampled_from(["weights", "special", "equal", "random"])):
        case "weights":
            first = (rng.normal(0, 0.02, count).view(np.uint64) >> np.uint64(64 - 8 * lane)).astype(f"u{lane}")
        case "special":
            first = rng.choice(special, count)
        case "equal":
            first = np.full(count, special[1], f"u{lane}")
        case _:
            first = rng.integers(0, 2 ** (8 * lane), count, f"u{lane}")
    blocks = [first.view(np.uint8)]
    for k in range(draw(st.integers(1, 4))):
        old = blocks[-1]
        if k and draw(st.booleans()):
            blocks.append(blocks[draw(st.integers(0, k))])
            continue
        where = rng.random(count) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
        kind = draw(st.sampled_from(["step", "far", "bit", "special", "random"]))
        blocks.append(changed(old.view(f"u{lane}"), where, kind, seed + k))
    kinds = draw(st.lists(st.sampled_from(CODECS), min_size=len(blocks) - 1, max_size=len(blocks) - 1))
    return dtype, blocks, kinds


def check(steps: Sequence[Payload], old: Array, new: Array, dtype: str, coder: context.Model | None) -> None:
    lane = dtypes.lane(dtype)
    frozen = old.tobytes()
    assert payloads.replay(steps, old, lane).tobytes() == new.tobytes()
    for way, start, end in ((payloads.compose, old, new), (payloads.invert, new, old)):
        made, was = way(steps, old, lane, coder)
        before, after = start.view(f"u{lane}"), end.view(f"u{lane}")
        assert was.tobytes() == before[before != after].tobytes()
        assert (made.codec == payloads.SAME) == (start.tobytes() == end.tobytes())
        assert payloads.replay([made], start, lane).tobytes() == end.tobytes()
        # Not larger than a diff of the ends, which is not larger than the block.
        assert len(made.data) <= len(wk.encode_patch(start, end, lane)[1]) <= end.size
        if made.codec == payloads.CONTEXT:
            assert made.model is coder
    assert old.tobytes() == frozen


@settings(max_examples=150, deadline=None, derandomize=True)
@given(walks(), st.booleans())
def test_many_steps_are_one_and_lead_back(walk: tuple[str, list[Array], list[str]], tabled: bool) -> None:
    dtype, blocks, kinds = walk
    steps = [step(a, b, dtype, kind) for (a, b), kind in zip(pairwise(blocks), kinds, strict=True)]
    tabled = tabled and context.supports(dtype)
    check(steps, blocks[0], blocks[-1], dtype, model(blocks[0], blocks[-1], dtype) if tabled else None)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "U8"])
def test_every_codec_is_composed_and_turned(dtype: str, kind: str) -> None:
    lane = dtypes.lane(dtype)
    rng = np.random.default_rng(1)
    blocks = [rng.integers(0, 2 ** (8 * lane - 2), 20_000, f"u{lane}").view(np.uint8)]
    for k in range(3):
        where = rng.random(20_000) < (0.0 if kind == "SAME" else 0.01)
        blocks.append(changed(blocks[-1].view(f"u{lane}"), where, "step", k))
    steps = [step(a, b, dtype, kind) for a, b in pairwise(blocks)]
    assert {one.codec for one in steps} == {getattr(payloads, kind, getattr(wk, kind, None))}
    check(steps, blocks[0], blocks[-1], dtype, model(blocks[0], blocks[-1], dtype))


def test_bits_are_not_numbers() -> None:
    old = np.array([0x0000, 0x7FC0, 0x3F80, 0x7F81], np.uint16).view(np.uint8)
    new = np.array([0x8000, 0x7FC1, 0x7FC0, 0xFFC0], np.uint16).view(np.uint8)
    for kind in CODECS[1:]:
        there = step(old, new, "BF16", kind)
        back, was = payloads.invert([there], old, 2)
        assert was.view(np.uint8).tobytes() == new.tobytes()
        made, was = payloads.compose([there, back], old, 2)
        assert (made, was.size) == (Payload(payloads.SAME), 0)


@pytest.mark.parametrize("dtype", dtypes.BITS)
def test_one_flipped_bit_is_one_change_in_every_codec(dtype: str) -> None:
    lane = dtypes.lane(dtype)
    old = np.random.default_rng(4).integers(0, 256, 70 * lane, np.uint8)
    for kind in CODECS[1:]:
        for bit in range(8 * lane):
            new = old.copy()
            new[33 * lane + bit // 8] ^= 1 << bit % 8
            there = step(old, new, dtype, kind)
            assert payloads.replay([there], old, lane).tobytes() == new.tobytes()
            back, was = payloads.invert([there], old, lane)
            assert was.tobytes() == new[33 * lane : 34 * lane].tobytes()
            assert payloads.replay([there, back], old, lane).tobytes() == old.tobytes()


@pytest.mark.parametrize("kind", CODECS[1:])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F64"])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_blocks_around_full_size(dtype: str, kind: str, off: int) -> None:
    """Changes at both ends, around 2^16 lanes, around each border of units near them, and some in between."""
    lane = dtypes.lane(dtype)
    count = (4 << 20) // lane + off
    rng = np.random.default_rng(5)
    bits = rng.normal(0, 0.02, count).view(np.uint64) >> np.uint64(64 - 8 * lane)
    old = bits.astype(f"u{lane}")
    new, unit = old.copy(), 4096 // lane
    for at in (0, unit - 1, unit, 2**16 - 1, 2**16, count - unit, count - unit - 1, count - 2, count - 1):
        new[at] ^= 1
    new[rng.integers(0, count, 100)] += 1
    there = step(old.view(np.uint8), new.view(np.uint8), dtype, kind)
    assert payloads.replay([there], old, lane).tobytes() == new.tobytes()


@pytest.mark.parametrize("kind", ["SPARSE", "CONTEXT"])
def test_the_largest_block(kind: str) -> None:
    old = np.zeros(wk.BLOCK_LIMIT, np.uint8)
    new = old.copy()
    places = [0, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**25, wk.BLOCK_LIMIT - 1]
    new[places] = 1
    there = step(old, new, "U8", kind)
    assert len(there.data) < 100
    assert (np.flatnonzero(payloads.replay([there], old, 1)) == places).all()


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_a_payload_cut_short_or_longer_is_refused_in_every_codec(dtype: str, kind: str) -> None:
    lane = dtypes.lane(dtype)
    old = np.random.default_rng(6).integers(0, 256, 500 * lane, np.uint8)
    new = old if kind == "SAME" else changed(old.view(f"u{lane}"), np.arange(500) % 9 == 0, "bit", 1)
    there, frozen = step(old, new, dtype, kind), old.tobytes()
    for data in (there.data[:-1], there.data[: len(there.data) // 2], there.data + b"\0", there.data + bytes(4)):
        if data == there.data or (kind == "SPARSE" and not data):
            continue
        with pytest.raises(wk.CodecError):
            payloads.replay([there._replace(data=data)], old, lane)
        assert old.tobytes() == frozen


def test_the_numbers_are_those_of_the_format() -> None:
    assert (payloads.SAME, payloads.CONTEXT) == (manifest.SAME, manifest.CONTEXT)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    old = np.zeros(64, np.uint8)
    for bad, reason in (
        (Payload(payloads.SAME, b"x"), "nothing changes"),
        (Payload(payloads.CONTEXT, b""), "model"),
        (Payload(99, b""), "codec 99"),
        (Payload(wk.RAW, b"x"), "64 were expected"),
    ):
        for way in (payloads.compose, payloads.invert):
            with pytest.raises(wk.CodecError, match=reason):
                way([bad], old, 2)
    assert not old.any()


@pytest.mark.parametrize("kind", ["SPARSE", "DENSE", "PLANES", "RAW"])
def test_memory_is_that_of_a_few_blocks_however_many_steps(kind: str) -> None:
    rng = np.random.default_rng(2)
    blocks = [rng.integers(0, 1 << 14, 1 << 19, np.uint16).view(np.uint8)]
    for k in range(12):
        blocks.append(changed(blocks[-1].view(np.uint16), rng.random(1 << 19) < 0.005, "step", k))
    steps = [step(a, b, "BF16", kind) for a, b in pairwise(blocks)]
    peaks = []
    for some in (steps[:2], steps):
        tracemalloc.start()
        payloads.compose(some, blocks[0], 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + blocks[0].size
    assert peaks[1] < 16 * blocks[0].size
