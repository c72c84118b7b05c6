"""Frames, canonical JSON and zstd frames, and what is refused."""

import struct

import pytest
import zstandard

from weightvc.errors import Corrupt, Unsupported
from weightvc.objects import frame


def test_head_and_sections_come_back() -> None:
    data = frame.encode(frame.MANIFEST, {"a": [1, 2.5, "é", None]}, [b"", b"x" * 10])
    head, sections = frame.decode(frame.MANIFEST, data, "it")
    assert head == {"a": [1, 2.5, "é", None], "sections": [0, 10]}
    assert [bytes(section) for section in sections] == [b"", b"x" * 10]


@pytest.mark.parametrize("kind", [frame.ROOT, frame.SEGMENT])
def test_every_cut_and_every_byte_more_is_corrupt_and_named(kind: str) -> None:
    data = frame.encode(kind, {"a": 1}, [b"abc"])
    for damaged in (*(data[:n] for n in range(len(data))), data + b"\0", b" " * len(data), bytes(len(data))):
        with pytest.raises(Corrupt, match="the object"):
            frame.decode(kind, damaged, "the object")


def test_a_flipped_bit_anywhere_in_a_root_is_found() -> None:
    data = frame.encode(frame.ROOT, {"branches": {"main": "00"}})
    for i in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[i // 8] ^= 1 << i % 8
        with pytest.raises((Corrupt, Unsupported)):
            frame.decode(frame.ROOT, damaged, "root")


def test_another_kind_is_corrupt_and_another_format_unsupported() -> None:
    data = frame.encode(frame.SCHEMA, {})
    with pytest.raises(Corrupt, match="kind"):
        frame.decode(frame.LAYOUT, data, "it")
    with pytest.raises(Unsupported, match="format 2"):
        frame.decode(frame.SCHEMA, data[:3] + b"\x02" + data[4:], "it")


@pytest.mark.parametrize("content", [b"", b"x", b"weights" * 1000])
def test_exactly_one_zstd_frame_and_nothing_behind_it(content: bytes) -> None:
    one = frame.compress(content)
    assert frame.decompress(one, len(content), "it") == content
    for damaged in (one + one, one + b"junk", one[:-1], one[:5], b"", one + frame.compress(b"")):
        with pytest.raises(Corrupt):
            frame.decompress(damaged, 1 << 20, "it")


def test_output_is_capped_before_it_is_made() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    assert len(bomb) < 64 << 10
    with pytest.raises(Corrupt, match="over"):
        frame.decompress(bomb, 1 << 20, "it")
    body = struct.pack("<I", len(bomb)) + bomb
    with pytest.raises(Corrupt):
        frame.decode(frame.ROOT, frame.header(frame.ROOT) + frame.digest(body) + body, "root")


def test_canonical_json_is_sorted_short_and_finite() -> None:
    assert frame.canonical({"b": 1, "a": [0.1, 1e-07, True, None, "é\n"]}) == (
        '{"a":[0.1,1e-07,true,null,"é\\n"],"b":1}'.encode()
    )
    with pytest.raises(ValueError):
        frame.canonical(float("nan"))
