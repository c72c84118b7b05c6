"""The context codec comes back bit for bit: every dtype, density, size and bit pattern, from any thread."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import plain_context
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit import blocks as blocks_kit
from tests.kit.blocks import SPECIAL
from weightvc_kernels import context, context_kernels, context_tables

Array = npt.NDArray[np.uint8]
DTYPES = sorted(context_tables.FORMS)


def check(old: Array, new: Array, dtype: str, shared: bytes | None = None, plain: bool = False) -> bytes:
    """Code and decode in all ways, compare, and return the payload."""
    frozen = old.tobytes()
    if shared is None:
        shared = context.tables(context.sample(old, new, dtype, 1), dtype)
    model = context.Model(shared, dtype)
    payload, was = context.encode_patch(model, old, new)
    assert (payload == b"") == (old.tobytes() == new.tobytes())
    before, wanted = (side.view(was.dtype) for side in (old, new))
    np.testing.assert_array_equal(was, before[before != wanted])
    at, values = context.positions_values(model, payload, old)
    np.testing.assert_array_equal(at, np.flatnonzero(before != wanted))
    np.testing.assert_array_equal(values, wanted[at])
    after = context.decode(model, payload, old)
    assert after.dtype == np.uint8
    assert after.tobytes() == new.tobytes()
    assert old.tobytes() == frozen
    target = old.copy()
    context.decode_into(model, payload, target)
    assert target.tobytes() == new.tobytes()
    if plain:
        assert plain_context.decode(shared, dtype, payload, frozen) == new.tobytes()
        assert plain_context.encode(shared, dtype, frozen, new.tobytes()) == payload
        # Tables are the writer's choice: others than ours have to do as well.
        others = plain_context.tables_of(dtype, frozen, new.tobytes())
        written = plain_context.encode(others, dtype, frozen, new.tobytes())
        assert context.decode(context.Model(others, dtype), written, old).tobytes() == new.tobytes()
    return payload


def changed(old: npt.NDArray[np.unsignedinteger], where: npt.NDArray[np.bool_], kind: str, seed: int) -> Array:
    """`old` with other bits at `where`, as bytes."""
    return blocks_kit.changed(old, where, kind, seed).view(np.uint8)


@st.composite
def blocks(draw: st.DrawFn, most: int = 3000) -> tuple[Array, Array, str]:
    """An old and a new block, and their dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    lane = context.lane(dtype)
    unit = context.UNIT // lane
    sizes = st.sampled_from([1, 63, 64, 65, unit - 1, unit, unit + 1, 2 * unit + 7])
    count = draw(st.one_of(st.integers(0, 20), sizes, st.integers(0, most)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{lane}")
    kind = draw(st.sampled_from(["random", "weights", "special", "equal"]))
    if kind == "random":
        old = rng.integers(0, 2 ** (8 * lane), count, unsigned)
    elif kind == "weights":
        # Float bits, narrowed from above: exponents as weights have them.
        bits = rng.normal(0, 0.02, count).view(np.uint64) >> np.uint64(64 - 8 * lane)
        old = bits.astype(unsigned)
    else:
        special = np.array(SPECIAL[lane], unsigned)
        old = rng.choice(special, count) if kind == "special" else np.full(count, special[1], unsigned)
    where = rng.random(count) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 1.0]))
    if draw(st.booleans()) and count:
        begin = draw(st.integers(0, count - 1))
        where[begin : begin + draw(st.integers(1, 200))] = True
    new = changed(old, where, draw(st.sampled_from(["step", "far", "bit", "special", "random"])), seed)
    return old.view(np.uint8), new, dtype


@settings(max_examples=300, deadline=None, derandomize=True)
@given(blocks())
def test_any_block_comes_back(case: tuple[Array, Array, str]) -> None:
    check(*case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(blocks(most=300), blocks(most=300))
def test_any_block_comes_back_with_the_tables_of_another(
    case: tuple[Array, Array, str], other: tuple[Array, Array, str]
) -> None:
    old, new, dtype = case
    before, after, _ = other
    size = before.size // context.lane(dtype) * context.lane(dtype)
    check(old, new, dtype, context.tables(context.sample(before[:size], after[:size], dtype, 1), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_documented(dtype: str) -> None:
    lane = context.lane(dtype)
    rng = np.random.default_rng(lane)
    for density, kind in ((0.002, "step"), (0.1, "far"), (0.6, "random"), (1.0, "special")):
        old = rng.integers(0, 2 ** (8 * lane), 12_000 // lane, f"u{lane}")
        new = changed(old, rng.random(old.size) < density, kind, 7)
        check(old.view(np.uint8), new, dtype, plain=True)


def test_tables_are_the_same_integers_in_floating_point() -> None:
    hazards = context_tables.hazards()
    assert hazards.tolist() == [plain_context.hazard(min(t, 255), max(0, t - 255)) for t in range(336)]
    nodes, finder = context_tables.curve()
    assert nodes.tolist() == [*plain_context.NODES, plain_context.NODES[-1]]
    assert np.diff(nodes[:513].astype(np.int64)).min() >= 1024
    weights, thresholds = context_tables.pace()
    assert weights.tolist() == plain_context.WEIGHTS
    assert thresholds[:80].tolist() == plain_context.THRESHOLDS
    for value in (0, 1, 4095):
        node = int(finder[value])
        assert nodes[node] <= value << 19


def test_lanes_are_those_of_the_library() -> None:
    from weightvc.objects.dtypes import lane

    assert all(lane(dtype) == context.lane(dtype) for dtype in DTYPES)


def test_constants_agree() -> None:
    assert context_kernels.UNIT == context.UNIT
    assert context_kernels.TOP == context_tables.TOP
    assert context_kernels.SCALES == context_tables.SCALES
    assert context_kernels.MIDDLE == context_tables.MIDDLE
    assert context_kernels.STEP_BITS == context_tables.STEP_BITS
    assert context_kernels.LOWEST == context_tables.TOTAL


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return ((values.view(np.uint32) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)


def pair(count: int, seed: int = 1, size: float = 3e-7) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """bf16 of float32 weights, before and after a step of about the same `size` for every weight."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, count).astype(np.float32)
    return rounded(weights), rounded(weights + rng.normal(0, size, count).astype(np.float32))


def bound(old: npt.NDArray[np.uint16], new: npt.NDArray[np.uint16]) -> float:
    """Bytes: entropy of positions and of steps, given the exponent, counts unpaid for."""
    exponent, at = (old >> 7) & 255, old != new

    def monotone(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
        signed = bits.astype(np.int32)
        return np.where(signed & 0x8000, 0x7FFF - signed, signed)

    total = 0.0
    for e in np.unique(exponent[at]):
        n, k = int((exponent == e).sum()), int((at & (exponent == e)).sum())
        for part in (k, n - k):
            total -= part * np.log2(part / n) if part else 0
        moved = (monotone(new) - monotone(old))[at & (exponent == e)]
        counts = np.unique(moved, return_counts=True)[1]
        total -= float((counts * np.log2(counts / k)).sum())
    return total / 8


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2000)), min_size=1, max_size=248),
    st.integers(0, 248),
    st.integers(1, 200),
)
def test_whatever_was_seen_has_a_width(histogram: list[int], even: int, each: int) -> None:
    """Also where many buckets are about as likely, as of float64, and many more are rare."""
    histogram = [each if i % 2 and i < even else seen for i, seen in enumerate(histogram)]
    widths = context_tables.widths_of(histogram)
    if any(histogram):
        assert 1920 <= sum(widths) <= 2047
        assert all(width >= 1 for width, seen in zip(widths, histogram) if seen)
        assert all(width >= 0 for width in widths)
        assert not any(histogram[len(widths) :])


def test_single_bits_of_float64_are_coded() -> None:
    rng = np.random.default_rng(4)
    old = rng.normal(0, 1, 50_000).view(np.uint64)
    new = old ^ (np.uint64(1) << rng.integers(0, 64, old.size, np.uint64))
    shared = context.tables(context.sample(old, new, "F64", 1), "F64")
    check(old.view(np.uint8), new.view(np.uint8), "F64", shared)


def test_close_to_the_bound() -> None:
    old, new = pair(1 << 20)
    assert 0.002 < float((old != new).mean()) < 0.03
    shared = context.tables(context.sample(old, new, "BF16"), "BF16")
    payload = check(old.view(np.uint8), new.view(np.uint8), "BF16", shared)
    assert len(shared) < 200
    assert bound(old, new) < len(payload) < 1.03 * bound(old, new)


def test_dense_changes_stay_close_to_their_entropy() -> None:
    rng = np.random.default_rng(3)
    old, _ = pair(200_000)
    new = old + (rng.random(old.size) < 0.5).astype(np.uint16)
    payload = check(old.view(np.uint8), new.view(np.uint8), "BF16")
    # A bit a lane for whether it changed, another a change for the direction.
    assert len(payload) < 1.03 * (old.size + (old != new).sum()) / 8


def test_the_scale_follows_the_density() -> None:
    parts = pair(1 << 19, 1, 5e-8), pair(1 << 19, 2, 4e-7)
    old, new = (np.concatenate(side) for side in zip(*parts))
    shared = context.tables(context.sample(old, new, "BF16", 1), "BF16")
    payload = check(old.view(np.uint8), new.view(np.uint8), "BF16", shared)
    apart = bound(*parts[0]) + bound(*parts[1])
    # Below what is possible with one chance a class for all.
    assert apart < len(payload) < 0.97 * bound(old, new)


def test_sampling_adds_up_and_is_deterministic() -> None:
    old, new = pair(1 << 18)
    whole = context.sample(old, new, "BF16", 1)
    parts = [context.sample(old[i : i + 65536], new[i : i + 65536], "BF16", 1) for i in range(0, old.size, 65536)]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert context.tables(total, "BF16") == context.tables(whole, "BF16")
    assert int(whole.changed.sum()) == int((old != new).sum()) == int(whole.steps.sum())
    # Of 16 units one, whose lanes are all there if any of them changed.
    some = context.sample(old, new, "BF16")
    assert int(some.seen.sum()) == old.size // 16
    assert context.sample(old, old, "BF16").seen.sum() == 0


def test_tables_of_nothing_still_code() -> None:
    for dtype in DTYPES:
        empty = np.zeros(0, np.uint8)
        shared = context.tables(context.sample(empty, empty, dtype), dtype)
        rng = np.random.default_rng(5)
        old = rng.integers(0, 256, 4000).astype(np.uint8)
        check(old, changed(old, rng.random(4000) < 0.3, "random", 6), dtype, shared)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_sums_by_vectors_and_by_lane_give_the_same_bytes(dtype: str) -> None:
    rng = np.random.default_rng(8)
    old, new = pair(400_000)
    # Classes far outside of the 32, with and without a change.
    rare = rng.integers(0, old.size, 2)
    old[rare] = [0x0123, 0x7F00]
    new[rare[1]] = old[rare[1]]
    shared = context.tables(context.sample(old, new, dtype, 1), dtype)
    by_vector, by_lane = context.Model(shared, dtype), context.Model(shared, dtype)
    assert by_vector.window >= 0
    by_lane.window = -1
    payload = context.encode(by_vector, old, new)
    assert context.encode(by_lane, old, new) == payload
    for model in (by_vector, by_lane):
        assert context.decode(model, payload, old).tobytes() == new.tobytes()


def test_weights_that_stay_zero_cost_nothing() -> None:
    old, new = pair(200_000)
    zero = np.random.default_rng(7).random(old.size) < 0.33
    old[zero] = new[zero] = 0
    model = context.Model(context.tables(context.sample(old, new, "BF16", 1), "BF16"), "BF16")
    assert len(context.encode(model, old, new)) < 1.05 * bound(old, new)


def test_any_buffer_will_do() -> None:
    old, new = pair(5000, size=1e-5)
    model = context.Model(context.tables(context.sample(old, new, "BF16", 1), "BF16"), "BF16")
    payload = context.encode(model, old, new)
    context.decode(model, payload, old)
    compiled = len(context_kernels.scan.signatures), len(context_kernels.apply.signatures)
    store = np.zeros(old.nbytes + 16, np.uint8)
    for shift in range(9):
        place = store[shift : shift + old.nbytes]
        place[:] = old.view(np.uint8)
        assert context.encode(model, place, new.tobytes()) == payload
        assert context.encode(model, bytearray(old.tobytes()), memoryview(new)) == payload
        around = store.copy()
        context.decode_into(model, memoryview(b"x" * shift + payload)[shift:], place)
        around[shift : shift + old.nbytes] = new.view(np.uint8)
        assert store.tobytes() == around.tobytes()
        store[:] = 0
    target = bytearray(old.tobytes())
    context.decode_into(model, payload, target)
    assert bytes(target) == new.tobytes()
    # Each other kind of array would have been some seconds of compiling.
    assert (len(context_kernels.scan.signatures), len(context_kernels.apply.signatures)) == compiled


def test_many_threads_share_one_model() -> None:
    old, new = zip(*(pair(100_000, seed) for seed in range(8)))
    model = context.Model(context.tables(context.sample(old[0], new[0], "BF16"), "BF16"), "BF16")
    alone = [context.encode(model, x, y) for x, y in zip(old, new)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda both: context.encode(model, *both), zip(old, new))) == alone
            back = list(pool.map(lambda both: context.decode(model, *both), zip(alone, old)))
            assert all(a.tobytes() == b.tobytes() for a, b in zip(back, new))


def test_compiled_code_is_imported_at_the_first_call_only() -> None:
    script = (
        "import sys, weightvc_kernels.context as c\n"
        "assert c.supports('BF16') and not c.supports('I64') and c.lane('F16') == 2\n"
        "print({'numba', 'llvmlite', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nothing_is_compiled_once_all_is_prepared() -> None:
    script = (
        "import numpy as np\n"
        "from weightvc_kernels import context, context_kernels as k, context_sample as s\n"
        "parts = [k.scan, k.pack, k.apply, s.tally, s.merge]\n"
        "count = lambda: [len(part.signatures) for part in parts]\n"
        "assert count() == [0] * 5\n"
        "context.prepare(['BF16', 'I64'])\n"
        "assert count() == [1] * 5\n"
        "context.prepare()\n"
        "before = count()\n"
        "assert before == [4, 4, 4, 4, 1]\n"
        "for dtype in ('BF16', 'F16', 'F32', 'F64', 'U8', 'F8_E4M3'):\n"
        "    for n in (0, 8, 4104, 70000):\n"
        "        old = np.arange(n).astype(np.uint8)\n"
        "        for new in (old, old ^ 255, old ^ (np.arange(n) % 100 == 0)):\n"
        "            for a, b in ((old, new.astype(np.uint8)), (old.tobytes(), bytearray(new.astype(np.uint8)))):\n"
        "                stats = context.sample(a, b, dtype) + context.sample(a, b, dtype, 1)\n"
        "                model = context.Model(context.tables(stats, dtype), dtype)\n"
        "                context.decode(model, context.encode(model, a, b), a)\n"
        "assert count() == before, count()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_code_that_cannot_be_kept_is_told_of() -> None:
    script = (
        "import numba\n"
        "real = numba.njit\n"
        "def njit(cache=False, **options):\n"
        "    if cache: raise RuntimeError('no locator available')\n"
        "    return real(**options)\n"
        "numba.njit = njit\n"
        "import weightvc_kernels.context_vectors\n"
        "for make in ('compiled', 'inlined'):\n"
        "    getattr(weightvc_kernels.context_vectors, make)(lambda: 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_real_chain(chain: tuple[Path, Path], optimizer: str) -> None:
    from safetensors.numpy import load_file

    steps = load_file(chain[1].with_name(f"{optimizer}.safetensors"))
    base = np.fromfile(chain[0], np.uint8)
    start = 8 + int(base[:8].view(np.uint64)[0])
    pairs, least = [], 0.0
    for name, entry in json.loads(base[8:start].tobytes()).items():
        if f"1/{name}/at" not in steps:
            continue
        begin, end = entry["data_offsets"]
        old = base[start + begin : start + end].copy().view(np.uint16)
        new = old.copy()
        new[steps[f"1/{name}/at"]] = steps[f"1/{name}/bits"]
        least += bound(old, new)
        pairs += [(old[i : i + (1 << 21)], new[i : i + (1 << 21)]) for i in range(0, old.size, 1 << 21)]
    stats = context.sample(*pairs[0], "BF16")
    for both in pairs[1:]:
        stats = stats + context.sample(*both, "BF16")
    shared = context.tables(stats, "BF16")
    model = context.Model(shared, "BF16")
    stored = len(shared)
    for old, new in pairs:
        payload = context.encode(model, old, new)
        assert context.decode(model, payload, old).tobytes() == new.tobytes()
        stored += len(payload)
    # Small tensors have a block each here, as they would not have in a patch.
    assert stored < 1.04 * least + 8 * len(pairs)
    with pytest.raises(wk.CodecError):
        context.decode(model, context.encode(model, *pairs[0])[:-4], pairs[0][0])


def test_a_processor_that_numba_is_told_of_gives_the_same_bytes(tmp_path: Path) -> None:
    code = (
        "import hashlib, numpy as np; from weightvc_kernels import context\n"
        "old = np.arange(1 << 14, dtype='<u2'); new = old.copy(); new[::37] += 1\n"
        "tables = context.tables(context.sample(old, new, 'BF16', 1), 'BF16')\n"
        "model = context.Model(tables, 'BF16')\n"
        "payload = context.encode(model, old, new)\n"
        "assert context.decode(model, payload, old).tobytes() == new.tobytes()\n"
        "print(hashlib.sha256(tables + payload).hexdigest())"
    )

    def run(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **more}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == run(NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))
