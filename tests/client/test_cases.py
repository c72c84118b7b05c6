"""What has gone wrong for others who pull weights, against the client: all kinds of target, disk and a server."""

import contextlib
import errno
import json
import os
import secrets
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import weightvc
from tests.kit import faults
from tests.kit.servers import Place
from tests.kit.stub import Body, Cut, Hang, IgnoreRange, Status, Stub, WrongRange
from tests.kit.weights import tiny_format
from weightvc import live
from weightvc.filesystem import WeightvcFileSystem
from weightvc.objects import key, manifest
from weightvc.objects import root as roots
from weightvc.protocol import checkout, files, swap
from weightvc.stores import s3
from weightvc.targets import Directory, Slots

Weights = dict[str, np.ndarray[Any, Any]]
SIZE = 1_000


def weights(step: int) -> Weights:
    """Every step changes all of a and some of b."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 16, SIZE).astype(np.uint16), rng.integers(0, 1 << 16, SIZE).astype(np.uint16)
    b[step] ^= 1
    return {"a": a + np.uint16(step), "b": b}


@pytest.fixture(params=["local", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "local":
        return str(tmp_path / "repository"), {}
    place: Place = request.getfixturevalue("s3_place")
    return place.url, place.options


@pytest.fixture
def remote(stub: Stub) -> tuple[str, dict[str, Any]]:
    """A place in an S3 server that misbehaves on demand."""
    place = stub.place()
    return place.url, place.options


def published(remote: tuple[str, dict[str, Any]], steps: int, **options: Any) -> list[weightvc.Version]:
    url, more = remote
    with weightvc.init(url, cache=None, **more) as writer:
        return [writer.commit(weights(step), step=step, **options) for step in range(steps)]


def test_eight_engines_of_a_host_pull_once(stub: Stub, remote: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Each pulls a version from nothing, and the next one; everything but the root is fetched once."""
    url, options = remote
    with tiny_format():
        versions = published(remote, 2)
        stub.fault(Hang(0.02), operation="GetObject", times=None)
        weightvc.Client(url, cache=None, into=weights(7), **options).pull()  # what is imported here is so in children
        before = len(stub.log)

        def work() -> None:
            target = {name: np.zeros_like(value) for name, value in weights(0).items()}
            client = weightvc.Client(url, cache=tmp_path / "cache", into=target, **options)
            for step, version in enumerate(versions):
                client.pull(version)
                assert all(np.array_equal(target[name], value) for name, value in weights(step).items())

        children = [faults.fork(work, tmp_path / f"result{i}") for i in range(8)]
        assert [faults.wait(child) for child in children] == [0] * 8
    asked = [request.key for request in stub.log[before:] if not request.key.endswith("/root")]
    assert sum("/pack/" in key for key in asked) > 4
    assert len(asked) == len(set(asked))


# Directories: killed, or the disk full, at any moment


def read(path: Path) -> Weights:
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("where", "way", "fault"),
    [
        *product(["local"], ["swap", "two renames", "slots", "slots and cache"], [faults.die, faults.full_disk]),
        ("s3", "slots", faults.full_disk),
    ],
    indirect=["where"],
)
def test_at_any_file_operation_it_is_the_old_version_or_the_new(
    where: tuple[str, dict[str, Any]],
    tmp_path: Path,
    way: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases 21 and 29, and what was held is usable all the time; then the next pull gets the new one."""
    versions = published(where, 2)
    kind: Any = Slots if way.startswith("slots") else Directory
    full = fault is faults.full_disk
    if way == "two renames":
        monkeypatch.setattr(checkout, "_rename_exchange", lambda one, other: False)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # nothing here tells whether it was done, and it is slow
    k, ends = 0, set()
    while True:
        place = tmp_path / f"{k}" / "served"
        options = {"cache": tmp_path / f"cache{k}" if way.endswith("cache") else None, **where[1]}
        weightvc.Client(where[0], into=kind(place), **options).pull(versions[0])
        there = {path.name for path in place.parent.iterdir()}

        def work(place: Path = place, k: int = k, options: dict[str, Any] = options) -> str:
            client = weightvc.Client(where[0], into=kind(place), **options)
            faults.die_at_file_operation(k, fault)
            try:
                client.pull(versions[1])
            except weightvc.Unavailable as error:
                return "full" if "make space" in str(error) else str(error)
            return "done"

        status = faults.wait(faults.fork(work, tmp_path / "result"))
        assert status == 0 if full else status in (0, -9)
        ended = "killed" if status else json.loads((tmp_path / "result").read_text())
        assert ended in ("killed", "full", "done")
        client = weightvc.Client(where[0], into=kind(place), **options)
        held = client.current()
        assert held in versions
        current = place if kind is Directory else place / "current"
        step = versions.index(held)
        assert same(read(current), weights(step))
        assert client.verify() == []
        if ended != "killed":
            # Nothing is left lying about. (What was staged whole may be, and is used.)
            assert {path.name for path in place.parent.iterdir()} - {".served.next"} == there
            assert not any(".weightvc-" in path.name for path in place.iterdir())
        ends.add(step)
        client.pull(versions[1])
        assert same(read(current), weights(1))
        assert client.verify() == []
        assert {path.name for path in place.parent.iterdir()} == there
        assert not any(".weightvc-" in path.name for path in place.iterdir())
        if ended == "done":
            break
        k += 1
    assert k >= 8
    assert ends == {0, 1}


# All kinds of target, in a directory and on a server


class Host:
    """A client with a target of some kind, and what is seen of it."""

    def __init__(self, where: tuple[str, dict[str, Any]], kind: str, place: Path, **options: Any) -> None:
        self.blank = {name: np.zeros_like(value) for name, value in weights(0).items()}
        self.target = self.blank if kind == "tensors" else Slots(place) if kind == "slots" else place
        self.path = None if kind == "tensors" else place / "current" if kind == "slots" else place
        self.client = weightvc.Client(where[0], into=self.target, **{"cache": None, **where[1], **options})

    def holds(self, step: int | None) -> bool:
        """Whether it is a step's bits (None: what it was before the first), and says so."""
        if step is None:
            empty = not any(value.any() for value in self.blank.values())
            return empty and self.client.current() is None and (self.path is None or not self.path.exists())
        held = self.client.current()
        there = self.blank if self.path is None else read(self.path)
        return held is not None and held.step == step and same(there, weights(step)) and self.client.verify() == []


KINDS = pytest.mark.parametrize("kind", ["tensors", "directory", "slots"])


@KINDS
def test_interrupted_between_two_tensors(
    where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 21, for what is in memory: at every write. (For directories, a write to a file fails.)"""
    versions = published(where, 2)
    k = 0
    while True:
        host = Host(where, kind, tmp_path / str(k))
        host.client.pull(versions[0])
        with monkeypatch.context() as patch:
            module: Any = (live.Write, "apply") if kind == "tensors" else (files, "_write_all")
            done, count = getattr(*module), iter(range(k))

            def failing(*arguments: Any, done: Any = done, count: Any = count) -> None:
                if next(count, None) is None:
                    raise KeyboardInterrupt
                done(*arguments)

            patch.setattr(*module, failing)
            with contextlib.suppress(KeyboardInterrupt):
                host.client.pull(versions[1])
        complete = host.client.current() == versions[1]
        if not complete:
            assert host.client.current() is None if kind == "tensors" else host.holds(0)
        host.client.pull(versions[1])
        assert host.holds(1)
        if complete:
            break
        k += 1
    assert k >= 2


@KINDS
def test_the_patch_of_another_version(where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path) -> None:
    """Case 22: at v2, handed v3 to v4 where v2 to v3 is asked for. Refused, nothing written; then it is mended."""
    versions = published(where, 5)
    host = Host(where, kind, tmp_path / "served")
    host.client.pull(versions[2])
    writer = weightvc.open(where[0], cache=None, **where[1])
    seen = swap.must_read(writer.store)
    tail = list(seen.root.tail)
    assert tail[3].place is not None
    assert tail[4].place is not None
    tail[3] = replace(tail[3], place=replace(tail[3].place, manifest=tail[4].place.manifest))
    wrong = seen.root.next(tail=tuple(tail))
    etag = writer.store.swap(key.ROOT, roots.encode(wrong), seen.etag)
    with pytest.raises(weightvc.Corrupt, match="version"):
        host.client.pull(versions[3])
    assert host.holds(2)
    writer.store.swap(key.ROOT, roots.encode(wrong.next(tail=seen.root.tail)), etag)
    host.client.pull(versions[3])
    assert host.holds(3)


@KINDS
def test_a_base_that_is_gone(where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path) -> None:
    """Case 22: an empty cache, and the base is deleted. An error that names it; then another base leads there."""
    versions = published(where, 3)
    writer = weightvc.open(where[0], cache=tmp_path / "writer", **where[1])
    writer.load(versions[2], framework="numpy")
    place = writer.entry(versions[0]).place
    assert place is not None
    writer.store.delete([place.manifest])
    host = Host(where, kind, tmp_path / "served", cache=tmp_path / "cache")
    with pytest.raises((weightvc.NotFound, weightvc.Corrupt), match=place.manifest):
        host.client.pull(versions[2])
    assert host.holds(None)
    writer.commit(weights(3), step=3, base=True)
    host.client.pull("main")
    assert host.holds(3)


@KINDS
def test_back_to_an_older_version_and_after_a_reset(
    where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    """Case 23."""
    versions = published(where, 4)
    host = Host(where, kind, tmp_path / "served")
    host.client.pull("main")
    host.client.pull(versions[1])
    assert host.holds(1)
    host.client.pull("main")
    with weightvc.open(where[0], cache=None, **where[1]) as writer:
        writer.reset("main", versions[1].id, rewind=True)
    host.client.pull("main")
    assert host.holds(1)


@KINDS
def test_a_pack_that_is_missing(where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path) -> None:
    """Case 24: the reader stays where it is, and the next pull succeeds."""
    with tiny_format():
        (first,) = published(where, 1)
        host = Host(where, kind, tmp_path / "served", cache=tmp_path / "cache")
        host.client.pull(first)
        writer = weightvc.open(where[0], cache=None, **where[1])
        store = writer.store
        before = {one.key for one in store.list("pack/")}
        second = writer.commit(weights(1), step=1)
        pack = next(one.key for one in store.list("pack/") if one.key not in before)
        got = store.get(pack)
        assert got is not None
        store.delete([pack])
        with pytest.raises((weightvc.NotFound, weightvc.Corrupt)):
            host.client.pull(second)
        assert host.holds(0)
        store.put(pack, got.data)
        host.client.pull(second)
        assert host.holds(1)


def test_a_pack_that_is_missing_once(stub: Stub, remote: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Case 24, where it is there when it is asked for again: nobody notices."""
    with tiny_format():
        versions = published(remote, 2)
        host = Host(remote, "tensors", tmp_path)
        host.client.pull(versions[0])
        missing = stub.fault(Status(404), operation="GetObject", key="/pack/")
        host.client.pull(versions[1])
        assert missing.done == 1
        assert host.holds(1)


@KINDS
def test_what_retention_keeps(where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path) -> None:
    """Case 25: two of ten are kept, the rest is collected. v9 from nothing is exact; from v8 it is one patch."""
    versions = published(where, 10)
    near = Host(where, kind, tmp_path / "near")
    near.client.pull(versions[8])
    with weightvc.open(where[0], cache=None, **where[1]) as writer:
        writer.expire(weightvc.Rules(last=2))
        for _ in range(2):
            writer.gc(grace=0, force=True)
    far = Host(where, kind, tmp_path / "far", cache=tmp_path / "cache")
    far.client.pull(versions[9])
    assert far.holds(9)
    update = near.client.pull(versions[9])
    assert near.holds(9)
    assert update.timings.requests == 2  # the root, and a manifest with the patch
    with pytest.raises(weightvc.Expired):
        near.client.pull(versions[3])
    assert near.holds(9)


@pytest.mark.parametrize("kind", ["directory", "slots"])
def test_modes(where: tuple[str, dict[str, Any]], kind: str, tmp_path: Path) -> None:
    """Case 27: as the umask has them, or as they were."""
    published(where, 2)
    host = Host(where, kind, tmp_path / "served")
    assert host.path is not None
    before = os.umask(0o002)
    try:
        host.client.pull("main~1")
        file = host.path / "model.safetensors"
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o664, 0o775)
        if kind == "directory":
            file.chmod(0o640)
        host.client.pull("main")
        assert file.stat().st_mode & 0o777 == (0o640 if kind == "directory" else 0o664)
    finally:
        os.umask(before)


@pytest.mark.parametrize("locks", ["no-op", "ENOLCK"])
def test_eight_readers_where_there_are_no_locks(
    where: tuple[str, dict[str, Any]], tmp_path: Path, locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 28: one cache, and for half of them one directory."""
    versions = published(where, 2)

    def flock(file: object, how: int) -> None:
        if locks == "ENOLCK":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def work(number: int) -> str:
        host = Host(where, "slots", tmp_path / ("shared" if number % 2 else str(number)), cache=tmp_path / "cache")
        for step in (0, 1, 0, 1):
            try:
                host.client.pull(versions[step])
            except weightvc.Conflict:  # another one moved the link
                continue
            if number % 2 == 0:
                assert host.holds(step)
        return "done"

    children = [faults.fork(lambda number=number: work(number), tmp_path / f"result{number}") for number in range(8)]
    assert [faults.wait(child) for child in children] == [0] * 8
    last = Host(where, "slots", tmp_path / "shared", cache=tmp_path / "cache")
    last.client.pull(versions[1])
    assert last.holds(1)


@pytest.mark.parametrize("fault", [faults.die, faults.full_disk])
def test_at_any_file_operation_a_cache_is_in_nobodys_way(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 29 for the cache: where it lies on a full disk, a pull that needs no other is done; whatever a killed
    process left in it, the next one gets what is right."""
    monkeypatch.setattr(manifest, "INLINE", 120)  # so that there are packs
    where = str(tmp_path / "repository"), {}
    versions = published(where, 2)
    k = 0
    while True:
        cache = tmp_path / f"{k}"
        Host(where, "tensors", tmp_path, cache=cache).client.pull(versions[0])

        def work(k: int = k, cache: Path = cache) -> int:
            host = Host(where, "tensors", tmp_path, cache=cache)
            seen = faults.die_at_file_operation(k, fault)
            host.client.pull(versions[1])
            assert host.holds(1)
            return len(seen)

        status = faults.wait(faults.fork(work, tmp_path / "result"))
        assert status in (0, -9 if fault is faults.die else 0)
        if fault is faults.full_disk:
            assert not [path for path in cache.rglob("*") if path.name.startswith((".tmp-", ".claim-"))]
        for step in (0, 1):
            after = Host(where, "tensors", tmp_path, cache=cache)
            after.client.pull(versions[step])
            assert after.holds(step)
        if status == 0 and int((tmp_path / "result").read_text()) < k:
            break
        k += 1
    assert k >= 8


READERS = ("tensors", "directory", "slots", "load", "rows", "file", "mirror")


class Reader:
    """One of those who read versions, with a cache; each opens the repository anew."""

    def __init__(self, kind: str, where: tuple[str, dict[str, Any]], place: Path) -> None:
        self.kind, self.where, self.place = kind, where, place
        self.options = {"cache": place / "cache", **where[1]}
        self.host = Host(where, kind, place / "served", **self.options) if kind in READERS[:3] else None

    def read(self, version: weightvc.Version, step: int) -> None:
        """Read a version, and see that it is the bits of that step."""
        url = self.where[0]
        if self.host is not None:
            self.host.client.pull(version)
            assert self.host.holds(step)
        elif self.kind == "load":
            assert same(
                weightvc.Client(url, **self.options).repository.load(version, framework="numpy"), weights(step)
            )
        elif self.kind == "rows":
            with weightvc.open(url, lazy=True, **self.options) as repository:
                rows = repository.tensor(version, "a", rows=slice(100, 900), framework="numpy")
            assert np.array_equal(rows, weights(step)["a"][100:900])
        elif self.kind == "file":
            # fsspec would give the one of before, with what that has read.
            files = WeightvcFileSystem(url, version.id, skip_instance_cache=True, **self.options)
            assert same(safetensors.numpy.load(files.cat_file("model.safetensors")), weights(step))
        else:
            near = weightvc.init(self.place / secrets.token_hex(4), cache=None)
            weightvc.mirror(weightvc.open(url, **self.options), near)
            assert near.fsck(read_data=True).ok
            assert same(near.load(version, framework="numpy"), weights(step))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("action", [Cut(100), Cut(0), IgnoreRange(), WrongRange(), Body(b"<html>")])
def test_bodies_that_are_cut_or_begin_elsewhere(
    stub: Stub,
    remote: tuple[str, dict[str, Any]],
    tmp_path: Path,
    action: Any,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 30, at the first request of an object and at one half-way: read again, and nothing bad is kept for the
    next one. (Only a server that is made to does it.)"""
    monkeypatch.setattr(manifest, "INLINE", 120)  # so that there are packs, and
    monkeypatch.setattr(s3, "_FIRST", 150)  # that objects come in two parts
    versions = published(remote, 2)
    for wanted in ("/manifest/", "/pack/"):
        place = tmp_path / wanted.strip("/")
        reader = Reader(kind, remote, place)
        for step, half_way in enumerate((False, True)):
            fault = stub.fault(action, operation="GetObject", key=wanted, range_from=int(half_way))
            reader.read(versions[step], step)
            assert fault.done == 1
        after = Reader(kind, remote, place)
        for step, version in enumerate(versions):
            after.read(version, step)
