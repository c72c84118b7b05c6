"""Compaction: exact by every way, whatever is going on beside it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, Tensor, Weights, flipped, held, tensor, tiny_format
from weightvc.cache import Cache
from weightvc.errors import Corrupt, Refused, StateUnknown, WeightvcError
from weightvc.objects import key
from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.protocol import compact, patches, resolve, swap
from weightvc.protocol.plan import Plan, Step, steps_to
from weightvc.protocol.refs import Refs
from weightvc.protocol.rewrite import rewritten
from weightvc.protocol.spool import Spool
from weightvc.protocol.state import Lying, Verified
from weightvc.repository import Repository
from weightvc.stores import open_store

FIRST: Weights = {
    ("", "a"): tensor("BF16", (300,), 1),
    ("", "b"): tensor("F32", (30,), 2),
    ("draft", "c"): tensor("F16", (40,), 3),
}


def step(number: int) -> Weights:
    """Weights that change a little from number to number, now and then in more than their values."""
    weights = dict(FIRST)
    for i in range(number):
        weights["", "a"] = flipped(weights["", "a"], 0.02, i)
    if number % 20 > 14:
        weights["", "renamed"] = weights.pop(("", "b"))
    if number % 30 > 20:
        weights["draft", "c"] = replace(weights["draft", "c"], dtype="BF16")
    return weights


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(swap, "_pause", lambda attempt: None)
    with tiny_format():
        yield


def grow(repository: Repository, count: int, first: int = 0, **options: Any) -> dict[str, Weights]:
    """Commit some steps; their weights by id."""
    out = {}
    for number in range(first, first + count):
        weights = step(number)
        out[repository.commit(Bits(weights), step=number, **options).id] = weights
    return out


def read_by(repository: Repository, one: Step, model: dict[str, Weights]) -> Weights:
    """What a version is by one edge alone, from the right bytes of its source."""
    refs = Refs(repository._shelf, repository.refresh())
    source = refs.entry(one.edge.source) if one.edge.source is not None else None
    lying: resolve.Lying = {}
    if source is not None and source.version is not None:
        bits = Bits(model[source.version.id])
        lying = {source.version.tree: lambda schema: Lying(schema, bits)}
    made = resolve.manifest_of(repository._shelf, one.entry, one.way)
    tree = resolve.tree_of(repository._shelf, made, one.way.manifest)
    spool = Spool(None)
    with ThreadPoolExecutor(2) as pool:
        chain = partial(
            resolve._chain, repository._shelf, Plan(one.entry, source, (one,)), pool, spool, lying, True, {}
        )
        verified = Verified(tree, [chain], "by one edge")
        data = b"".join(bytes(verified.read(*block)) for block in verified.blocks())
    spool.close()
    out: Weights = {}
    at = 0
    for info in tree.schema.tensors:
        out[info.component, info.name] = Tensor(info.dtype, info.shape, data[at : at + info.nbytes])
        at += info.nbytes
    return out


def check(repository: Repository, model: dict[str, Weights]) -> None:
    """Every version by every edge, and by the cheapest way from nothing; ids and ways are in order."""
    fresh = weightvc.open(repository.url, cache=None) if "memory" in repository.url else repository
    seen = set()
    for entry in fresh.entries([*fresh.branches()]):
        assert entry.new is not None
        seen.add(entry.new)
        steps = list(steps_to(entry))
        for one in steps:
            assert read_by(fresh, one, model) == model[entry.new], (entry.new, one.edge)
        sources = [one.edge.source for one in steps]
        assert len(set(sources)) == len(sources)
        assert held(fresh, entry.new) == model[entry.new]
    assert seen <= set(model)


def edges(repository: Repository) -> set[tuple[str | None, str | None]]:
    """All edges, as (source, version)."""
    found = repository.entries([*repository.branches()])
    return {(one.edge.source, entry.new) for entry in found for one in steps_to(entry)}


def test_every_way_is_exact_and_a_second_run_does_nothing(again: Any, tmp_path: Path) -> None:
    repository = again()
    model = grow(repository, 18)
    before = list(repository.log())
    told: list[compact.Wanted] = []
    done = repository.compact(reverse=True, base_every=8, report=lambda wanted, way: told.append(wanted))
    assert (done.patches, done.back, done.skipped) == (4 + 1, 17 + 4 + 1, [])
    assert len(told) == done.patches + done.back + done.bases
    assert done.bases > 0
    assert done.nbytes > 0
    assert list(repository.log()) == before
    assert list(again().log()) == before
    check(again(), model)
    other = again(cache=tmp_path / "cache")
    writes = other.stats.writes
    assert other.compact(reverse=True, base_every=8) == compact.Compacted()
    assert other.stats.writes == writes
    model |= grow(other, 3, 18)
    assert other.compact(reverse=True, base_every=8).patches == 1
    assert other.compact(reverse=True, base_every=8) == compact.Compacted()


def test_with_a_cache_the_trees_of_others_stay(memory_url: str, tmp_path: Path) -> None:
    writer = weightvc.init(memory_url, cache=tmp_path / "cache")
    model = grow(writer, 30)
    trees = set((tmp_path / "cache/trees").iterdir())
    bare = weightvc.open(memory_url, cache=None)
    assert writer.compact().patches == 7 + 1
    assert set((tmp_path / "cache/trees").iterdir()) == trees
    assert len(list((tmp_path / "cache/compaction/trees").iterdir())) == compact.TREES
    check(bare, model)
    # What lies in that cache is trusted no more than anything else.
    for path in (tmp_path / "cache/compaction/trees").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    model |= grow(writer, 10, 30)
    assert writer.compact().skipped == []
    check(bare, model)


def test_a_cold_reader_makes_as_many_requests_as_the_plan_says(memory_url: str) -> None:
    repository = weightvc.init(memory_url, cache=None)
    model = grow(repository, 60)
    repository.compact(share=1000)
    for number in (59, 31):
        ident = list(model)[number]
        cold = weightvc.open(memory_url, cache=None)
        before = cold.stats.reads
        assert held(cold, ident) == model[ident]
        made = cold.plan(None, ident)
        schemas = len({one.entry.place.schema for one in made.steps if one.entry.place})
        # The root, the segment, what the plan says, and a schema or more.
        least = 2 + made.requests
        assert least < cold.stats.reads - before <= least + schemas


def test_a_held_tree_is_where_a_reader_starts(again: Any, tmp_path: Path) -> None:
    repository = again()
    model = grow(repository, 21)
    ids = list(model)
    repository.compact(share=10_000, reverse=True)
    for start, end in ((3, 20), (20, 3), (7, 8)):
        reader = again(cache=tmp_path / f"{start}-{end}")
        reader.checkout(ids[start], tmp_path / f"out{start}-{end}")
        before = reader.stats.reads
        reader.checkout(ids[end], tmp_path / f"out{start}-{end}")
        segments = len(repository.refresh().segments)
        assert reader.stats.reads - before <= 1 + segments + reader.plan(ids[start], ids[end]).requests + 4
        assert held(reader, ids[end]) == model[ids[end]]


def test_a_commit_without_a_cache_reads_its_parent_by_few_patches(memory_url: str) -> None:
    repository = weightvc.init(memory_url, cache=None)
    model = grow(repository, 44)
    repository.compact(share=10_000)
    writer = weightvc.open(memory_url, cache=None)
    before, made = writer.stats.reads, writer.plan(None)
    assert made.patches <= 12
    writer.commit(Bits(step(44)))
    assert writer.stats.reads - before <= 3 + len(writer.refresh().segments) + made.requests + 2
    assert len(model) == 44


def test_ways_that_are_bad_are_gone_round(memory_url: str) -> None:
    repository = weightvc.init(memory_url, cache=None)
    model = grow(repository, 20)
    head = list(model)[-1]
    repository.compact(share=10_000)
    store = repository.store
    for kind in ("junk", "gone"):
        for manifest in [one.way.manifest for one in repository.plan(None, head).steps if one.entry.place
                         and one.way.manifest != one.entry.place.manifest]:  # fmt: skip
            data = store.get(manifest)
            assert data is not None
            if kind == "junk":
                store.put(manifest, bytes(data.data)[:-3])
            else:
                store.delete([manifest])
            reader = weightvc.open(memory_url, cache=None)
            assert held(reader, head) == model[head], kind
            store.put(manifest, bytes(data.data))


def test_a_version_that_cannot_be_read_is_skipped_and_told(memory_url: str) -> None:
    repository = weightvc.init(memory_url, cache=None)
    model = grow(repository, 10)
    entry = repository.entry(list(model)[3])
    assert entry.place is not None
    repository.store.delete([entry.place.manifest])
    done = weightvc.open(memory_url, cache=None).compact(share=10_000)
    assert len(done.skipped) == 2  # neither 4 nor 8 can be read without 3
    assert entry.place.manifest in done.skipped[0]
    assert done.patches == 0


# Policy


def test_the_policy_is_kept_when_that_is_asked_for(repository: Repository) -> None:
    grow(repository, 20)
    root = repository.refresh()
    assert repository.compact(base_every=8, share=10_000).bases == 2  # at 8 and 16
    assert "compaction" not in repository.refresh().extra
    with_more = {"compaction": {"later": [1]}}
    swap.change(
        repository._shelf, lambda root: root.next(extra={**root.extra, **with_more}), key.Transaction(root.sequence)
    )
    repository.compact(reverse=True, base_every=4, share=10_000, save=True)
    kept = weightvc.open(repository.url, cache=None)
    assert kept.refresh().extra["compaction"] == {"share": 10_000, "base_every": 4, "reverse": True, "later": [1]}
    grow(repository, 5, 20)
    done = kept.compact()
    assert done.back > 0
    assert done.bases == 2  # at 20 and 24
    assert kept.compact(reverse=False).back == 0


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.5}, {"base_every": 3}, {"reverse": 1}])
def test_a_policy_that_means_nothing_is_refused(repository: Repository, wrong: dict[str, Any]) -> None:
    writes = repository.stats.writes
    with pytest.raises(Refused, match=next(iter(wrong))):
        repository.compact(**wrong, save=True)
    assert repository.stats.writes == writes


@pytest.mark.parametrize("wrong", [5, {"share": "x"}, {"reverse": None}])
def test_a_kept_policy_that_means_nothing_is_corrupt(repository: Repository, wrong: Any) -> None:
    grow(repository, 2)
    transaction = key.Transaction(repository.refresh().sequence)
    swap.change(repository._shelf, lambda root: root.next(extra={"compaction": wrong}), transaction)
    with pytest.raises(Corrupt, match="policy"):
        repository.compact()
    assert held(repository) == step(1)


# Faults


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [("memory", f) for f in ("kill before", "kill after", "fail", "drop", "late")] + [("local", "kill before")],
)
def test_a_fault_at_every_request(scheme: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, every version reads, by every way; and the next run makes what is missing, and no more."""
    monkeypatch.setattr(compact, "BATCH", 2)
    k, wanted, failures = 0, None, 0
    while True:
        url = f"memory://{secrets.token_hex(8)}" if scheme == "memory" else str(tmp_path / f"r{k}")
        with weightvc.init(url, cache=None) as repository:
            model = grow(repository, 9)
        store = Faulty(open_store(url), k, fault, late=1 + k % 3)
        try:
            Repository(store, None, author="test").compact(base_every=8)
        except (WeightvcError, Killed) as error:
            failures += 1
            if isinstance(error, StateUnknown):
                store.settle()
        store.settle()
        done = k >= len(store.operations)
        with weightvc.open(url, cache=None) as repository:
            check(repository, model)
            repository.compact(base_every=8)
            found = edges(repository)
            assert len(found) == 9 + 2 + 1  # 0 to 4 to 8, and a base of 8
            if wanted is None:
                wanted = [one.edge.nbytes for entry in repository.entries() for one in steps_to(entry)]
            check(repository, model)
            assert repository.compact(base_every=8) == compact.Compacted()
        if done:
            break
        k += 1 if (scheme, fault) == ("memory", "kill before") else 3
    assert k > 10
    assert failures > 0


# Others at work


@contextmanager
def once_during_a_patch(monkeypatch: pytest.MonkeyPatch, work: Any) -> Iterator[list[int]]:
    """Do something while the first patch is made."""
    made, done = patches.patch, [0]

    def patch(*arguments: Any) -> Any:
        if not done[0]:
            done[0] = 1
            work()
        return made(*arguments)

    with monkeypatch.context() as during:
        during.setattr(patches, "patch", patch)
        yield done


def edit_root(repository: Repository, change: Any) -> None:
    root = repository.refresh()
    transaction = key.Transaction(root.sequence)

    def make(root: Root) -> Root:
        tail, segments = rewritten(repository._shelf, root, transaction, change)
        return root.next(tail=tail, segments=segments)

    swap.change(repository._shelf, make, transaction)


def test_versions_that_expire_meanwhile_are_skipped(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = weightvc.init(memory_url, cache=None)
    ids = list(grow(repository, 17))
    other = weightvc.open(memory_url, cache=None)

    def expire(entry: Entry) -> Entry | None:
        if entry.new == ids[8]:
            return replace(entry, op="expired", place=None, expired=99)
        return replace(entry, expired=99) if entry.new in (ids[4], ids[12]) else None

    with once_during_a_patch(monkeypatch, lambda: edit_root(other, expire)) as happened:
        done = repository.compact(share=10_000)
    assert happened == [1]
    assert done.patches == 1  # 0 to 16: not to 4 and 12, nor from 12 or 8
    assert len(done.skipped) == 1
    refs = Refs(repository._shelf, repository.refresh())
    ways = {(edge.source, ident) for ident in ids if (place := refs.entry(ident).place)
            for way in place.ways for edge in way.edges}  # fmt: skip
    assert ways == {(ids[0], ids[16])}


def test_across_a_base_whose_parent_expired_and_other_tensors(memory_url: str) -> None:
    repository = weightvc.init(memory_url, cache=False)
    model = {}
    for at in range(9):
        # From a base on, which is a patch as well, a tensor more.
        weights = {**step(at), **({("", "more"): tensor("U8", (3,), 1)} if at >= 3 else {})}
        model[repository.commit(Bits(weights), base=at == 3).id] = weights
    repository.expire(weightvc.Policy({"*": weightvc.Rules(every=4)}))
    done = repository.compact()
    assert (done.patches, done.skipped) == (2, [])
    for entry in repository.entries():
        if entry.expired is None and entry.new is not None:
            assert held(repository, entry.new) == model[entry.new]
    assert repository.fsck(read_data=1).ok


def test_a_collector_that_passes_by_makes_it_begin_again(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = weightvc.init(memory_url, cache=None)
    model = grow(repository, 9)
    other = weightvc.open(memory_url, cache=None)

    def collect() -> None:
        transaction = key.Transaction(other.refresh().sequence)
        swap.change(other._shelf, lambda root: root.next(horizon=root.sequence + 1), transaction)

    with once_during_a_patch(monkeypatch, collect):
        done = repository.compact(share=10_000)
    assert done.patches == 2
    root = repository.refresh()
    for entry in repository.entries():
        assert entry.place is not None
        for way in entry.place.ways:
            assert key.parse(way.manifest).begin >= root.horizon
    check(repository, model)


def test_commits_and_other_runs_beside_it(again: Any) -> None:
    repository = again()
    model = grow(repository, 12)
    failures: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    def commit() -> None:
        writer = again()
        for number in range(12, 24):
            model[writer.commit(Bits(step(number)), step=number).id] = step(number)

    def run(reverse: bool) -> None:
        other = again()
        for _ in range(4):
            other.compact(reverse=reverse, share=10_000)

    works = [commit, partial(run, False), partial(run, True)]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    last = again()
    last.compact(reverse=True, share=10_000)
    assert [version.step for version in last.log()] == list(range(24))[::-1]
    assert len(edges(last)) == 24 + 5 + 1 + 23 + 5 + 1
    assert last.compact(reverse=True, share=10_000) == compact.Compacted()
    check(last, model)


def test_a_cache_and_a_store_in_one_process_that_both_commit_and_compact(memory_url: str, tmp_path: Path) -> None:
    repository = weightvc.init(memory_url, cache=Cache(tmp_path / "c").directory)
    model = grow(repository, 6)
    worker = threading.Thread(target=lambda: [repository.compact() for _ in range(5)])
    worker.start()
    model |= grow(repository, 6, 6)
    worker.join()
    repository.compact()
    check(repository, model)
