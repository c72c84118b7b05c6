"""Stored bytes that are not what they should be: Corrupt, naming the object; what does not need it works."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import weightvc
from tests.kit.weights import Bits, flipped, held, lying, tensor, tiny_format
from weightvc.errors import Corrupt, KeyNotFound, WeightvcError
from weightvc.objects import frame, key
from weightvc.objects import root as roots
from weightvc.protocol import swap
from weightvc.stores import Store, open_store

WEIGHTS = {("", "w"): tensor("BF16", (200,), 0), ("", "x"): tensor("F32", (40,), 1)}


def weights(number: int):
    return {k: flipped(v, 0.2, number) for k, v in WEIGHTS.items()}


def flip(data: bytes, seed: int = 1) -> bytes:
    at = random.Random(seed).randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << seed % 8]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "spaces": lambda data: b" " * len(data),
    "NULs": lambda data: bytes(len(data)),
    "cut short": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one bit flipped": flip,
    "a bit of the first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit of the last byte": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "junk behind": lambda data: data + b"junk",
    "HTML": lambda data: b"<html>Service unavailable</html>",
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)


def read(store: Store, name: str) -> bytes:
    got = store.get(name)
    assert got is not None
    return got.data


def begin(name: str) -> int:
    """The root's sequence number when the writer of an object began."""
    return int(name.split(".")[1].split("-")[0])


def listed(store: Store, kind: str) -> list[str]:
    return [one.key for one in store.list(f"{kind}/")]


@pytest.fixture
def store(memory_url) -> Iterator[Store]:
    """Nine versions in tiny packs, a segment and a tag, behind the code under test."""
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        for i in range(9):
            repository.commit(Bits(weights(i)), step=i)
            if i == 0:
                repository.tag("v1")
        assert len(repository.refresh().segments) == 1
        assert [entry.version.step for entry in repository.refresh().tail] == [7, 8]
        yield open_store(memory_url)


def attempt(name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, or None if it raises Corrupt, which has to name the object."""
    try:
        return work()
    except Corrupt as error:
        if name in str(error):
            return None
        raise


@damaged
def test_root(store, damage):
    good = read(store, key.ROOT)
    opened = weightvc.open(store.url, cache=None)
    store.put(key.ROOT, damage(good))
    for work in (
        lambda: weightvc.open(store.url, cache=None),
        opened.refresh,
        lambda: opened.commit(Bits({})),
        lambda: opened.branch("b"),
    ):
        with pytest.raises(Corrupt, match="root"):
            work()
    assert read(store, key.ROOT) == damage(good)
    store.put(key.ROOT, good)
    assert held(opened) == weights(8)


@damaged
def test_page(store, damage):
    (page,) = listed(store, "page")
    store.put(page, damage(read(store, page)))
    repository = weightvc.open(store.url, cache=None)
    with pytest.raises(Corrupt, match=page):
        repository.tags()
    with pytest.raises(Corrupt, match=page):
        repository.tag("v2")
    assert held(repository, "main") == weights(8)
    repository.commit(Bits(weights(9)))
    assert held(repository, "main") == weights(9)


@damaged
def test_segment(store, damage):
    repository = weightvc.open(store.url, cache=None)
    (segment,) = [ref.key for ref in repository.refresh().segments]
    store.put(segment, damage(read(store, segment)))
    with pytest.raises(Corrupt, match=segment):
        list(repository.log())
    assert [version.step for version in repository.log(n=2)] == [8, 7]
    with pytest.raises(Corrupt, match=segment):
        held(repository, "main")  # the only base is there
    assert repository.branches()["main"] == repository.resolve().id


@damaged
@pytest.mark.parametrize(
    ("kind", "which"), [("schema", 0), ("manifest", 0), ("manifest", -1), ("pack", 0), ("pack", -1)]
)
def test_object(store, damage, kind, which, tmp_path):
    """Every version reads exactly or is refused naming the object; a directory stays as it was."""
    repository = weightvc.open(store.url, cache=tmp_path / "cache")
    ids = [version.id for version in repository.log()][::-1]
    target = tmp_path / "out"
    weightvc.open(store.url, cache=None).checkout(ids[0], target)
    name = sorted(listed(store, kind), key=begin)[which]  # of the base or of the newest version
    good = read(store, name)
    store.put(name, damage(good))
    # Of a pack that no cache is to keep only blocks are read: what lies around them is fsck's to find.
    harmless = kind == "pack" and damage(good)[8 : len(good)] == good[8:]
    refused = []
    for number, ident in enumerate(ids):
        fresh = weightvc.open(store.url, cache=None)
        if whole := attempt(name, lambda fresh=fresh, ident=ident: held(fresh, ident)):
            assert whole == weights(number)
        else:
            refused.append(number)
        before = lying(target)
        done = attempt(name, lambda ident=ident: repository.checkout(ident, target))
        assert lying(target) == (weights(number) if done else before)
    assert refused == ([] if harmless and which == 0 else list(range(9)) if which == 0 else [8])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []
    store.put(name, good)
    for number, ident in enumerate(ids):  # and nothing bad was cached
        assert held(repository, ident) == weights(number)


@damaged
def test_layout_and_files(memory_url, damage, tmp_path):
    from tests.kit.weights import files_below, write_shards

    repository = weightvc.init(memory_url, cache=None)
    write_shards(tmp_path / "in", WEIGHTS, 2)
    (tmp_path / "in" / "tokenizer.json").write_bytes(random.Random(1).randbytes(100_000))
    repository.commit(tmp_path / "in")
    for kind in ("layout", "file"):
        (name,) = listed(repository.store, kind)
        good = read(repository.store, name)
        repository.store.put(name, damage(good))
        reader = weightvc.open(memory_url, cache=None)
        with pytest.raises(Corrupt, match=name):
            reader.checkout("main", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert held(reader) == WEIGHTS  # which needs no layout
        repository.store.put(name, good)
        reader.checkout("main", tmp_path / kind)
        assert files_below(tmp_path / kind) == files_below(tmp_path / "in")


def test_a_missing_base_is_an_error_before_any_write(store, tmp_path):
    """An empty cache, and the base is gone: a clear error, and the directory as it was."""
    repository = weightvc.open(store.url, cache=None)
    first = list(repository.log())[-1]
    target = tmp_path / "out"
    repository.checkout(first.id, target)
    before = lying(target)
    base = repository.entry(first.id).place.manifest
    store.delete([base])
    fresh = weightvc.open(store.url, cache=tmp_path / "empty")
    with pytest.raises((KeyNotFound, Corrupt), match=base):
        fresh.load(framework="numpy")
    with pytest.raises((KeyNotFound, Corrupt)):
        fresh.checkout("main", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert lying(target) == before


def test_a_pack_that_is_missing_once(store, tmp_path):
    """A 404 leaves the reader where it was; the next pull succeeds."""
    repository = weightvc.open(store.url, cache=tmp_path / "cache")
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    before = lying(target)
    with tiny_format():
        pack = max(listed(store, "pack"), key=begin)
        data = read(store, pack)
        store.delete([pack])
        with pytest.raises((KeyNotFound, Corrupt)):
            repository.checkout("main", target)
        assert lying(target) == before
        store.put(pack, data)
        repository.checkout("main", target)
        assert lying(target) == weights(8)


def test_the_patch_of_another_version_changes_nothing(memory_url, tmp_path):
    """A reader is handed v4's manifest where v3's should be: refused, nothing written."""
    repository = weightvc.init(memory_url, cache=None)
    for i in range(5):
        repository.commit(Bits(weights(i)))
    repository.checkout("main~2", tmp_path / "out")
    before = lying(tmp_path / "out")
    seen = swap.must_read(repository.store)
    tail = list(seen.root.tail)
    place = replace(tail[3].place, manifest=tail[4].place.manifest)
    tail[3] = replace(tail[3], place=place)
    repository.store.swap(key.ROOT, roots.encode(seen.root.next(tail=tuple(tail))), seen.etag)
    reader = weightvc.open(memory_url, cache=None)
    with pytest.raises(Corrupt, match="version"):
        reader.checkout("main~1", tmp_path / "out")
    assert lying(tmp_path / "out") == before
    assert held(reader, "main~2") == weights(2)


def test_bodies_that_are_cut_or_begin_elsewhere(stub, tmp_path):
    """The transport lies once: read again, and nothing bad is cached."""
    from tests.kit.stub import Body, Cut, IgnoreRange, WrongRange

    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    large = {("", "w"): tensor("U8", (300_000,), 1)}
    repository.commit(Bits(large))
    for i, action in enumerate((Cut(60_000), Cut(0), IgnoreRange(), WrongRange(), Body(b"<html>"), Body(b""))):
        cache = tmp_path / f"cache{i}"
        stub.fault(action, operation="GetObject", key="manifest/")
        for _ in range(2):
            reader = weightvc.open(place.url, cache=cache, **place.options)
            assert held(reader) == large
        stub.fault(action, operation="GetObject", key="manifest/")
        reader = weightvc.open(place.url, cache=None, **place.options)
        part = reader.tensor("main", "w", rows=slice(1000, 2000), framework="numpy")
        assert part.tobytes() == large["", "w"].data[1000:2000]
    stub.clear()


def test_bodies_that_are_always_bad(stub, tmp_path):
    from tests.kit.stub import Body

    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    repository.commit(Bits(WEIGHTS))
    stub.fault(Body(b"<html>no</html>"), operation="GetObject", key="manifest/", times=None)
    reader = weightvc.open(place.url, cache=tmp_path / "cache", **place.options)
    with pytest.raises(WeightvcError):
        held(reader)
    stub.clear()
    assert held(reader) == WEIGHTS


def test_zstd_frames():
    """Exactly one frame, of the size that it says, and no more than the cap."""
    import zstandard

    good = frame.compress(b"x" * 1000)
    assert frame.decompress(good, 1000, "it") == b"x" * 1000
    no_size = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 1000)
    bomb = frame.compress(bytes(256 << 20), 19)
    assert len(bomb) < 32 << 10
    for bad, limit in (
        (good + good, 10_000),
        (good + b"junk", 10_000),
        (good[:-1], 10_000),
        (good[: len(good) // 2], 10_000),
        (b"", 10_000),
        (good, 999),
        (no_size, 10_000),
        (bomb, 1 << 20),
    ):
        with pytest.raises(Corrupt, match="it"):
            frame.decompress(bad, limit, "it")
