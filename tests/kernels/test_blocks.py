"""Round trips: every lane, size, density and bit pattern comes back bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_codec import decode as plain_decode

import weightvc_kernels as wk

Array = npt.NDArray[np.uint8]

# Lanes whose bits are special as floats: zeros, subnormals, infinities, quiet and signalling NaNs.
SPECIAL = {
    1: [0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7C, 0xFC],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0x7F81, 0xFFC0, 0xFFFF],
    4: [0, 0x80000000, 1, 0x80000001, 0x3F800000, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF],
    8: [0, 1 << 63, 1, (1 << 63) + 1, 0x7FF << 52, (0x7FF << 52) + 1, (1 << 64) - 1],
}


def check(old: Array, new: Array, lane: int) -> tuple[int, bytes]:
    """Code and decode in all ways, compare, and return the codec and the payload."""
    frozen = old.tobytes()
    codec, payload, changes = wk.encode_patch(old, new, lane)
    assert len(payload) <= new.size
    at = np.flatnonzero((old.reshape(-1, lane) != new.reshape(-1, lane)).any(axis=1))
    assert changes.tobytes() == old.reshape(-1, lane)[at].tobytes()
    after = wk.decode_patch(codec, payload, old, lane)
    assert after.tobytes() == new.tobytes()
    assert after.dtype == np.uint8
    assert after.flags.writeable
    target = old.copy()
    wk.decode_patch_into(codec, payload, target, lane)
    assert target.tobytes() == new.tobytes()
    positions, values = wk.positions_values(codec, payload, old, lane)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, at)
    np.testing.assert_array_equal(values, new.view(values.dtype)[at])
    assert values.itemsize == lane
    assert old.tobytes() == frozen
    kind, whole = wk.encode_whole(new, lane)
    assert kind in (wk.RAW, wk.PLANES)
    assert len(whole) <= new.size
    back = wk.decode_whole(kind, whole, new.size, lane)
    assert back.tobytes() == new.tobytes()
    assert back.flags.writeable
    return codec, payload


@st.composite
def blocks(draw: st.DrawFn, most: int = 600) -> tuple[Array, Array, int]:
    """An old and a new block, and their lane."""
    lane = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 255, 256, 257]), st.integers(0, most)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(f"u{lane}")
    special = np.array(SPECIAL[lane], dtype)
    kind = draw(st.sampled_from(["random", "special", "equal"]))
    if kind == "random":
        old = rng.integers(0, 2 ** (8 * lane), count, dtype)
    else:
        old = rng.choice(special, count) if kind == "special" else np.full(count, special[1], dtype)
    new = old.copy()
    density = draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3, 1.0]))
    where = rng.random(count) < density
    if draw(st.booleans()) and count:
        begin = draw(st.integers(0, count - 1))
        where[begin : begin + draw(st.integers(1, 40))] = True
    change = draw(st.sampled_from(["step", "bit", "special", "random"]))
    n = int(where.sum())
    if change == "step":
        new[where] += rng.choice(np.array([1, 2 ** (8 * lane) - 1], dtype), n)
    elif change == "bit":
        new[where] ^= dtype.type(1) << rng.integers(0, 8 * lane, n).astype(dtype)
    elif change == "special":
        new[where] = rng.choice(special, n)
    else:
        new[where] = rng.integers(0, 2 ** (8 * lane), n, dtype)
    return old.view(np.uint8), new.view(np.uint8), lane


@settings(max_examples=300, deadline=None, derandomize=True)
@given(blocks())
def test_any_block_comes_back(case: tuple[Array, Array, int]) -> None:
    check(*case)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(blocks(200))
def test_layout_is_as_documented(case: tuple[Array, Array, int]) -> None:
    old, new, lane = case
    codec, payload, _ = wk.encode_patch(old, new, lane)
    assert plain_decode(codec, payload, old.tobytes(), lane) == new.tobytes()
    codec, payload = wk.encode_whole(new, lane)
    assert plain_decode(codec, payload, old.tobytes(), lane) == new.tobytes()


def weights(count: int, lane: int, seed: int = 1) -> npt.NDArray[np.unsignedinteger]:
    """Normally distributed weights in the float of that width (fp8 e4m3 by its sign and exponent)."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, count)
    if lane == 8:
        return values.view(np.uint64)
    single = values.astype(np.float32).view(np.uint32)
    return single if lane == 4 else (single >> (32 - 8 * lane)).astype(f"u{lane}")


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0005, 0.004, 0.1, 0.2, 0.5, 1.0])
def test_large_blocks(lane: int, density: float) -> None:
    old = weights((1 << 19) // lane, lane)
    rng = np.random.default_rng(2)
    at = np.flatnonzero(rng.random(old.size) < density)
    new = old.copy()
    new[at] += rng.choice(np.array([1, 2 ** (8 * lane) - 1], old.dtype), at.size)
    codec, payload = check(old.view(np.uint8), new.view(np.uint8), lane)
    assert density == 0.2 or codec == (wk.SPARSE if density < 0.2 else wk.DENSE)
    if codec == wk.SPARSE:
        # A geometric gap costs log2(e / density) bits; a step of ±1 at least 1, at most 2 with slack for headers.
        bound = (np.log2(np.e / density) + 2) / 8
        assert len(payload) < bound * at.size * 1.05 + 100


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1 << 22, 1 << 23])
def test_full_sized_blocks_with_changes_at_the_edges(lane: int, size: int) -> None:
    old = np.zeros(size // lane, f"u{lane}")
    new = old.copy()
    for at in (0, 2**16 - 1, 2**16, old.size - 2, old.size - 1):
        new[at] = 1
    codec, payload = check(old.view(np.uint8), new.view(np.uint8), lane)
    assert codec == wk.SPARSE
    assert len(payload) < 60


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_one_flipped_bit_is_one_change(lane: int) -> None:
    old = weights(1000, lane).view(np.uint8)
    for bit in range(8 * lane):
        new = old.copy()
        new[500 * lane + bit // 8] ^= 1 << bit % 8
        codec, payload = check(old, new, lane)
        assert codec == wk.SPARSE
        assert len(payload) <= 12 + 2 * lane


def test_bits_are_not_numbers() -> None:
    old = np.array([0x0000, 0x7FC0, 0x3F80, 0x7F81], np.uint16)
    new = np.array([0x8000, 0x7FC1, 0x7FC0, 0xFFC0], np.uint16)
    check(old.view(np.uint8), new.view(np.uint8), 2)
    assert wk.encode_patch(old, new, 2)[2].tolist() == [0x0000, 0x7FC0, 0x3F80, 0x7F81]
    codec, payload, changes = wk.encode_patch(new, new, 2)
    assert (codec, payload, changes.size) == (wk.SPARSE, b"", 0)


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_nothing_to_code(lane: int) -> None:
    empty = np.empty(0, np.uint8)
    codec, payload, changes = wk.encode_patch(b"", b"", lane)
    assert (codec, payload, changes.size) == (wk.SPARSE, b"", 0)
    assert wk.encode_whole(empty, lane) == (wk.RAW, b"")
    check(empty, empty, lane)


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_noise_is_kept_raw(lane: int) -> None:
    rng = np.random.default_rng(3)
    old, new = rng.integers(0, 256, (2, 1 << 16), np.uint8)
    assert wk.encode_whole(new, lane) == (wk.RAW, new.tobytes())
    codec, payload = check(old, new, lane)
    assert codec == wk.RAW
    assert len(payload) == new.size


def test_a_new_tensor_of_weights_is_kept_whole() -> None:
    old, new = weights(1 << 17, 2, 1).view(np.uint8), weights(1 << 17, 2, 2).view(np.uint8)
    codec, payload = check(old, new, 2)
    assert codec == wk.PLANES
    assert len(payload) < 0.70 * new.size


def test_xor_where_it_is_smaller() -> None:
    old = weights(4000, 2)
    new = old.copy()
    new[::10] ^= 0x0820  # as a step this is one of four amounts, as XOR always the same
    codec, payload = check(old.view(np.uint8), new.view(np.uint8), 2)
    assert codec == wk.SPARSE
    assert payload[0] == 1


def test_buffers_of_any_kind_and_alignment() -> None:
    raw = bytearray(weights(5001, 2).tobytes())
    odd = memoryview(raw)[3:10001]
    new = bytearray(odd)
    new[100] ^= 1
    for old in (odd, bytes(odd), np.frombuffer(odd, np.uint8), np.frombuffer(odd, np.int16)):
        codec, payload, changes = wk.encode_patch(old, bytes(new), 2)
        assert changes.size == 1
        assert wk.decode_patch(codec, memoryview(payload), old, 2).tobytes() == new
    wk.decode_patch_into(codec, payload, odd, 2)
    assert raw[3:10001] == new


def test_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(5)
    cases = []
    for i in range(32):
        lane = (1, 2, 4, 8)[i % 4]
        old = weights(20_000 + i, lane, i)
        new = old.copy()
        new[rng.random(old.size) < (0.003, 0.1, 0.5)[i % 3]] += 1
        cases.append((old.view(np.uint8), new.view(np.uint8), lane))
    alone = [check(*case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda case: check(*case), cases)) == alone


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_diff_lanes_around_word_edges(lane: int) -> None:
    dtype = np.dtype(f"u{lane}")
    for count in range(20):
        for at in range(count):
            old, new = np.zeros(count, dtype), np.zeros(count, dtype)
            new[at] = 1 << (8 * lane - 1)
            assert wk.diff_lanes(old, new, lane).tolist() == [at]
    assert wk.diff_lanes(np.zeros(40, dtype), np.ones(40, dtype), lane).tolist() == list(range(40))


def test_ulp_steps() -> None:
    def steps(old: list[int], new: list[int], lane: int) -> list[int]:
        dtype = np.dtype(f"u{lane}")
        return wk.ulp_steps(np.array(old, dtype), np.array(new, dtype), lane).tolist()

    assert steps([0x0000, 0x8000, 0x3F80, 0xBF80, 0xFF80], [0x8000, 0x0000, 0x3F81, 0xBF81, 0x7F80], 2) == [
        -1,
        1,
        1,
        -1,
        2 * 0x7F80 + 1,
    ]
    assert steps([0x00, 0x80], [0x80, 0x00], 1) == [-1, 1]
    assert steps([0xFF800000], [0x7F800000], 4) == [2 * 0x7F800000 + 1]
    assert steps([1 << 63], [0], 8) == [1]


def test_no_compiled_code_and_no_torch_is_loaded() -> None:
    import subprocess
    import sys

    code = "import sys, weightvc_kernels; print({'numba', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_real_chain(chain: tuple[Path, Path]) -> None:
    from safetensors.numpy import load_file

    steps = load_file(chain[1])
    base = np.fromfile(chain[0], np.uint8)
    import json

    start = 8 + int(base[:8].view(np.uint64)[0])
    header = json.loads(base[8:start].tobytes())
    stored = changes = whole = total = 0
    for name, entry in header.items():
        if f"1/{name}/at" not in steps:
            continue
        begin, end = entry["data_offsets"]
        old = base[start + begin : start + end]
        new = old.copy()
        new.view(np.uint16)[steps[f"1/{name}/at"]] = steps[f"1/{name}/bits"]
        for at in range(0, old.size, 1 << 22):
            part, want = old[at : at + (1 << 22)], new[at : at + (1 << 22)]
            codec, payload, changed = wk.encode_patch(part, want, 2)
            np.testing.assert_array_equal(wk.decode_patch(codec, payload, part, 2), want)
            stored += len(payload)
            changes += changed.size
            whole += len(wk.encode_whole(want, 2)[1])
            total += want.size
    assert stored < 1.5 * changes
    assert whole < 0.70 * total
