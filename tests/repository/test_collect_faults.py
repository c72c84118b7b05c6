"""Collectors that meet errors or are interrupted: nothing goes that was not condemned, and the next run goes on."""

import contextlib
import itertools
import threading

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.garbage import HOUR, START, dead, gc, names, orphan, read_all, step
from tests.kit.stub import Body, Drop, Status
from tests.kit.weights import Bits, held, tiny_format
from weightvc.errors import Corrupt, Expired, Refused, StoreError, Unavailable, WeightvcError
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import collect
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository


def test_an_object_that_is_missing_is_looked_at_first(repository):
    made = repository.commit(Bits(START))
    orphan(repository, 1)
    repository.store.delete([repository.entry(made).place.manifest])
    with pytest.raises(Refused, match="fsck"):
        gc(repository, 0)


@pytest.mark.parametrize("damage", ["empty", "spaces", "nuls", "cut", "flip"])
@pytest.mark.parametrize("what", ["root", "segment", "page", "collector"])
def test_what_is_corrupt_is_named_and_nothing_is_deleted(repository, what, damage):
    """Case 33."""
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)))
        repository.tag("v1")
        orphan(repository, 1)
        gc(repository, 0, force=True)
        orphan(repository, 1)
        root = repository.refresh()
        name = {"root": "root", "segment": root.segments[0].key, "page": root.tags, "collector": root.collector}[what]
        data = repository.store.get(name).data
        bad = {
            "empty": b"",
            "spaces": b" " * len(data),
            "nuls": bytes(len(data)),
            "cut": data[: len(data) // 2],
            "flip": data[:40] + bytes([data[40] ^ 1]) + data[41:],
        }[damage]
        repository.store.put(name, bad)
        before = names(repository)
        with pytest.raises(Corrupt, match=name.replace(".", r"\.")):
            gc(repository, 0, force=True)
        assert names(repository) == before


class Failing:
    """A store whose listing, or read, fails at one point."""

    def __init__(self, inner, *, list_at: int | None = None, forget: bool = False) -> None:
        self._inner, self._list_at, self._forget = inner, list_at, forget

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def list(self, prefix=""):
        for i, one in enumerate(self._inner.list(prefix)):
            if i == self._list_at:
                raise Unavailable("page two")
            if self._forget and one.key.startswith("probe/"):
                continue
            yield one


def test_a_listing_that_fails_deletes_nothing(repository):
    """Case 37."""
    for i in range(5):
        repository.commit(Bits(step(i)), branch=f"b{i}", expect="")
    orphan(repository, 1)
    before = names(repository)
    for at in range(len(before)):
        with pytest.raises(Unavailable):
            collect.run(Shelf(Failing(repository.store, list_at=at), None), grace=0, force=True)
        assert names(repository) == before
    with pytest.raises(Unavailable, match="just written"):
        collect.run(Shelf(Failing(repository.store, forget=True), None), grace=0, force=True)
    assert names(repository) == before


def test_listings_of_pages_of_two_keys(s3_place):
    """Case 37, where the pages are real."""
    repository = weightvc.init(s3_place.url, cache=None, **s3_place.options)
    repository.store._page_size = 2
    for i in range(5):
        repository.commit(Bits(step(i)), branch=f"b{i}", expect="")
    orphans = {orphan(repository, 1) for _ in range(3)}
    gc(repository, 0, force=True)
    assert not orphans & names(repository)
    for i in range(5):
        assert held(repository, f"b{i}") == step(i)


def test_an_error_on_the_second_page(stub):
    """Case 37, where the server itself fails."""
    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **{**place.options, "page_size": 2, "attempts": 2})
    for i in range(5):
        repository.commit(Bits(step(i)), branch=f"b{i}", expect="")
    orphan(repository, 1)
    before = set(stub.objects)
    for fault in (Status(500), Drop(), Body(b"<html/>")):
        stub.fault(fault, operation="ListObjectsV2", after=1, times=2)
        with pytest.raises(Unavailable):
            gc(repository, 0, force=True)
        stub.clear()
        assert {name for name in stub.objects if "probe/" not in name} == before
    gc(repository, 0, force=True)
    for i in range(5):
        assert held(repository, f"b{i}") == step(i)


FAULTS = ["kill before", "kill after", "fail", "drop", "late"]


@pytest.mark.parametrize(
    ("place", "faults"),
    [*(("memory", [one]) for one in FAULTS), ("local", FAULTS), ("s3", FAULTS)],
    indirect=["place"],
)
def test_the_job_goes_wrong_at_every_request(place, faults):
    """Expiry, compaction, collection and the copy of the root: for each k the k-th request goes wrong, once. What is
    promised is there at once, and when a write that was late has come; and the next run does all that is left. In a
    directory each request meets one of the faults, in turn, and on S3 each other one."""
    url, options = place
    with tiny_format(), weightvc.init(url, cache=None, **options) as repository:

        def check(number: int) -> None:
            reader = Repository(repository.store, None)
            assert [held(reader, ref) for ref in ("main", "main~1")] == [step(number + 1), step(number)]
            assert reader.fsck(read_data=1).ok

        repository.commit(Bits(step(0)))
        repository.expire(Policy({"*": Rules(last=2)}, 0), save=True)
        garbage = set()
        for turn in itertools.count():
            at = turn * (2 if url.startswith("s3:") else 1)
            for i in range(2):
                repository.commit(Bits(step(10 * at + i)), base=i == 0)
            garbage.add(orphan(repository, 1))
            store = Faulty(repository.store, at, faults[turn % len(faults)])
            with contextlib.suppress(Killed, WeightvcError):
                Repository(store, None).maintain(grace=0, force=True)
            check(10 * at)
            # What is late comes before the next run, or after it.
            if turn % 2:
                store.settle()
            Repository(repository.store, None).maintain(grace=0, force=True)
            store.settle()
            check(10 * at)
            if len(store.operations) <= at:
                break
        assert at > 25
        left = gc(repository, 0, force=True)
        assert (left.young.objects, left.waiting.objects) == ({}, {})
        assert not garbage & names(repository)


def test_keys_that_cannot_be_deleted_are_told_and_tried_again(repository):
    repository.commit(Bits(START))
    stuck = orphan(repository, 1)
    other = orphan(repository, 1)

    class Locked(Failing):
        def delete(self, keys):
            names = list(keys)
            failed = {name: StoreError("locked") for name in names if name == stuck}
            return failed | self._inner.delete([name for name in names if name != stuck])

    store = Locked(repository.store)
    result = collect.run(Shelf(store, None), grace=0, force=True)
    assert list(result.failed) == [stuck]
    assert other not in names(repository)
    later = orphan(repository, 1)
    collect.run(Shelf(store, None), grace=0, force=True)
    assert later not in names(repository)
    gc(repository, 0, force=True)
    assert stuck not in names(repository)


def test_each_batch_of_a_list_tells_its_errors(repository, clock, monkeypatch):
    """Not the last one alone."""
    monkeypatch.setattr(collect, "BATCH", 2)
    repository.commit(Bits(START))
    orphans = {orphan(repository, 1) for _ in range(5)}
    repository.branch("moved")
    gc(repository)
    clock.later(HOUR)
    assert gc(repository).condemned.objects == {"pack": 5}
    clock.later(HOUR)
    batches = []

    class Locked(Failing):
        def delete(self, keys):
            first, *others = keys
            if not first.startswith("pack/"):
                return self._inner.delete([first, *others])
            batches.append([first, *others])
            return {first: StoreError("locked"), **self._inner.delete(others)}

    result = collect.run(Shelf(Locked(repository.store), None), grace=HOUR)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [*result.failed] == [first for first, *_ in batches]
    assert orphans & names(repository) == set(result.failed)


def test_several_collectors_and_writers_at_once(memory_url):
    with tiny_format():
        weightvc.init(memory_url, cache=None).commit(Bits(START))
        stop = threading.Event()
        errors: list[BaseException] = []

        def collector() -> None:
            repository = weightvc.open(memory_url, cache=None)
            for _ in range(12):
                try:
                    gc(repository, 0, force=True)
                except Exception as error:
                    errors.append(error)
                    return
                # Without a grace period every run passes whoever is writing: let them get through now and then.
                if stop.wait(0.3):
                    return

        def writer(number: int) -> None:
            repository = weightvc.open(memory_url, cache=None)
            done = 0
            while done < 4:
                try:
                    repository.commit(Bits(step(100 * number + done)), branch=f"b{number}", on_conflict="rebase")
                    done += 1
                except Expired:
                    continue  # the collectors are faster than grace allows
                except Exception as error:
                    errors.append(error)
                    return

        writers = [threading.Thread(target=writer, args=(i,)) for i in range(2)]
        collectors = [threading.Thread(target=collector) for _ in range(2)]
        for thread in writers + collectors:
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in collectors:
            thread.join()
        assert errors == []
        repository = weightvc.open(memory_url, cache=None)
        for i in range(2):
            assert held(repository, f"b{i}") == step(100 * i + 3)
        read_all(repository)
        gc(repository, 0, force=True)
        assert dead(repository) == set()
