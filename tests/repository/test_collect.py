"""Garbage collection: what is deleted, when, and above all what is not."""

import os
import secrets
import threading
import time
from dataclasses import replace

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed, deny_what_is_missing
from tests.kit.stub import Body, Drop, Status
from tests.kit.weights import Bits, contents, flipped, held, tensor, tiny_format
from weightvc.errors import Corrupt, Expired, Refused, StoreError, Unavailable, WeightvcError
from weightvc.objects import frame, key
from weightvc.objects import root as roots
from weightvc.protocol import collect, compact, live, patches, pins, swap
from weightvc.protocol.shelf import Shelf
from weightvc.stores.memory import MemoryStore

START = {("", "w"): tensor("BF16", (400,), 0)}
HOUR = 3600.0


def step(number: int):
    return {("", "w"): flipped(START["", "w"], 0.2, number)}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, repository: weightvc.Repository) -> None:
        self.now = 1_800_000_000.0
        assert isinstance(repository.store, MemoryStore)
        repository.store.set_clock(lambda: self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(repository) -> Clock:
    return Clock(repository)


def shelf(repository: weightvc.Repository) -> Shelf:
    """A shelf that has read nothing yet."""
    return Shelf(repository.store, None)


def gc(repository: weightvc.Repository, grace: float = HOUR, **options) -> collect.Collection:
    return collect.run(shelf(repository), grace=grace, **options)


def names(repository: weightvc.Repository) -> set[str]:
    return {one.key for one in repository.store.list()}


def dead(repository: weightvc.Repository) -> set[str]:
    """What is ours and named by nothing."""
    made = shelf(repository)
    named = live.of_root(made, swap.must_read(repository.store).root)
    return {
        name
        for name in names(repository)
        if name.partition("/")[0] not in ("pin", "probe", "root.d") and name not in named
    }


def orphan(repository: weightvc.Repository, begin: int | None = None, size: int = 10) -> str:
    """What a writer that was killed leaves."""
    transaction = key.Transaction(repository.refresh().sequence if begin is None else begin)
    data = frame.header(frame.PACK) + secrets.token_bytes(size)
    name = transaction.key("pack", data)
    repository.store.put(name, data)
    return name


def forget(repository: weightvc.Repository, ident: str) -> None:
    """Drop a version's entry, as nothing but retention may."""

    def make(root):
        kept = tuple(entry for entry in root.tail if entry.new != ident)
        branches = {name: head for name, head in root.branches.items() if head != ident}
        return root.next(tail=kept, branches=branches)

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))


def read_all(repository: weightvc.Repository) -> None:
    """Every version of every branch can be read."""
    for branch in repository.branches():
        for version in repository.log(branch):
            held(repository, version.id)


# When


def test_an_upload_of_a_killed_writer_goes_after_two_grace_periods(repository, clock):
    repository.commit(Bits(START))
    name = orphan(repository)
    repository.commit(Bits(step(1)))
    assert gc(repository).condemned.objects.total() == 0  # first seen
    clock.later(HOUR - 1)
    assert gc(repository).condemned.objects.total() == 0
    clock.later(1)
    assert gc(repository).condemned.objects == {"pack": 1}
    clock.later(HOUR - 1)
    assert gc(repository).deleted.objects.total() == 0
    assert name in names(repository)
    clock.later(1)
    assert gc(repository).deleted.objects == {"pack": 1}
    assert name not in names(repository)
    read_all(repository)


def test_at_once_without_a_grace_period(again):
    repository = again()
    repository.commit(Bits(START))
    repository.commit(Bits(step(1)))
    orphans = {orphan(repository) for _ in range(3)}
    result = gc(repository, 0, force=True)
    assert result.deleted.objects["pack"] == 3
    assert not orphans & names(repository)
    assert dead(repository) == set()
    assert held(again()) == step(1)
    # There is nothing to do, and nothing is done.
    sequence = again().refresh().sequence
    for _ in range(2):
        result = gc(again(), 0, force=True)
        assert (result.condemned.objects.total(), result.deleted.objects.total()) == (0, 0)
    assert again().refresh().sequence == sequence
    assert again().commit(Bits(START)).generation == 2
    read_all(again())


def test_an_object_that_was_named_until_just_now_stays_for_a_grace_period(repository, clock):
    """Case 36: old as it is, it was seen to be named by nothing only now."""
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    mine = repository.entry(old).place.manifest
    orphan(repository, 1)
    gc(repository, force=True)
    clock.later(30 * 24 * HOUR)
    repository.commit(Bits(step(2)), branch="main")
    source = repository.source(old, whole=True)
    forget(repository, old.id)
    assert gc(repository, force=True).condemned.objects["manifest"] == 1
    for _ in range(6):
        clock.later(HOUR / 6 - 1)
        gc(repository, force=True)
        assert mine in names(repository)
    assert source.read(0, 0, 800) == step(1)["", "w"].data
    clock.later(6)
    gc(repository, force=True)
    assert mine not in names(repository)
    read_all(repository)


def test_notes_do_not_keep_a_list_from_growing_old(repository, clock):
    """Runs far more frequent than the grace period, writers that are busy all the time."""
    repository.commit(Bits(START))
    first = orphan(repository)
    for i in range(40):
        repository.commit(Bits(step(i)))
        orphan(repository)
        gc(repository, force=True)
        clock.later(HOUR / 12)
        if i == 26:
            assert first not in names(repository)
    page = collect.read_page(shelf(repository), repository.refresh())
    assert len(page.noted) <= collect.NOTES + 2
    read_all(repository)


def test_an_idle_repository_is_left_alone(repository, clock):
    repository.commit(Bits(START))
    for _ in range(5):
        gc(repository)
        clock.later(HOUR)
    assert repository.refresh().sequence == 2


# What


def test_every_kind_goes_that_nothing_names(repository, tmp_path):
    with tiny_format():
        (tmp_path / "d").mkdir()
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"w": np.arange(200, dtype=np.float32)}, tmp_path / "d" / "model.safetensors")
        (tmp_path / "d" / "vocab.txt").write_bytes(secrets.token_bytes(100_000))
        gone = repository.commit(tmp_path / "d", branch="gone", expect="")
        for i in range(12):
            repository.commit(Bits(step(i)))
            repository.tag(f"t{i}")
        forget_later = set(live.named(repository.entry(gone)))
        kinds = {name.partition("/")[0] for name in forget_later}
        assert kinds == {"manifest", "schema", "layout", "file"}

        def make(root):
            from weightvc.protocol.rewrite import rewritten

            def edit(entry):
                if entry.new == gone.id and entry.place is not None:
                    return replace(entry, op="expired", place=None)
                return None

            transaction = key.Transaction(root.sequence)
            tail, segments = rewritten(repository._shelf, root, transaction, edit)
            branches = {n: i for n, i in root.branches.items() if n != "gone"}
            return root.next(tail=tail, segments=segments, branches=branches)

        swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
        deleted = gc(repository, 0, force=True).deleted.objects
        assert {"manifest", "schema", "layout", "file", "pack", "segment", "page"} <= set(deleted)
        assert not forget_later & names(repository)
        assert dead(repository) == set()
        read_all(repository)


def test_what_is_not_ours_is_never_touched(place, again):
    repository = again()
    repository.commit(Bits(START))
    foreign = [
        "notes.txt",
        "pack/abc",
        "manifest/" + "0" * 64,
        "pin/mine",
        "probe/other",
        "root.d/x",
        "rooty",
        "x/y/z",
    ]
    for name in foreign:
        repository.store.put(name, b"mine")
    orphan(repository)
    result = gc(repository, 0, force=True)
    assert set(foreign) <= names(repository)
    assert result.foreign.objects.total() == len(foreign)


def test_a_sibling_whose_name_begins_alike_is_not_seen(place, tmp_path):
    """Case 38: p, p/ and p2."""
    url, options = place
    if url.startswith("memory"):
        pytest.skip("names in memory have no prefixes")
    first = weightvc.init(f"{url}/p", cache=None, **options)
    second = weightvc.init(f"{url}/p2", cache=None, **options)
    for one in (first, second):
        one.commit(Bits(START))
        one.commit(Bits(step(1)))
        orphan(one)
    before = names(second)
    for spelling in ("p", "p/", "/p"):
        opened = weightvc.open(f"{url}/{spelling}", cache=None, **options)
        gc(opened, 0, force=True)
        read_all(opened)
        assert dead(opened) == set()
    assert names(second) == before
    read_all(second)


def test_probes_and_half_written_files_go_by_age(tmp_path):
    repository = weightvc.init(tmp_path / "r", cache=None)
    repository.commit(Bits(START))
    probe, young = (f"probe/{secrets.token_hex(16)}-{i}" for i in range(2))
    repository.store.put(probe, b"x")
    repository.store.put(young, b"x")
    half, fresh = tmp_path / "r" / "pack" / ".tmp-1-a", tmp_path / "r" / ".tmp-2-b"
    half.parent.mkdir(exist_ok=True)
    for path in (half, fresh):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * collect.DAY
    for path in (tmp_path / "r" / probe, half):
        os.utime(path, (long_ago, long_ago))
    result = gc(repository, 0)
    assert (result.deleted.objects["probe"], result.deleted.objects["temporary"]) == (1, 1)
    assert (half.exists(), fresh.exists()) == (False, True)
    assert names(repository) >= {young}
    assert probe not in names(repository)


# Writers


class Paused(Bits):
    """A source whose check(), after the uploads and before the manifest, lets something else happen."""

    def __init__(self, weights, meanwhile, times: int = 1) -> None:
        super().__init__(weights)
        self._meanwhile = meanwhile
        self._times = times
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks <= self._times:
            self._meanwhile()


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_commit_that_was_asleep_begins_again_under_new_names(again, rounds):
    """Case 35: its packs are collected before it swaps."""
    repository, other = again(), again()

    def meanwhile() -> None:
        other.branch("moved")  # so that the sequence number of the sleeper is in the past
        other.delete_branch("moved")
        # They go up beside the encoding: one of the base, one of the patch.
        while len([name for name in dead(other) if name.startswith("pack/")]) < 2:
            time.sleep(0.01)
        for _ in range(rounds):
            gc(other, 0, force=True)
        assert dead(other) == set()  # its packs are gone

    with tiny_format():
        repository.commit(Bits(START), base=True)
        source = Paused(step(1), meanwhile)
        made = repository.commit(source, base=True)
        assert source.checks == 2  # it was read twice
        assert held(again()) == step(1)
        assert next(v.id for v in again().log()) == made.id
        entry = again().entry(made)
        assert key.parse(entry.place.manifest).begin >= again().refresh().horizon
        gc(again(), 0, force=True)
        assert dead(again()) == set()
        read_all(again())


def test_a_tag_that_was_asleep_begins_again(repository, monkeypatch):
    repository.commit(Bits(START))
    other = weightvc.open(repository.url, cache=None)
    put = repository._shelf.put
    seen = []

    def slow(transaction, kind, data, **more):
        seen.append(transaction.begin)
        name = put(transaction, kind, data, **more)
        if len(seen) == 1:
            other.branch("moved")
            gc(other, 0, force=True)
            assert name not in names(other)
        return name

    monkeypatch.setattr(repository._shelf, "put", slow)
    repository.tag("v1")
    assert len(seen) == 2
    assert seen[1] > seen[0]
    assert weightvc.open(repository.url, cache=None).tags() == {"v1": repository.resolve().id}
    assert dead(repository) == set()


def test_the_horizon_does_not_pass_a_transaction_that_is_pinned(repository, clock):
    repository.commit(Bits(START))
    with pins.Holder(repository.store, begin=repository.refresh().sequence, lifetime=7200):
        name = orphan(repository)
        repository.commit(Bits(step(1)))
        for _ in range(2):
            gc(repository, force=True)
            clock.later(HOUR)
        assert repository.refresh().horizon <= key.parse(name).begin
        assert name in names(repository)
        clock.later(HOUR)  # not renewed in two hours, by the store's clock
        for _ in range(2):
            gc(repository, force=True)
            clock.later(HOUR)
    assert name not in names(repository)


def test_a_commit_pins_its_transaction_if_it_lasts(repository, monkeypatch):
    repository.commit(Bits(START))
    found = []

    def meanwhile() -> None:
        for _ in range(500):
            if found := [n for n in names(repository) if n.startswith("pin/")]:
                break
            time.sleep(0.01)
        pinned = pins.read(repository.store, time.time())
        assert pinned.begin == repository.refresh().sequence
        seen.extend(found)

    seen: list[str] = found
    repository.commit(Paused(step(1), lambda: None))
    assert not [n for n in names(repository) if n.startswith("pin/")]
    monkeypatch.setattr(pins, "PATIENCE", 0.01)
    repository.commit(Paused(step(2), meanwhile))
    assert len(seen) == 1
    assert not [n for n in names(repository) if n.startswith("pin/")]
    assert held(repository) == step(2)


def passing(repository: weightvc.Repository, clock: Clock):
    """A collector whose grace period is shorter than anything takes: it passes whatever is not pinned."""
    other = weightvc.open(repository.url, cache=None)

    def run() -> None:
        orphan(other)
        other.branch("moved")
        other.delete_branch("moved")
        for _ in range(2):
            gc(other, 1, force=True)
            clock.later(1)

    return run


def test_a_commit_that_was_passed_pins_its_next_attempt(repository, clock):
    repository.commit(Bits(START))
    source = Paused(step(1), passing(repository, clock), times=10)
    repository.commit(source)
    assert source.checks == 2
    assert held(repository) == step(1)
    assert not [n for n in names(repository) if n.startswith("pin/")]


def test_a_compaction_is_never_passed(repository, clock, monkeypatch):
    """It takes longer than a commit, so it pins what it does from its first upload on."""
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)))
        real, run = patches.patch, passing(repository, clock)

        def slow(*given):
            run()
            return real(*given)

        monkeypatch.setattr(patches, "patch", slow)
        attempts = []
        monkeypatch.setattr(compact.Compaction, "run", counted(compact.Compaction.run, attempts))
        done = repository.compact(share=10_000)
        assert done.patches == 2
        assert len(attempts) == 1
        assert not [n for n in names(repository) if n.startswith("pin/")]
        writes = repository.stats.writes
        repository.compact(share=10_000)
        assert repository.stats.writes == writes  # nothing to do, nothing to pin
        read_all(weightvc.open(repository.url, cache=None))


def counted(call, calls: list):
    def run(*given, **options):
        calls.append(given)
        return call(*given, **options)

    return run


# Readers


def test_a_lease_keeps_what_a_version_is_read_from(repository, clock):
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    repository.commit(Bits(step(2)), branch="main")
    holder, seen, entry = pins.lease(shelf(repository), old.id, lifetime=24 * 3600)
    forget(repository, old.id)
    for _ in range(6):
        gc(repository, force=True)
        clock.later(HOUR)
    reader = weightvc.open(repository.url, cache=None)
    reader._seen, reader._frozen = seen, 1
    assert held(reader, old.id) == step(1)
    assert gc(repository, force=True).pinned.objects["manifest"] >= 1
    clock.later(24 * HOUR)  # it was not renewed
    for _ in range(4):
        gc(repository, force=True)
        clock.later(HOUR)
    assert entry.place.manifest not in names(repository)
    assert holder.name not in names(repository)


def test_a_lease_on_what_has_gone_is_refused(repository):
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    repository.commit(Bits(step(2)), branch="main")
    put = repository.store.put
    other = weightvc.open(repository.url, cache=None)

    def slow(name, data):
        if name.startswith("pin/"):
            forget(other, old.id)
            gc(other, 0, force=True)
        return put(name, data)

    mine = shelf(repository)
    mine.store.put = slow
    with pytest.raises(WeightvcError):
        pins.lease(mine, old.id)
    assert not [n for n in names(repository) if n.startswith("pin/")]


def test_a_branch_that_moves_while_a_lease_is_taken_means_what_is_leased(repository):
    """Otherwise what is read inside is another version, which nothing shelters."""
    old = repository.commit(Bits(START))
    other = weightvc.open(repository.url, cache=None)
    reader = weightvc.open(repository.url, cache=None)
    put = reader.store.put

    def slow(name, data):
        other.commit(Bits(step(1)))
        reader.store.put = put
        return put(name, data)

    reader.store.put = slow
    with reader.lease("main") as leased:
        assert leased.id != old.id
        assert reader.resolve("main").id == leased.id
        (pin,) = pins.read(other.store, 0).held
        assert pin.versions == {leased.id}
        assert set(live.named(other.entry(leased))) <= pin.names


def test_a_lease_that_has_lapsed_is_not_revived(repository):
    now = [0.0]
    holder = pins.Holder(repository.store, versions=["0" * 64], lifetime=60, clock=lambda: now[0])
    holder.take()
    now[0] = 50.0
    holder.renew()
    now[0] = 109.0
    assert holder.holds
    now[0] = 110.0
    with pytest.raises(Expired):
        holder.renew()
    slow = pins.Holder(repository.store, versions=["0" * 64], lifetime=60, clock=lambda: now[0])
    slow.take()
    put = repository.store.put

    def late(name, data):
        now[0] += 61
        return put(name, data)

    repository.store.put = late
    with pytest.raises(Expired):
        slow.renew()
    with pytest.raises(Refused):
        pins.Holder(repository.store, lifetime=0)


def test_a_pin_that_cannot_be_read_stops_everything(repository):
    repository.commit(Bits(START))
    name = orphan(repository, 1)
    repository.commit(Bits(step(1)))
    pin = f"pin/{secrets.token_hex(16)}"
    repository.store.put(pin, b"")
    with pytest.raises(Corrupt, match=pin):
        gc(repository, 0, force=True)
    assert name in names(repository)


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("tiny", [False, True])
def test_a_reader_that_lost_the_race_says_so(repository, tiny, lists, monkeypatch):
    """Never partial weights: Expired, also in the middle of a read, and for those who may not list."""
    with tiny_format():
        repository.commit(Bits(START))
        repository.commit(Bits(step(1)))
        old = repository.commit(Bits(step(2)), branch="old", expect="")
        reader = weightvc.open(repository.url, cache=None)
        early = reader.source(old)
        refs = reader._refs()
        middle = reader.source(old)
        if tiny:
            middle.read(0, 0, 64)
        expire_entry(repository, old.id)
        gc(repository, 0, force=True)
        if not lists:
            deny_what_is_missing(monkeypatch)
        for source in (early, middle):
            with pytest.raises(Expired):
                contents(source)
        with pytest.raises(Expired):
            contents(reader._open(refs, refs.resolve(old).entry, whole=True))
        with pytest.raises(Expired):
            reader.load(old.id, framework="numpy")
        assert held(reader, "main") == step(1)


def expire_entry(repository: weightvc.Repository, ident: str) -> None:
    def make(root):
        out = tuple(
            replace(e, op="expired", place=None, expired=root.sequence + 1) if e.new == ident and e.place else e
            for e in root.tail
        )
        segments = []
        transaction = key.Transaction(root.sequence)
        for ref in root.segments:
            entries = [
                replace(e, op="expired", place=None, expired=root.sequence + 1) if e.new == ident and e.place else e
                for e in repository._shelf.segment(ref)
            ]
            from weightvc.objects import catalogue

            name = repository._shelf.put(transaction, "segment", catalogue.encode_segment(entries))
            segments.append(catalogue.SegmentRef(name, len(entries)))
        branches = {name: head for name, head in root.branches.items() if head != ident}
        return root.next(tail=out, segments=tuple(segments), branches=branches)

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))


# Refusals


def test_no_branches_is_a_mistake(repository):
    gc(repository, 0)  # nothing was ever committed
    repository.commit(Bits(START))
    orphan(repository)
    repository.branch("b")

    def make(root):
        return root.next(branches={})

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
    before = names(repository)
    with pytest.raises(Refused, match="no branches"):
        gc(repository, 0)
    assert names(repository) == before
    gc(repository, 0, force=True)


def test_much_that_nobody_let_go_of_is_a_mistake(repository):
    with tiny_format():
        repository.commit(Bits(START))
        old = repository.commit(Bits(step(1)), branch="old", expect="", base=True)
        manifest = repository.entry(old).place.manifest
        forget(repository, old.id)
        before = names(repository)
        with pytest.raises(Refused, match="--force"):
            gc(repository, 0)
        assert names(repository) == before
        gc(repository, 0, force=True)
        assert manifest not in names(repository)


def test_a_list_that_holds_a_part_of_it_makes_it_no_smaller(repository, monkeypatch):
    """Otherwise a lost history went list by list, each a small share."""
    for i in range(6):
        repository.commit(Bits(step(i)), branch=f"b{i}", expect="", base=True)
    heads = repository.branches()
    for i in range(4):
        forget(repository, heads[f"b{i}"])
    monkeypatch.setattr(collect, "LIST", 1)
    before = names(repository)
    with pytest.raises(Refused, match="--force"):
        gc(repository, 0)
    assert names(repository) == before


def test_uploads_without_a_manifest_were_never_published(repository):
    """A writer that was killed at its first, large upload: nothing that could be lost."""
    made = repository.commit(Bits(START))
    name = orphan(repository, 1, size=10 * repository.entry(made).place.nbytes)
    gc(repository, 0)
    assert name not in names(repository)
    assert held(repository) == START


def test_ways_of_a_compaction_that_was_killed_are_no_lost_versions(repository, monkeypatch):
    """All of them lead to versions that the catalogue reaches without."""
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)), branch="main")
        before = dead(repository)

        def killed(*_):
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(compact.Compaction, "_publish", killed)
            with pytest.raises(Killed):
                repository.compact(base_every=4, share=1, reverse=True)
        assert len([name for name in dead(repository) - before if name.startswith("manifest/")]) > 5
        repository.branch("moved")
        gc(repository, 0)
        assert dead(repository) == set()
        read_all(weightvc.open(repository.url, cache=None))
        # Versions that the root lost beside them are seen all the same.
        with monkeypatch.context() as patched:
            patched.setattr(compact.Compaction, "_publish", killed)
            with pytest.raises(Killed):
                repository.compact(base_every=4, share=1, reverse=True)
        for i in range(20):
            forget(repository, repository.commit(Bits(step(20 + i)), branch="lost", expect="", base=True).id)
        with pytest.raises(Refused, match="--force"):
            gc(repository, 0)


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


@pytest.mark.parametrize("fault", ["kill before", "kill after", "fail"])
def test_interrupted_anywhere_the_next_run_goes_on(memory_url, fault):
    at = 0
    while True:
        url = f"{memory_url}-{fault}-{at}".replace(" ", "")
        with tiny_format():
            repository = weightvc.init(url, cache=None)
            for i in range(7):
                repository.commit(Bits(step(i)))
            orphans = {orphan(repository, 2) for _ in range(3)}
            faulty = Faulty(repository.store, at, fault)
            try:
                collect.run(Shelf(faulty, None), grace=0, force=True)
                done = True
            except (Killed, StoreError):
                done = False
            read_all(weightvc.open(url, cache=None))
            gc(repository, 0, force=True)
            assert not orphans & names(repository)
            assert dead(repository) == set()
            read_all(weightvc.open(url, cache=None))
        if done and len(faulty.operations) <= at:
            break
        at += 1
    assert at > 10


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


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(repository, clock):
    repository.commit(Bits(START))
    orphan(repository, 1)
    repository.commit(Bits(step(1)))
    for _ in range(3):
        before = names(repository), repository.refresh()
        said = gc(repository, dry_run=True)
        assert (names(repository), weightvc.open(repository.url, cache=None).refresh()) == before
        done = gc(repository)
        assert said.condemned == done.condemned
        assert said.deleted == done.deleted
        clock.later(HOUR)
    assert done.deleted.objects["pack"] == 1


def test_a_list_that_a_root_names_is_not_deleted(repository, clock):
    """A root that was put back by hand: what is on its list may be named."""
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    entry = repository.entry(old)
    orphan(repository, 1)
    gc(repository, force=True)
    clock.later(HOUR)
    forget(repository, old.id)
    gc(repository, force=True)

    def make(root):
        return root.next(tail=(*root.tail, entry))

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
    clock.later(HOUR)
    with pytest.raises(Corrupt, match="by hand"):
        gc(repository, force=True)
    assert entry.place.manifest in names(repository)


def test_the_newest_copies_of_the_root_keep_their_segments(repository, clock):
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)))
        seen = swap.must_read(repository.store)
        repository.store.put(key.copy(seen.root.sequence, seen.root.write), roots.encode(seen.root))
        named = {ref.key for ref in seen.root.segments}
        for i in range(9):
            repository.commit(Bits(step(i)))
        gc(repository, 0, force=True)
        assert named <= names(repository)
        for _ in range(2):
            seen = swap.must_read(repository.store)
            repository.store.put(key.copy(seen.root.sequence, seen.root.write), roots.encode(seen.root))
            repository.branch(secrets.token_hex(4))
        gc(repository, 0, force=True)
        assert not named & names(repository)


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
