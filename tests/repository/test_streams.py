"""Blocks that no writer wrote: Corrupt, or Unsupported, naming the manifest and the block."""

from typing import Any

import pytest

from tests.fuzz.targets import Bytes, Inline
from weightvc.errors import Corrupt, Unsupported
from weightvc.objects.manifest import CONTEXT, REF, RICE, SAME, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.protocol.state import Chain, Level, Models
from weightvc_kernels import DENSE, RAW, SPARSE

SCHEMA = Schema([TensorInfo("", name, "U8", (size,), size) for name, size in (("a", 6), ("b", 6), ("c", 4))])
OLD = b"abcdefghijklmnop"
CHUNKS = [(RAW, b"ABCDEF"), (RAW, b"GHIJKL"), (RAW, b"MNOP")]


def read(blocks: list[tuple[int, bytes]], sources: list[int] | None = None, counts: Any = (1, 1, 1)) -> bytes:
    """All chunks of a base of these blocks, or of a patch on OLD if there are sources; one by one as well."""
    codecs, payloads = zip(*blocks)
    stream = Stream([*counts], [*codecs], [*map(len, payloads)], [0] * len(blocks), [], b"".join(payloads)).seal()
    level = Level(SCHEMA, stream, Inline(stream), "it", "weightvc 9", sources, Models({}, "it"))
    chain = Chain(Bytes(SCHEMA, OLD) if sources else None, [level])
    try:
        whole = bytes(chain.read(0, SCHEMA.chunks))
    except (Corrupt, Unsupported) as error:
        with pytest.raises(type(error)):
            [chain.read(chunk, chunk + 1) for chunk in range(SCHEMA.chunks)]
        raise
    assert b"".join(bytes(chain.read(chunk, chunk + 1)) for chunk in range(SCHEMA.chunks)) == whole
    return whole


def test_good_ones_are_read() -> None:
    assert read(CHUNKS) == b"ABCDEFGHIJKLMNOP"
    assert read([CHUNKS[0], (REF, bytes(4)), CHUNKS[2]]) == b"ABCDEFABCDEFMNOP"
    assert read([(SAME, b""), (RAW, b"GHIJKL"), (SPARSE, b"")], [1, -1, 2]) == b"ghijklGHIJKLmnop"


@pytest.mark.parametrize("codec", [SAME, SPARSE, DENSE, CONTEXT, RICE])
def test_a_base_has_nothing_to_be_coded_against(codec: int) -> None:
    with pytest.raises(Corrupt, match=r"it.*(block 1 of a base has no content|no tables)"):
        read([CHUNKS[0], (codec, b""), CHUNKS[2]])


@pytest.mark.parametrize("codec", [SAME, SPARSE, DENSE, CONTEXT, RICE])
def test_a_chunk_without_a_source_has_nothing_to_be_coded_against(codec: int) -> None:
    with pytest.raises(Corrupt, match=r"it.*(block 1 has no source|no tables)"):
        read([(SAME, b""), (codec, b""), (SAME, b"")], [0, -1, 2])
    with pytest.raises(Corrupt, match=r"it.*(block 0 has no source|no tables)"):
        read([(codec, b""), (SAME, b"")], [0, -1, 2], (2, 1))


@pytest.mark.parametrize("chunk", [1, 2, 3, 2**32 - 1])
def test_a_reference_leads_backwards(chunk: int) -> None:
    with pytest.raises(Corrupt, match=f"it.* block 1 refers to chunk {chunk}, which is not before it"):
        read([CHUNKS[0], (REF, chunk.to_bytes(4, "little")), CHUNKS[2]])


def test_a_reference_is_to_as_many_bytes_of_one_chunk() -> None:
    with pytest.raises(Corrupt, match="block 2 refers to chunk 0, which has another size"):
        read([*CHUNKS[:2], (REF, bytes(4))])
    for payload in (b"", bytes(3), bytes(5)):
        with pytest.raises(Corrupt, match=r"it.* block 1 refers"):
            read([CHUNKS[0], (REF, payload), CHUNKS[2]])
    with pytest.raises(Corrupt, match=r"it.* block 1 refers"):
        read([CHUNKS[0], (REF, bytes(4))], None, (1, 2))


def test_a_block_is_as_long_as_its_chunks() -> None:
    for payload in (b"GHIJK", b"GHIJKLM", b""):
        for sources in (None, [0, 1, 2]):
            with pytest.raises(Corrupt, match=r"it.* block 1"):
                read([CHUNKS[0], (RAW, payload), CHUNKS[2]], sources)


def test_a_context_block_has_tables() -> None:
    with pytest.raises(Corrupt, match="it is corrupt: it has no tables for U8"):
        read([(SAME, b""), (CONTEXT, b"12345678"), (SAME, b"")], [0, 1, 2])


@pytest.mark.parametrize("sources", [None, [0, 1, 2]])
def test_a_codec_of_a_later_writer_is_named_with_what_wrote_it(sources: list[int] | None) -> None:
    with pytest.raises(Unsupported, match=r"it.* codec 8 of weightvc 9 .*upgrade"):
        read([CHUNKS[0], (8, b""), CHUNKS[2]], sources)
