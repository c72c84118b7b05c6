"""Deltas that are damaged or made to harm: one typed error that names the directory, and nothing is committed."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import weightvc
from tests.kit.slime import INDEX, Plain, checkpoint, checksum, delta, opened, publish, safetensors
from weightvc.errors import BadFile, BadName, BadTensor
from weightvc.importing import Import
from weightvc.objects import slime
from weightvc.repository import Repository

SHARD = "model-00000-of-00001.safetensors"
OLD: Plain = {"a": ("BF16", [32], bytes(range(64))), "b": ("U8", [9], b"123456789")}
NEW: Plain = {"a": ("BF16", [32], bytes(reversed(range(64)))), "b": ("U8", [9], b"123456780")}


@pytest.fixture
def repository(fresh: Callable[[str], Repository], tmp_path: Path) -> Repository:
    """Has OLD as step 0."""
    made = fresh("repository")
    made.commit(checkpoint(tmp_path / "model", OLD), step=0)
    return made


def refused(repository: Repository, where: Path, error: type[Exception], said: str) -> None:
    head = repository.resolve("main").id
    with pytest.raises(error, match=said) as raised:
        list(Import(repository, where).run())
    assert type(raised.value) is error
    assert "weight_v000001" in str(raised.value)
    assert weightvc.open(repository.url, cache=None).resolve("main").id == head


# The index


def said(**changes: Any) -> Callable[[Any], Any]:
    def change(index: Any) -> Any:
        for name, value in changes.items():
            if value is None:
                del index["metadata"][name]
            else:
                index["metadata"][name] = value
        return index

    return change


def mapped(weight_map: Any) -> Callable[[Any], Any]:
    return lambda index: {**index, "weight_map": weight_map}


INDEXES: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (said(version="000002"), BadFile, "says that it is version 2"),
    (said(version="1.5"), BadFile, "no numbers"),
    (said(version=None), BadFile, "no numbers"),
    (said(version=1), BadFile, "no numbers"),
    (said(version="٣"), BadFile, "no numbers"),
    (said(base_version="-1"), BadFile, "no numbers"),
    (said(base_version="9" * 5000), BadFile, "no numbers"),
    (said(base_version="000001"), BadFile, "does not come before"),
    (said(delta_encoding="pickle"), BadFile, "delta_encoding is 'pickle'"),
    (said(delta_encoding=["xor"]), BadFile, "delta_encoding"),
    (said(compression_format="lz4"), BadFile, "compression_format"),
    (said(checksum_format=None), BadFile, "checksum_format is None"),
    (mapped({"a": SHARD}), BadFile, "not those that the index says"),
    (mapped({"a": SHARD, "b": SHARD, "c": SHARD}), BadFile, "not those that the index says"),
    (mapped({"a": SHARD, "b": "../model/model.safetensors"}), BadFile, "no safetensors file beside it"),
    (mapped({"a": SHARD, "b": "/etc/passwd"}), BadFile, "no safetensors file beside it"),
    (mapped({"a": SHARD, "b": "model-00001-of-00001.safetensors"}), BadFile, "is not there"),
    (mapped({"a": SHARD, "b": 1}), BadFile, "weight_map"),
    (mapped([]), BadFile, "weight_map"),
]


@pytest.mark.parametrize(("change", "error", "message"), INDEXES)
def test_an_index(
    repository: Repository, tmp_path: Path, change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    path = publish(tmp_path / "in", 1, OLD, NEW)
    (path / INDEX).write_text(json.dumps(change(json.loads((path / INDEX).read_text()))))
    refused(repository, tmp_path / "in", error, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "malformed"),
        ("{", "malformed|match"),
        ('{"metadata": {"delta_encoding": "xor", "delta_encoding": "xor"}}', "twice"),
        ("[" * 100_000, "nest"),
        ("[1]", "weight_map"),
        ('{"metadata": {"delta_encoding": "\\ud800"}}', "malformed"),
    ],
)
def test_an_index_that_is_no_json_of_one(repository: Repository, tmp_path: Path, text: str, message: str) -> None:
    path = publish(tmp_path / "in", 1, OLD, NEW)
    (path / INDEX).write_text(text)
    refused(repository, tmp_path / "in", BadFile, message)


# The shards


def header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        made = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + length :])

    return write


def entry(name: str, **changes: Any) -> Callable[[Path], None]:
    return header(lambda head: {**head, name: {**head[name], **changes}})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def linked(path: Path) -> None:
    os.rename(path, path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def unsummed(head: Any) -> Any:
    del head["__metadata__"]["b"]
    return head


def wrong(head: Any) -> Any:
    head["__metadata__"]["b"] = "0" * 32
    return head


FILES: list[tuple[Callable[[Path], None], type[Exception], str]] = [
    (cut, BadFile, "cut short"),
    (lambda path: path.write_bytes(b""), BadFile, "too few"),
    (lambda path: path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}"), BadFile, "cut short"),
    (lambda path: path.unlink(), BadFile, "is not there"),
    (linked, BadFile, "link out of"),
    (entry("b", shape=[1 << 33, 1 << 33]), BadFile, "too large|needs"),
    (entry("b", data_offsets=[0, 1 << 60]), BadFile, "needs|give"),
    (entry("b", data_offsets=[-1, 3]), BadFile, "must have"),
    (entry("b", dtype="F99"), BadTensor, "F99"),
    (entry("b", dtype="I8"), BadTensor, "not U8"),
    (header(unsummed), BadFile, "no checksum of 'b'"),
    (header(wrong), BadFile, "have the xxh3-128 checksum"),
]


@pytest.mark.parametrize(("change", "error", "message"), FILES)
def test_a_shard(
    repository: Repository, tmp_path: Path, change: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    path = publish(tmp_path / "in", 1, OLD, NEW)
    change(path / SHARD)
    refused(repository, tmp_path / "in", error, message)


# The deltas of tensors


def frame(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def overwrite(count: int, positions: list[int], values: bytes) -> bytes:
    return frame(struct.pack(f"<I{len(positions)}I", count, *positions) + values)


GOOD = delta("xor", OLD["b"][2], NEW["b"][2])
FRAMES: list[tuple[str, bytes, str]] = [
    ("xor", b"", "cut short"),
    ("xor", b"no frame at all", "no zstd frame"),
    ("xor", frame(GOOD)[:-1], "cut short"),
    ("xor", frame(GOOD) + b"x", "goes on behind"),
    ("xor", frame(GOOD) + frame(GOOD), "goes on behind"),
    ("xor", frame(GOOD[:-1]), "has 8 bytes, where the tensor has 9"),
    ("xor", frame(GOOD + b"\0"), "over 9 bytes"),
    ("xor", frame(bytes(256 << 20)), "over 9 bytes"),
    ("overwrite", frame(b"\1\0"), "2 bytes, where 1 changes"),
    ("overwrite", overwrite(1, [8], b""), "where 1 changes"),
    ("overwrite", overwrite(0, [8], b"0"), "where 0 changes"),
    ("overwrite", overwrite(2**32 - 1, [8], b"0"), "where 4294967295 changes"),
    ("overwrite", overwrite(1, [9], b"0"), "out of order, or beyond"),
    ("overwrite", overwrite(1, [2**32 - 1], b"0"), "out of order, or beyond"),
    ("overwrite", overwrite(2, [8, 8], b"00"), "out of order"),
    ("overwrite", overwrite(2, [8, 1], b"00"), "out of order"),
    ("overwrite", overwrite(12, list(range(12)), bytes(12)), "over 49 bytes"),
    ("overwrite", frame(bytes(64 << 20)), "over 49 bytes"),
]


@pytest.mark.parametrize(("encoding", "data", "message"), FRAMES)
def test_a_frame(repository: Repository, tmp_path: Path, encoding: str, data: bytes, message: str) -> None:
    path = publish(tmp_path / "in", 1, OLD, {**OLD, "b": NEW["b"]}, encoding=encoding)
    safetensors(
        path / SHARD, {"b": ("U8", [len(data)], data)}, {"b": checksum("xxh3-128", NEW["b"][2])}
    )  # fmt: skip
    refused(repository, tmp_path / "in", BadFile, f"tensor 'b': its delta .*{message}")


def test_a_delta_on_another_base(repository: Repository, tmp_path: Path) -> None:
    other: Plain = {**OLD, "a": ("BF16", [32], bytes(64))}
    publish(tmp_path / "in", 1, other, NEW)
    refused(repository, tmp_path / "in", BadFile, "tensor 'a'.*or was made on another base")


@pytest.mark.parametrize("shape", [[33], [31]])
def test_a_delta_of_another_shape(repository: Repository, tmp_path: Path, shape: list[int]) -> None:
    other: Plain = {**OLD, "a": ("BF16", shape, bytes(2 * shape[0]))}
    publish(tmp_path / "in", 1, other, {**other, "a": ("BF16", shape, b"\1" * 2 * shape[0])})
    refused(repository, tmp_path / "in", BadFile, "tensor 'a'")


def test_a_delta_of_a_tensor_that_its_base_has_not(repository: Repository, tmp_path: Path) -> None:
    more: Plain = {"../../c": ("U8", [1], b"1")}
    publish(tmp_path / "in", 1, OLD | more, NEW | {"../../c": ("U8", [1], b"2")})
    refused(repository, tmp_path / "in", BadFile, "'../../c'")


def test_a_whole_one_that_is_hostile(repository: Repository, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "in" / "weight_v000001", OLD)
    (path / "a\\b").write_bytes(b"")
    refused(repository, tmp_path / "in", BadName, "backslash")


def test_while_following_it_is_told_once_and_nothing_is_committed(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = publish(tmp_path / "in", 1, OLD, NEW)
    header(wrong)(path / SHARD)
    checkpoint(tmp_path / "in" / "weight_v000002", NEW)
    found = Import(repository, tmp_path / "in").follow(every=0.01)
    assert next(found).number == 2
    publish(tmp_path / "in", 3, NEW, OLD)
    assert next(found).number == 3
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "weight_v000001 is not whole" in told[0]
    assert [version.step for version in repository.log()] == [3, 2, 0]


def test_a_delta_of_nothing(repository: Repository, tmp_path: Path) -> None:
    publish(tmp_path / "in", 1, OLD, OLD)
    assert [one.number for one in Import(repository, tmp_path / "in").run()] == [1]
    assert repository.resolve("main").tree == repository.resolve("main~1").tree


@pytest.mark.parametrize("name", ["weight_v12345", "weight_v0000001", "weight_v000001x", "weight_v" + "1" * 19, ""])
def test_names_of_no_version(name: str) -> None:
    assert slime.number_of(name) is None


def test_names_of_versions() -> None:
    for number in (0, 1, 999_999, 1_000_000):
        assert slime.number_of(slime.directory(number)) == number


def test_frames_say_their_size(tmp_path: Path) -> None:
    for encoding in slime.ENCODINGS:
        made = slime.Encoder(encoding, "blake3", 9)
        made.add(OLD["b"][2][:4], NEW["b"][2][:4])
        made.add(OLD["b"][2][4:], NEW["b"][2][4:])
        data, digest = made.finish()
        assert digest == checksum("blake3", NEW["b"][2])
        wanted = delta(encoding, OLD["b"][2], NEW["b"][2])
        assert zstandard.get_frame_parameters(data).content_size == len(wanted)
        assert zstandard.ZstdDecompressor().decompress(data) == wanted
    assert opened(publish(tmp_path, 1, OLD, NEW) / SHARD)[1].keys() == {"a", "b"}
