"""The planner and the ladder, on entries alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import lines
from tests.kit.lines import ASIDE, BASE, ONE, All, compacted, entry, line
from weightvc.errors import Corrupt, Expired
from weightvc.objects.catalogue import SEGMENT, Catalogue, Entry, SegmentRef, Way
from weightvc.objects.policy import Policy
from weightvc.objects.version import Edge, Version
from weightvc.protocol.plan import Plan, needed, plan, steps_to


def tree(one: Entry) -> str:
    assert one.version is not None
    return one.version.tree


def version(one: Entry) -> Version:
    assert one.version is not None
    return one.version


def after(ends: list[Entry], *edges: tuple[int, Edge]) -> list[Entry]:
    """Entries with further ways, each by the number of the entry that it leads to."""
    out = list(ends)
    for number, edge in edges:
        place = out[number].place
        assert place is not None
        way = Way(lines.name(), 0, (edge,), edge.nbytes + ASIDE)
        out[number] = replace(out[number], place=replace(place, ways=(*place.ways, way)))
    return out


def finder(entries: list[Entry]) -> All:
    return All({one.new: one for one in entries if one.new})


def route(made: Plan) -> list[int | None]:
    """The numbers of the versions on a way; None for nothing."""
    first: list[int | None] = [version(made.start).step] if made.start is not None else [None]
    return first + [version(step.entry).step for step in made.steps]


# Where ways lead


def test_forward_along_a_long_patch_back_and_sideways() -> None:
    trunk = line(9)
    fork = line(3, on=trunk[4], first=20)
    entries = after(
        trunk + fork,
        (8, Edge(trunk[0].new, 2 * ONE, 1)),  # long
        (4, Edge(fork[0].new, ONE, 1)),  # back
        (9, Edge(fork[2].new, ONE, 1)),  # back, over two
    )
    at = finder(entries)
    assert route(plan(at, entries[8])) == [None, 0, 8]
    assert route(plan(at, entries[8], {tree(trunk[7])})) == [7, 8]
    assert route(plan(at, entries[8], {tree(trunk[3])})) == [3, 4, 5, 6, 7, 8]
    assert route(plan(at, entries[6], {tree(fork[2])})) == [22, 20, 4, 5, 6]
    assert route(plan(at, entries[4], {tree(trunk[4])})) == [4]
    assert plan(at, entries[8], {tree(trunk[7])}).nbytes == ONE + ASIDE
    assert plan(at, entries[8], {tree(trunk[7])}).requests == 1


def test_a_base_that_weighs_less_than_the_patches_is_taken() -> None:
    entries = after(line(600), (599, Edge(None, BASE, 1)))
    at = finder(entries)
    assert route(plan(at, entries[599], {tree(entries[550])})) == list(range(550, 600))
    assert route(plan(at, entries[599], {tree(entries[0])})) == [None, 599]


def test_a_way_that_was_bad_is_avoided_only_where_there_is_another() -> None:
    entries = after(line(5), (4, Edge(None, BASE, 1)))
    at = finder(entries)
    place = entries[4].place
    assert place is not None
    assert route(plan(at, entries[4], failed={place.ways[0].manifest: 1})) == [None, 0, 1, 2, 3, 4]
    both = {place.ways[0].manifest: 1, place.manifest: 1}
    assert route(plan(at, entries[4], failed=both)) == [None, 4]


def test_streams_in_one_manifest_come_together_and_packs_are_requests() -> None:
    one = line(1)[0]
    both = entry(1, [version(one)], [Edge(one.new, ONE, 1), Edge(None, 70 << 20, 1)])
    assert both.place is not None
    both = replace(both, place=replace(both.place, packs=3))
    patch, base = steps_to(both)
    assert (patch.nbytes, patch.requests) == (ONE + ASIDE, 1)
    assert (base.nbytes, base.requests) == ((70 << 20) + ONE + ASIDE, 4)


def test_no_way_is_expired_and_a_circle_is_corrupt() -> None:
    entries = line(3)
    at = finder(entries[1:])
    with pytest.raises(Expired):
        plan(at, entries[2])
    assert route(plan(at, entries[2], {tree(entries[1])})) == [1, 2]
    a, b = entries[1], entries[2]
    assert a.place is not None
    circle = replace(a, place=replace(a.place, edges=(Edge(b.new, ONE, 1),)))
    with pytest.raises(Corrupt, match="circle"):
        plan(finder([circle, b]), b)


@st.composite
def graphs(draw: st.DrawFn) -> list[Entry]:
    count = draw(st.integers(1, 7))
    entries = line(count)
    edges = st.tuples(st.integers(0, count - 1), st.integers(-1, count - 1), st.integers(0, 10 * ONE))
    extra = draw(st.lists(edges, max_size=14))
    return after(
        entries,
        *[(to, Edge(entries[source].new if source >= 0 else None, weight if source >= 0 else BASE, 1))
          for to, source, weight in extra if to != source],
    )  # fmt: skip


@given(graphs(), st.data())
@settings(max_examples=200, deadline=None)
def test_it_is_the_cheapest_of_all(entries: list[Entry], data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(entries))
    held = {tree(one) for one in entries if data.draw(st.integers(0, 3)) == 0}
    best: dict[str | None, int] = {None: 0} | {one.new: 0 for one in entries if tree(one) in held}
    for _ in entries:  # Bellman and Ford
        for one in entries:
            for step in steps_to(one):
                if step.edge.source in best:
                    cost = best[step.edge.source] + step.cost
                    best[one.new] = min(best.get(one.new, cost), cost)
    made = plan(finder(entries), target, held)
    assert sum(step.cost for step in made.steps) == best[target.new]
    at = made.start.new if made.start is not None else None
    assert (at is not None) == (made.start is not None and tree(made.start) in held)
    for step in made.steps:
        assert step.edge.source == at
        assert step.edge in step.way.edges
        at = step.entry.new
    assert at == target.new
    assert plan(finder(entries), target, held) == made


# What is read for it


class Segmented:
    """The catalogue of entries in full segments and a tail of 10, and which of them were read."""

    def __init__(self, entries: list[Entry], size: int = SEGMENT) -> None:
        old, tail = entries[:-10], entries[-10:]
        parts = {f"{at // size}": old[at : at + size] for at in range(0, len(old), size)}
        self.read: list[int] = []

        def fetch(ref: SegmentRef) -> list[Entry]:
            self.read.append(int(ref.key))
            return parts[ref.key]

        self.catalogue = Catalogue(tail, [SegmentRef(name, len(part)) for name, part in parts.items()], fetch)


def test_only_segments_that_are_needed_are_read() -> None:
    made, _ = compacted(line(3000))
    entries = list(made.values())
    for held, most in (({tree(entries[-2])}, 0), ({tree(entries[-10])}, 0), (set(), 5), ({"f" * 64}, 8)):
        at = Segmented(entries, 200)
        plan(at.catalogue, entries[-1], held)
        assert len(at.read) <= most, held
    at = Segmented(entries, 200)
    assert route(plan(at.catalogue, entries[-1], {tree(entries[1500])}))[0] == 1500
    assert min(at.read) >= 1500 // 200


def test_a_segment_that_cannot_be_read_is_no_better_way() -> None:
    entries = after(line(50), (49, Edge(None, BASE, 1)))

    def fetch(ref: SegmentRef) -> list[Entry]:
        raise Corrupt(ref.key)

    broken = Catalogue(entries[-10:], [SegmentRef("old", 40)], fetch)
    assert route(plan(broken, entries[49], {tree(entries[3])})) == [None, 49]


# The ladder


@pytest.fixture(scope="module")
def long() -> list[Entry]:
    """3,000 versions, compacted."""
    return list(compacted(line(3000))[0].values())


def test_at_most_22_patches_for_1000_versions_behind(long: list[Entry]) -> None:
    at, most = finder(long), 0
    for start in random.Random(0).sample(range(2000), 60):
        made = plan(at, long[start + 1000], {tree(long[start])})
        assert made.start is not None
        assert made.nbytes < 50 * ONE
        most = max(most, made.patches)
    assert most <= 22


def test_a_cold_start_is_one_base_and_a_dozen_patches(long: list[Entry]) -> None:
    at = finder(long)
    for one in long:
        made = plan(at, one)
        assert made.start is None
        assert made.patches <= 12
    bases = [version(one).generation for one in long if any(step.edge.source is None for step in steps_to(one))]
    assert bases == [0, 1024, 2048]


@pytest.mark.parametrize("first", [1, 7, 63, 500])
def test_a_base_that_a_commit_wrote_anywhere_serves_as_well(first: int) -> None:
    trunk = line(1200)
    stray = entry(first, [version(trunk[first - 1])], [Edge(trunk[first - 1].new, ONE, 1), Edge(None, BASE, 1)])
    entries = [*trunk[:first], stray, *line(1200 - first, on=stray, first=first + 1)]
    made, _ = compacted(entries)
    at = finder(list(made.values()))
    assert max(plan(at, one).patches for one in made.values()) <= 12
    bases = [version(one).generation for one in made.values() if None in {s.edge.source for s in steps_to(one)}]
    # The next one where long spans begin, unless that is near.
    assert bases == ([0, first, 1024] if first <= 512 else [0, first])


def test_far_behind_takes_some_30_patches() -> None:
    entries = list(compacted(line(12_000))[0].values())
    at = finder(entries)
    made = [plan(at, entries[at_ + 10_000], {tree(entries[at_])}) for at_ in range(3, 2000, 397)]
    assert all(one.start is not None for one in made)
    assert max(one.patches for one in made) <= 30


def test_the_rungs_take_little_and_a_second_run_wants_nothing(long: list[Entry]) -> None:
    ways = [way for one in long if one.place is not None for way in one.place.ways]
    patches = sum(way.nbytes for way in ways if way.edges[0].source is not None)
    assert patches < 0.6 * 3000 * (ONE + ASIDE)
    assert compacted(long)[1] == []
    shuffled = random.Random(1).sample(long, len(long))
    assert compacted(shuffled)[1] == []
    assert len(compacted([lines.without_ways(one) for one in shuffled])[1]) == len(ways)


def test_what_comes_later_changes_nothing_of_what_was_wanted(long: list[Entry]) -> None:
    early = [lines.without_ways(one) for one in long[:700]]
    made, asked = compacted(early)
    late = [lines.without_ways(one) for one in long[700:]]
    _, more = compacted([*made.values(), *late])
    _, whole = compacted([*early, *late])
    assert sorted(map(str, asked + more)) == sorted(map(str, whole))


def test_dense_steps_get_bases_and_the_share_tells_how_many() -> None:
    def weigh(span: int) -> int:
        return min(BASE, 40 * lines.grown(span))  # 4 MB a step, 30 MB at most

    heavy = [replace(one, place=replace(one.place, edges=(Edge(e.source, weigh(1), 1),)))
             if one.place and (e := one.place.edges[0]).source else one for one in line(300)]  # fmt: skip
    counts = []
    for share in (25, 50, 200):
        made, asked = compacted(heavy, Policy(share=share), weigh)
        counts.append(sum(want.source is None for want in asked))
        at = finder(list(made.values()))
        for one in made.values():
            found = plan(at, one)
            assert found.patches <= 12
            assert sum(step.edge.nbytes for step in found.steps[1:]) < BASE * share / 100 + 4 * weigh(1)
        assert compacted(made.values(), Policy(share=share), weigh)[1] == []
    assert counts[0] > counts[1] > counts[2] > 0


def test_patches_back_are_as_good_as_those_forward() -> None:
    made, _ = compacted(line(400), Policy(reverse=True))
    entries = list(made.values())
    at = finder(entries)
    for start, end in ((399, 0), (399, 398), (255, 1), (300, 200)):
        found = plan(at, entries[end], {tree(entries[start])})
        assert found.start is not None
        assert found.patches <= 22
    assert compacted(entries, Policy(reverse=True))[1] == []


def test_branches_share_their_trunk_and_jumps_in_generation_keep_the_rungs() -> None:
    trunk = line(70)
    fork = line(70, on=trunk[37], first=100)
    entries = trunk + fork
    other = line(3, on=trunk[0], first=300)
    for number in range(40):  # merges of a side line, so that generations jump by two
        below = entries[-1]
        side = entry(400 + number, [version(below)], [Edge(below.new, ONE, 1)], "side")
        entries += [side, entry(500 + number, [version(below), version(side)], [Edge(below.new, ONE, 1)])]
    made, _ = compacted(entries + other)
    at = finder(list(made.values()))
    ends = list(made.values())
    assert plan(at, made[fork[-1].new or ""], {tree(trunk[3])}).patches <= 14
    last = max(ends, key=lambda one: version(one).generation)
    assert plan(at, last, {tree(fork[-1])}).patches <= 13


def test_versions_that_expired_get_no_ways_and_are_stepped_over() -> None:
    entries = line(200)
    gone = [replace(one, op="expired", place=None, expired=9) if 20 < version(one).generation < 60 else
            replace(one, expired=9) if 80 < version(one).generation < 100 else one for one in entries]  # fmt: skip
    made, asked = compacted(gone)
    for want in asked:
        for ident in {want.target, want.source or want.target}:
            assert not 20 < version(made[ident]).generation < 60
            assert not 80 < version(made[ident]).generation < 100
    assert (entries[64].new, entries[0].new) in {(want.target, want.source) for want in asked}
    # A line whose beginning has expired begins anew, on all rungs.
    gone = [replace(one, op="expired", place=None, expired=9) for one in entries[:21]]
    ways = {(version(one).generation, want.source) for want in compacted([*gone, *entries[21:]])[1]
            for one in entries if one.new == want.target}  # fmt: skip
    assert {(24, entries[21].new), (32, entries[21].new), (64, entries[21].new)} <= ways


# What has to stay


def test_kept_versions_need_few_others() -> None:
    entries = after(line(20), (16, Edge(None, BASE, 1)), (8, Edge(None, 2 * BASE, 1)))
    ids = [one.new or "" for one in entries]
    found = needed(entries, {ids[19], ids[3]})
    assert set(found) == {ids[n] for n in (0, 1, 2, 3, 16, 17, 18, 19)}
    assert found[ids[16]].edge.source is None
    assert found[ids[19]].edge.source == ids[18]
    # A dearer way over what is kept anyway is better than a stepping stone.
    assert set(needed(entries, {ids[n] for n in range(12)})) == {ids[n] for n in range(12)}
    assert needed(entries[1:5], {ids[3]}) == {}
