"""Diff and apply on a device, against numpy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda as device

from weightvc_kernels import CodecError, cuda, cuda_arrays
from weightvc_kernels.cuda import Write

LANES = (1, 2, 4, 8)
BLOCK = 4 * 8 * 8  # bytes that a block of 4 threads looks at


def arrays(lane: int, n: int, share: float, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, n * lane, np.uint8).view(f"u{lane}")
    new = old.copy()
    at = rng.random(n) < share
    # Only one byte of a lane changes, so that lanes have to be told by all of their bytes.
    new.view(np.uint8).reshape(n, lane)[at, rng.integers(0, lane, n)[at]] ^= 128
    return old, new


def check(changes: cuda.Changes, old: Any, new: Any) -> None:
    at = np.flatnonzero(old != new)
    positions, before, after = (each.copy_to_host() for each in changes)
    assert positions.dtype == np.int64
    assert before.dtype == after.dtype == old.dtype
    np.testing.assert_array_equal(positions, at)
    np.testing.assert_array_equal(before, old[at])
    np.testing.assert_array_equal(after, new[at])


@pytest.mark.parametrize("share", [0.02, 0.3, 1])
@pytest.mark.parametrize("lane", LANES)
def test_diff_of_many_arrays_at_once(lane: int, share: float) -> None:
    """Sizes on both sides of a word, a thread's share, a block and several."""
    sizes = [0, 1, 7, 8, 9, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 8]
    pairs = [arrays(lane, nbytes // lane, share, i) for i, nbytes in enumerate(sizes)]
    found = cuda.diff([(device.to_device(x), device.to_device(y)) for x, y in pairs])
    for changes, (x, y) in zip(found, pairs, strict=True):
        check(changes, x, y)


def test_diff_of_lanes_of_all_widths_together() -> None:
    pairs = [arrays(lane, 40, 0.3) for lane in (2, 8, 1, 2, 4)]
    found = cuda.diff([(device.to_device(x), device.to_device(y)) for x, y in pairs])
    assert len(found) == 5
    for changes, (x, y) in zip(found, pairs, strict=True):
        check(changes, x, y)


def test_diff_of_nothing() -> None:
    assert cuda.diff([]) == []
    x = device.to_device(np.arange(300, dtype=np.uint16))
    check(cuda.diff([(x, x)])[0], x.copy_to_host(), x.copy_to_host())


@pytest.mark.parametrize("begin", [0, 1, 3, 4])
@pytest.mark.parametrize("other", [0, 1])
def test_diff_where_words_are_not_aligned(begin: int, other: int) -> None:
    old, new = arrays(2, 200, 0.2)
    x, y = device.to_device(old)[begin : begin + 150], device.to_device(np.roll(new, other))[begin + other :][:150]
    check(cuda.diff([(x, y)])[0], old[begin : begin + 150], new[begin : begin + 150])
    # On a device, not in the simulator, it were a fault to load words there.
    assert cuda_arrays.whole_words(x, y) == (37 if begin % 4 == 0 and other == 0 else 0)


def test_diff_is_of_bits() -> None:
    old = np.array([0.0, np.nan, 1.0, np.inf], np.float32)
    new = np.array([-0.0, np.nan, 1.0, np.inf], np.float32)
    new.view(np.uint32)[1] ^= 1
    (changes,) = cuda.diff([(device.to_device(old.reshape(2, 2)), device.to_device(new.reshape(2, 2)))])
    check(changes, old.view(np.uint32), new.view(np.uint32))


def test_diff_refuses_what_does_not_pair_up() -> None:
    x = device.to_device(np.zeros(4, np.uint16))
    for other in (np.zeros(5, np.uint16), np.zeros(4, np.uint32)):
        with pytest.raises(CodecError, match="pair 1: old has 4 elements of 2 bytes"):
            cuda.diff([(x, x), (x, device.to_device(other))])
    with pytest.raises(CodecError, match="new array 0 is no array on a CUDA device"):
        cuda.diff([(x, np.zeros(4, np.uint16))])
    with pytest.raises(CodecError, match="lane of 16 bytes"):
        cuda.diff([(device.to_device(np.zeros(4, np.complex128)),) * 2])
    with pytest.raises(CodecError, match="old array 0 is not contiguous"):
        cuda.diff([(device.to_device(np.zeros(8, np.uint16))[::2], x)])


@pytest.mark.parametrize("lane", LANES)
def test_apply_what_diff_found(lane: int) -> None:
    pairs = [arrays(lane, n, 0.3, n) for n in (0, 1, 50, 90)]
    targets = [device.to_device(x) for x, _ in pairs]
    found = cuda.diff([(target, device.to_device(y)) for target, (_, y) in zip(targets, pairs, strict=True)])
    writes = [
        Write(target, changes.positions, changes.new, cuda.check_of(changes.old.copy_to_host()))
        for target, changes in zip(targets, found, strict=True)
    ]
    cuda.apply(writes)
    for target, (_, y) in zip(targets, pairs, strict=True):
        np.testing.assert_array_equal(target.copy_to_host(), y)
    cuda.apply([write._replace(check=None) for write in writes])  # absolute: again is the same
    for target, (_, y) in zip(targets, pairs, strict=True):
        np.testing.assert_array_equal(target.copy_to_host(), y)
    with pytest.raises(CodecError, match="target 2 does not hold what write 2 replaces"):
        cuda.apply(writes)


def test_the_check_is_that_of_the_format() -> None:
    from weightvc.objects import manifest

    old = np.array([0x3F80, 0x8080, 0x3FBF], np.uint16)
    assert cuda.check_of(old) == manifest.check(old.view(np.uint8))


BAD = {
    "repeated": ([3, 3], [1, 2], "positions 1 do not ascend"),
    "descending": ([0, 7, 6], [1, 2, 3], "positions 1 do not ascend"),
    "negative": ([-1, 3], [1, 2], "write 1 reaches past its target's 8 lanes"),
    "far below": ([-(2**63), 3], [1, 2], "write 1 reaches past"),
    "past the end": ([3, 8], [1, 2], "write 1 reaches past"),
    "far past the end": ([3, 2**63 - 1], [1, 2], "write 1 reaches past"),
    "fewer values": ([3, 4], [1], "write 1 has 2 positions, but 1 values"),
    "more values": ([3], [1, 2], "write 1 has 1 positions, but 2 values"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("checked", [False, True])
def test_apply_writes_nothing_if_anything_is_wrong(case: str, checked: bool) -> None:
    """Neither where it is wrong, nor in the write before, which is right."""
    positions, values, message = BAD[case]
    old = np.arange(8, dtype=np.uint16)
    targets = [device.to_device(old), device.to_device(old)]
    right = Write(targets[0], device.to_device(np.array([1])), device.to_device(np.array([9], np.uint16)))
    wrong = Write(
        targets[1],
        device.to_device(np.array(positions)),
        device.to_device(np.array(values, np.uint16)),
        0 if checked else None,
    )
    with pytest.raises(CodecError, match=message):
        cuda.apply([right, wrong])
    for target in targets:
        np.testing.assert_array_equal(target.copy_to_host(), old)


def test_apply_refuses_other_old_lanes_and_writes_nothing() -> None:
    old = np.arange(8, dtype=np.uint16)
    targets = [device.to_device(old), device.to_device(old)]
    at, values = device.to_device(np.array([1, 5])), device.to_device(np.array([9, 9], np.uint16))
    writes = [Write(target, at, values, cuda.check_of(old[[1, 5]])) for target in targets]
    writes[1] = writes[1]._replace(check=cuda.check_of(old[[1, 6]]))
    with pytest.raises(CodecError, match="target 1 does not hold what write 1 replaces"):
        cuda.apply(writes)
    for target in targets:
        np.testing.assert_array_equal(target.copy_to_host(), old)


def test_apply_refuses_arrays_of_the_wrong_kind() -> None:
    target, at = device.to_device(np.arange(8, dtype=np.uint16)), device.to_device(np.array([1]))
    value = device.to_device(np.array([9], np.uint16))
    with pytest.raises(CodecError, match="positions 0 are uint64: they must be int64"):
        cuda.apply([Write(target, device.to_device(np.array([1], np.uint64)), value)])
    with pytest.raises(CodecError, match="values of 4 bytes for a target of 2"):
        cuda.apply([Write(target, at, device.to_device(np.array([9], np.uint32)))])
    with pytest.raises(CodecError, match="target 0 is no array on a CUDA device"):
        cuda.apply([Write(np.arange(8, dtype=np.uint16), at, value)])
    frozen = SimpleNamespace(
        __cuda_array_interface__={"data": (64, True), "typestr": "<u2", "shape": (8,), "version": 3}
    )
    with pytest.raises(CodecError, match="target 0 is read-only"):
        cuda.apply([Write(frozen, at, value)])
    assert target.copy_to_host()[1] == 1
