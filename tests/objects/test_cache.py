"""The cache: names never lead out of it, nothing waits, and it stays as small as it was told."""

import os
import secrets
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

import weightvc
from tests.kit.forge import Forge
from weightvc.cache import Cache
from weightvc.errors import Corrupt
from weightvc.objects import frame
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo

DATA = b"object" * 100
TREE = "a" * 64


def key_of(data: bytes) -> str:
    return f"file/{frame.digest(data).hex()}.1-{secrets.token_hex(16)}-0"


def schema_of(nbytes: int) -> Schema:
    return Schema([TensorInfo("", "w", "U8", (nbytes,), nbytes)])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    return path


def names(victim: Path) -> list[str]:
    return [
        str(victim),
        "../../victim",
        "../../../victim",
        f"file/../../../{victim.name}",
        "",
        ".",
        key_of(DATA) + "/..",
    ]


def test_objects_come_back(cache: Cache) -> None:
    for data in (DATA, bytes(3 << 20)):
        name = key_of(data)
        assert cache.get(name) is None
        cache.put(name, data)
        assert cache.get(name) == data


def test_what_is_no_key_is_corrupt_and_touches_nothing(cache: Cache, victim: Path) -> None:
    for name in names(victim):
        for do in (cache.get, cache.discard, lambda name: cache.put(name, b"x")):
            with pytest.raises(Corrupt):
                do(name)
    assert victim.read_bytes() == b"precious"


def test_what_is_no_digest_is_corrupt_and_touches_nothing(cache: Cache, victim: Path) -> None:
    writer = cache.write_tree(schema_of(3))
    assert writer is not None
    for name in [*names(victim), "A" * 64]:
        for do in (cache.has_tree, lambda name: cache.open_tree(name, schema_of(3)), writer.commit):
            with pytest.raises(Corrupt):
                do(name)
    writer.drop()
    assert victim.read_bytes() == b"precious"


@pytest.mark.timeout(20)
def test_a_pipe_in_the_cache_is_not_waited_for(cache: Cache) -> None:
    name = key_of(DATA)
    for path in (cache.directory / "objects" / name, cache.directory / "trees" / TREE):
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
    assert cache.get(name) is None
    assert cache.open_tree(TREE, schema_of(0)) is None


@pytest.mark.parametrize("data", [DATA, os.urandom(2 << 20)])
def test_a_file_cut_short_later_does_no_harm(cache: Cache, data: bytes) -> None:
    name = key_of(data)
    cache.put(name, data)
    held = cache.get(name)
    os.truncate(cache.directory / "objects" / name, 0)
    # A mapped file would end the process here.
    assert held == data
    assert cache.get(name) is None
    assert not (cache.directory / "objects" / name).exists()


def test_trees_of_another_size_are_thrown_away(cache: Cache) -> None:
    writer = cache.write_tree(schema_of(3))
    assert writer is not None
    writer.write(0, b"abc")
    writer.commit(TREE)
    flat = cache.open_tree(TREE, schema_of(3))
    assert flat is not None
    assert flat.read(0, 3) == b"abc"
    assert cache.open_tree(TREE, schema_of(4)) is None
    assert not cache.has_tree(TREE)


def test_many_short_processes_keep_the_cache_small(tmp_path: Path) -> None:
    limit = 64 << 10
    for i in range(1500):
        # Each writes a tenth of what a process would have to write for a sweep of its own.
        Cache(tmp_path, limit=limit).put(key_of(data := i.to_bytes(800, "big")), data)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 8 * limit


def test_a_hostile_manifest_cannot_name_local_files(tmp_path: Path, victim: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": numpy.arange(4, dtype=numpy.float32)}, source / "model.safetensors")
    (source / "big.json").write_bytes(os.urandom(70_000))
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None).commit(source)
    Forge(url).rewrite(manifest=lambda head, _: head.update(files=dict.fromkeys(head["files"], str(victim))))
    with pytest.raises(Corrupt):
        weightvc.open(url, cache=str(tmp_path / "cache")).checkout("main", tmp_path / "out")
    assert victim.read_bytes() == b"precious"


def test_a_hostile_record_cannot_name_local_files(tmp_path: Path, victim: Path) -> None:
    url = str(tmp_path / "repository")
    weights = {"w": numpy.arange(4, dtype=numpy.float32)}
    weightvc.init(url, cache=None).commit(weights)
    Forge(url).rewrite(record=lambda fields: fields.update(tree=str(victim)))
    for use in (lambda r: r.load(framework="numpy"), lambda r: r.commit(weights)):
        with pytest.raises(Corrupt):
            use(weightvc.open(url, cache=str(tmp_path / "cache")))
    assert victim.read_bytes() == b"precious"


def test_a_schema_of_a_tensor_of_2_to_the_50_bytes_is_corrupt(tmp_path: Path) -> None:
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None).commit({"w": numpy.arange(4, dtype=numpy.float32)})
    for n in (1 << 50, 1 << 62):
        Forge(url).rewrite(schema=f'{{"components":{{"":[["w","U8",[{n}]]]}},"weightvc":"schema 1"}}')
        with pytest.raises(Corrupt, match="digests"):
            weightvc.open(url, cache=None).load(framework="numpy")
