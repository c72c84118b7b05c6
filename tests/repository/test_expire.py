"""Retention: each rule, what it needs to stay, what happens to what goes, and that nothing kept is ever lost."""

import json
import secrets
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightvc
from tests.kit.weights import Bits, contents, flipped, held, tensor, tiny_format
from weightvc.errors import Conflict, Expired, RefNotFound, Refused, Unsupported
from weightvc.objects import catalogue, key
from weightvc.objects import root as roots
from weightvc.objects.catalogue import Entry, Place, Way
from weightvc.objects.retention import Policy, Rules
from weightvc.objects.version import Edge
from weightvc.protocol import collect, expire, live, pins, swap
from weightvc.stores.memory import MemoryStore

START = {("", "w"): tensor("BF16", (300,), 0)}
DAY = 86400


def step(number: int):
    return {("", "w"): flipped(START["", "w"], 0.1, number)}


def fill(
    repository: weightvc.Repository, count: int, *, branch: str = "main", base: int = 0, first: int = 0
) -> list[str]:
    """So many versions of a branch, a base every `base`; their ids."""
    out = []
    for i in range(first, first + count):
        made = repository.commit(
            Bits(step(i)), step=i, branch=branch, base=bool(base) and i % base == 0, metadata={"eval": i % 4 == 0}
        )
        out.append(made.id)
    return out


def states(result: expire.Expiry) -> dict[str, str]:
    return {one.version.id: one.state for one in result.decisions}


def rule_of(result: expire.Expiry, ident: str) -> str:
    return next(one.rule for one in result.decisions if one.version.id == ident)


def fresh(repository: weightvc.Repository) -> weightvc.Repository:
    return weightvc.open(repository.url, cache=None)


def sweep(repository: weightvc.Repository) -> collect.Collection:
    return fresh(repository).gc(grace=0, force=True)


def check_kept(repository: weightvc.Repository, ids: list[str], numbers: dict[str, int]) -> None:
    for ident in ids:
        assert held(fresh(repository), ident) == step(numbers[ident])


# Rules


def test_the_last_of_a_branch(repository):
    """Case 25: what is kept can be read with an empty cache once the rest has been collected."""
    ids = fill(repository, 10)
    numbers = {ident: i for i, ident in enumerate(ids)}
    result = repository.expire(Rules(last=2))
    # v9 and v8 are patches upon patches upon v0: all of these stay, as steps.
    assert [states(result)[ident] for ident in ids] == ["stone"] * 8 + ["kept"] * 2
    assert rule_of(result, ids[9]) == "head of main"
    assert rule_of(result, ids[8]) == "last 2 of main"
    sweep(repository)
    check_kept(repository, ids[8:], numbers)
    reader = fresh(repository)
    for gone in ids[:8]:
        for ask in (gone, gone[:12], f"main~{9 - numbers[gone]}"):
            with pytest.raises(Expired, match="expired"):
                reader.load(ask, framework="numpy")
    assert [v.id for v in reader.log()] == ids[::-1]  # history stays


def test_what_no_kept_version_needs_goes(repository):
    ids = fill(repository, 10, base=4)
    numbers = {ident: i for i, ident in enumerate(ids)}
    places = {ident: set(live.named(repository.entry(ident))) for ident in ids}
    result = repository.expire(Rules(last=2))
    assert [states(result)[ident] for ident in ids] == ["expired"] * 8 + ["kept"] * 2
    assert result.released == sum(one.nbytes for one in result.decisions if one.state == "expired")
    done = sweep(repository)
    assert done.deleted.objects["manifest"] == 8
    left = {one.key for one in repository.store.list()}
    shared = places[ids[8]] | places[ids[9]]
    assert all(not (places[ident] - shared) & left for ident in ids[:8])
    check_kept(repository, ids[8:], numbers)
    reader = fresh(repository)
    assert [v.id for v in reader.log()] == ids[::-1]
    assert [e.op for e in reader.reflog("main")] == ["commit"] * 2 + ["expired"] * 8
    with pytest.raises(Expired):
        held(reader, ids[3])
    # It goes on: the next version is a patch on the head.
    made = fresh(repository).commit(Bits(step(77)))
    assert made.parents == (ids[9],)
    assert held(fresh(repository)) == step(77)
    # And nothing is left to do.
    sequence = fresh(repository).refresh().sequence
    assert set(states(fresh(repository).expire(Rules(last=3))).values()) == {"kept"}
    assert fresh(repository).refresh().sequence == sequence


def test_by_generation_step_and_metadata(repository):
    ids = fill(repository, 13, base=1)
    for rules, wanted in (
        (Rules(every=5), {0, 5, 10, 12}),
        (Rules(every_step=6), {0, 6, 12}),
        (Rules(meta={"eval": True}), {0, 4, 8, 12}),
        (Rules(last=1, every=6, meta={"eval": True}), {0, 4, 6, 8, 12}),
        (Rules(meta={"eval": 1}), {12}),  # 1 is not true
    ):
        result = repository.expire(rules, dry_run=True)
        assert {ids.index(k) for k, state in states(result).items() if state == "kept"} == wanted, rules
    assert len(fresh(repository).expire(Rules(every=5)).decisions) == 13
    assert len(fresh(repository).expire(Rules(every=5)).decisions) == 4


def test_by_age_by_the_clock_of_the_store(repository):
    ids = fill(repository, 4, base=1)
    assert isinstance(repository.store, MemoryStore)
    result = repository.expire(Rules(within=3 * DAY), dry_run=True)
    assert set(states(result).values()) == {"kept"}
    repository.store.set_clock(lambda: time.time() + 2 * DAY)
    assert set(states(repository.expire(Rules(within=3 * DAY), dry_run=True)).values()) == {"kept"}
    repository.store.set_clock(lambda: time.time() + 4 * DAY)
    result = repository.expire(Rules(within=3 * DAY), dry_run=True)
    assert [states(result)[ident] for ident in ids] == ["expired"] * 3 + ["kept"]


def test_clocks_that_are_wrong_let_nothing_go_too_early(repository, monkeypatch):
    from weightvc.objects import version

    real = version.make
    skew = {1: -400 * DAY, 2: 4000 * DAY}
    monkeypatch.setattr(
        version, "make", lambda **f: real(**f, now=time.time_ns() // 1000 + skew.get(f["step"], 0) * 10**6)
    )
    ids = fill(repository, 5, base=1)
    result = repository.expire(Rules(within=3 * DAY), dry_run=True)
    assert set(states(result).values()) == {"kept"}
    repository.store.set_clock(lambda: time.time() + 10 * DAY)
    result = repository.expire(Rules(within=3 * DAY), dry_run=True)
    # The one from the far future is not believed, and stays; it takes none of the others with it.
    assert [states(result)[ident] for ident in ids] == ["expired", "expired", "kept", "expired", "kept"]


def test_tags_and_heads_always_stay(repository):
    ids = fill(repository, 8, base=1)
    repository.tag("release", ids[2])
    repository.branch("old", ids[4])
    result = repository.expire(Rules(last=1))
    assert {ids.index(k) for k, state in states(result).items() if state == "kept"} == {2, 4, 7}
    assert rule_of(result, ids[2]) == "tag release"
    assert rule_of(result, ids[4]) == "head of old"
    sweep(repository)
    check_kept(repository, [ids[2], ids[4], ids[7]], {ident: i for i, ident in enumerate(ids)})


def test_rules_of_one_branch_leave_the_others_alone(repository):
    fill(repository, 4, base=1)
    fill(repository, 4, branch="exp", base=1, first=20)
    result = repository.expire(Policy({"exp": Rules(last=1)}))
    rules = {one.branch: set() for one in result.decisions}
    for one in result.decisions:
        rules[one.branch].add(one.state)
    assert rules == {"main": {"kept"}, "exp": {"kept", "expired"}}
    result = repository.expire(Policy({"*": Rules(last=1), "main": Rules(last=3)}), dry_run=True)
    assert [one.branch for one in result.decisions if one.state == "kept"] == ["exp", "main", "main", "main"]


def test_what_another_branch_shares_stays_for_it(repository):
    ids = fill(repository, 4, base=1)
    repository.branch("fork", ids[3])
    fill(repository, 2, branch="fork", base=1, first=30)
    result = repository.expire(Policy({"main": Rules(last=1)}), dry_run=True)
    assert set(states(result).values()) == {"kept"}  # `fork` has no rules, and descends from all of them


def test_what_was_merged_in_is_history_as_well(repository):
    """A version descends from all of its parents, not from the first alone."""
    ids = fill(repository, 2, base=1)
    side = fill(repository, 3, branch="side", base=1, first=20)
    ids.append(repository.commit(Bits(step(50)), base=True, parents=[side[2]]).id)
    ids += fill(repository, 1, base=1, first=51)
    repository.delete_branch("side")
    result = repository.expire(Policy({"*": Rules(last=9)}, 0), dry_run=True)
    assert {rule_of(result, ident) for ident in [*ids[:3], *side]} == {"last 9 of main"}
    result = repository.expire(Policy({"*": Rules(every_step=22)}, 0))
    assert [ident for ident, state in states(result).items() if state == "kept"] == [ids[3], side[2], ids[0]]
    assert rule_of(result, side[2]) == "every step 22 of main"
    assert rule_of(result, side[1]) == "no rule keeps it"
    sweep(repository)
    check_kept(repository, [side[2], ids[3]], {side[2]: 22, ids[3]: 51})


# What nothing leads to


def test_a_deleted_branch_stays_for_a_while_and_can_be_restored(repository):
    ids = fill(repository, 2, base=1)
    gone = fill(repository, 3, branch="gone", base=1, first=40)
    repository.delete_branch("gone")
    rules = Policy({"*": Rules(last=1)}, 7 * DAY)
    result = repository.expire(rules)
    assert [states(result)[ident] for ident in gone] == ["kept"] * 3
    assert rule_of(result, gone[0]) == "unreachable for less than 7d"
    assert states(result)[ids[0]] == "expired"
    assert repository.restore_branch("gone").id == gone[2]
    assert repository.branches()["gone"] == gone[2]
    with pytest.raises(Conflict, match="exists"):
        repository.restore_branch("gone")
    with pytest.raises(RefNotFound):
        repository.restore_branch("never")
    repository.delete_branch("gone")
    # A month later it was made: what counts is when it was deleted.
    repository.store.set_clock(lambda: time.time() + 8 * DAY)
    result = repository.expire(rules)
    assert [states(result)[ident] for ident in gone] == ["expired"] * 3
    with pytest.raises(Expired):
        repository.restore_branch("gone")
    with pytest.raises(Expired):
        repository.branch("again", gone[1])
    with pytest.raises(Expired):
        repository.tag("again", gone[1])
    with pytest.raises(Expired):
        repository.reset("main", gone[2], rewind=True)


def test_a_branch_that_was_deleted_twice_stays_from_the_last_time_on(repository, monkeypatch):
    start, day = time.time(), [0.0]
    monkeypatch.setattr(time, "time_ns", lambda: int((start + day[0] * DAY) * 1e9))
    repository.store.set_clock(lambda: start + day[0] * DAY)
    fill(repository, 1)
    gone = fill(repository, 3, branch="gone", base=1, first=40)
    rules = Policy({"*": Rules(last=1)}, 7 * DAY)
    day[0] = 2
    repository.delete_branch("gone")
    day[0] = 8
    repository.restore_branch("gone")
    repository.tag("t", gone[1])
    day[0] = 14
    repository.delete_tag("t")
    repository.delete_branch("gone")
    day[0] = 20
    result = repository.expire(rules)
    assert [(states(result)[ident], rule_of(result, ident)) for ident in gone] == [
        ("kept", "unreachable for less than 7d")
    ] * 3
    day[0] = 21.5
    assert [states(repository.expire(rules, dry_run=True))[ident] for ident in gone] == ["expired"] * 3


def test_an_old_version_that_was_let_go_just_now_stays_for_a_while(repository, monkeypatch):
    from weightvc.objects import version

    real = version.make
    monkeypatch.setattr(version, "make", lambda **f: real(**f, now=time.time_ns() // 1000 - 30 * DAY * 10**6))
    ids = fill(repository, 4, base=1)
    monkeypatch.undo()
    repository.reset("main", ids[1], rewind=True)
    result = repository.expire(Policy({"*": Rules(last=4)}, 7 * DAY), dry_run=True)
    assert set(states(result).values()) == {"kept"}
    repository.tag("t", ids[3])
    repository.delete_tag("t")
    repository.store.set_clock(lambda: time.time() + 8 * DAY)
    result = repository.expire(Policy({"*": Rules(last=4)}, 7 * DAY), dry_run=True)
    assert [states(result)[ident] for ident in ids] == ["kept", "kept", "expired", "expired"]
    # Without a rule for it, it stays for good.
    assert set(states(repository.expire(Policy({"*": Rules(last=4)}), dry_run=True)).values()) == {"kept"}


def test_a_name_that_a_deleted_tag_had_is_not_given_away(repository):
    ids = fill(repository, 2, base=1)
    repository.tag("v1", ids[0])
    repository.delete_tag("v1")
    repository.expire(Policy({"*": Rules(last=1)}, 0))
    sweep(repository)
    with pytest.raises(Conflict, match="--force"):
        fresh(repository).tag("v1", ids[1])
    fresh(repository).tag("v1", ids[1], force=True)


# Pins, races


def test_a_leased_version_stays(repository):
    ids = fill(repository, 4, base=1)
    with fresh(repository).lease(ids[1]) as version:
        result = repository.expire(Rules(last=1))
        assert states(result)[version.id] == "kept"
        assert rule_of(result, ids[1]).startswith("lease pin/")
    assert states(repository.expire(Rules(last=1)))[ids[1]] == "expired"


def test_a_lease_taken_while_its_version_goes_still_reads_it(repository, monkeypatch):
    """The swap that lets go of it wins; its objects stay all the same."""
    ids = fill(repository, 4, base=1)
    reader = fresh(repository)
    real = pins.read
    taken = []

    def read(store, now):
        found = real(store, now)
        if not taken:  # after the pins were read, and before the swap
            taken.append(reader.lease(ids[1]))
            taken[0].__enter__()
        return found

    monkeypatch.setattr(pins, "read", read)
    assert states(repository.expire(Rules(last=1)))[ids[1]] == "expired"
    sweep(repository)
    sweep(repository)
    assert held(reader, ids[1]) == step(1)
    taken[0].__exit__(None, None, None)
    sweep(repository)
    with pytest.raises(Expired):
        held(reader, ids[1])


def test_it_is_decided_again_on_each_root(repository, monkeypatch):
    """A tag that comes in between is seen."""
    ids = fill(repository, 4, base=1)
    other = fresh(repository)
    real = expire.plan
    asked = []

    def plan(*arguments, **options):
        found = real(*arguments, **options)
        if not asked:
            other.tag("late", ids[0])
        asked.append(1)
        return found

    monkeypatch.setattr(expire, "plan", plan)
    result = repository.expire(Rules(last=1))
    assert len(asked) == 2
    assert states(result)[ids[0]] == "kept"
    assert fresh(repository).entry(ids[0]).place is not None
    check_kept(repository, [ids[0], ids[3]], {ident: i for i, ident in enumerate(ids)})


def test_a_detached_version_on_a_parent_that_goes(repository, monkeypatch):
    from weightvc.protocol import commit

    ids = fill(repository, 4, base=1)
    writer = fresh(repository)
    real = commit.publish

    def publish(*arguments, **options):
        repository.expire(Rules(last=1))
        return real(*arguments, **options)

    monkeypatch.setattr(commit, "publish", publish)
    with pytest.raises(Expired):
        writer.commit(Bits(step(50)), branch=None, parents=[ids[1]])
    versions = [entry.new for entry in fresh(repository)._refs().catalogue if entry.version is not None]
    assert versions == ids[::-1]


def test_a_head_that_was_let_go_of_can_be_read_again(repository):
    """No command lets a branch or a tag name an expired version; a root that was made of what was left may."""
    ids = fill(repository, 4)
    repository.expire(Rules(last=1))
    swap.change(
        repository._shelf,
        lambda root: root.next(branches={**root.branches, "again": ids[1]}),
        key.Transaction(repository.refresh().sequence),
    )
    with pytest.raises(Expired):
        held(fresh(repository), "again")
    result = repository.expire(Rules(last=1))
    assert [states(result)[ident] for ident in ids] == ["stone", "kept", "stone", "kept"]
    assert held(fresh(repository), "again") == step(1)


def test_killed_before_the_swap_everything_is_as_it_was(repository, monkeypatch):
    with tiny_format():
        ids = fill(repository, 10, base=3)
        before = repository.refresh()

        def fail(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(repository.store, "swap", fail)
        with pytest.raises(KeyboardInterrupt):
            repository.expire(Rules(last=1))
        monkeypatch.undo()
        assert fresh(repository).refresh() == before
        check_kept(repository, ids, {ident: i for i, ident in enumerate(ids)})
        sweep(repository)
        repository.expire(Rules(last=1))
        sweep(repository)
        assert held(fresh(repository)) == step(9)


# The policy


def test_a_policy_is_kept_in_the_root(repository):
    fill(repository, 4, base=1)
    with pytest.raises(Refused, match="--save"):
        repository.expire()
    with pytest.raises(Refused):
        repository.expire(save=True)
    rules = Policy({"*": Rules(last=2, meta={"eval": "no", "n": [1.5, None]}), "exp": Rules(within=60)}, 5 * DAY)
    repository.expire(rules, save=True, dry_run=True)
    assert fresh(repository).policy() is None
    repository.expire(rules, save=True)
    assert fresh(repository).policy() == rules
    # Writers that know nothing of it carry it along, and it is followed.
    fill(fresh(repository), 3, base=1, first=10)
    assert [one.state for one in fresh(repository).expire().decisions].count("kept") == 2
    assert fresh(repository).forget_policy(["*"]) == Policy({"exp": Rules(within=60)}, 5 * DAY)
    assert fresh(repository).forget_policy() is None
    assert fresh(repository).refresh().retention is None


def test_a_policy_of_a_newer_weightvc_is_not_followed(repository):
    fill(repository, 4, base=1)
    for odd in ({"branches": {"*": {"last": 1, "phase of the moon": 3}}, "unreachable": 5},
                {"branches": {}, "unreachable": 5, "also": 1}):  # fmt: skip
        swap.change(
            repository._shelf,
            lambda root, odd=odd: root.next(retention=odd),
            key.Transaction(repository.refresh().sequence),
        )
        with pytest.raises(Unsupported, match="upgrade"):
            repository.expire()
    assert len(repository.expire(Rules(last=9)).decisions) == 4


@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(last=0), Rules(last=-1), Rules(within=1.5), Rules(every=True), Rules(last="2"),
     Rules(meta={"a": float("nan")}), Rules(meta={"a": {1, 2}}), Rules(meta={"a": "x" * 5000})],
)  # fmt: skip
def test_rules_that_are_none_are_refused(repository, rules):
    fill(repository, 2, base=1)
    with pytest.raises(Refused):
        repository.expire(rules)
    assert repository.refresh().sequence == 3


def test_without_branches_nothing_goes(repository):
    ids = fill(repository, 2, base=1)
    swap.change(
        repository._shelf, lambda root: root.next(branches={}), key.Transaction(repository.refresh().sequence)
    )
    for dry_run in (True, False):
        with pytest.raises(Refused, match="no branches"):
            repository.expire(Policy({"*": Rules(last=1)}, 0), dry_run=dry_run)
    check_kept(repository, ids, {ident: i for i, ident in enumerate(ids)})
    repository.expire(Policy({"*": Rules(last=1)}, 0), force=True)
    assert [e.op for e in fresh(repository)._refs().catalogue] == ["expired"] * 2


def test_a_dry_run_says_what_is_then_done(repository):
    fill(repository, 6, base=2)
    before = repository.refresh()
    said = repository.expire(Rules(last=2), dry_run=True)
    assert fresh(repository).refresh() == before
    assert repository.expire(Rules(last=2)).decisions == said.decisions


def test_entries_come_back_from_their_bytes_as_they_were(repository):
    fill(repository, 6, base=2)
    repository.expire(Rules(last=1))
    root = fresh(repository).refresh()
    assert {entry.op for entry in root.tail} == {"commit", "expired"}
    assert roots.decode(roots.encode(root), "it") == root
    for entry in root.tail:
        fields = json.loads(json.dumps(catalogue.to_json(entry)))
        assert catalogue.from_json(fields, "it") == entry
        if entry.op == "expired":
            assert not list(key.found(fields))
            assert entry.released
            assert fields["record"] == entry.version.record


# Ways, as compaction will add them


def entry_of(ident: str, *sources: tuple[str | None, int]) -> Entry:
    """A version with a manifest for each of some edges."""
    transaction = [key.Transaction(1) for _ in sources]
    made = [
        Way(t.key("manifest", ident.encode()), 0, (Edge(source, cost, 1),), cost)
        for t, (source, cost) in zip(transaction, sources)
    ]
    first = made[0]
    place = Place(first.manifest, "schema", None, (), 0, first.edges, first.nbytes, tuple(made[1:]))
    return Entry("commit", 1, 0, "", "main", None, ident, "", None, place)


@st.composite
def graphs(draw):
    """Versions in order, each with a first way from an earlier one or a base, and ways from any."""
    count = draw(st.integers(1, 12))
    out = {}
    for i in range(count):
        first = draw(st.integers(-1, i - 1))
        more = draw(st.lists(st.integers(-1, count - 1).filter(lambda j, i=i: j != i), max_size=3))
        edges = [(None if j < 0 else f"v{j}", draw(st.integers(0, 100))) for j in [first, *more]]
        out[f"v{i}"] = entry_of(f"v{i}", *edges)
    kept = draw(st.sets(st.sampled_from(sorted(out)), min_size=1))
    return out, kept


def readable(entries: dict[str, Entry], first_only: bool) -> set[str]:
    """What can be read: from a base, by any ways, or by first ways alone."""
    good: set[str] = set()
    while True:
        more = {
            ident
            for ident, entry in entries.items()
            for way in (entry.place.all_ways[:1] if first_only else entry.place.all_ways)
            for edge in way.edges
            if edge.source is None or edge.source in good
        }
        if more <= good:
            return good
        good |= more


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_what_is_kept_can_be_read_by_what_stays(graph):
    there, kept = graph
    chosen = expire.ways(there, kept)
    assert kept <= set(chosen)
    stays = set(chosen)
    left = {ident: expire.trimmed(there[ident], stays.__contains__, None) for ident in stays}
    firm = expire.grounded(left)
    assert firm == readable(left, first_only=True)
    left = {
        ident: left[ident] if ident in firm else expire.trimmed(left[ident], stays.__contains__, chosen[ident])
        for ident in stays
    }
    # By first ways alone, as readers go that know of no other; and no edge is left that starts from what goes, but in
    # a manifest that has another.
    assert readable(left, first_only=True) == stays
    for ident, entry in left.items():
        old = {way.manifest for way in there[ident].place.all_ways}
        new = {way.manifest for way in entry.place.all_ways}
        assert new <= old
        assert all(edge.source is None or edge.source in stays for way in entry.place.all_ways for edge in way.edges)
        gone = {name.split("-")[1] for name in old - new}
        assert set(entry.released) == gone


def test_a_step_that_is_kept_anyhow_is_preferred():
    there = {
        "a": entry_of("a", (None, 1000)),
        "b": entry_of("b", ("a", 1)),
        "c": entry_of("c", ("b", 1), ("a", 500)),
    }
    assert set(expire.ways(there, {"a", "c"})) == {"a", "c"}
    assert set(expire.ways(there, {"c"})) == {"a", "c"}
    made = expire.trimmed(there["c"], {"a", "c"}.__contains__, None)
    assert made.place.edges == (Edge("a", 500, 1),)
    assert made.place.ways == ()


def test_nothing_goes_if_a_kept_version_cannot_be_read(repository):
    from weightvc.errors import Corrupt

    there = {"b": entry_of("b", ("a", 1)), "c": entry_of("c", (None, 5))}
    with pytest.raises(Corrupt, match="fsck"):
        expire.ways(there, {"b", "c"})


# All together


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_is_done_what_is_kept_is_read_bit_for_bit(data):
    with tiny_format():
        repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None, author="test")
        numbers: dict[str, int] = {}
        for round_ in range(data.draw(st.integers(1, 3))):
            for i in range(data.draw(st.integers(1, 6))):
                number = 100 * round_ + i
                name = data.draw(st.sampled_from(["main", "main", "exp"]))
                base = data.draw(st.booleans())
                numbers[repository.commit(Bits(step(number)), branch=name, base=base, step=number).id] = number
            act = data.draw(st.sampled_from(["tag", "reset", "delete", "fork", "none"]))
            there = [one.version.id for one in repository.expire(Rules(last=99), dry_run=True).decisions]
            some = data.draw(st.sampled_from(there))
            try:
                if act == "tag":
                    repository.tag(f"t{round_}", some)
                elif act == "reset":
                    repository.reset("main", some, rewind=True)
                elif act == "delete":
                    repository.delete_branch("exp")
                elif act == "fork":
                    repository.branch(f"f{round_}", some)
            except (Expired, Refused, RefNotFound):
                pass
            if not repository.branches():
                continue
            rules = Rules(last=data.draw(st.one_of(st.none(), st.integers(1, 4))), every=data.draw(st.integers(1, 5)))
            result = repository.expire(Policy({"*": rules}, data.draw(st.sampled_from([None, 0, DAY]))))
            if data.draw(st.booleans()):
                sweep(repository)
            reader = fresh(repository)
            for ident, state in states(result).items():
                if state == "kept":
                    assert held(reader, ident) == step(numbers[ident])
                else:
                    with pytest.raises(Expired):
                        held(reader, ident)
            for ident in {*reader.branches().values(), *reader.tags().values()}:
                assert states(result)[ident] == "kept"
        sweep(repository)
        for ident in {*fresh(repository).branches().values(), *fresh(repository).tags().values()}:
            assert held(fresh(repository), ident) == step(numbers[ident])


def test_compaction_sets_steps_free(repository):
    """A chain from one base; kept ones are given ways around the steps, which then go, and their space with them."""
    with tiny_format():
        ids = fill(repository, 40)
        numbers = {ident: i for i, ident in enumerate(ids)}
        kept = [ident for i, ident in enumerate(ids) if i % 16 == 0 or i == 39]
        policy = Policy({"*": Rules(every=16)}, 0)
        result = repository.expire(policy, save=True)
        assert list(states(result).values()).count("stone") == 40 - len(kept)
        before = sum(one.size for one in repository.store.list())
        repository.maintain(grace=0, force=True)
        repository.maintain(grace=0, force=True)
        result = repository.expire()
        assert {ident for ident, state in states(result).items() if state == "kept"} == set(kept)
        assert list(states(result).values()).count("stone") < 12
        assert sum(one.size for one in repository.store.list()) < before
        check_kept(repository, kept, numbers)
        # Readers that know of no further ways arrive as well.
        refs = fresh(repository)._refs()
        there = {entry.new: entry for entry in refs.catalogue if entry.place is not None}
        assert expire.grounded(there) == set(there)
        assert sweep(repository).deleted.objects["manifest"] == 0


def test_a_reader_goes_on_where_its_version_lies_by_now(repository):
    """The manifests that it was going to read are gone, the version is not."""
    with tiny_format():
        ids = fill(repository, 40)
        reader = fresh(repository)
        source = reader.source(ids[39], whole=True)
        before = {repository.entry(ident).place.manifest for ident in ids[1:]}
        repository.expire(Policy({"*": Rules(every=16)}, 0), save=True)
        for _ in range(3):
            repository.maintain(grace=0, force=True)
        assert not before <= {one.key for one in repository.store.list()}
        assert contents(source) == step(39)
        source.close()
