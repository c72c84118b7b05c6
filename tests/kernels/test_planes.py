"""PLANES by compiled passes and by numpy: the same bytes, either way back."""

import subprocess
import sys

import numpy as np
import pytest

from weightvc_kernels import CodecError, planes

SIZES = (0, 1, 2, 15, 16, 17, 63, 1000, 32_768, 100_003)


def blocks(lane: int) -> list[np.ndarray]:
    rng = np.random.default_rng(lane)
    made = [rng.integers(0, 256, lane * count, np.uint8).view(f"u{lane}") for count in SIZES]
    likely = (rng.normal(0, 0.02, 50_000).astype("f4").view("u4") >> 8 * max(0, 4 - lane)).astype(f"u{lane}")
    high = np.full(300, 1 << 8 * lane - 1, f"u{lane}")
    room = np.zeros(lane * 1000 + 1, np.uint8)
    room[1:] = rng.integers(0, 256, lane * 1000, np.uint8)
    return [*made, likely, high, ~high, room[1:].view(f"u{lane}")]


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        planes.load(planes.LARGE)
    else:
        monkeypatch.setattr(planes, "_compiled", lambda block: False)
    return bool(request.param)


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_both_ways_give_the_same_bytes_and_read_each_other(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planes.load(planes.LARGE)
    compiled = [planes.encode(block) for block in blocks(lane)]
    with monkeypatch.context() as numpy:
        numpy.setattr(planes, "_compiled", lambda block: False)
        assert [planes.encode(block) for block in blocks(lane)] == compiled
        by_numpy = [np.full_like(block, 1) for block in blocks(lane)]
        for payload, out in zip(compiled, by_numpy):
            planes.decode_into(payload, out)
    for block, payload, other in zip(blocks(lane), compiled, by_numpy):
        out = np.full_like(block, 1)
        planes.decode_into(payload, out)
        assert out.tobytes() == block.tobytes() == other.tobytes()


def test_the_sign_goes_below_and_the_exponent_is_a_plane_of_its_own(way: bool) -> None:
    """Every bit of a lane by itself: where it goes, and that it comes back."""
    for lane in (2, 4):
        for bit in range(8 * lane):
            block = np.array([1 << bit], f"u{lane}")
            rotated = 1 << (bit + 1) % (8 * lane)
            sections = b"".join(bytes([2, rotated >> 8 * j & 255]) for j in range(lane))
            assert planes.encode(block) == sections
            out = np.zeros_like(block)
            planes.decode_into(sections, out)
            assert out[0] == block[0]


def test_an_unaligned_target_is_filled(way: bool) -> None:
    block = np.arange(1000, dtype=np.uint32)
    room = np.zeros(4 * 1000 + 3, np.uint8)
    planes.decode_into(planes.encode(block), room[3:].view("u4"))
    assert room[3:].tobytes() == block.tobytes()


def test_a_payload_of_another_length_is_refused(way: bool) -> None:
    payload = planes.encode(np.arange(1000, dtype=np.uint16))
    for changed in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(CodecError):
            planes.decode_into(changed, np.empty(1000, np.uint16))


def test_numba_is_loaded_for_large_bases_alone() -> None:
    program = """
import sys
import numpy as np
from weightvc_kernels import planes
planes.load(planes.LARGE - 1)
planes.encode(np.zeros(100, np.uint16))
assert "numba" not in sys.modules
planes.load(planes.LARGE)
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
