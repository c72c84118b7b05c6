"""Payloads that no encoder wrote end in CodecError or in a block of the right length, in bounded memory."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from weightvc_kernels import streams
from weightvc_kernels.streams import put_numbers, put_section, put_varint

CODECS = [wk.RAW, wk.PLANES, wk.SPARSE, wk.DENSE]


def attempt(codec: int, payload: bytes, old: npt.NDArray[np.uint8], lane: int) -> None:
    """Decode in every way: each gives a whole block or CodecError, and a refusal leaves the target alone."""
    target = old.copy()
    try:
        wk.decode_patch_into(codec, payload, target, lane)
    except wk.CodecError:
        assert target.tobytes() == old.tobytes()
        with pytest.raises(wk.CodecError):
            wk.decode_patch(codec, payload, old, lane)
        with pytest.raises(wk.CodecError):
            wk.positions_values(codec, payload, old, lane)
        return
    assert wk.decode_patch(codec, payload, old, lane).tobytes() == target.tobytes()
    at, values = wk.positions_values(codec, payload, old, lane)
    expected = old.view(values.dtype).copy()
    expected[at] = values
    assert expected.tobytes() == target.tobytes()
    assert (np.diff(at) > 0).all()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.sampled_from([0, *CODECS, 5, 99]), st.binary(max_size=200), st.integers(0, 40), st.sampled_from([1, 2, 4, 8])
)
def test_arbitrary_bytes(codec: int, payload: bytes, count: int, lane: int) -> None:
    attempt(codec, payload, np.arange(count * lane, dtype=np.uint8), lane)


def sample(lane: int, density: float) -> tuple[npt.NDArray[np.uint8], int, bytes]:
    """An old block, and the codec and payload of a patch on it."""
    rng = np.random.default_rng(lane)
    old = rng.integers(0, 2 ** (8 * lane - 2), 800, f"u{lane}")
    new = old.copy()
    new[rng.random(old.size) < density] += 3
    codec, payload, _ = wk.encode_patch(old, new, lane)
    return old.view(np.uint8), codec, payload


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_payloads(data: st.DataObject) -> None:
    lane = data.draw(st.sampled_from([1, 2, 4, 8]))
    old, codec, payload = sample(lane, data.draw(st.sampled_from([0.01, 0.1, 0.7])))
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat"]))
        if kind == "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            damaged[at] = data.draw(st.sampled_from([0, 1, 127, 128, 254, 255]))
        elif kind == "cut":
            del damaged[max(1, at) :]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            damaged += damaged[at:]
    attempt(data.draw(st.sampled_from([codec, *CODECS])), bytes(damaged), old, lane)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.7])
@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_cut_short_or_longer(lane: int, density: float) -> None:
    old, codec, payload = sample(lane, density)
    for size in range(1, len(payload)):
        with pytest.raises(wk.CodecError):
            wk.decode_patch(codec, payload[:size], old, lane)
    with pytest.raises(wk.CodecError):
        wk.decode_patch(codec, payload + b"\0", old, lane)


def sparse(gaps: list[int], deltas: list[int], count: int | None = None, mode: int = 1) -> bytes:
    """A SPARSE payload of 16-bit lanes, built by hand."""
    return (
        bytes([mode])
        + put_varint(len(gaps) if count is None else count)
        + put_numbers(np.array(gaps, np.uint64))
        + put_numbers(np.array(deltas, np.uint16))
    )


def test_the_hand_built_payload_is_sound() -> None:
    old = np.zeros(10, np.uint16)
    assert wk.decode_patch(wk.SPARSE, sparse([2, 6], [7, 8]), old, 2).view(np.uint16).tolist() == [
        *[0, 0, 7, 0, 0, 0, 0, 0, 0, 8]
    ]


# A position is the one before, plus a gap, plus 1: repeats and unsorted pairs need a gap that wraps around.
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (sparse([2**64 - 1], [1]), "reaches past lane 10"),
        (sparse([10], [1]), "reaches past lane 10"),
        (sparse([3, 2**64 - 1], [1, 1]), "reaches past lane 10"),
        (sparse([5, 2**64 - 3], [1, 1]), "reaches past lane 10"),
        (sparse([5, 4], [1, 1]), "reaches past lane 10"),
        (sparse([2**63, 2**63], [1, 1]), "reaches past lane 10"),
        (sparse([2**32], [1]), "reaches past lane 10"),
        (sparse([2, 2], [1, 1], count=1), "has 2 bytes, 1 were expected"),
        (sparse([2, 2], [1, 1], count=3), "has 2 bytes, 3 were expected"),
        (sparse([2, 2], [1, 1, 1]), "has 3 bytes, 2 were expected"),
        (sparse([2, 2], [1]), "has 1 bytes, 2 were expected"),
        (sparse([], [], count=0), "changes 0 of 10"),
        (sparse([0] * 11, [1] * 11), "changes 11 of 10"),
        (sparse([0], [1], count=2**60), f"changes {2**60} of 10"),
        (sparse([1], [0]), "changes nothing"),
        (sparse([1], [1], mode=2), "mode 2"),
        (b"\x01" + b"\xff" * 9, "longer than 9 bytes"),
    ],
)
def test_positions_and_counts_are_refused(payload: bytes, reason: str) -> None:
    old = np.arange(10, dtype=np.uint16)
    with pytest.raises(wk.CodecError, match=reason):
        wk.decode_patch(wk.SPARSE, payload, old, 2)
    attempt(wk.SPARSE, payload, old.view(np.uint8), 2)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"\x08" + put_section(np.zeros(8, np.uint8)), "keeps 8 bits apart of 8"),
        (b"\x07" + put_section(np.zeros(7, np.uint8)) + put_section(np.full(4, 2, np.uint8)), "more than 8 bits"),
        (b"\x00" + put_section(np.full(4, 255, np.uint8)) + b"\x02", "2 byte planes of at most 1"),
        (
            b"\x00" + put_section(np.full(4, 255, np.uint8)) + b"\x01" + put_section(np.ones(4, np.uint8)),
            "more than 8",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(stream: bytes, reason: str) -> None:
    with pytest.raises(wk.CodecError, match=reason):
        wk.decode_patch(wk.DENSE, b"\x01" + stream, bytes(4), 1)


def framed(frame: bytes) -> bytes:
    """A PLANES payload of 1-byte lanes that holds `frame`."""
    return put_varint(2 * len(frame) + 1) + frame


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=False).compress(data)


def lying(size: int, stated: int) -> bytes:
    """A frame of `size` zeros whose header states another content size."""
    honest = frame(bytes(size))
    # The size takes four bytes, after the magic, the descriptor and (in large frames alone) the window.
    said = size.to_bytes(4, "little")
    assert honest.index(said) in (5, 6)
    return honest.replace(said, stated.to_bytes(4, "little"), 1)


SIZE = 100_000
BAD_FRAMES: dict[str, Callable[[], bytes]] = {
    "two frames": lambda: frame(bytes(SIZE // 2)) * 2,
    "a frame twice": lambda: frame(bytes(SIZE)) * 2,
    "frame and junk": lambda: frame(bytes(SIZE)) + b"junk",
    "frame and an empty frame": lambda: frame(bytes(SIZE)) + frame(b""),
    "cut short": lambda: frame(bytes(SIZE))[:-1],
    "header alone": lambda: frame(bytes(SIZE))[:9],
    "nothing": lambda: b"",
    "too small": lambda: frame(bytes(SIZE - 1)),
    "too large": lambda: frame(bytes(SIZE + 1)),
    "bomb": lambda: frame(bytes(256 << 20)),
    "bomb that lies": lambda: lying(256 << 20, SIZE),
    "small that lies": lambda: lying(SIZE + 5000, SIZE),
    "large that lies": lambda: lying(SIZE - 5000, SIZE),
    "no size": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE)),
    "skippable": lambda: b"\x50\x2a\x4d\x18" + SIZE.to_bytes(4, "little") + bytes(SIZE),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_one_whole_frame_of_the_stated_size_or_nothing(name: str) -> None:
    payload = framed(BAD_FRAMES[name]())
    assert wk.decode_whole(wk.PLANES, framed(frame(bytes(SIZE))), SIZE, 1).tobytes() == bytes(SIZE)
    tracemalloc.start()
    try:
        with pytest.raises(wk.CodecError, match="byte plane 0"):
            wk.decode_whole(wk.PLANES, payload, SIZE, 1)
        assert tracemalloc.get_traced_memory()[1] < 4 * SIZE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [0, wk.SPARSE, wk.DENSE, 5, 17])
def test_unknown_codecs_are_named(codec: int) -> None:
    with pytest.raises(wk.CodecError, match=f"codec {codec} "):
        wk.decode_whole(codec, b"", 0, 1)


def test_wrong_arguments() -> None:
    block, longer = np.zeros(12, np.uint8), np.zeros(14, np.uint8)
    with pytest.raises(wk.CodecError, match="lane of 3 bytes"):
        wk.encode_whole(block, 3)
    with pytest.raises(wk.CodecError, match="lane of 16 bytes"):
        wk.decode_whole(wk.RAW, b"", 0, 16)
    with pytest.raises(wk.CodecError, match="whole number of 8-byte lanes"):
        wk.encode_whole(block, 8)
    with pytest.raises(wk.CodecError, match="one length"):
        wk.encode_patch(block, longer, 2)
    with pytest.raises(wk.CodecError, match="12 bytes, 14 were expected"):
        wk.decode_whole(wk.RAW, bytes(12), 14, 2)
    with pytest.raises(wk.CodecError, match="block of -2 bytes"):
        wk.decode_whole(wk.RAW, b"", -2, 2)
    with pytest.raises(wk.CodecError, match="block of 1099511627776 bytes"):
        wk.decode_whole(wk.PLANES, b"", 2**40, 2)
    with pytest.raises(wk.CodecError, match="the limit is"):
        wk.encode_whole(np.zeros(wk.BLOCK_LIMIT + 8, np.uint8), 1)
    with pytest.raises(wk.CodecError, match="read-only"):
        wk.decode_patch_into(wk.SPARSE, b"", bytes(12), 2)
    with pytest.raises(wk.CodecError, match="not contiguous"):
        wk.decode_patch_into(wk.SPARSE, b"", longer[::2], 1)
    with pytest.raises(wk.CodecError, match="not contiguous"):
        wk.decode_patch_into(wk.SPARSE, b"", memoryview(longer)[::2], 1)


def test_a_zstd_frame_of_nothing_is_refused_with_and_without_something_behind_it() -> None:
    frame = zstandard.ZstdCompressor().compress(b"")
    for more in (b"", b"junk"):
        body = frame + more
        with pytest.raises(wk.CodecError, match="nothing"):
            streams.Reader(bytes([2 * len(body) + 1]) + body).section(0, "it")
