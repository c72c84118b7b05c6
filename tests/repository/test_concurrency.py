"""Several writers at once: threads, processes, and children forked from an open repository."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

import weightvc
from tests.kit import faults
from tests.kit.weights import Bits, flipped, held, tensor
from weightvc.errors import BranchMoved, Conflict

START = {("", "w"): tensor("BF16", (300,), 0)}


def other(number: int):
    return {("", "w"): flipped(START["", "w"], 0.05, number)}


def outcome(repository: weightvc.Repository, number: int) -> str:
    try:
        return repository.commit(Bits(other(number)), message=str(number)).id
    except BranchMoved:
        return "moved"


def test_two_threads_with_one_parent(place, again):
    first = again().commit(Bits(START))
    for round_ in range(3):
        writers = [again(), again()]
        for writer in writers:
            writer.load(framework="numpy")
        parent = writers[0].resolve().id
        start = threading.Barrier(2)

        def work(i: int, start=start, writers=writers, round_=round_) -> str:
            start.wait()
            return outcome(writers[i], 10 * round_ + i)

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, range(2)))
        assert sorted(result == "moved" for result in results) == [False, True]
        (winner,) = [result for result in results if result != "moved"]
        head = again().resolve()
        assert (head.id, head.parents) == (winner, (parent,))
        assert held(again()) == other(10 * round_ + results.index(winner))
    assert [v.id for v in again().log()][-1] == first.id
    assert len(list(again().log())) == 4


def processes(count: int, work, folder: Path) -> list:
    """work(i) in `count` forked processes, which begin together; their results."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()

    def run(i: int):
        os.close(go_write)
        begin = work(i)
        os.write(ready_write, b".")
        os.read(go_read, 1)  # ends when the parent closes its end
        return begin()

    children = [faults.fork(lambda i=i: run(i), folder / f"result{i}") for i in range(count)]
    os.close(ready_write)
    got = 0
    while got < count and (more := os.read(ready_read, count)):
        got += len(more)
    os.close(go_write)
    status = [faults.wait(child) for child in children]
    os.close(ready_read)
    os.close(go_read)
    assert status == [0] * count
    return [json.loads((folder / f"result{i}").read_text()) for i in range(count)]


@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_two_processes_with_one_parent(place, again, tmp_path):
    again().commit(Bits(START))

    def work(i: int):
        writer = again()
        writer.load(framework="numpy")
        return lambda: outcome(writer, i)

    results = processes(2, work, tmp_path)
    assert sorted(result == "moved" for result in results) == [False, True]
    (winner,) = [result for result in results if result != "moved"]
    assert again().resolve().id == winner
    assert len(list(again().log())) == 2


def test_eight_processes_of_twenty_versions_each(s3_place, tmp_path):
    """on_conflict="rebase": all 160 are in the log, none is lost, none is there twice."""
    weightvc.init(s3_place.url, cache=None, **s3_place.options).commit(Bits(START))

    def work(i: int):
        writer = weightvc.open(s3_place.url, cache=tmp_path / f"cache{i}", **s3_place.options)

        def run():
            made = []
            for k in range(20):
                weights = Bits(other(100 * i + k))
                made.append(writer.commit(weights, on_conflict="rebase", step=k, run=f"writer {i}").id)
            return made

        return run

    results = processes(8, work, tmp_path)
    repository = weightvc.open(s3_place.url, cache=None, **s3_place.options)
    log = list(repository.log())
    assert len(log) == 161
    made = [ident for result in results for ident in result]
    assert sorted(made) == sorted(version.id for version in log[:-1])
    assert len(set(made)) == 160
    place = {version.id: at for at, version in enumerate(log)}
    for i, result in enumerate(results):
        assert sorted(result, key=place.__getitem__, reverse=True) == result  # each writer's own order is kept
        assert [repository.resolve(ident).run for ident in result] == [f"writer {i}"] * 20
    for child, parent in pairwise(log):
        assert child.parents == (parent.id,)
    for i, k in ((0, 0), (7, 19), (3, 10)):
        assert held(repository, results[i][k]) == other(100 * i + k)


def test_writers_of_different_branches_never_conflict(place, again):
    again().commit(Bits(START))
    writers = [again() for _ in range(4)]
    for i, writer in enumerate(writers):
        writer.branch(f"b{i}")

    def work(i: int) -> list[str]:
        return [writers[i].commit(Bits(other(10 * i + k)), branch=f"b{i}").id for k in range(4)]

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(work, range(4)))
    reader = again()
    for i in range(4):
        assert [version.id for version in reader.log(f"b{i}")][:4] == made[i][::-1]
        assert held(reader, f"b{i}") == other(10 * i + 3)


def test_a_writer_that_slept_learns_that_the_branch_moved(place, again):
    a, b = again(), again()
    v3 = a.commit(Bits(START))
    a.load(framework="numpy")
    v4 = b.commit(Bits(other(4)))
    with pytest.raises(BranchMoved, match="moved") as caught:
        a.commit(Bits(other(5)))
    assert (caught.value.branch, caught.value.expected, caught.value.head) == ("main", v3.id, v4.id)
    assert again().resolve().id == v4.id
    assert held(again()) == other(4)
    v5 = a.commit(Bits(other(5)), on_conflict="rebase")
    assert v5.parents == (v4.id,)
    assert held(again()) == other(5)


def test_the_same_step_again_is_another_version(place, again):
    first = again()
    for step in (1, 2, 3):
        first.commit(Bits(other(step)), step=step, run="a")
    old = first.resolve("main@{step=1}")
    new = again().commit(Bits(other(9)), step=1, run="a", message="resumed")
    assert new.id != old.id
    reader = again()
    assert reader.resolve("main@{step=1}").id == new.id
    assert reader.resolve("main~3").id == old.id
    assert held(reader, old.id) == other(1)
    assert held(reader, new.id) == other(9)
    assert [version.step for version in reader.log()] == [1, 3, 2, 1]


def test_threads_share_one_repository(place, again):
    """One object in eight threads: each commit lands once, readers read meanwhile."""
    shared = again()
    shared.commit(Bits(START))

    def work(i: int) -> str:
        held(shared, "main~0")
        return shared.commit(Bits(other(i)), on_conflict="rebase").id

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(work, range(8)))
    assert sorted(made) == sorted(version.id for version in list(again().log())[:-1])


@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_a_forked_child_uses_the_repository(place, again, tmp_path):
    repository = again()
    repository.commit(Bits(START))
    held(repository)

    def work() -> list[str]:
        assert held(repository) == START
        return [repository.commit(Bits(other(1))).id]

    assert faults.wait(faults.fork(work, tmp_path / "result")) == 0
    (made,) = json.loads((tmp_path / "result").read_text())
    assert repository.resolve().id == made
    assert held(repository) == other(1)
    with pytest.raises(Conflict):
        repository.commit(Bits(other(2)), expect="main~1")
