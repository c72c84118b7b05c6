"""Damaged tables and payloads: CodecError or other lanes, never a write elsewhere, a hang or a crash."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit import blocks
from tests.kit.blocks import damage
from weightvc_kernels import context, context_kernels, context_tables
from weightvc_kernels.context_tables import FORMS, Tables
from weightvc_kernels.streams import put_varint

Array = npt.NDArray[np.uint8]
GUARD = 4096


def sample(dtype: str, density: float, count: int = 5000) -> tuple[Array, Array, bytes, bytes]:
    """An old and a new block, tables and payload."""
    lane = context.lane(dtype)
    old, new = blocks.sample(lane, density, count)
    shared = context.tables(context.sample(old, new, dtype, 1), dtype)
    payload = context.encode(context.Model(shared, dtype), old, new)
    return old.view(np.uint8), new.view(np.uint8), shared, payload


def attempt(shared: bytes, dtype: str, payload: bytes, old: Array) -> bool:
    """Decode between guards. Whether it was refused."""
    store = np.full(old.size + 2 * GUARD, 0xA5, np.uint8)
    target = store[GUARD:-GUARD]
    target[:] = old
    refused = False
    try:
        context.decode_into(context.Model(shared, dtype), payload, target)
    except wk.CodecError:
        refused = True
    assert (store[:GUARD] == 0xA5).all()
    assert (store[-GUARD:] == 0xA5).all()
    return refused


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_payloads(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["BF16", "F32", "F64", "U8", "F8_E4M3"]))
    old, _, shared, payload = sample(dtype, data.draw(st.sampled_from([0.002, 0.1, 1.0])), 3000)
    changed = damage(data, payload)
    # A flip in the raw bits of a long step passes: that is what digests are for.
    attempt(shared, dtype, changed, old)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(["BF16", "F64", "I8"]), st.binary(max_size=400), st.integers(0, 700))
def test_arbitrary_payloads(dtype: str, payload: bytes, count: int) -> None:
    _, _, shared, _ = sample(dtype, 0.3)
    old = np.arange(count * context.lane(dtype)).astype(np.uint8)
    assert attempt(shared, dtype, payload, old) or not payload


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_tables(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["BF16", "F16", "F64", "U8"]))
    old, new, shared, payload = sample(dtype, 0.05)
    changed = damage(data, shared)
    try:
        model = context.Model(changed, dtype)
    except wk.CodecError:
        return
    # Tables that pass are tables: everything can be coded with them.
    assert context.decode(model, context.encode(model, old, new), old).tobytes() == new.tobytes()
    attempt(changed, dtype, payload, old)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E5M2", "F64"])
def test_cut_short_longer_or_of_another_block(dtype: str) -> None:
    old, _, shared, payload = sample(dtype, 0.02)
    assert not attempt(shared, dtype, payload, old)
    for size in range(1, len(payload)):
        assert attempt(shared, dtype, payload[:size], old)
    assert attempt(shared, dtype, payload + bytes(4), old)
    assert attempt(shared, dtype, payload + b"\xff" * 4, old)
    assert attempt(shared, dtype, payload, old[: old.size // 2 // 8 * 8])
    assert attempt(shared, dtype, payload, np.zeros_like(old))
    assert attempt(shared, dtype, payload, old[:0])


def state(high: int, low: int, *rest: int) -> bytes:
    return np.array([high, low, *rest], "<u4").tobytes()


def test_reasons_are_named() -> None:
    old, _, shared, payload = sample("BF16", 0.02)
    model = context.Model(shared, "BF16")
    for bad, reason in (
        (payload[:-4], "ends too early"),
        (payload + bytes(4), "words left over"),
        (state(0, 0x7FFFFFFF), "state"),
        (state(0x80000000, 0), "state"),
        (payload[:-1], "whole words"),
        (payload[:4], "at least two"),
    ):
        with pytest.raises(wk.CodecError, match=reason):
            context.decode(model, bad, old)
    with pytest.raises(wk.CodecError, match="empty block"):
        context.decode(model, payload, old[:0])


def test_a_bucket_over_the_last_is_refused() -> None:
    # Every step an escape, so that a bucket is nine raw bits of the payload; search for one that decodes to too much.
    shared = Tables(0, (255,), (), ((),)).pack()
    model = context.Model(shared, "F16")
    old = np.zeros(64, np.uint16)
    rng = np.random.default_rng(1)
    reasons = set()
    for _ in range(300):
        words = rng.integers(0, 2**32, 40, np.uint32)
        words[0] &= 0x7FFFFFFF
        try:
            context.decode(model, words.tobytes(), old)
        except wk.CodecError as error:
            reasons.add("too long" if "too long" in str(error) else "other")
    assert reasons == {"too long", "other"}


def numbers(*values: int) -> bytes:
    return b"".join(map(put_varint, values))


@pytest.mark.parametrize(
    ("dtype", "data", "reason"),
    [
        ("BF16", b"", "first class"),
        ("BF16", numbers(256), "first class is 256"),
        ("F16", numbers(32), "first class is 32"),
        ("F64", numbers(2048), "first class is 2048"),
        ("BF16", numbers(10, 0), "number of classes is 0"),
        ("BF16", numbers(10, 247), "number of classes is 247"),
        ("BF16", numbers(10, 1, 256), "odds is 256"),
        ("BF16", numbers(10, 2, 255, 2), "odds of 256"),
        ("BF16", numbers(10, 2, 0, 1), "odds of -1"),
        ("BF16", numbers(10, 2, 0, 511), "difference of odds is 511"),
        ("BF16", numbers(10, 1, 9, 0), "number of groups is 0"),
        ("BF16", numbers(10, 1, 9, 33), "number of groups is 33"),
        ("BF16", numbers(10, 1, 9, 2, 0), "first class is 0"),
        ("BF16", numbers(10, 1, 9, 2, 256), "first class is 256"),
        ("BF16", numbers(10, 1, 9, 3, 200, 56), "first class is 56"),
        ("BF16", numbers(10, 1, 9, 1, 57), "number of buckets is 57"),
        ("U8", numbers(10, 1, 9, 1, 25), "number of buckets is 25"),
        ("BF16", numbers(10, 1, 9, 1, 1, 2048), "width is 2048"),
        ("BF16", numbers(10, 1, 9, 1, 2, 2047, 1), "add up to 2048"),
        ("BF16", numbers(10, 1, 9, 1, 2, 2047), "ends inside a width"),
        ("BF16", numbers(10, 1, 9, 1, 1, 2047, 0), "follow the payload's end"),
        ("BF16", b"\xff" * 10, "longer than 9 bytes"),
    ],
)
def test_tables_out_of_range_are_refused(dtype: str, data: bytes, reason: str) -> None:
    with pytest.raises(wk.CodecError, match=reason):
        context.Model(data, dtype)


def test_extreme_tables_are_sound() -> None:
    rng = np.random.default_rng(9)
    old = rng.integers(0, 65536, 9000).astype(np.uint16)
    for odds in (0, 255):
        for widths in ((), (0,), (2047,), (0,) * 55 + (1,), (36,) * 56):
            model = context.Model(Tables(0, (odds,), (), (widths,)).pack(), "BF16")
            for density in (0.0005, 0.3, 1.0):
                new = np.where(rng.random(old.size) < density, old ^ 0x8421, old).astype(np.uint16)
                payload = context.encode(model, old, new)
                assert context.decode(model, payload, old).tobytes() == new.tobytes()


def test_hazard_that_ends_exactly_at_the_curves_end() -> None:
    # Odds 160 at scale 40 are a hazard of exactly one bit, and a rest comes after eight lanes.
    assert context_tables.hazards()[200] == 65536
    model = context.Model(Tables(0, (160,), (), ((2047,),)).pack(), "BF16")
    old = np.zeros(2048, np.uint16)
    for at in (7, 8, 9, 15, 16, 17, 2047):
        new = old.copy()
        new[at] = 1
        assert context.decode(model, context.encode(model, old, new), old).tobytes() == new.tobytes()


def test_hazard_one_over_the_curves_end() -> None:
    # Eight lanes of one bit, and the least hazard: the rest comes before the ninth.
    model = context.Model(Tables(0, (160, 0), (), ((2047,),)).pack(), "BF16")
    assert model.rows[40, :2].tolist() == [65536, 1]
    old = np.zeros(2048, np.uint16)
    old[[8, 25, 70]] = 0x80
    for at in (8, 9, 10, 20, 70, 2000):
        new = old.copy()
        new[at] += 1
        assert context.decode(model, context.encode(model, old, new), old).tobytes() == new.tobytes()


def test_nothing_is_read_beyond_the_payload() -> None:
    # What was cut off is still there in memory: a decoder that read on would come to the right end.
    old, new, shared, payload = sample("BF16", 0.02)
    model = context.Model(shared, "BF16")
    store = np.frombuffer(payload, np.uint8)
    for cut in (4, 8, 40):
        target = old.copy()
        with pytest.raises(wk.CodecError):
            context.decode_into(model, store[:-cut], target)
        assert target.tobytes() != new.tobytes()


def test_classes_in_registers_only_if_all_fit() -> None:
    rng = np.random.default_rng(6)
    old = rng.integers(0, 65536, 20_000).astype(np.uint16)
    new = np.where(rng.random(old.size) < 0.1, old + 1, old).astype(np.uint16)
    for first, count, fits in ((100, 32, True), (100, 33, False), (0, 32, True), (224, 32, True), (223, 33, False)):
        odds = tuple(int(q) for q in rng.permutation(200)[:count])
        model = context.Model(Tables(first, odds, (), ((1500,),)).pack(), "BF16")
        assert (model.window >= 0) == fits
        payload = context.encode(model, old, new)
        model.window = -1
        assert context.encode(model, old, new) == payload


def test_wrong_arguments() -> None:
    old, new, shared, payload = sample("BF16", 0.02)
    model = context.Model(shared, "BF16")
    assert not context.supports("I64")
    for call in (
        lambda: context.Model(shared, "I64"),
        lambda: context.sample(old, new, "I64"),
        lambda: context.tables(context.sample(old, new, "BF16"), "U16"),
        lambda: context.lane("F8"),
    ):
        with pytest.raises(wk.CodecError, match="has no context codec"):
            call()
    with pytest.raises(wk.CodecError, match="one length"):
        context.encode(model, old, new[:-2])
    with pytest.raises(wk.CodecError, match="one length"):
        context.sample(old, new[:-2], "BF16")
    with pytest.raises(wk.CodecError, match="whole number of 2-byte lanes"):
        context.encode(model, old[:-1], new[:-1])
    with pytest.raises(wk.CodecError, match="stride of 0"):
        context.sample(old, new, "BF16", 0)
    with pytest.raises(wk.CodecError, match="read-only"):
        context.decode_into(model, payload, old.tobytes())
    with pytest.raises(wk.CodecError, match="not contiguous"):
        context.decode_into(model, payload, np.zeros(20, np.uint8)[::2])
    big = np.zeros(context.BLOCK_LIMIT + 2, np.uint8)
    with pytest.raises(wk.CodecError, match="the limit is"):
        context.encode(model, big, big)


def test_every_status_has_a_reason() -> None:
    assert len({context_kernels.OK, context_kernels.CUT_SHORT, context_kernels.WRONG_STATE}) == 3
    assert context_kernels.WRONG_BUCKET != context_kernels.LEFT_OVER
    assert FORMS["F64"].buckets == 248
