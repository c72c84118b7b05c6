"""Damaged RICE payloads: refused before the first write, or other lanes; no write elsewhere, no hang, no crash."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import plain_rice
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit import blocks, memory
from tests.kit.blocks import damage
from weightvc_kernels import rice, rice_kernels
from weightvc_kernels.streams import put_varint

Array = npt.NDArray[np.uint8]
GUARD = 4096
LANES = {"BF16": 2, "F32": 4, "F64": 8, "U8": 1, "F8_E4M3": 1}


def sample(dtype: str, density: float, count: int = 5000) -> tuple[Array, Array, bytes]:
    """An old and a new block, and a payload."""
    lane = LANES[dtype]
    old, new = blocks.sample(lane, density, count)
    return old.view(np.uint8), new.view(np.uint8), rice.encode(old, new, dtype, lane)


def attempt(payload: bytes, old: Array, lane: int) -> bool:
    """Decode between guards. Whether it was refused, and then nothing may have been written."""
    store = np.full(old.size + 2 * GUARD, 0xA5, np.uint8)
    target = store[GUARD:-GUARD]
    target[:] = old
    refused = False
    try:
        rice.decode_into(payload, target, lane)
    except wk.CodecError:
        refused = True
        assert target.tobytes() == old.tobytes()
    assert (store[:GUARD] == 0xA5).all()
    assert (store[-GUARD:] == 0xA5).all()
    return refused


def plain_refuses(payload: bytes, old: Array, lane: int) -> bool:
    try:
        plain_rice.decode(payload, lane, old.tobytes())
    except (AssertionError, IndexError):
        return True
    return False


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_payloads(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(LANES)))
    old, _, payload = sample(dtype, data.draw(st.sampled_from([0.01, 0.1, 0.5])), 1500)
    changed = damage(data, payload)
    # Both decoders agree on what is refused: a flip in a sign passes, which is what digests are for.
    assert attempt(changed, old, LANES[dtype]) == plain_refuses(changed, old, LANES[dtype])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 4, 8]), st.binary(max_size=400), st.integers(0, 700))
def test_arbitrary_payloads(lane: int, payload: bytes, count: int) -> None:
    old = np.arange(count * lane).astype(np.uint8)
    assert attempt(payload, old, lane) == plain_refuses(payload, old, lane)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 4, 8]), st.binary(min_size=40, max_size=400), st.data())
def test_arbitrary_groups(lane: int, body: bytes, data: st.DataObject) -> None:
    """What stands behind a good header."""
    changes = data.draw(st.sampled_from([1, 5, 250, 256]))
    form = data.draw(st.integers(0, 8 * lane - 1)) + 64 * data.draw(st.booleans())
    head = put_varint(changes) + bytes([form, data.draw(st.integers(0, 15))])
    head += data.draw(st.integers(0, 4096)).to_bytes(2, "little")
    old = np.random.default_rng(lane).integers(0, 256, 3000 * lane, np.uint8)
    for first in (body[0], 31, 0):
        payload = head + bytes([first]) + body[1:]
        assert attempt(payload, old, lane) == plain_refuses(payload, old, lane)


def payload_of(
    gaps: list[int],
    *,
    count: int | None = None,
    k: int = 3,
    form: int = 7,
    j: int = 8,
    border: int = 0,
    spans: list[int] | None = None,
    sizes: list[int] | None = None,
    widths: tuple[int, int] = (20, 20),
    tail: str = "",
    last: bytes = b"",
) -> bytes:
    """A payload of steps of one up, put together by hand; what is not given is as it should be."""
    groups = [gaps[i : i + 256] for i in range(0, len(gaps), 256)]
    bits, ends = "", []
    for group in groups:
        begin = len(bits)
        fields = [(k, 5), *(plain_rice.code(gap, k, 26) for gap in group if k != 31), (0, len(group))]
        fields.append(plain_rice.code(len(group), j, 26))
        bits += "".join(f"{value:0{width}b}"[::-1] for value, width in fields)
        ends.append(len(bits) - begin)
    bits += tail
    head = put_varint(len(gaps) if count is None else count) + bytes([form, j]) + border.to_bytes(2, "little")
    if len(groups) > 1:
        told = zip(spans or [sum(group) + len(group) for group in groups[:-1]], sizes or ends[:-1])
        fields = list(itertools.chain.from_iterable(zip(pair, widths) for pair in told))
        index = "".join(f"{value:0{width}b}"[::-1] for value, width in fields)
        head += bytes(widths) + to_bytes(index)
    return head + to_bytes(bits) + last


def to_bytes(bits: str) -> bytes:
    return int(bits[::-1] or "0", 2).to_bytes((len(bits) + 7) // 8, "little")


BLOCK = np.zeros(10_000, np.uint16)


def test_payloads_put_together_by_hand_are_good() -> None:
    for gaps in ([0], [9_999], [3] * 256, [3] * 257, [1] * 1000, [0] * 10_000):
        for k in (0, 3, 10, 26):
            payload = payload_of(gaps, k=k)
            at, values = rice.positions_values(payload, BLOCK, 2)
            np.testing.assert_array_equal(at, np.cumsum(np.array(gaps) + 1) - 1)
            assert set(values.tolist()) == {1}
            assert not attempt(payload, BLOCK.view(np.uint8), 2)
    assert not attempt(payload_of([0] * 300, k=31), BLOCK.view(np.uint8), 2)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\0", "ends inside"),
        (bytes(12), "changes 0 of"),
        (put_varint(10_001) + bytes(9999), "changes 10001 of 10000"),
        (payload_of([1] * 9, count=200), "changes 200 of"),
        (b"\xff" * 12, "longer than 9 bytes"),
        # Positions past the end, in the first group and in others.
        (payload_of([10_000]), "past its group or the block"),
        (payload_of([9_998, 1]), "past its group or the block"),
        (payload_of([(1 << 26) - 1] * 3), "past its group or the block"),
        (payload_of([38] * 257), "past its group or the block"),
        # Counts that differ.
        (payload_of([3] * 9, count=10), "an end too early or too late"),
        (payload_of([3] * 9, count=5), "an end too early or too late"),
        (payload_of([3] * 300, count=301), "an end too early or too late"),
        # An index of other groups.
        (payload_of([3] * 300, spans=[1025]), "an index that is not that of its groups"),
        (payload_of([3] * 300, spans=[0]), "an index that is not that of its groups"),
        (payload_of([3] * 300, sizes=[1580]), "index|group|gap|position"),
        (payload_of([3] * 300, sizes=[1 << 19]), "an index that is not that of its groups"),
        (payload_of([3] * 300, widths=(28, 20)), "index of 28 and 20 bits"),
        (payload_of([3] * 300, widths=(20, 33)), "index of 20 and 33 bits"),
        # Parameters out of range.
        (payload_of([3], form=16), "form 16, 8, 0"),
        (payload_of([3], form=128 + 7), "form 135, 8, 0"),
        (payload_of([3], j=16), "form 7, 16, 0"),
        (payload_of([3], border=4097), "form 7, 8, 4097"),
        (payload_of([3] * 9, k=27), "past its group or the block"),
        (payload_of([3] * 9, k=30), "past its group or the block"),
        # What follows the last group.
        (payload_of([3] * 9, last=b"\0"), "an end too early or too late"),
        (payload_of([3] * 300, last=b"\0"), "an end too early or too late"),
        (payload_of([3] * 3, tail="1"), "an end too early or too late"),
        (payload_of([3] * 9)[:-1], "an end too early or too late|past its group"),
    ],
)
def test_refused_before_the_first_write(payload: bytes, reason: str) -> None:
    with pytest.raises(wk.CodecError, match=reason):
        rice.decode(payload, BLOCK, 2)
    assert attempt(payload, BLOCK.view(np.uint8), 2)
    assert plain_refuses(payload, BLOCK.view(np.uint8), 2)


def test_a_group_that_ends_elsewhere_than_the_index_says() -> None:
    """Steps, of which nothing is known before the old lanes are, end in the wrong place."""
    old = np.full(3000, 0x3F80, np.uint16)
    new = old.copy()
    new[::4] += np.arange(750, dtype=np.uint16) % 200 + 1
    payload = rice.encode(old, new, "BF16", 2)
    assert not attempt(payload, old.view(np.uint8), 2)
    # With other old lanes other steps are long, and codes end elsewhere.
    other = np.zeros_like(old)
    with pytest.raises(wk.CodecError, match=r"does not end where|too early or too late|too long"):
        rice.decode(payload, other, 2)
    assert attempt(payload, other.view(np.uint8), 2)


def test_a_step_over_the_lanes_bits() -> None:
    for lane in (1, 2, 4, 8):
        top = 8 * lane - 1
        old = np.zeros(100 * lane, np.uint8)
        for border, k, value, limit in ((top + 1, top, None, top), (0, 0, (1 << top) - 1, top)):
            fields: list[tuple[int, int]] = [(0, 5), plain_rice.code(0, 0, 26), (0, 1)]
            if border:
                # One more than the largest.
                fields += [(2, 2), (0, k)]
            else:
                fields += [plain_rice.code(0, 8, 26), (0, 16), (value or 0, limit)]
            bits = "".join(f"{v:0{width}b}"[::-1] for v, width in fields)
            head = bytes([1, top + 64, 8]) + border.to_bytes(2, "little")
            with pytest.raises(wk.CodecError, match="too long"):
                rice.decode(head + to_bytes(bits), old, lane)
            assert attempt(head + to_bytes(bits), old, lane)
            assert plain_refuses(head + to_bytes(bits), old, lane)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F64"])
def test_cut_short_longer_or_of_another_block(dtype: str) -> None:
    old, _, payload = sample(dtype, 0.1)
    lane = LANES[dtype]
    assert not attempt(payload, old, lane)
    for size in range(1, len(payload)):
        assert attempt(payload[:size], old, lane)
    assert attempt(payload + b"\0", old, lane)
    assert attempt(payload, old[: old.size // 2 // 8 * 8], lane)
    assert attempt(payload, old[:0], lane)


def test_a_short_payload_takes_little_memory() -> None:
    """What it says of itself is not believed: a count takes as many bits of payload."""
    old = np.zeros(rice.BLOCK_LIMIT, np.uint8)
    with memory.at_most(64 << 20):
        for count in (1 << 20, rice.BLOCK_LIMIT, 1 << 62):
            with pytest.raises(wk.CodecError, match="not of this block"):
                rice.decode_into(put_varint(count) + bytes(200), old, 1)


def test_nothing_is_read_beyond_the_payload() -> None:
    old, _, payload = sample("BF16", 0.02)
    store = np.frombuffer(payload + payload, np.uint8)
    for cut in (1, 4, 40):
        with pytest.raises(wk.CodecError):
            rice.decode_into(store[: len(payload) - cut], old.copy(), 2)


def test_wrong_arguments() -> None:
    old, new, payload = sample("BF16", 0.02)
    changes = rice.Changes(payload, old.size // 2, 2)
    calls: list[tuple[Any, str]] = [
        (lambda: rice.encode(old, new[:-2], "BF16", 2), "one length"),
        (lambda: rice.encode(old[:-1], new[:-1], "BF16", 2), "whole number of 2-byte lanes"),
        (lambda: rice.encode(old, new, "BF16", 3), "lane of 3 bytes"),
        (lambda: rice.decode_into(payload, old.tobytes(), 2), "read-only"),
        (lambda: rice.decode_into(payload, np.zeros(20, np.uint8)[::2], 1), "not contiguous"),
        (lambda: rice.Changes(payload, rice.BLOCK_LIMIT, 2), "the limit is"),
        (lambda: rice.Changes(payload, -1, 2), "the limit is"),
        (lambda: rice.Changes(payload, 9, 16), "lane of 16 bytes"),
        (lambda: changes.values(np.zeros(3, np.uint16)), "3 old lanes for a patch of"),
    ]
    for call, reason in calls:
        with pytest.raises(wk.CodecError, match=reason):
            call()
    big = np.zeros(rice.BLOCK_LIMIT + 2, np.uint8)
    with pytest.raises(wk.CodecError, match="the limit is"):
        rice.encode(big, big, "U8", 1)


def test_slack_covers_what_one_group_can_take() -> None:
    # A gap takes 16 + 1 + 26 + 11 bits at most; a sign, a run and a step of 64 bits 1 + 54 + 17 + 74.
    assert rice_kernels.GROUP * (54 + 1 + 54 + 91) // 8 + 16 < rice_kernels.SLACK
