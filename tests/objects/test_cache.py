"""The cache: names never lead out of it, nothing waits, and it stays as small as it was told."""

import os
import re
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

import weightvc
from tests.kit import faults
from tests.kit.forge import Forge
from weightvc import claims
from weightvc.cache import OBJECTS, Cache
from weightvc.errors import Corrupt
from weightvc.objects import frame
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.protocol import spool

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
        for do in (
            cache.has_tree,
            lambda name: cache.open_tree(name, schema_of(3)),
            lambda name: cache.write_tree(schema_of(3), name),
            writer.commit,
        ):
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
        Cache(tmp_path, objects=limit).put(key_of(data := i.to_bytes(800, "big")), data)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 4 * limit


def keep(cache: Cache, digest: str, nbytes: int) -> None:
    writer = cache.write_tree(schema_of(nbytes))
    assert writer is not None
    writer.write(0, b"x" * nbytes)
    writer.commit(digest)


def test_trees_and_objects_stay_within_the_limit_and_the_newest_are_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=100_000)
    for i in range(40):
        cache.put(key_of(data := i.to_bytes(5000, "big")), data)
        keep(cache, f"{i:064x}", 20_000)
        os.utime(tmp_path / "trees" / f"{i:064x}", (i, i))
        size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert size <= 100_000
        assert cache.has_tree(f"{i:064x}")
    assert cache.trees() == {f"{i:064x}" for i in (37, 38, 39)}
    # One that cannot be held drives nothing out, and what is being written spares the newest one.
    assert cache.write_tree(schema_of(75_001)) is None
    assert len(cache.trees()) == 3
    large = cache.write_tree(schema_of(75_000))
    assert large is not None
    assert cache.trees() == {f"{39:064x}"}
    large.drop()
    assert cache.trees() == {f"{39:064x}"}
    cache.put(name := key_of(data := bytes(25_001)), data)
    assert cache.get(name) is None


def test_one_writes_a_tree_and_a_dead_one_s_is_begun_anew(cache: Cache) -> None:
    first = cache.write_tree(schema_of(3), TREE)
    assert first is not None
    assert cache.write_tree(schema_of(3), TREE) is None
    first.write(0, b"ab")
    (path,) = (cache.directory / "trees").iterdir()
    os.utime(path, (0, 0))
    second = cache.write_tree(schema_of(3), TREE)
    assert second is not None
    second.write(0, b"a")
    # The one that was taken for dead was not: it leaves the other's file alone.
    first.commit(TREE)
    assert not cache.has_tree(TREE)
    second.write(1, b"bc")
    second.commit(TREE)
    flat = cache.open_tree(TREE, schema_of(3))
    assert flat is not None
    assert flat.read(0, 3) == b"abc"
    third = cache.write_tree(schema_of(3), TREE)
    assert third is not None
    third.drop()
    assert [one.name for one in (cache.directory / "trees").iterdir()] == [TREE]


def test_a_limit_is_told_when_a_repository_is_opened(tmp_path: Path) -> None:
    for bad in (0, -1, 1.5, "10G", True):
        with pytest.raises(weightvc.Refused, match="cache_limit"):
            weightvc.open(tmp_path / "repository", lazy=True, cache=tmp_path / "cache", cache_limit=bad)
    weights = {"w": numpy.frombuffer(os.urandom(1 << 20), numpy.uint8)}
    writer = weightvc.init(tmp_path / "repository", cache=tmp_path / "cache", cache_limit=1 << 20)
    with pytest.warns(weightvc.WeightvcWarning, match="keeps no weights"):
        writer.commit(weights)
    for step in range(3):
        writer.commit({"w": weights["w"] + numpy.uint8(step)})
        assert numpy.array_equal(writer.load(framework="numpy")["w"], weights["w"] + numpy.uint8(step))
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert size <= 1 << 20


def test_a_limit_that_no_version_fits_in_is_said_once(tmp_path: Path) -> None:
    """With what has to be given instead; that is then enough, and one byte less is not."""
    cache = Cache(tmp_path, limit=1 << 20)
    with pytest.warns(weightvc.WeightvcWarning) as said:
        assert [cache.write_tree(schema_of(nbytes)) for nbytes in (1 << 20, 1 << 21)] == [None, None]
    (text,) = (str(one.message) for one in said)
    assert str(tmp_path) in text
    assert f"has {1 << 20} bytes" in text
    assert f"its limit of {1 << 20} leaves {3 << 18}" in text
    for nbytes in (*range(1, 30), 1 << 20, 3 * OBJECTS - 1, 3 * OBJECTS, 3 * OBJECTS + 1, 1 << 40):
        with pytest.warns(weightvc.WeightvcWarning) as said:
            assert Cache(tmp_path, limit=1).write_tree(schema_of(2 + nbytes)) is None
        need = int(re.findall(r"has to be (\d+) or more", str(said[0].message))[0])
        assert Cache(tmp_path, limit=need)._bounds()[1] >= 2 + nbytes
        assert Cache(tmp_path, limit=need - 1)._bounds()[1] < 2 + nbytes


def test_one_of_many_fetches(cache: Cache) -> None:
    name, count = key_of(DATA), []
    go_on = threading.Event()

    def fetch() -> bytes:
        count.append(1)
        assert go_on.wait(30)
        return DATA

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.fetched(name, fetch))) for _ in range(8)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 8
    assert len(count) == 1
    assert [path.name for path in (cache.directory / "objects" / "file").iterdir()] == [name.partition("/")[2]]


def test_a_fetch_that_fails_lets_the_next_one_try(cache: Cache) -> None:
    name, begun, fail = key_of(DATA), threading.Event(), threading.Event()

    def failing() -> bytes:
        begun.set()
        assert fail.wait(30)
        raise weightvc.Unavailable("the network is away")

    def first() -> None:
        with pytest.raises(weightvc.Unavailable):
            cache.fetched(name, failing)

    owner = threading.Thread(target=first)
    owner.start()
    assert begun.wait(30)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(cache.fetched(name, lambda: DATA)))
    waiting.start()
    fail.set()
    owner.join()
    waiting.join()
    assert found == [DATA]


def test_where_nothing_is_left_the_others_do_not_take_turns(tmp_path: Path) -> None:
    begun, end, together = threading.Event(), threading.Event(), threading.Barrier(3)

    def first() -> bytes:
        begun.set()
        assert end.wait(30)
        return DATA

    def other() -> bytes:
        together.wait(30)
        return DATA

    looked: Counter[int] = Counter()

    def look() -> bytes | None:
        looked[threading.get_ident()] += 1
        return None

    path = tmp_path / "claim"
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(claims.once(path, lambda: None, first)))]
    threads[0].start()
    assert begun.wait(30)
    threads += [threading.Thread(target=lambda: found.append(claims.once(path, look, other))) for _ in "123"]
    for thread in threads[1:]:
        thread.start()
    patience = time.monotonic() + 30
    while sorted(looked.values())[:1] < [2] or len(looked) < 3:  # until all of them wait
        assert time.monotonic() < patience
        time.sleep(0.01)
    end.set()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 4


def test_who_was_killed_or_stopped_while_it_fetched_is_not_waited_for(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "STALE", 0.2)
    for ends in (signal.SIGKILL, signal.SIGSTOP):
        data = os.urandom(100)
        name = key_of(data)

        def work(ends: int = ends, data: bytes = data, name: str = name) -> str:
            def fetch() -> bytes:
                os.kill(os.getpid(), ends)
                return data

            return bytes(cache.fetched(name, fetch)).hex()

        child = faults.fork(work, tmp_path / "result")
        claim = cache.directory / "objects" / name.replace("/", "/.claim-")
        end = time.monotonic() + 30
        while not claim.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        if ends == signal.SIGSTOP:
            os.waitpid(child, os.WUNTRACED)
        assert cache.fetched(name, lambda data=data: data) == data
        assert not claim.exists()
        if ends == signal.SIGSTOP:
            os.kill(child, signal.SIGCONT)
        assert faults.wait(child) == (0 if ends == signal.SIGSTOP else -9)
        assert cache.get(name) == data


def test_who_lives_and_has_nothing_is_not_waited_for_for_ever(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PULSE", 0.02)
    monkeypatch.setattr(claims, "STALE", 20.0)
    monkeypatch.setattr(claims, "PATIENCE", 0.3)
    name, begun, end = key_of(DATA), threading.Event(), threading.Event()

    def slow() -> bytes:
        begun.set()
        assert end.wait(60)
        return DATA

    owner = threading.Thread(target=cache.fetched, args=(name, slow))
    owner.start()
    assert begun.wait(30)
    assert cache.fetched(name, lambda: DATA) == DATA
    assert owner.is_alive()
    end.set()
    owner.join()
    assert cache.get(name) == DATA


def test_a_claim_that_is_touched_stands(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PULSE", 0.02)
    monkeypatch.setattr(claims, "STALE", 1.0)
    name, begun, taken = key_of(DATA), threading.Event(), threading.Event()

    def slow() -> bytes:
        begun.set()
        taken.wait(2.5)  # longer than an untouched claim would stand
        return DATA

    owner = threading.Thread(target=cache.fetched, args=(name, slow))
    owner.start()
    assert begun.wait(30)
    assert cache.fetched(name, lambda: taken.set() or b"") == DATA
    assert not taken.is_set()
    owner.join()


def test_a_place_that_cannot_be_written_only_costs_fetches(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    cache = Cache(tmp_path / "cache")
    assert [cache.fetched(key_of(DATA), lambda: DATA) for _ in range(2)] == [DATA, DATA]


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


def test_a_claim_that_cannot_be_removed_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or one in a directory that became read-only. Here a directory, which no unlink() removes."""
    monkeypatch.setattr(claims, "STALE", 0.05)
    monkeypatch.setattr(claims, "PATIENCE", 1e9)
    (tmp_path / "claim").mkdir()
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: found.append(claims.once(tmp_path / "claim", lambda: None, lambda: b"x")), daemon=True
    )
    thread.start()
    thread.join(20)
    assert found == [b"x"]


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[Path]:
    """A cache that another user made, who shares it with nobody. This process is not root for so long."""
    directory = tmp_path / "cache"
    directory.mkdir(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield directory
    if root:
        os.seteuid(0)
    directory.chmod(0o700)


def test_a_cache_of_another_user_is_no_cache(unreadable: Path) -> None:
    url = f"memory://{secrets.token_hex(8)}"
    with weightvc.init(url, cache=unreadable) as repository:
        for step in range(2):
            repository.commit({"w": numpy.full(5000, step, numpy.int32)}, step=step)
        assert repository.load("main", framework="numpy")["w"].sum() == 5000


def test_patches_are_spooled_elsewhere_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY", 0)
    (tmp_path / "file").touch()
    held = spool.Spool(tmp_path / "file" / "cache")
    read = held.keep(b"0123456789")
    assert read(2, 5) == b"234"
    held.close()
