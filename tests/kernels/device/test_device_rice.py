"""The RICE codec on a device, against the CPU's: the same payloads, the same arrays, the same refusals."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numba import cuda as device

from weightvc_kernels import CodecError, cuda, cuda_rice, rice, rice_kernels
from weightvc_kernels import cuda_rice_kernels as kernels
from weightvc_kernels.cuda_rice import Block

# numpy tells of integers that wrap, as they are meant to.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

LANES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
TILE = 4 * 8 * 8  # bytes that a block of 4 threads looks at


def arrays(dtype: str, count: int, share: float, seed: int = 0) -> tuple[Any, Any]:
    """Weights around 1, a share of which move: most by one step, some by more, a few anywhere."""
    rng, lane = np.random.default_rng(seed), LANES[dtype]
    numbers = rng.standard_normal(count)
    if lane == 1 or dtype.startswith("I"):
        old = (numbers * 20).astype(f"i{lane}").view(f"u{lane}")
    elif dtype == "BF16":
        old = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        old = numbers.astype(f"f{lane}").view(f"u{lane}")
    step = np.where(rng.random(count) < 0.1, rng.integers(1, 60, count), 1).astype(old.dtype)
    step[rng.random(count) < 0.01] = 1 << (8 * lane - 1)
    sign = rng.random(count) < 0.5
    new = np.where(rng.random(count) < share, np.where(sign, old + step, old - step), old)
    return old, new


def changing(dtype: str, count: int, changes: int) -> tuple[Any, Any]:
    """Arrays that differ in exactly so many lanes, the first and the last among them if there are two."""
    old, _ = arrays(dtype, count, 0)
    at = np.linspace(0, count - 1, changes).astype(int)
    new = old.copy()
    new[at] += 1 + (at % 5 == 0).astype(old.dtype)
    return old, new


def check(dtype: str, old: Any, new: Any, block: int) -> list[Block]:
    """Encode on the device as on the CPU, decode there what either made."""
    lane = LANES[dtype]
    (found,) = cuda_rice.encode([(device.to_device(old), device.to_device(new))], dtype, block=block)
    wanted = []
    for at in range(0, old.size, block // lane):
        before, after = old[at : at + block // lane], new[at : at + block // lane]
        payload, was = rice.encode_patch(before, after, dtype, lane)
        wanted.append(Block(payload, before.nbytes, cuda.check_of(was)))
        assert rice.decode(payload, before, lane).tobytes() == after.tobytes()
    assert found == wanted
    target = device.to_device(old)
    cuda_rice.decode_into(found, [target])
    np.testing.assert_array_equal(target.copy_to_host(), new)
    return found


@pytest.mark.parametrize("dtype", LANES)
def test_payloads_are_those_of_the_cpu(dtype: str) -> None:
    count = 4 * TILE // LANES[dtype] + 3
    blocks = check(dtype, *arrays(dtype, count, 0.4), 2 * TILE)
    assert len(blocks) == 3


@pytest.mark.parametrize("changes", [0, 1, 2, 255, 256, 257, 512, 513])
def test_groups(changes: int) -> None:
    """On both sides of where a group ends, in one block and no more than fit."""
    check("BF16", *changing("BF16", 600, changes), 8 * TILE)


def test_many_groups_in_a_block() -> None:
    """They are written side by side, and share words."""
    check("BF16", *changing("BF16", 2100, 2000), 32 * TILE)


def test_border_and_runs() -> None:
    """Of borders that cost the same the smallest wins, whichever thread tried it."""
    rng = np.random.default_rng(6)
    counts, prices = np.zeros((8, 256, 16), np.uint32), rice.prices(15)
    for each in counts:
        first = rng.integers(20, 120)
        each[first : first + 20, :5] = rng.integers(0, 3, (20, 5)) * (rng.random((20, 5)) < 0.2)
        each[first, 0] += 1
        # The best border is the last thread's, and the next one, which often costs the same, the first thread's.
        each[:] = np.roll(each, 31 - rice_kernels.settle(each, prices, 0, 255)[0] % 32, axis=0)
    chosen, reach = device.to_device(np.zeros((8, 2), np.int64)), device.to_device(np.zeros((8, 256), np.int32))
    kernels.settle[8, kernels.FEW](device.to_device(counts), device.to_device(prices), reach, chosen)
    assert [tuple(row) for row in chosen.copy_to_host().tolist()] == [
        rice_kernels.settle(each, prices, 0, 255) for each in counts
    ]


@pytest.mark.parametrize("share", [0.003, 0.05, 1])
def test_densities(share: float) -> None:
    check("BF16", *arrays("BF16", 3 * TILE, share, 1), 2 * TILE)


def test_bits_that_are_no_numbers() -> None:
    """Infinities and NaNs of every kind, and steps as long as they can be."""
    rng = np.random.default_rng(2)
    old, new = rng.integers(0, 256, (2, TILE), np.uint8)
    check("F8_E5M2", old, new, TILE)
    # Of few exponents, since the simulator would try thousands of borders; but the new ones may be anything.
    old, new = rng.integers(0, 1 << 16, (2, TILE // 2), np.uint16)
    check("BF16", old | 0x7E00, new, TILE)
    old = np.array([0, 1 << 63, 3, (1 << 63) + 5] * 4, np.uint64)
    new = rng.integers(0, 1 << 64, 16, np.uint64)
    new[:3] = 1 << 63, 0x7FF8 << 48, (1 << 64) - 1
    check("F64", old, new, TILE)


def test_runs_of_changes() -> None:
    """Groups in which nothing lies between changes, and gaps longer than a group."""
    old, _ = arrays("I16", 2000, 0)
    new = old.copy()
    new[700:1300] += 1
    check("I16", old, new, 16 * TILE)


def test_many_arrays() -> None:
    sizes = [0, 1, 128, 129, 300, 0, 64]
    pairs = [arrays("BF16", n, 0.3, n) for n in sizes]
    found = cuda_rice.encode([(device.to_device(x), device.to_device(y)) for x, y in pairs], "BF16", block=TILE)
    assert [sum(block.nbytes for block in blocks) for blocks in found] == [2 * n for n in sizes]
    for blocks, (x, y) in zip(found, pairs, strict=True):
        for i, block in enumerate(blocks):
            part = slice(i * TILE // 2, i * TILE // 2 + block.nbytes // 2)
            assert block.payload == rice.encode(x[part], y[part], "BF16", 2)
    assert cuda_rice.encode([], "BF16", block=TILE) == []
    cuda_rice.decode_into([], [])


def test_blocks_that_lie_in_several_arrays_and_arrays_of_several_blocks() -> None:
    old, new = arrays("BF16", 1000, 0.2, 5)
    new[400:600] = old[400:600]  # nothing changes in the third block, nor in the second array
    blocks = []
    for part in (slice(0, 10), slice(10, 400), slice(400, 590), slice(590, 1000)):
        payload, was = rice.encode_patch(old[part], new[part], "BF16", 2)
        blocks.append(Block(payload, old[part].nbytes, cuda.check_of(was)))
    assert blocks[2].payload == b""
    cuts = [0, 420, 550, 550, 560, 700, 1000]
    targets = [device.to_device(old[a:b]) for a, b in pairwise(cuts)]
    cuda_rice.decode_into(blocks, targets)
    np.testing.assert_array_equal(np.concatenate([target.copy_to_host() for target in targets]), new)


@pytest.fixture(scope="module")
def small() -> tuple[Any, bytes]:
    """An old array, and a payload of two groups for it."""
    old, new = arrays("BF16", 320, 0.9, 3)
    payload = rice.encode(old, new, "BF16", 2)
    assert rice.Head.parse(np.frombuffer(payload, np.uint8), 320, 2).changes > rice.GROUP
    return old, payload


def outcome(payload: bytes, old: Any) -> Any:
    """What the CPU makes of a payload: an array, or None if it refuses."""
    try:
        return rice.decode(payload, old, 2).view(np.uint16)
    except CodecError:
        return None


def mutations(payload: bytes) -> list[bytes]:
    rng = np.random.default_rng(4)
    found = [payload[:-1], payload + b"\0", payload[: len(payload) // 2], payload[:3], b"\xff" * len(payload)]
    head = rice.Head.parse(np.frombuffer(payload, np.uint8), 320, 2)
    # Every bit of the index, which has one entry; elsewhere one of a byte.
    index = range(head.nbytes, head.nbytes + (head.span_bits + head.size_bits + 7) // 8)
    bits = [(at, bit) for at in index for bit in range(8)]
    others = [*range(head.nbytes), *rng.integers(index[-1], len(payload), 20).tolist(), len(payload) - 1]
    for at, bit in [*bits, *((at, int(rng.integers(8))) for at in others)]:
        changed = bytearray(payload)
        changed[at] ^= 1 << bit
        found.append(bytes(changed))
    # A size, and a span, as large as they can be told.
    for span_bits, size_bits in ((head.span_bits, 32), (27, head.size_bits)):
        width = span_bits + size_bits
        entry = ((1 << width) - 1).to_bytes((width + 7) // 8, "little")
        found.append(payload[: head.nbytes - 2] + bytes([span_bits, size_bits]) + entry + payload[index[-1] + 1 :])
    return found


def test_what_the_cpu_refuses_is_refused(small: tuple[Any, bytes]) -> None:
    """And what it takes gives the same, though it be nothing that was ever meant."""
    old, payload = small
    refused = 0
    for changed in mutations(payload):
        target, wanted = device.to_device(old), outcome(changed, old)
        if wanted is None:
            refused += 1
            with pytest.raises(CodecError):
                cuda_rice.decode_into([Block(changed, old.nbytes)], [target])
            np.testing.assert_array_equal(target.copy_to_host(), old)
        else:
            cuda_rice.decode_into([Block(changed, old.nbytes)], [target])
            np.testing.assert_array_equal(target.copy_to_host(), wanted)
    assert refused >= 20


def test_codes_longer_than_an_encoder_writes() -> None:
    """Any number may be told by sixteen zeros and all of its bits; but no step by 2^15 + 1."""
    old = np.array([1, 0x8003, 0x3F80, 0x7FFF, 9], np.uint16)
    for last in (0x7FFE, 0x7FFF):
        fields = [(0, 5)]  # k
        for gap in (0, 1, 1):
            fields += [(0, 16), (gap, 26)]
        fields += [
            (0b101, 3),
            (0, 16),
            (2, 26),
            (0, 16),
            (last, 15),
        ]  # signs; two by one step, and one by the longest
        value = at = 0
        for field, width in fields:
            value |= field << at
            at += width
        payload = bytes([3, 7, 0, 0, 0]) + value.to_bytes((at + 7) // 8, "little")
        wanted, target = outcome(payload, old), device.to_device(old)
        if last == 0x7FFE:
            assert wanted is not None
            cuda_rice.decode_into([Block(payload, old.nbytes)], [target])
            np.testing.assert_array_equal(target.copy_to_host(), wanted)
        else:
            assert wanted is None
            with pytest.raises(CodecError, match="a step that is too long"):
                cuda_rice.decode_into([Block(payload, old.nbytes)], [target])


def test_one_bad_block_and_nothing_is_written(small: tuple[Any, bytes]) -> None:
    old, payload = small
    targets = [device.to_device(old) for _ in range(3)]
    wrong = bytearray(payload)
    wrong[-1] ^= 0x80
    blocks = [Block(payload, old.nbytes), Block(bytes(wrong), old.nbytes), Block(payload, old.nbytes)]
    with pytest.raises(CodecError, match="block 1: RICE payload has"):
        cuda_rice.decode_into(blocks, targets)
    for target in targets:
        np.testing.assert_array_equal(target.copy_to_host(), old)


def test_positions_past_the_block_are_refused(small: tuple[Any, bytes]) -> None:
    """Though the targets go on behind it."""
    old, payload = small
    targets = [device.to_device(np.concatenate([old, old]))]
    blocks = [Block(payload, old.nbytes - 2), Block(b"", old.nbytes + 2)]
    with pytest.raises(CodecError, match="block 0"):
        cuda_rice.decode_into(blocks, targets)
    np.testing.assert_array_equal(targets[0].copy_to_host(), np.concatenate([old, old]))


def test_other_old_lanes_are_refused(small: tuple[Any, bytes]) -> None:
    old, payload = small
    _, was = rice.encode_patch(old, rice.decode(payload, old, 2).view(np.uint16), "BF16", 2)
    changed = old.copy()
    changed[(old == was[7]).nonzero()[0][0]] ^= 0x4000
    targets = [device.to_device(old), device.to_device(changed)]
    blocks = [Block(payload, old.nbytes, cuda.check_of(was)) for _ in targets]
    with pytest.raises(CodecError, match=r"block 1\b"):
        cuda_rice.decode_into(blocks, targets)
    np.testing.assert_array_equal(targets[0].copy_to_host(), old)
    np.testing.assert_array_equal(targets[1].copy_to_host(), changed)
    cuda_rice.decode_into(blocks[:1], targets[:1])
    with pytest.raises(CodecError, match="block 0 is a patch of"):  # steps are relative: not twice
        cuda_rice.decode_into(blocks[:1], targets[:1])


def test_arguments_that_do_not_fit() -> None:
    x, y = device.to_device(np.zeros(8, np.uint16)), device.to_device(np.zeros(8, np.uint32))
    for block in (0, TILE + 1, 2 * rice.BLOCK_LIMIT):
        with pytest.raises(CodecError, match=f"blocks of {block} bytes"):
            cuda_rice.encode([(x, x)], "BF16", block=block)
    with pytest.raises(CodecError, match="elements of different sizes"):
        cuda_rice.encode([(x, x), (y, y)], "BF16", block=TILE)
    for dtype in ("BF16", "F64"):
        with pytest.raises(CodecError, match=f"elements of 4 bytes: those of {dtype} have not as many"):
            cuda_rice.encode([(y, y)], dtype, block=TILE)
    with pytest.raises(CodecError, match="elements of different sizes"):
        cuda_rice.decode_into([Block(b"", 48)], [x, y])
    with pytest.raises(CodecError, match="not as many bytes"):
        cuda_rice.decode_into([Block(b"", 14)], [x])
    with pytest.raises(CodecError, match="15 bytes is not a whole number of 2-byte lanes"):
        cuda_rice.decode_into([Block(b"", 15), Block(b"", 1)], [x])
    with pytest.raises(CodecError, match="target 0 is no array on a CUDA device"):
        cuda_rice.decode_into([Block(b"", 16)], [np.zeros(8, np.uint16)])
