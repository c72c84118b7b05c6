"""The RICE codec comes back bit for bit: every dtype, density, size and bit pattern, from any thread."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import plain_rice
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit.blocks import SPECIAL, changed
from weightvc.objects.dtypes import BITS, lane
from weightvc_kernels import rice, rice_kernels

Array = npt.NDArray[np.uint8]
Lanes = npt.NDArray[np.unsignedinteger]
DTYPES = sorted(BITS)
SOME = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "BOOL", "I16", "U32", "I64", "C64", "F4"]


def check(old: Lanes, new: Lanes, dtype: str, plain: bool = False) -> bytes:
    """Code and decode in all ways, compare, and return the payload."""
    width, frozen = old.itemsize, old.tobytes()
    payload, was = rice.encode_patch(old, new, dtype, width)
    assert (payload == b"") == (frozen == new.tobytes())
    where = np.flatnonzero(old != new)
    np.testing.assert_array_equal(was, old[where])
    at, values = wk.positions_values(wk.RICE, payload, old, width)
    assert at.dtype == np.int64
    np.testing.assert_array_equal(at, where)
    np.testing.assert_array_equal(values, new[where])
    changes = rice.Changes(payload, old.size, width)
    np.testing.assert_array_equal(changes.at, where)
    np.testing.assert_array_equal(changes.values(old[where]), new[where])
    after = wk.decode_patch(wk.RICE, payload, old, width)
    assert after.dtype == np.uint8
    assert after.tobytes() == new.tobytes()
    assert old.tobytes() == frozen
    target = old.copy()
    wk.decode_patch_into(wk.RICE, payload, target, width)
    assert target.tobytes() == new.tobytes()
    if plain:
        assert plain_rice.encode(dtype, width, frozen, new.tobytes()) == payload
        assert plain_rice.decode(payload, width, frozen) == new.tobytes()
    return payload


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Lanes, Lanes, str]:
    """An old and a new block, and their dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    unsigned = np.dtype(f"u{lane(dtype)}")
    sizes = st.sampled_from([1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025])
    count = draw(st.one_of(st.integers(0, 20), sizes, st.integers(0, 3000)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["random", "weights", "special", "equal"]))
    special = np.array(SPECIAL[unsigned.itemsize], unsigned)
    if kind == "random":
        old = rng.integers(0, 2 ** (8 * unsigned.itemsize), count, unsigned)
    elif kind == "weights":
        # Float bits, narrowed from above: exponents as weights have them.
        old = (rng.normal(0, 0.02, count).view(np.uint64) >> np.uint64(64 - 8 * unsigned.itemsize)).astype(unsigned)
    else:
        old = rng.choice(special, count) if kind == "special" else np.full(count, special[1], unsigned)
    where = rng.random(count) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 1.0]))
    if draw(st.booleans()) and count:
        begin = draw(st.integers(0, count - 1))
        where[begin : begin + draw(st.integers(1, 700))] = True
    return old, changed(old, where, draw(st.sampled_from(["step", "far", "bit", "special", "random"])), seed), dtype


@settings(max_examples=300, deadline=None, derandomize=True)
@given(blocks())
def test_any_block_comes_back(case: tuple[Lanes, Lanes, str]) -> None:
    check(*case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(blocks())
def test_any_block_is_coded_as_documented(case: tuple[Lanes, Lanes, str]) -> None:
    check(*case, plain=True)


@pytest.mark.parametrize("dtype", SOME)
def test_as_documented(dtype: str) -> None:
    width = lane(dtype)
    rng = np.random.default_rng(width)
    for density, kind in ((0.002, "step"), (0.1, "far"), (0.6, "random"), (1.0, "special")):
        old = rng.integers(0, 2 ** (8 * width), 3000, f"u{width}")
        check(old, changed(old, rng.random(old.size) < density, kind, 7), dtype, plain=True)


@pytest.mark.parametrize("changes", [1, 255, 256, 257, 511, 512, 513, 1024])
def test_around_the_borders_of_groups(changes: int) -> None:
    rng = np.random.default_rng(changes)
    old = rng.integers(0, 65536, 40_000, np.uint16)
    for first, apart in ((0, 1), (0, 39), (40_000 - changes, 1), (old.size - 1 - 30 * (changes - 1), 30)):
        where = np.zeros(old.size, bool)
        where[first : first + apart * (changes - 1) + 1 : apart] = True
        for kind in ("step", "random"):
            new = changed(old, where, kind, 1)
            new[where & (new == old)] ^= 1
            check(old, new, "BF16", plain=True)


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64, 65, 4095, 4096, 4097])
def test_the_first_and_the_last_lane(size: int) -> None:
    for width in (1, 2, 4, 8):
        old = np.arange(size).astype(f"u{width}")
        for at in ([0], [size - 1], [0, size - 1]):
            new = old.copy()
            new[at] ^= 1
            check(old, new, "U8", plain=True)


def test_gaps_of_any_length() -> None:
    """Up to the longest: of the largest block, alone and among short ones (an escape)."""
    old = np.zeros(rice.BLOCK_LIMIT, np.uint8)
    new = old.copy()
    new[-1] = 1
    assert len(check(old, new, "U8", plain=False)) < 12
    new[5_000_000:5_000_300] = 1
    new[40_000_000::8_000_000] = 3
    check(old, new, "U8", plain=False)


def test_steps_of_any_length() -> None:
    for width in (1, 2, 4, 8):
        bits = 8 * width
        steps = [s for k in range(bits) for s in ((1 << k) - 1, 1 << k, (1 << k) + 1) if 0 < s <= 1 << (bits - 1)]
        old = np.zeros(2 * len(steps), f"u{width}")
        new = np.array([*steps, *(2**bits - s for s in steps)], np.uint64).astype(old.dtype)
        for dtype in ("U8", "BF16", "F64"):
            if dtype == "U8" or lane(dtype) == width:
                check(old, new, dtype, plain=True)
                check(np.concatenate([old] * 20), np.concatenate([new] * 20), dtype, plain=True)


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return ((values.view(np.uint32) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)


def pair(count: int, seed: int = 1, size: float = 3e-7) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """bf16 of float32 weights, before and after a step of about the same `size` for every weight."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, count).astype(np.float32)
    return rounded(weights), rounded(weights + rng.normal(0, size, count).astype(np.float32))


def entropy(counts: npt.NDArray[np.int64]) -> float:
    part = counts / counts.sum()
    return float(-(counts * np.log2(part)).sum())


def test_close_to_the_entropy_of_gaps_and_steps() -> None:
    old, new = pair(1 << 20)
    at = np.flatnonzero(old != new)
    density = at.size / old.size
    positions = entropy(np.array([at.size, old.size - at.size]))
    steps = wk.ulp_steps(old[at], new[at], 2)
    exponent = (old[at] >> 7) & 255
    bits = sum(entropy(np.unique(steps[exponent == e], return_counts=True)[1]) for e in np.unique(exponent))
    payload = check(old, new, "BF16")
    assert 0.002 < density < 0.03
    assert (positions + bits) / 8 < len(payload) < 1.06 * (positions + bits) / 8


def test_dense_float32_is_close_to_the_context_codec() -> None:
    rng = np.random.default_rng(2)
    weights = rng.normal(0, 0.02, 200_000).astype(np.float32)
    after = weights + rng.normal(0, 1e-6, weights.size).astype(np.float32)
    old, new = weights.view(np.uint32), after.view(np.uint32)
    model = wk.context.Model(wk.context.tables(wk.context.sample(old, new, "F32", 1), "F32"), "F32")
    assert len(check(old, new, "F32")) < 1.05 * len(wk.context.encode(model, old, new))


def test_nothing_but_what_changed_is_looked_at() -> None:
    """Positions come without the old lanes, and new lanes from those that changed alone."""
    old, new = pair(50_000)
    payload = rice.encode(old, new, "BF16", 2)
    where = np.flatnonzero(old != new)
    other = np.random.default_rng(1).integers(0, 65536, old.size, np.uint16)
    np.testing.assert_array_equal(rice.Changes(payload, old.size, 2).at, where)
    other[where] = old[where]
    wanted = other.copy()
    wanted[where] = new[where]
    rice.decode_into(payload, other, 2)
    np.testing.assert_array_equal(other, wanted)


def test_any_buffer_will_do() -> None:
    old, new = pair(5000, size=1e-5)
    payload = rice.encode(old, new, "BF16", 2)
    rice.decode(payload, old, 2)
    compiled = [len(f.signatures) for f in (rice_kernels.scan, rice_kernels.pack, rice_kernels.decode)]
    store = np.zeros(old.nbytes + 16, np.uint8)
    for shift in range(9):
        place = store[shift : shift + old.nbytes]
        place[:] = old.view(np.uint8)
        assert rice.encode(place, new.tobytes(), "BF16", 2) == payload
        assert rice.encode(bytearray(old.tobytes()), memoryview(new), "BF16", 2) == payload
        around = store.copy()
        rice.decode_into(memoryview(b"x" * shift + payload)[shift:], place, 2)
        around[shift : shift + old.nbytes] = new.view(np.uint8)
        assert store.tobytes() == around.tobytes()
        store[:] = 0
    target = bytearray(old.tobytes())
    rice.decode_into(payload, target, 2)
    assert bytes(target) == new.tobytes()
    # Each other kind of array would have been some seconds of compiling.
    assert [len(f.signatures) for f in (rice_kernels.scan, rice_kernels.pack, rice_kernels.decode)] == compiled


def test_threads_do_not_share_their_room() -> None:
    old, new = zip(*(pair(100_000, seed) for seed in range(8)))
    alone = [rice.encode(x, y, "BF16", 2) for x, y in zip(old, new)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda both: rice.encode(*both, "BF16", 2), zip(old, new))) == alone
            back = list(pool.map(lambda both: rice.decode(*both, 2), zip(alone, old)))
            assert all(a.tobytes() == b.tobytes() for a, b in zip(back, new))


def test_blocks_too_large_for_the_room_that_a_thread_keeps() -> None:
    rng = np.random.default_rng(4)
    old = rng.integers(0, 256, 20 << 20, np.uint8)
    payload = check(old, old + np.uint8(1), "U8")
    # A bit for each direction: that all changed costs nothing.
    assert len(payload) < 1.01 * old.size / 8 + old.size / 256 * 16


def test_the_example_of_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "patch.md").read_text()
    old = np.full(10, 0x3F80, np.uint16)
    new = old + np.array([0, 1, -1, 0, 0, 0, 0, 0, 0, 200]).astype(np.uint16)
    payload = check(old, new, "BF16", plain=True)
    assert [part for part in (old.tobytes().hex(), new.tobytes().hex(), payload.hex()) if part not in text] == []


def test_constants_agree() -> None:
    assert (rice_kernels.GROUP, rice_kernels.GAP_BITS) == (rice.GROUP, rice.GAP_BITS)
    assert rice_kernels.BORDER_LIMIT == rice.BORDER_LIMIT
    assert rice.BLOCK_LIMIT == 1 << rice.GAP_BITS


def test_compiled_code_is_imported_at_the_first_call_only() -> None:
    script = "import sys, weightvc_kernels.rice\nprint({'numba', 'llvmlite', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
