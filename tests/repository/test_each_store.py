"""Letting go, collecting and damage, from end to end in a directory and on real S3."""

import os
import time
from pathlib import Path

import pytest

import weightvc
from tests.kit.garbage import names, orphan
from tests.kit.weights import Bits, held, lying, tiny_format
from tests.repository.test_fsck import fresh, listed, spoil, weights
from weightvc.errors import Corrupt, Expired
from weightvc.objects import key, version
from weightvc.objects.retention import Policy, Rules

pytestmark = pytest.mark.parametrize("place", ["local", "s3"], indirect=True)


def test_two_of_ten_are_kept(again, tmp_path):
    """Case 25: a new host gets v9 from v0 and patches that are steps by now, a host at v8 one patch."""
    repository = again()
    ids = [repository.commit(Bits(weights(i)), step=i).id for i in range(10)]
    near = again(cache=tmp_path / "cache")
    near.checkout(ids[8], tmp_path / "near")
    repository.expire(Rules(last=2))
    repository.gc(grace=0, force=True)
    again().checkout("main", tmp_path / "cold")
    assert lying(tmp_path / "cold") == weights(9)
    before = near.stats.reads
    near.checkout("main", tmp_path / "near")
    assert near.stats.reads - before == 2  # the root, and the manifest with the patch in it
    assert lying(tmp_path / "near") == weights(9)
    assert held(again(), ids[8]) == weights(8)
    with pytest.raises(Expired):
        again().load(ids[7], framework="numpy")


def test_damage_stops_collection_and_what_needs_it(place, again):
    """Case 33: whatever was in a root, a page or a segment, it is named, and nothing is deleted."""
    url, options = place
    with tiny_format():
        repository = again()
        ids = [repository.commit(Bits(weights(i)), step=i).id for i in range(9)]
        repository.tag("v1", ids[8])
        orphan(repository, 1)
        root = repository.refresh()
        before = names(repository)
        for name in (root.tags, root.segments[0].key, key.ROOT):
            for damage in (
                lambda data: b"",
                lambda data: b" " * len(data),
                lambda data: bytes(len(data)),
                lambda data: data[: len(data) // 2],
                lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            ):
                good = spoil(repository.store, name, damage)
                with pytest.raises(Corrupt, match=name.replace(".", r"\.")):
                    repository.gc(grace=0, force=True)
                if name == root.tags:
                    assert held(fresh(url, **options), "main") == weights(8)
                elif name != key.ROOT:
                    assert fresh(url, **options).resolve("main").id == ids[8]
                assert [one.key for one in weightvc.fsck(url, cache=None, **options).damages] == [name]
                repository.store.put(name, good)
        assert names(repository) == before
        spoil(repository.store, key.ROOT, lambda data: data[:100])
        fresh(url, lazy=True, **options).rebuild_root(adopt=True)
        assert [version.id for version in again().log()] == ids[::-1]
        assert held(again()) == weights(8)
        assert again().tags() == {"v1": ids[8]}


def test_an_old_object_that_was_let_go_of_just_now(place, again, tmp_path):
    """Case 36: its age is nothing to the collector."""
    url, _ = place
    repository = again()
    for i in range(3):
        repository.commit(Bits(weights(i)), base=True)
    if Path(url).is_dir():
        month_ago = time.time() - 30 * 86400
        for one in repository.store.list():
            os.utime(Path(url) / one.key, (month_ago, month_ago))
    reader = again()
    with reader.source("main~1", whole=True) as source:
        repository.reset("main", "main~2", rewind=True)
        for _ in range(20):  # the clock of S3 tells whole seconds, and so may be behind the reset
            if any(one.state == "expired" for one in repository.expire(Policy({"*": Rules(last=1)}, 0)).decisions):
                break
            time.sleep(0.2)
        before = names(repository)
        for _ in range(2):
            assert repository.gc(grace=3600, force=True).deleted.objects.total() == 0
        assert before <= names(repository)
        got = {("", t.name): bytes(source.read(i, 0, t.nbytes)) for i, t in enumerate(source.tensors)}
    assert got == {name: one.data for name, one in weights(1).items()}
    # Without a grace period it goes.
    gone = 0
    for _ in range(20):
        gone += repository.gc(grace=0, force=True).deleted.objects["manifest"]
        if gone == 2:
            break
        time.sleep(0.2)
    assert gone == 2
    assert held(again()) == weights(0)


@pytest.mark.parametrize("hours", [-7, 7])
def test_hosts_whose_clocks_are_hours_off(again, monkeypatch, hours):
    """A writer's clock, and the collector's: garbage is as old as the store says, and nothing goes too early."""
    hour, real, real_ns = 3600, time.time, time.time_ns
    writer, keeper = again(), again()
    writer.commit(Bits(weights(0)), base=True)
    with monkeypatch.context() as patched:
        patched.setattr(version, "make", _later(version.make, hours * hour * 10**6))
        writer.commit(Bits(weights(1)), base=True)
    writer.commit(Bits(weights(2)), base=True)
    left = orphan(writer, 1)
    before = names(writer)
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: real() - hours * hour)
        if Path(writer.url).is_dir():  # requests to S3 are signed with the time, and refused if that is far off
            patched.setattr(time, "time_ns", lambda: real_ns() - hours * hour * 10**9)
        for _ in range(2):
            done = keeper.gc(grace=hour, force=True)
            assert (done.condemned.objects.total(), done.deleted.objects.total()) == (0, 0)
        assert before <= names(writer)
        result = keeper.expire(Policy({"*": Rules(within=hour)}, hour))
        assert [one.state for one in result.decisions] == ["kept"] * 3
        assert keeper.gc(grace=0, force=True).deleted.objects["pack"] == 1
    assert left not in names(writer)
    assert [held(again(), f"main~{i}") for i in range(3)] == [weights(i) for i in (2, 1, 0)]


def _later(make, micros):
    return lambda **more: make(**more | {"now": time.time_ns() // 1000 + micros})


def test_a_pack_is_cut_to_nothing_and_the_same_weights_are_committed_again(place, again, tmp_path):
    """Case 39: an equal version does not hide the damage, nothing bad is cached, and repair puts the pack back."""
    url, options = place
    with tiny_format():
        writer = again(cache=tmp_path / "writer")
        writer.commit(Bits(weights(0)))
        writer.commit(Bits(weights(1)))
        writer.checkout("main", tmp_path / "held")
        pack = listed(writer.store, "pack")[-1]
        good = spoil(writer.store, pack, lambda data: b"")
        made = writer.commit(Bits(weights(1)))
        reader = again(cache=tmp_path / "reader")
        for _ in range(2):
            with pytest.raises(Corrupt, match=pack.replace(".", r"\.")):
                reader.checkout("main", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        report = fresh(url, **options).fsck()
        assert [one.key for one in report.damages] == [pack]
        assert made.id in {one.id for one in report.damages[0].lost}
        report = fresh(url, **options).fsck(repair=True, sources=[tmp_path / "held"])
        assert fresh(url, **options).fsck(read_data=1).ok
        got = writer.store.get(pack)
        assert got is not None
        assert got.data in (good, b"")  # the same bytes, or a new base beside it
        reader.checkout("main", tmp_path / "out")
        assert lying(tmp_path / "out") == weights(1)
