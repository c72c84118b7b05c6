"""Pins: what a reader's lease or a writer's transaction keeps from the collector; and who has none."""

import contextlib
import os
import secrets
import socket
import threading
import time
from dataclasses import replace

import pytest

import weightvc
from tests.kit.faults import deny_what_is_missing
from tests.kit.garbage import HOUR, START, Clock, dead, forget, gc, names, orphan, read_all, shelf, step
from tests.kit.schedule import mutated
from tests.kit.stub import Status
from tests.kit.weights import Bits, contents, held, tiny_format
from weightvc.errors import AccessDenied, Corrupt, Expired, Refused, Unavailable, WeightvcError
from weightvc.objects import frame, key
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import collect, compact, live, patches, pins, swap


@pytest.mark.parametrize("operation", ["GetObject", "ListObjectsV2"])
def test_a_pin_that_cannot_be_read_ends_the_run(stub, operation):
    """What it keeps is not known then."""
    place = stub.place()
    repository = weightvc.init(place.url, cache=None, **place.options)
    old = repository.commit(Bits(START))
    repository.commit(Bits(step(1)), base=True)
    with repository.lease(old):
        forget(repository, old.id)
        before = names(repository)
        if operation == "GetObject":
            wrong = stub.fault(Status(403), operation=operation, key="/pin/", times=None)
        else:  # the first listing is of everything
            wrong = stub.fault(Status(403), operation=operation, times=None, after=1)
        with pytest.raises(AccessDenied):
            gc(repository, 0, force=True)
        assert wrong.done == 1
        stub.clear()
        assert before - names(repository) == set()
        gc(repository, 0, force=True)
        assert before - names(repository) == set()
    assert gc(repository, 0, force=True).deleted.objects["manifest"] == 1


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


def test_a_run_says_what_a_killed_writer_still_holds_and_until_when(repository, clock):
    repository.commit(Bits(START))
    writer = pins.Holder(repository.store, begin=repository.refresh().sequence)
    writer.take()  # and is killed
    name = orphan(repository)
    for i in range(2):
        repository.commit(Bits(step(i)))
    clock.later(60)
    done = gc(repository, 0, force=True)
    assert (done.held.objects, done.young.objects.total()) == ({"pack": 1}, 0)
    (pin,) = done.pins
    assert (pin.name, pin.holder, pin.until) == (writer.name, pins.myself(), clock.now - 60 + HOUR)
    told = pin.told
    assert f"{socket.gethostname()}, process {os.getpid()}" in told
    assert told.endswith("last renewed 2027-01-15 08:00:00 UTC, and dies at 2027-01-15 09:00:00 UTC")
    assert pin.mend(repository.url).endswith(f"delete {repository.url}/{writer.name}")
    clock.later(HOUR - 61)
    assert gc(repository, 0, force=True).held.objects == {"pack": 1}
    clock.later(1)
    done = gc(repository, 0, force=True)
    assert done.held.objects.total() == 0
    assert done.pins == ()
    assert name not in names(repository)


def test_what_is_too_young_as_well_is_held_by_no_pin(repository, clock):
    """It would not be condemned without the pin either; nor is what began before it."""
    repository.commit(Bits(START))
    early = orphan(repository)
    repository.commit(Bits(step(1)))
    with pins.Holder(repository.store, begin=repository.refresh().sequence, lifetime=4 * 3600) as writer:
        orphan(repository)
        repository.commit(Bits(step(2)))
        done = gc(repository)
        assert (done.held.objects.total(), done.young.objects["pack"], done.pins) == (0, 2, ())
        clock.later(HOUR)
        orphan(repository)
        done = gc(repository)
        assert (done.condemned.objects, done.young.objects) == ({"pack": 1}, {"pack": 1})
        assert early in collect.read_page(shelf(repository), repository.refresh()).dead
        # While that list waits no other is made; and then it would still be held.
        assert (done.held.objects["pack"], [pin.name for pin in done.pins]) == (1, [writer.name])


def test_pages_that_are_not_worth_a_swap_are_held_by_no_pin(repository, clock):
    repository.commit(Bits(START))
    with pins.Holder(repository.store, begin=repository.refresh().sequence, lifetime=4 * 3600):
        for name in ("a", "b", "c"):
            repository.tag(name)
        orphan(repository)
        gc(repository)
        clock.later(HOUR)
        done = gc(repository)
        assert (done.held.objects, done.young.objects["page"], done.pins) == ({}, 2, ())


def test_a_run_names_the_leases_that_something_is_left_for(repository):
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    repository.commit(Bits(step(2)), branch="main")
    with repository.lease("main"), repository.lease(old.id):
        assert gc(repository, 0).pins == ()
        forget(repository, old.id)
        done = gc(repository, 0, force=True)
        assert done.pinned.objects["manifest"] == 1
        (pin,) = done.pins
        assert pin.versions == {old.id}
        assert "a reader (" in pin.told


def test_a_pin_of_before_holders_were_recorded(repository):
    head = {"begin": 1, "lifetime": 600, "names": [], "versions": [], "weightvc": "pin 1"}
    repository.store.put(f"pin/{secrets.token_hex(16)}", frame.encode(frame.PAGE, head))
    (pin,) = pins.read(repository.store, time.time()).held
    assert (pin.holder, pin.since) == (None, None)
    assert "a writer (not recorded which), last renewed" in pin.told


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


def test_a_lease_whose_version_lies_elsewhere_by_then_is_taken_anew(repository):
    """What it names has gone, and what the version is read from now would be sheltered by nothing."""
    with tiny_format():
        ids = [repository.commit(Bits(step(i))).id for i in range(40)]
        keeper = weightvc.open(repository.url, cache=None)
        reader = weightvc.open(repository.url, cache=None)
        put, written = reader.store.put, []

        def slow(name, data):
            written.append(name)
            if len(written) == 1:
                keeper.expire(Policy({"*": Rules(every=16)}, 0), save=True)
                for _ in range(3):
                    keeper.maintain(grace=0, force=True)
                assert not pins._decode(data, name, 0).names <= names(keeper)
            return put(name, data)

        reader.store.put = slow
        with reader.lease(ids[39]):
            assert len(set(written)) == 2
            (pin,) = pins.read(keeper.store, time.time()).held
            assert {one.way.manifest for one in reader.plan(None, ids[39]).steps} <= pin.names <= names(keeper)
            assert held(reader, ids[39]) == step(39)


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
    # Nor is one believed in whose first write took longer than it lives: it may have died since.
    slow = pins.Holder(repository.store, versions=["0" * 64], lifetime=60, clock=lambda: now[0])
    slow.take()
    assert not slow.holds
    with pytest.raises(Expired):
        slow.check()
    with pytest.raises(Refused):
        pins.Holder(repository.store, lifetime=0)


def test_a_lease_renews_itself_while_it_is_held(repository, monkeypatch):
    """Also where the store failed for a while."""
    repository.commit(Bits(START))
    monkeypatch.setattr(pins, "RENEWALS", 6000)
    put, written, again = repository.store.put, [], threading.Event()

    def watched(name, data):
        written.append(name)
        if len(written) in (2, 3):
            raise Unavailable("for a while")
        if len(written) == 6:
            again.set()
        return put(name, data)

    monkeypatch.setattr(repository.store, "put", watched)
    with repository.lease(lifetime=600):
        assert again.wait(60)
        (pin,) = pins.read(repository.store, time.time()).held
        assert {*written} == {pin.name}
    assert pins.read(repository.store, time.time()) == pins.Pins((), ())


AGAIN = "held = pins.read(shelf.store, sight.now)"
ONCE = "held = sight.tally.objects.__dict__.setdefault('pins', pins.read(shelf.store, sight.now))"


@pytest.mark.parametrize("again", [True, False])
def test_leases_are_read_anew_with_each_root(repository, monkeypatch, again):
    """A lease comes while a version is let go of, and that while a collector was about to swap: its next attempt has
    to see the lease. With the leases of its first attempt the version is lost to who holds one."""
    ids = [repository.commit(Bits(step(i)), base=True).id for i in range(4)]
    orphan(repository, 1)
    reader, keeper, collector = (weightvc.open(repository.url, cache=None) for _ in range(3))
    real, swapped, lease = pins.read, collector.store.swap, reader.lease(ids[1])
    seen = []

    def read(store, now):
        found = real(store, now)
        if store is keeper.store:
            lease.__enter__()
        return found

    def swap_later(*given):
        if not seen:
            seen.append(keeper.expire(Rules(last=1)))
        return swapped(*given)

    monkeypatch.setattr(pins, "read", read)
    monkeypatch.setattr(collector.store, "swap", swap_later)
    with contextlib.ExitStack() as stack:
        stack.callback(lease.__exit__, None, None, None)
        if not again:
            stack.enter_context(mutated(collect, "mark", AGAIN, ONCE))
        collector.gc(grace=0, force=True)
        assert {one.state for one in seen[0].decisions if one.version.id == ids[1]} == {"expired"}
        if again:
            assert held(reader, ids[1]) == step(1)
        else:
            with pytest.raises(Expired):
                held(reader, ids[1])


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
