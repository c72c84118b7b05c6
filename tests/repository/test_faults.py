"""A commit that is killed, or one of whose requests fails, at every request: the branch is whole, nothing is lost."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import weightvc
from tests.kit import faults
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, Tensor, Weights, flipped, held, tensor, tiny_format, write_shards
from weightvc.cache import Cache
from weightvc.errors import AccessDenied, StateUnknown, StoreError, Unavailable, WeightvcError
from weightvc.objects import root as roots
from weightvc.protocol import swap
from weightvc.repository import Repository
from weightvc.stores import open_store

SMALL: Weights = {("", "a"): tensor("BF16", (60,), 1), ("", "b"): tensor("F32", (30,), 2)}
LARGE: Weights = {("", "a"): tensor("BF16", (600,), 1), ("draft", "b"): tensor("F32", (100,), 2)}


def small(number: int) -> Weights:
    """A patch that lies in its manifest."""
    return {key: flipped(value, 0.01, number) for key, value in SMALL.items()}


def large(number: int) -> Weights:
    """A patch of several packs."""
    return {key: flipped(value, 1.0, number) for key, value in LARGE.items()}


class Case:
    """A repository with some versions, and the commit of one more that is to go wrong."""

    def __init__(self, url: str, kind: str, cache: Path) -> None:
        self.url, self.kind, self.cache = url, kind, cache
        self.make = large if kind == "packs" else small
        repository = weightvc.init(url, cache=None)
        self.model: dict[str, Weights] = {}
        # The commit that is to go wrong is the one whose tail spills; a segment is there already.
        before = swap.TAIL + swap.RECENT + swap.TAIL - 1 if kind == "spill" else 2
        for i in range(before):
            weights = self.make(i)
            self.model[repository.commit(Bits(weights)).id] = weights
        self.new = self.make(1000)
        if kind == "files":
            folder = cache.parent / "files"
            if not folder.exists():
                self.new["", "fresh"] = tensor("F16", (9,), 5)
                write_shards(folder, self.new, 2)
                (folder / "tokenizer.json").write_bytes(b"[" + b"1,\n" * 40_000 + b"1]")
            self.new["", "fresh"] = tensor("F16", (9,), 5)
            self.source: object = folder
        else:
            self.source = Bits(self.new)

    def writer(self, store: Faulty) -> Repository:
        return Repository(store, Cache(self.cache), author="test")

    def check(self, outcome: object) -> int:
        """The branch reads in full; returns how often the commit is in its log. `outcome`: a version, or an error."""
        repository = weightvc.open(self.url, cache=None)
        log = list(repository.log())
        known = [version for version in log if version.id in self.model]
        assert [v.id for v in known] == list(reversed(self.model))
        extra = [version for version in log if version.id not in self.model]
        for version in log[:4]:
            assert held(repository, version.id) == self.model.get(version.id, self.new)
        if isinstance(outcome, weightvc.Version):
            assert [version.id for version in extra] == [outcome.id]
        elif isinstance(outcome, Killed | StateUnknown):
            assert len(extra) <= 1
        else:
            assert isinstance(outcome, WeightvcError)
            assert extra == []
        for version in extra:
            self.model[version.id] = self.new
        return len(extra)

    def next_commit(self) -> None:
        repository = weightvc.open(self.url, cache=None)
        weights = self.make(2000)
        version = repository.commit(Bits(weights))
        assert held(weightvc.open(self.url, cache=None)) == weights
        assert version.parents == (list(self.model)[-1],)


def attempt(work: Callable[[], object]) -> object:
    try:
        return work()
    except (WeightvcError, Killed) as error:
        return error


@contextlib.contextmanager
def quick_swaps():
    """No waiting between attempts."""
    old = swap._pause
    swap._pause = lambda attempt: None
    try:
        with tiny_format():
            yield
    finally:
        swap._pause = old


KINDS = ["inline", "packs", "spill", "files"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scheme", "fault"),
    [("memory", f) for f in ("kill before", "kill after", "fail", "drop", "late")]
    + [("local", f) for f in ("kill before", "kill after")],
)
def test_every_request_of_a_commit(kind, scheme, fault, tmp_path):
    """For each k: the k-th request goes wrong. The commit is in the log at most once, and the next one succeeds."""
    with quick_swaps():
        k = 0
        seen = {"success": 0, "error": 0}
        while True:
            place = f"memory://{secrets.token_hex(8)}" if scheme == "memory" else str(tmp_path / f"r{k}")
            case = Case(place, kind, tmp_path / f"cache{k}" / "c")
            store = Faulty(open_store(case.url), k, fault, late=1 + k % 3)
            outcome = attempt(partial(case.writer(store).commit, case.source))
            done = k >= len(store.operations)
            case.check(outcome)
            store.settle()
            if isinstance(outcome, StateUnknown):
                case.check(outcome)
            case.next_commit()
            seen["success" if isinstance(outcome, weightvc.Version) else "error"] += 1
            if done:
                assert isinstance(outcome, weightvc.Version)
                break
            k += 1
        assert k >= 4
        if fault in ("drop", "late"):
            assert seen["success"] > 1, "a lost reply of the swap is decided by reading the root"
        if kind == "packs":
            assert sum("put pack/" in operation for operation in store.operations) >= 3
        if kind == "spill":
            assert sum("put segment/" in operation for operation in store.operations) == 1


def test_a_spill_is_lost_by_no_fault(tmp_path):
    """As above, where the tail joins a segment that exists: the old segment stays until the swap."""
    with quick_swaps():
        for k in range(12):
            url = f"memory://{secrets.token_hex(8)}"
            repository = weightvc.init(url, cache=None)
            ids = [repository.commit(Bits(small(0))).id]
            ids += [repository.commit(Bits(small(i % 2))).id for i in range(2 * swap.TAIL + swap.RECENT - 2)]
            assert len(repository.refresh().segments) == 1
            store = Faulty(open_store(url), k, "kill after")
            for i in range(4):
                attempt(partial(Repository(store, None).commit, Bits(small(i))))
            log = [version.id for version in weightvc.open(url, cache=None).log()]
            assert [ident for ident in log if ident in ids] == ids[::-1]


def test_two_changes_of_refs_under_every_fault(memory_url):
    """Branches and tags, too, change at most once and never by half."""
    repository = weightvc.init(memory_url, cache=None)
    first = repository.commit(Bits(small(1)))
    second = repository.commit(Bits(small(2)))
    with quick_swaps():
        for fault in ("kill before", "kill after", "fail", "drop", "late"):
            for k in range(6):
                name = f"{fault.replace(' ', '-')}-{k}"
                for work, look in (
                    (lambda r, n=name: r.branch(n, first.id), lambda r, n=name: r.branches().get(n)),
                    (lambda r, n=f"tag-{name}": r.tag(n, first.id), lambda r, n=f"tag-{name}": r.tags().get(n)),
                ):
                    store = Faulty(open_store(memory_url), k, fault)
                    outcome = attempt(partial(work, Repository(store, None)))
                    store.settle()
                    found = look(weightvc.open(memory_url, cache=None))
                    assert found in (None, first.id)
                    if isinstance(outcome, weightvc.Version):
                        assert found == first.id
                    elif not isinstance(outcome, Killed | StateUnknown):
                        assert found is None
    assert [version.id for version in weightvc.open(memory_url, cache=None).log()] == [second.id, first.id]


def test_a_pack_that_cannot_be_written(tmp_path):
    """Every PUT of one pack fails: an error, and the branch is as it was."""
    with tiny_format():
        case = Case(f"memory://{secrets.token_hex(8)}", "packs", tmp_path / "cache")

        class Stubborn(Faulty):
            packs = 0

            def put(self, key: str, data: bytes) -> str:
                if key.startswith("pack/"):
                    self.packs += 1
                    if self.packs >= 2:
                        raise Unavailable(f"{key}: the disk there is full")
                return super().put(key, data)

        with pytest.raises(Unavailable, match="full") as caught:
            case.writer(Stubborn(open_store(case.url))).commit(case.source)
        assert case.check(caught.value) == 0
        case.next_commit()


@pytest.mark.parametrize("cached", [False, True])
def test_a_commit_after_one_that_failed_covers_both_changes(cached, tmp_path, memory_url):
    repository = weightvc.init(memory_url, cache=None)
    start = {("", "w"): tensor("BF16", (100,), 1)}
    v0 = repository.commit(Bits(start))

    class Broken(Faulty):
        broken = False

        def put(self, key: str, data: bytes) -> str:
            if self.broken:
                raise Unavailable("down")
            return super().put(key, data)

    store = Broken(open_store(memory_url))
    writer = Repository(store, Cache(tmp_path / "cache") if cached else None)
    assert held(writer) == start
    data = bytearray(start["", "w"].data)
    data[10] ^= 1
    store.broken = True
    with pytest.raises(Unavailable):
        writer.commit(Bits({("", "w"): Tensor("BF16", (100,), bytes(data))}))
    store.broken = False
    data[150] ^= 1
    after = {("", "w"): Tensor("BF16", (100,), bytes(data))}
    v2 = writer.commit(Bits(after))
    assert v2.parents == (v0.id,)
    assert writer.entry().place.edges[0].changed == 2
    assert held(weightvc.open(memory_url, cache=None)) == after


def test_a_root_whose_reply_was_lost_is_in_the_log_once(stub):
    from tests.kit.stub import Drop

    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    fault = stub.fault(Drop(after_apply=True), method="PUT", key="/root$")
    version = repository.commit({})
    assert fault.done == 1
    assert [v.id for v in repository.log()] == [version.id]


def test_a_root_that_is_refused_four_times(stub):
    """503 three times and then 409: tried again or an error, never a success that is none."""
    from tests.kit.stub import Status

    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    down = stub.fault(Status(503), method="PUT", key="/root$", times=3)
    conflict = stub.fault(Status(409), method="PUT", key="/root$")
    outcome = attempt(lambda: repository.commit({}))
    assert (down.done, conflict.done) == (3, 1)
    log = attempt(lambda: [v.id for v in weightvc.open(place.url, cache=None, **place.options).log()])
    if isinstance(outcome, weightvc.Version):
        assert log == [outcome.id]
    else:
        assert isinstance(log, weightvc.RefNotFound)
        assert isinstance(outcome, WeightvcError)


def test_a_root_that_is_always_refused(stub, monkeypatch):
    from tests.kit.stub import Status

    monkeypatch.setattr(swap, "_pause", lambda attempt: None)
    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    down = stub.fault(Status(503), method="PUT", key="/root$", times=None)
    with pytest.raises((StoreError, StateUnknown)):
        repository.commit({})
    assert down.done > 1
    stub.clear()
    denied = stub.fault(Status(403), method="PUT", key="/root$", times=None)
    with pytest.raises(AccessDenied):
        repository.commit({})
    assert denied.done == 1
    assert repository.branches() == {}


def test_a_late_root_wins_or_loses_whole(stub, monkeypatch):
    """A PUT that timed out takes effect after another writer's: refused by its condition."""
    from tests.kit.stub import Late

    monkeypatch.setattr(swap, "_pause", lambda attempt: stub.release() if attempt else None)
    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    repository.commit({})
    late = stub.fault(Late(), method="PUT", key="/root$")
    second = repository.commit(Bits(small(1)))
    stub.release()
    assert late.done == 1
    log = list(weightvc.open(place.url, cache=None, **place.options).log())
    assert [version.parents for version in log] == [(log[1].id,), ()]
    assert log[0].id == second.id


def test_the_ring_is_too_short_to_tell(memory_url, monkeypatch):
    """A swap without a reply, and then more swaps by others than the root remembers: unknown, not guessed."""
    monkeypatch.setattr(swap, "_pause", lambda attempt: None)
    monkeypatch.setattr(roots, "RING", 3)
    repository = weightvc.init(memory_url, cache=None)
    repository.commit({})

    class Busy(Faulty):
        def swap(self, key: str, data: bytes, etag: str) -> str:
            for i in range(5):
                weightvc.open(memory_url, cache=None).commit({}, branch=f"other{i}")
            raise StateUnknown("the reply was lost")

    with pytest.raises(StateUnknown, match="weightvc log"):
        Repository(Busy(open_store(memory_url)), None).commit(Bits(small(1)))


# With real processes and a real SIGKILL


def test_sigkill_at_every_request_of_a_commit(tmp_path):
    with quick_swaps():
        k = 0
        while True:
            case = Case(str(tmp_path / f"r{k}"), "packs", tmp_path / f"cache{k}")

            def work(case: Case = case, k: int = k) -> str:
                store = Faulty(open_store(case.url), k, "kill before", die=faults.die)
                return case.writer(store).commit(case.source).id

            status = faults.wait(faults.fork(work, tmp_path / "result"))
            assert status in (0, -9)
            case.check(Killed())
            case.next_commit()
            if status == 0:
                break
            k += 1
        assert k >= 6


@pytest.mark.parametrize("kind", ["inline", "files"])
def test_sigkill_at_every_file_operation_of_a_commit(kind, tmp_path):
    """The store and the cache are directories here; whatever is half written is never read."""
    with quick_swaps():
        k = committed = 0
        while True:
            case = Case(str(tmp_path / f"r{k}"), kind, tmp_path / f"at{k}" / "cache")

            def work(case: Case = case, k: int = k) -> str:
                store = open_store(case.url)
                faults.die_at_file_operation(k)
                return Repository(store, Cache(case.cache)).commit(case.source).id

            status = faults.wait(faults.fork(work, tmp_path / "result"))
            assert status in (0, -9)
            committed += case.check(Killed())
            again = weightvc.open(case.url, cache=case.cache)
            assert held(again) == case.model[again.resolve().id]
            case.next_commit()
            if status == 0:
                break
            k += 1
        assert k >= 20
        assert committed >= 2  # killed after the swap's rename, too


@pytest.mark.parametrize("cached", [False, True])
def test_sigkill_at_every_file_operation_of_a_checkout(cached, tmp_path):
    """The old files or the new ones, marker included, never a mix; and the next checkout succeeds."""
    from tests.kit.weights import files_below
    from weightvc.protocol.checkout import read_marker

    repository = weightvc.init(tmp_path / "repository", cache=None)
    folder = tmp_path / "in"
    versions, contents = [], []
    for i, shards in enumerate((3, 1)):
        write_shards(folder, small(i), shards)
        versions.append(repository.commit(folder).id)
        contents.append(files_below(folder))
        for path in folder.iterdir():
            path.unlink()
    k, ends = 0, set()
    while True:
        target = tmp_path / f"out{k}"
        cache = tmp_path / f"cache{k}" if cached else None
        weightvc.open(repository.url, cache=cache).checkout(versions[0], target)
        (target / "notes.txt").write_text("mine")

        def work(target: Path = target, cache: Path | None = cache, k: int = k) -> str:
            reader = weightvc.open(repository.url, cache=cache)
            faults.die_at_file_operation(k)
            return reader.checkout(versions[1], target, force=True).id

        status = faults.wait(faults.fork(work, tmp_path / "result"))
        assert status in (0, -9)
        found = files_below(target)
        assert found.pop("notes.txt") == b"mine"
        assert found in contents
        marker = read_marker(target)
        assert marker is not None
        assert marker.version == versions[contents.index(found)]
        ends.add(contents.index(found))
        weightvc.open(repository.url, cache=cache).checkout(versions[1], target, force=True)
        assert {**contents[1], "notes.txt": b"mine"} == files_below(target)
        if status == 0:
            break
        k += 1
    assert k >= 15
    assert ends == {0, 1}
