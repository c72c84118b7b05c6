"""How many requests things take, and what a reader's identity needs."""

from collections import Counter

import pytest

import weightvc
from tests.kit import history
from tests.kit.weights import Bits, contents, flipped, held, lying, tensor, tiny_format
from weightvc.errors import AccessDenied, Expired
from weightvc.objects.retention import Rules
from weightvc.stores.base import Stats


def counts(stats: Stats) -> tuple[int, int, int]:
    return stats.reads, stats.writes, stats.lists


class Counted:
    """Requests of a repository inside a with statement: reads, writes, lists, bytes_read."""

    def __init__(self, repository: weightvc.Repository) -> None:
        self._stats = repository.stats

    def __enter__(self) -> "Counted":
        self._before = counts(self._stats), self._stats.bytes_read
        return self

    def __exit__(self, *_: object) -> None:
        self.reads, self.writes, self.lists = (a - b for a, b in zip(counts(self._stats), self._before[0]))
        self.bytes_read = self._stats.bytes_read - self._before[1]


def step(number: int) -> Bits:
    return Bits({("", "w"): flipped(tensor("BF16", (1000,), 0), 0.01, number)})


def test_a_small_commit_is_two_writes_and_every_64th_or_so_three(place, again, tmp_path):
    writer = again(cache=tmp_path / "cache")
    writer.commit(step(0))
    spills = 0
    for i in range(1, 141):
        with Counted(writer) as count:
            writer.commit(step(i))
        assert count.reads <= 3
        assert count.lists == 0
        assert count.writes in (2, 3)
        spills += count.writes == 3
    assert 1 <= spills <= 3
    assert len(list(again().log())) == 141
    # A process that starts with the cache at hand has to read no more.
    writer = again(cache=tmp_path / "cache")
    with Counted(writer) as count:
        writer.commit(step(999))
    assert count.writes == 2
    assert count.reads <= 3


def test_a_reader_one_behind_makes_two_reads(place, again, tmp_path):
    writer = again()
    writer.commit(step(0))
    readers = [again(cache=tmp_path / f"cache{i}") for i in range(3)]
    bare = again()
    readers[0].load(framework="numpy")
    readers[1].checkout("main", tmp_path / "out1")
    readers[2].load(framework="numpy")
    bare.checkout("main", tmp_path / "bare")
    for number in (1, 2):
        writer.commit(step(number))
        want = held(writer)
        readers[2] = again(cache=tmp_path / "cache2")  # a reader that was started again
        for i, (reader, pull) in enumerate(
            [
                (readers[0], lambda: readers[0].load(framework="numpy")),
                (readers[1], lambda: readers[1].checkout("main", tmp_path / "out1")),
                (readers[2], lambda: readers[2].load(framework="numpy")),
                (bare, lambda: bare.checkout("main", tmp_path / "bare")),
            ]
        ):
            # Opening reads the root once: the poll of readers[2] finds it unchanged.
            with Counted(reader) as count:
                pull()
            assert (count.reads, count.writes, count.lists) == (2, 0, 0), i
        assert lying(tmp_path / "out1") == lying(tmp_path / "bare") == want


def test_the_store_counts_the_same(stub, tmp_path):
    place = stub.place()
    writer = weightvc.init(place.url, cache=tmp_path / "cache", **place.options)
    writer.commit(step(0))
    reader = weightvc.open(place.url, cache=None, **place.options)
    reader.load(framework="numpy")
    stub.clear()
    writer.commit(step(1))
    asked = Counter(request.operation for request in stub.log)
    assert asked["PutObject"] == 2
    assert asked["GetObject"] <= 3
    assert asked.keys() == {"PutObject", "GetObject"}
    stub.clear()
    reader.load(framework="numpy")
    assert Counter(request.operation for request in stub.log) == {"GetObject": 2}
    stub.clear()
    assert reader.resolve().message == writer.resolve().message
    assert [(request.operation, "if-none-match" in request.headers) for request in stub.log] == [
        ("GetObject", True)
    ] * 2


def test_a_pack_is_one_read_more(place, again, tmp_path, monkeypatch):
    from weightvc.objects import manifest

    monkeypatch.setattr(manifest, "INLINE", 10)
    writer, reader = again(cache=tmp_path / "w"), again(cache=tmp_path / "r")
    writer.commit(step(0))
    reader.load(framework="numpy")
    with Counted(writer) as count:
        writer.commit(step(1))
    assert count.writes == 3
    with Counted(reader) as count:
        reader.load(framework="numpy")
    assert count.reads == 3


def test_an_idle_poll_is_one_conditional_read(place, again):
    writer, reader = again(), again()
    writer.commit(step(0))
    reader.refresh()
    with Counted(reader) as count:
        reader.refresh()
    assert (count.reads, count.writes, count.lists, count.bytes_read) == (1, 0, 0, 0)


def test_reading_needs_getobject_and_nothing_else(s3_place, tmp_path):
    writer = weightvc.init(s3_place.url, cache=None, **s3_place.options)
    writer.commit(step(0))
    reader = weightvc.open(s3_place.url, cache=tmp_path / "cache", **s3_place.reader_options)
    assert held(reader) == held(writer)
    reader.checkout("main", tmp_path / "out")
    writer.commit(step(1))
    writer.tag("v1")
    with Counted(reader) as count:
        reader.checkout("main", tmp_path / "out")
    assert (count.reads, count.writes, count.lists) == (2, 0, 0)
    assert lying(tmp_path / "out") == held(writer, "v1")
    assert reader.tags() == writer.tags()
    assert reader.verify(tmp_path / "out").ok
    assert len(list(reader.log())) == 2
    for change in (lambda: reader.commit(step(2)), lambda: reader.tag("v2"), lambda: reader.branch("b")):
        with pytest.raises(AccessDenied):
            change()
    assert [version.id for version in writer.log()] == [version.id for version in reader.log()]


def test_a_reader_that_may_only_get_learns_that_its_version_has_expired(s3_place, tmp_path):
    """S3 denies a missing key to those who may not list: that must not hide that a version has expired."""
    writer = weightvc.init(s3_place.url, cache=None, **s3_place.options)
    with tiny_format():
        ids = [writer.commit(step(i), base=i in (0, 4)).id for i in range(6)]
        reader = weightvc.open(s3_place.url, cache=None, **s3_place.reader_options)
        gone, begun = reader.source(ids[1]), reader.source(ids[1])
        begun.read(0, 0, 64)
        writer.expire(Rules(last=1))
        writer.gc(grace=0, force=True)
        for source in (gone, begun):
            with pytest.raises(Expired):
                contents(source)
        with pytest.raises(Expired):
            reader.load(ids[1], framework="numpy")
        assert held(reader) == held(writer)


def test_the_log_of_ten_thousand_versions_takes_few_reads(s3_place):
    repository = weightvc.init(s3_place.url, cache=None, **s3_place.options)
    first = repository.commit(step(0))
    ids = history.extend(repository.store, 10_000)
    reader = weightvc.open(s3_place.url, cache=None, **s3_place.options)
    with Counted(reader) as count:
        log = list(reader.log(n=1000))
    assert [version.id for version in log] == ids[:-1001:-1]
    print(f"log -n 1000 of 10,000 versions: {count.reads} reads, {count.bytes_read:,} bytes")
    assert count.reads <= 5
    everything = [version.id for version in reader.log()]
    assert everything == [*reversed(ids), first.id]
    assert reader.resolve("main@{step=5}").id == ids[4]
    assert reader.resolve("main~9999").id == ids[0]
    with Counted(reader) as count:
        made = reader.commit(step(1), branch="other", parents=[first.id])
    assert made.parents == (first.id,)
    assert count.writes == 2
    assert count.reads <= 3


def test_a_long_history_costs_what_a_short_one_does(tmp_path):
    """benchmarks/scale.py has it in full, with times."""
    asked: list[list[tuple[int, int, int]]] = []
    roots_: list[int] = []
    for count in (100, 3000):
        url = str(tmp_path / str(count))
        weightvc.init(url, cache=None).commit(Bits(history.weights(0)))
        ids = history.lay(weightvc.open(url, cache=None).store, count)
        assert weightvc.fsck(url, cache=None, read_data=0.02, seed=1).ok
        writer, reader = weightvc.open(url, cache=tmp_path / f"cache{count}"), weightvc.open(url, cache=None)
        assert held(reader, ids[count // 2]) == history.weights(count // 2 + 1)
        assert reader.load(framework="numpy")["w"].tobytes() == history.weights(count)["", "w"].data
        writer.commit(Bits(history.weights(count + 1)))
        reader.checkout("main", tmp_path / f"out{count}")
        asked.append([])
        for number in range(count + 2, count + 80):
            with Counted(writer) as commit:
                writer.commit(Bits(history.weights(number)))
            with Counted(reader) as pull:
                reader.checkout("main", tmp_path / f"out{count}")
            with Counted(reader) as poll:
                reader.refresh()
            asked[-1] += [(one.reads, one.writes, one.lists) for one in (commit, pull, poll)]
        roots_.append(len(writer.store.get("root").data))
        assert lying(tmp_path / f"out{count}") == history.weights(count + 79)
    assert asked[0] == asked[1]
    assert max(writes for _, writes, _ in asked[1]) == 3  # a segment spilled
    assert abs(roots_[0] - roots_[1]) < 200


def test_the_collector_reads_root_segments_and_pages_only(tmp_path):
    repository = weightvc.init(tmp_path / "repository", cache=None)
    repository.commit(Bits(history.weights(0)))
    history.lay(repository.store, 5000)
    repository.tag("v1")
    read = []
    get = repository.store.get
    repository.store.get = lambda name, **more: (read.append(name.partition("/")[0]), get(name, **more))[1]
    found = repository.gc()
    assert found.live.objects["manifest"] == 5001
    assert Counter(read)["segment"] == 2
    assert set(read) <= {"root", "segment", "page"}
