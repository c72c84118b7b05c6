"""Nothing is lost, whatever the order of what writers, readers and collectors do: the real code, searched as a model.

docs/gc.md has the proof; here is what tries to refute it. Each rule that the proof needs is also taken away, and the
same search has to find the loss then: so it can tell. WEIGHTVC_SEED=n runs that random order alone; `make soak`
searches further.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest

from tests.kit.faults import Killed
from tests.kit.orders import explore, wander
from tests.kit.schedule import (
    GRACE,
    Actor,
    Body,
    Lost,
    Scenario,
    View,
    World,
    mutated,
    scheduled,
)
from tests.kit.weights import Bits, Weights, flipped, held, tensor
from weightvc.errors import Unavailable, WeightvcError
from weightvc.objects import catalogue, key
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import collect, commit, pins, swap
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository

HOUR = 3600.0
ONLY_HEADS = Policy({"*": Rules(last=1)}, 0)
FEW = 1
"""Interruptions in searches that do not see all orders: as many as a loss needs, with most rules taken away."""


@pytest.fixture(autouse=True, scope="module")
def _scheduled() -> Iterator[None]:
    with scheduled():
        yield


# Actors


@cache
def weights(message: str) -> Weights:
    first = {("", "w"): tensor("BF16", (30,), 0)}
    return first if message == "0" else {("", "w"): flipped(first["", "w"], 0.3, int(message))}


def commits(message: str, **options: object) -> Body:
    options = {"on_conflict": "rebase", **options}
    return lambda actor: actor.open().commit(Bits(weights(message)), message=message, **options)  # type: ignore[arg-type]


def gc(grace: float = 0, runs: int = 1) -> Body:
    def body(actor: Actor) -> None:
        for _ in range(runs):
            actor.open().gc(grace=grace, force=True)

    return body


def expires(actor: Actor) -> None:
    actor.open().expire(ONLY_HEADS, force=True)


def compacts(actor: Actor) -> None:
    actor.open().compact(base_every=4, share=1, reverse=True)


def resets(actor: Actor) -> None:
    actor.open().reset("main", "main~1", rewind=True)


def restores(actor: Actor) -> None:
    actor.open().restore_branch("gone")


def deletes(actor: Actor) -> None:
    actor.open().delete_branch("side")


def tags(actor: Actor) -> None:
    repository = actor.open()
    repository.tag("one", "main")
    repository.tag("two", "main")
    repository.delete_tag("one")


def reads(ref: str) -> Body:
    """Exact weights, or an error that says why not."""

    def body(actor: Actor) -> None:
        repository = actor.open()
        made = repository.resolve(ref)
        assert held(repository, made.id) == weights(made.message)

    return body


def leases(ref: str) -> Body:
    """Who has a lease reads, whatever others do."""

    def body(actor: Actor) -> None:
        repository = actor.open()
        with repository.lease(ref, lifetime=pins.LONGEST) as made:
            try:
                assert held(repository, made.id) == weights(made.message)
            except Unavailable:
                raise
            except WeightvcError as error:
                raise AssertionError(f"a lease was held, and yet: {error}") from error

    return body


def leases_shortly(ref: str) -> Body:
    """Who believes in a lease when all is read has read it."""

    def body(actor: Actor) -> None:
        repository = actor.open()
        holder, seen, entry = pins.lease(repository._shelf, ref, lifetime=int(1.5 * GRACE), clock=actor.clock)
        repository._seen, repository._frozen = seen, 1
        failure, read = None, False
        try:
            read = held(repository, entry.new or "") == weights(entry.message)
        except WeightvcError as error:
            failure = error
        if holder.holds:
            assert read, f"a lease was held, and yet: {failure}"
        holder.release()

    return body


# What there is at first


class _Dying(View):
    def swap(self, key: str, data: bytes, etag: str) -> str:
        raise Killed


def some(repository: Repository, world: World) -> None:
    """Three versions, a side branch, one that was deleted; and what a writer left that was killed."""
    repository.commit(Bits(weights("0")), message="0")
    repository.commit(Bits(weights("1")), message="1")
    with contextlib.suppress(Killed):
        Repository(_Dying(world), None, author="killed").commit(Bits(weights("9")), message="9", base=True)
    repository.commit(Bits(weights("2")), message="2", base=True)
    repository.branch("side", "main~1")
    repository.commit(Bits(weights("3")), branch="side", message="3")


def plain(repository: Repository, world: World) -> None:
    """Three versions, none of which needs another one."""
    for number in "012":
        repository.commit(Bits(weights(number)), message=number, base=True)


def deleted(repository: Repository, world: World) -> None:
    """As some, and a branch that was deleted."""
    repository.commit(Bits(weights("0")), message="0", base=True)
    repository.branch("gone")
    repository.commit(Bits(weights("1")), branch="gone", message="1", base=True)
    repository.delete_branch("gone")


def long(repository: Repository, world: World) -> None:
    """Segments, of which the last one grows with the next change."""
    for number in range(10):
        repository.commit(Bits(weights(str(number))), message=str(number), base=number % 4 == 0)


def noted(repository: Repository, world: World) -> None:
    """A collector has seen what a killed writer left, and a grace period has passed since."""
    some(repository, world)
    repository.gc(grace=GRACE)
    world.tick()


def condemned(repository: Repository, world: World) -> None:
    """And then it was put on a list."""
    noted(repository, world)
    repository.commit(Bits(weights("4")), message="4")
    repository.gc(grace=GRACE, force=True)
    world.tick()


Setup = Callable[[Repository, World], None]


def scenario(
    setup: Setup, ticks: int | tuple[float, ...] = 0, skews: Mapping[str, float] = {}, **actors: Body
) -> Scenario:
    """`ticks` are so many grace periods, or what the store's clock does in hours; so are `skews`."""
    jumps = (1.0,) * ticks if isinstance(ticks, int) else ticks
    said = f"{setup.__name__}: {' ∥ '.join(actors)}"
    if jumps:
        said += f", the clock goes {' '.join(f'{hours:+g}' for hours in jumps)} h"
    seconds = {name: HOUR * hours for name, hours in skews.items()}
    return Scenario(said, setup, actors, tuple(HOUR * hours for hours in jumps), seconds, weights)


COMMIT = commits("5")
EXHAUSTIVE = [
    scenario(some, commit=COMMIT, gc=gc()),
    scenario(condemned, ticks=2, commit=COMMIT, gc=gc(GRACE)),
    scenario(condemned, ticks=(-5, 9), commit=COMMIT, gc=gc(GRACE)),
    scenario(condemned, gc1=gc(GRACE), gc2=gc(GRACE)),
    scenario(some, read=reads("main~1"), gc=gc()),
    scenario(plain, read=reads("main~1"), expire=expires),
    scenario(some, lease=leases("main~1"), expire=expires),
    scenario(plain, lease=leases("main~1"), expire=expires),
    scenario(some, lease=leases("main~1"), gc=gc()),
    scenario(some, reset=resets, gc=gc()),
    scenario(some, commit=COMMIT, expire=expires),
    scenario(deleted, restore=restores, gc=gc()),
    scenario(deleted, restore=restores, expire=expires),
    scenario(some, delete=deletes, gc=gc()),
]
BOUNDED = [
    scenario(long, commit=COMMIT, gc=gc()),
    scenario(some, compact=compacts, gc=gc()),
    scenario(some, tag=tags, gc=gc()),
    scenario(some, commit=COMMIT, gc1=gc(), gc2=gc()),
    scenario(some, commit=COMMIT, expire=expires, gc=gc(runs=2)),
    scenario(some, lease=leases("main~1"), expire=expires, gc=gc(runs=2)),
    scenario(some, reset=resets, commit=COMMIT, gc=gc()),
    scenario(long, read=reads("main~1"), expire=expires, gc=gc(runs=2)),
    scenario(some, compact=compacts, expire=expires, gc=gc()),
    scenario(some, commit=commits("5", branch=None, parents=["main~1"]), expire=expires, gc=gc()),
    scenario(deleted, restore=restores, expire=expires, gc=gc(runs=2)),
]
LARGE = [
    scenario(some, commit=COMMIT, gc=gc(runs=2)),
    scenario(some, commit1=COMMIT, commit2=commits("6"), gc=gc()),
    scenario(noted, ticks=2, commit=COMMIT, gc=gc(GRACE)),
    scenario(some, read=reads("main~1"), expire=expires, gc=gc()),
    scenario(noted, ticks=2, commit=COMMIT, gc1=gc(GRACE), gc2=gc(GRACE)),
    scenario(condemned, ticks=2, read=reads("main~1"), expire=expires, gc=gc(GRACE, runs=2)),
    scenario(condemned, ticks=2, lease=leases_shortly("main~1"), expire=expires, gc=gc(GRACE, runs=2)),
]
"""For `make soak`."""


def named(one: Scenario) -> str:
    return one.name


@pytest.mark.parametrize("one", EXHAUSTIVE, ids=named)
def test_every_order(one):
    found = explore(one)
    assert found.complete
    assert found.orders > 1


@pytest.mark.timeout(900)  # busy machines take five minutes for the longest
@pytest.mark.parametrize("one", BOUNDED, ids=named)
def test_every_order_with_few_interruptions(one):
    found = explore(one, preemptions=FEW)
    assert found.complete
    assert found.orders > 1


@pytest.mark.parametrize(
    "one", [scenario(some, reset=resets, gc=gc()), scenario(some, commit=COMMIT, expire=expires)], ids=named
)
def test_leaving_out_what_commutes_leaves_out_no_end(one):
    """The search that relies on it ends where the one that tries every order of everything ends."""
    short, plain = explore(one), explore(one, preemptions=1000)
    assert short.complete
    assert plain.complete
    assert short.ends == plain.ends
    assert len(short.ends) > 1


# Without its rules


def revives(actor: Actor) -> None:
    """Puts a version back as it was catalogued at first: what nobody may do."""
    repository = actor.open()
    old = repository.entry("main~1")
    shelf = Shelf(repository.store, None)
    seen = swap.must_read(repository.store)

    def make(root):
        back = {old.new: old}
        tail = tuple(back.get(one.new, one) if one.op == catalogue.EXPIRED else one for one in root.tail)
        return root.next(tail=tail)

    swap.change(shelf, make, key.Transaction(seen.root.sequence), seen)


WRITE = scenario(some, commit=COMMIT, gc=gc(runs=2))
LEASE = scenario(plain, lease=leases("main~1"), expire=expires, gc=gc(runs=2))
DETACHED = scenario(plain, commit=commits("5", branch=None, parents=["main~1"]), expire=expires)
MUTATIONS = {
    "the horizon is not checked": (
        WRITE,
        (swap, "change", "if seen.root.horizon > transaction.begin:", "if False:"),
    ),
    "deleted before the swap": (
        WRITE,
        (collect, "condemn", "page = shelf.put(", "delete(shelf.store, marked.dead); page = shelf.put("),
    ),
    "swapped against another root than was marked": (
        WRITE,
        (collect, "condemn", "marked = mark(", "marked = last[0][0] if last else mark("),
    ),
    "what began later is on the list as well": (
        WRITE,
        (collect, "mark", "key.parse(name).begin < horizon]", "True]"),
    ),
    "checked and swapped on two reads": (
        WRITE,
        (swap, "change", "new = _spilled(", "seen = must_read(shelf.store); new = _spilled("),
    ),
    "names are used again": (
        WRITE,
        (key.Transaction, "key", ".{self.begin}-{self.id}-{number}", ".0-{'0' * 32}-0"),
    ),
    "what is there is not written again": (
        scenario(some, commit=commits("9", base=True), gc=gc(runs=2)),
        (
            Shelf,
            "put",
            "self.store.put(name, bytes(data))",
            "there = [one.key for one in self.store.list(name.partition('.')[0])]\n"
            "    if there and kind == 'pack':\n        return there[0]\n    self.store.put(name, bytes(data))",
        ),
    ),
    "a lease is believed in by the root before it": (
        LEASE,
        (pins, "lease", "now = swap.must_read(shelf.store)", "now = seen"),
    ),
    "a lease is believed in whatever became of its version": (
        scenario(some, lease=leases("main~1"), expire=expires),
        (pins, "lease", "if now.root.sequence != seen.root.sequence:", "if False:"),
    ),
    "leases are not read": (LEASE, (collect, "mark", "kept = held.live | ", "kept = ")),
    "what a patch starts from is not looked for": (
        DETACHED,
        (commit, "publish", "if edge.source is not None and (source is None", "if False and (source is None"),
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_without_a_rule_something_is_lost(what):
    one, mutation = MUTATIONS[what]
    with mutated(*mutation), pytest.raises(Lost):
        search(one)


REVIVAL = scenario(plain, revive=revives, expire=expires, gc=gc(runs=2))


def test_without_the_rule_that_nothing_comes_back_something_is_lost():
    """Nothing in the code does that; an actor of this test does."""
    with pytest.raises(Lost, match=r"the root cannot be read|which is not there"):
        search(REVIVAL)


def search(one: Scenario) -> None:
    """Orders with few interruptions first: losses need few."""
    for preemptions in range(FEW + 2):
        explore(one, preemptions=preemptions)


# Faults

FAULTY = [
    scenario(condemned, gc1=gc(GRACE), gc2=gc(GRACE)),
    scenario(some, commit=COMMIT, expire=expires),
]
FAULTY_AND_LARGE = [
    scenario(some, commit=COMMIT, gc=gc()),
    scenario(some, reset=resets, gc=gc()),
    scenario(some, compact=compacts, gc=gc()),
    scenario(some, expire=expires, gc=gc()),
    scenario(some, commit=COMMIT, lease=leases("main~1"), expire=expires),
]
"""For `make soak`."""


@pytest.mark.parametrize("one", FAULTY, ids=named)
def test_one_fault_at_any_operation(one):
    """Killed before it; failed; done with the reply lost; or the reply lost and done at any later time."""
    found = explore(one, faults=1, preemptions=1)
    assert found.complete
    assert found.orders > 20


# At random

EVERYONE: dict[str, Body] = {
    "commit1": COMMIT,
    "commit2": commits("6", branch="side"),
    "commit3": commits("7", branch=None, parents=["main~1"]),
    "expire": expires,
    "compact": compacts,
    "reset": resets,
    "delete": deletes,
    "tag": tags,
    "gc1": gc(GRACE, runs=4),
    "gc2": gc(runs=2),
    "read": reads("main~1"),
    "lease": leases("main~2"),
}
EVERYTHING = scenario(condemned, ticks=6, **EVERYONE)
WRONG_CLOCKS = scenario(
    condemned,
    ticks=(1, -7, 7, 3, -2, 1),
    skews={"commit1": 9, "commit2": -9, "expire": -30, "compact": 5, "gc1": 26, "gc2": -26},
    **EVERYONE,
)
"""Leases live for days, and so outlast what the store's clock does."""
SEEDS = [int(os.environ["WEIGHTVC_SEED"])] if "WEIGHTVC_SEED" in os.environ else range(15)


@pytest.mark.parametrize("faults", [0, 3])
@pytest.mark.parametrize("one", [EVERYTHING, WRONG_CLOCKS], ids=["right clocks", "wrong clocks"])
def test_random_orders(one, faults):
    """Everybody at once. A failure names its seed."""
    for seed in SEEDS:
        assert wander(one, seed, faults=faults, changes=8, depth=200).whole


def test_a_seed_is_the_same_order_again():
    first, again, other = (wander(EVERYTHING, seed, faults=3, changes=8, depth=200) for seed in (1, 1, 2))
    assert first.trace == again.trace != other.trace
    assert first.world.state == again.world.state
