"""What every codec holds, each made to code what a writer might not give it: bits, positions, refusals, memory."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plain_codec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit import memory
from tests.kit.blocks import SPECIAL, Lanes, changed, golden
from weightvc.objects.dtypes import BITS, lane
from weightvc_kernels import context, rice

Patch = tuple[bytes, bytes]
"""Tables, empty for codecs that have none, and a payload."""


@dataclass(frozen=True)
class Codec:
    """A way to write a patch of a block, and to read it."""

    encode: Callable[[Lanes, Lanes, str], Patch]
    decode: Callable[[Patch, Lanes, str], npt.NDArray[np.uint8]]
    decode_into: Callable[[Patch, Lanes, str], None]
    positions: Callable[[Patch, Lanes, str], Any]
    dtypes: tuple[str, ...] = tuple(BITS)
    whole: bool = False
    """Whether a payload is the new block, whatever the old one was."""


def plain(codec: int, **options: Any) -> Codec:
    """One of the first codecs, as the plain writer of the tests writes it."""
    return Codec(
        lambda old, new, dtype: (
            b"",
            plain_codec.encode(codec, old.tobytes(), new.tobytes(), lane(dtype), **options),
        ),
        lambda patch, old, dtype: wk.decode_patch(codec, patch[1], old, lane(dtype)),
        lambda patch, target, dtype: wk.decode_patch_into(codec, patch[1], target, lane(dtype)),
        lambda patch, old, dtype: wk.positions_values(codec, patch[1], old, lane(dtype)),
        whole=codec in (wk.RAW, wk.PLANES),
    )


def by_context(old: Lanes, new: Lanes, dtype: str) -> Patch:
    tables = context.tables(context.sample(old, new, dtype, 1), dtype)
    return tables, context.encode(context.Model(tables, dtype), old, new)


CODECS = {
    "RAW": plain(wk.RAW),
    "PLANES": plain(wk.PLANES),
    "PLANES, packed": plain(wk.PLANES, packed=True),
    "SPARSE by steps": plain(wk.SPARSE, low=1),
    "SPARSE by XOR": plain(wk.SPARSE, xor=True, packed=True),
    "DENSE by steps": plain(wk.DENSE, packed=True),
    "DENSE by XOR": plain(wk.DENSE, xor=True, low=3),
    "CONTEXT": Codec(
        by_context,
        lambda patch, old, dtype: context.decode(context.Model(patch[0], dtype), patch[1], old),
        lambda patch, target, dtype: context.decode_into(context.Model(patch[0], dtype), patch[1], target),
        lambda patch, old, dtype: context.positions_values(context.Model(patch[0], dtype), patch[1], old),
        tuple(dtype for dtype in BITS if context.supports(dtype)),
    ),
    "RICE": Codec(
        lambda old, new, dtype: (b"", rice.encode(old, new, dtype, lane(dtype))),
        lambda patch, old, dtype: rice.decode(patch[1], old, lane(dtype)),
        lambda patch, target, dtype: rice.decode_into(patch[1], target, lane(dtype)),
        lambda patch, old, dtype: rice.positions_values(patch[1], old, lane(dtype)),
    ),
}
each_codec = pytest.mark.parametrize("name", CODECS)


def check(name: str, old: Lanes, new: Lanes, dtype: str) -> Patch:
    """Code and read in all ways, exactly."""
    codec, frozen = CODECS[name], old.tobytes()
    patch = codec.encode(old, new, dtype)
    assert codec.decode(patch, old, dtype).tobytes() == new.tobytes()
    assert old.tobytes() == frozen
    at, values = codec.positions(patch, old, dtype)
    np.testing.assert_array_equal(at, np.flatnonzero(old != new))
    np.testing.assert_array_equal(values, new[at])
    target = old.copy()
    codec.decode_into(patch, target, dtype)
    assert target.tobytes() == new.tobytes()
    return patch


@each_codec
def test_bits_are_not_numbers(name: str) -> None:
    """Zeros of either sign and NaNs of any payload differ, and equal NaNs do not."""
    old, new = np.array([0x0000, 0x7FC0, 0x3F80, 0x7F81], "u2"), np.array([0x8000, 0x7FC1, 0x7FC0, 0xFFC0], "u2")
    check(name, old, new, "BF16")
    _, payload = check(name, new, new, "BF16")
    assert CODECS[name].whole or "DENSE" in name or not payload


@each_codec
@pytest.mark.parametrize("dtype", BITS)
def test_one_bit_of_every_dtype(name: str, dtype: str) -> None:
    if dtype not in CODECS[name].dtypes:
        with pytest.raises(wk.CodecError, match=dtype):
            CODECS[name].encode(np.zeros(8, f"u{lane(dtype)}"), np.zeros(8, f"u{lane(dtype)}"), dtype)
        return
    old, _ = golden(dtype, lane(dtype))
    for bit in {0, 4 * lane(dtype), 8 * lane(dtype) - 1}:
        new = old.copy()
        new[7] ^= new.dtype.type(1 << bit)
        check(name, old[:40], new[:40], dtype)


@each_codec
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_special_bits_become_any_other(name: str, width: int) -> None:
    dtype = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}[width]
    special = np.array(SPECIAL[width], f"u{width}")
    for shift in range(1, special.size):
        check(name, special, np.roll(special, shift), dtype)


@each_codec
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_block(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(CODECS[name].dtypes))
    count = data.draw(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 700]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 2 ** (8 * lane(dtype)), count, f"u{lane(dtype)}")
    where = rng.random(count) < data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    check(name, old, changed(old, where, data.draw(st.sampled_from(["step", "far", "random"])), 1), dtype)


@each_codec
def test_first_and_last_lane_of_the_largest_block(name: str) -> None:
    old = np.zeros((1 << 26) // 8, "u8")
    new = old.copy()
    new[[0, -1]] = 1, 2**64 - 1
    if "SPARSE" in name:
        # The plain writer would take minutes over it.
        codec, payload, _ = wk.encode_patch(old, new, 8)
        assert codec == wk.SPARSE
        patch = (b"", payload)
    elif name in ("CONTEXT", "RICE"):
        patch = CODECS[name].encode(old, new, "F64")
    else:
        pytest.skip("has a number for every lane")
    at, values = CODECS[name].positions(patch, old, "F64")
    assert at.tolist() == [0, old.size - 1]
    assert values.tolist() == [1, 2**64 - 1]


@each_codec
def test_what_is_cut_short_or_longer_is_refused(name: str) -> None:
    codec = CODECS[name]
    old, after = golden("BF16", 2)
    old, new = old[:2000], after["few steps"][:2000]
    tables, payload = codec.encode(old, new, "BF16")
    for wrong in (*(payload[:at] for at in range(1, len(payload), max(1, len(payload) // 40))), payload + b"\0"):
        target = old.copy()
        with pytest.raises(wk.CodecError):
            codec.decode_into((tables, wrong), target, "BF16")
        # CONTEXT finds out as it goes: only there is a target lost, and a caller has to work on a copy.
        assert name == "CONTEXT" or target.tobytes() == old.tobytes()


@each_codec
def test_memory_does_not_follow_what_a_payload_says(name: str) -> None:
    """A few bytes cannot take more than some times the block that they are for."""
    codec, old = CODECS[name], np.zeros(1 << 23, "u2")
    tables, payload = codec.encode(old[:64], np.arange(64, dtype="u2"), "BF16")
    rng = np.random.default_rng(1)
    with memory.at_most(5 * old.nbytes):
        for size in (8, 64, len(payload) // 4 * 4):
            for _ in range(4):
                # Chance may write what can be read.
                with contextlib.suppress(wk.CodecError):
                    codec.decode((tables, payload[: size // 2] + rng.bytes(size - size // 2)), old, "BF16")
        with pytest.raises(wk.CodecError):
            codec.decode((tables, b"\xff" * 8 + b"\x7f" + payload), old, "BF16")
