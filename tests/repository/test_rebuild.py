"""A root that is lost is made anew, of its newest copy, of segments and manifests; what may be dying stays dead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, held, tiny_format
from tests.repository.test_fsck import add_way, damaged, flip, fresh, listed, numbers, reads, spoil, weights
from weightvc.errors import Conflict, Corrupt, Expired, KeyNotFound, Refused, StateUnknown, WeightvcError
from weightvc.objects import frame, key
from weightvc.objects import root as roots
from weightvc.protocol import live, rebuild, swap
from weightvc.repository import Repository
from weightvc.stores import Store, open_store


def keep_copy(store: Store) -> str:
    """What maintenance does: the root's bytes under root.d/, by its sequence number and write id."""
    got = store.get(key.ROOT)
    assert got is not None
    root = roots.decode(got.data, "root")
    name = f"root.d/{root.sequence:019}-{root.write}"
    store.put(name, got.data)
    return name


def begins(store: Store) -> list[int]:
    return [key.parse(one.key).begin for one in store.list() if "/" in one.key and one.key.startswith(KINDS)]


KINDS = ("manifest/", "pack/", "schema/", "layout/", "file/", "segment/", "page/")


def whole(url: str, **options) -> None:
    report = fresh(url, **options).fsck(read_data=1)
    assert report.ok, report.damages


@pytest.fixture
def store(memory_url: str) -> Iterator[Store]:
    """Nine versions on main, two on a branch, tags, a deleted branch; a segment, and the rest in the tail."""
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        for i in range(9):
            repository.commit(Bits(weights(i)), step=i)
            if i == 3:
                repository.branch("exp")
                repository.branch("old")
            if i == 5:
                repository.tag("v1", "main~1")
                repository.tag("v2", "main~1")
                repository.delete_tag("v2")
                repository.delete_branch("old")
        repository.commit(Bits(weights(20)), step=20, branch="exp")
        assert repository.refresh().segments
        yield open_store(memory_url)


@pytest.fixture
def idents(store: Store) -> list[str]:
    return [version.id for version in fresh(store.url).log()][::-1]


@damaged
def test_from_a_copy_that_is_up_to_date(store, idents, damage):
    before = fresh(store.url).refresh()
    tags = fresh(store.url).tags()
    reflog = [(e.op, e.new) for e in fresh(store.url).reflog()]
    name = keep_copy(store)
    old = spoil(store, key.ROOT, damage)
    made = fresh(store.url).rebuild_root()
    assert made.copy == name
    assert (made.offered, made.adopted, made.expired, made.lacking) == ([], [], [], [])
    now = fresh(store.url).refresh()
    assert now.repository == before.repository
    assert now.branches == before.branches == made.branches
    assert now.default == before.default
    assert fresh(store.url).tags() == tags
    with pytest.raises(Conflict, match="before it was deleted"):
        fresh(store.url).tag("v2", "main")
    assert [(e.op, e.new) for e in fresh(store.url).reflog()] == reflog
    assert now.sequence > max(begins(store)) - 1
    assert now.sequence > before.sequence + 1000
    assert now.horizon == now.sequence
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)
    fresh(store.url).commit(Bits(weights(9)))
    assert held(fresh(store.url)) == weights(9)
    if damage is None:
        assert made.kept is None
    else:
        assert made.kept == f"lost/root-{frame.digest(damage(old)).hex()}"
        assert store.get(made.kept).data == damage(old)


def test_from_an_older_copy(store, idents):
    """What the copy does not know is listed, and adopted where its parents are known: on its branch, in order."""
    name = keep_copy(store)
    writer = fresh(store.url)
    new = [writer.commit(Bits(weights(i)), step=i).id for i in range(9, 12)]
    new += [writer.commit(Bits(weights(30)), step=30, branch="fresh").id]
    spoil(store, key.ROOT, flip)
    report = fresh(store.url).fsck()
    assert sorted(numbers(report.offered)) == [9, 10, 11, 30]
    made = fresh(store.url).rebuild_root()
    assert made.copy == name
    # Segments are not older than the copy: what spilled since has been published.
    spilled = [ident for ident in new if ident not in {one.id for one in made.offered}]
    assert fresh(store.url).resolve("main").id == ([*idents, *spilled][-1])
    spoil(store, key.ROOT, flip)
    again = fresh(store.url).rebuild_root(adopt=True)
    assert again.sequence > made.sequence
    assert {one.id for one in again.adopted} == {ident for ident in new if ident not in spilled}
    assert [version.step for version in fresh(store.url).log("main")] == [*range(11, -1, -1)]
    assert fresh(store.url).resolve("fresh").id == new[-1]
    for ident, number in zip(new, (9, 10, 11, 30), strict=True):
        assert held(fresh(store.url), ident) == weights(number)
    assert fresh(store.url).resolve("main@{step=10}").id == new[1]
    whole(store.url)
    fresh(store.url).commit(Bits(weights(12)))


@damaged
def test_without_a_copy(store, idents, damage):
    before = fresh(store.url).refresh()
    spoil(store, key.ROOT, damage)
    made = fresh(store.url).rebuild_root(adopt=True)
    assert made.copy is None
    now = fresh(store.url)
    assert now.branches() == before.branches
    assert "old" not in now.branches()
    assert now.tags() == {"v1": idents[4]}
    assert [version.id for version in now.log()] == idents[::-1]
    assert reads(store.url, idents) == list(range(9))
    assert held(now, "exp") == weights(20)
    whole(store.url)
    now.commit(Bits(weights(9)))


def test_from_manifests_alone(store, idents):
    before = fresh(store.url).branches()
    spoil(store, key.ROOT, None)
    for name in (*listed(store, "segment"), *listed(store, "page")):
        store.delete([name])
    with pytest.raises(Refused, match="--adopt"):
        fresh(store.url).rebuild_root()
    assert [one.key for one in store.list() if not one.key.startswith(KINDS)] == []
    made = fresh(store.url).rebuild_root(adopt=True)
    assert fresh(store.url).branches() == before
    assert [one.generation for one in made.adopted] == sorted(one.generation for one in made.adopted)
    assert [version.id for version in fresh(store.url).log()] == idents[::-1]
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)


@pytest.mark.parametrize("fault", ["bad", "other"])
def test_copies_that_are_bad(store, idents, fault):
    """The newest copy that can be read is taken, whatever else lies there."""
    name = keep_copy(store)
    fresh(store.url).commit(Bits(weights(9)), step=9)
    newer = keep_copy(store)
    store.put(newer, flip(store.get(newer).data) if fault == "bad" else b"notes")
    store.put("root.d/README", b"notes")
    spoil(store, key.ROOT, None)
    made = fresh(store.url).rebuild_root()
    assert made.copy == name
    assert numbers(made.offered) in ([9], [])
    assert made.sequence > int(newer[7:26])


def test_a_root_that_can_be_read_stays(store):
    keep_copy(store)
    before = store.get(key.ROOT).data
    with pytest.raises(Refused, match="can be read"):
        fresh(store.url).rebuild_root(adopt=True)
    assert store.get(key.ROOT).data == before


def test_nothing_to_make_a_root_of(memory_url):
    with pytest.raises(KeyNotFound, match="nothing"):
        fresh_lazy(memory_url).rebuild_root(adopt=True)


def fresh_lazy(url: str, **options) -> Repository:
    return weightvc.open(url, cache=None, lazy=True, **options)


@pytest.fixture(autouse=True)
def _lazily(monkeypatch):
    """A repository whose root is lost is opened lazily."""
    monkeypatch.setitem(globals(), "fresh", fresh_lazy)


def commit_and_die(store, step: int) -> None:
    """A writer that is killed once all is uploaded."""

    class Dying(type(store)):
        def swap(self, name, data, etag):
            raise Killed

    dying = Repository(Dying(store.url.removeprefix("memory://")), None)
    with pytest.raises(Killed):
        dying.commit(Bits(weights(step)), step=step)


def test_uploads_that_were_never_published(store, idents):
    """Two writers raced: which one won is not known, and the branch follows neither. One that was built on won."""
    keep_copy(store)

    commit_and_die(store, 40)
    won = fresh(store.url).commit(Bits(weights(9)), step=9)
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root(adopt=True)
    assert sorted(numbers(made.offered)) == [9, 40]
    assert fresh(store.url).resolve("main").id == idents[8]
    assert any("reset main" in note for note in made.notes)
    # Both can be had, and the branch moved by whoever knows.
    fresh(store.url).reset("main", won.id)
    assert held(fresh(store.url)) == weights(9)
    whole(store.url)


def test_what_was_built_on_was_published(store, idents):
    keep_copy(store)

    commit_and_die(store, 40)
    first = fresh(store.url).commit(Bits(weights(9)), step=9)
    second = fresh(store.url).commit(Bits(weights(10)), step=10)
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root(adopt=True)
    assert sorted(numbers(made.offered)) == [9, 10, 40]
    assert [version.id for version in fresh(store.url).log(n=2)] == [second.id, first.id]
    assert [one.branch for one in made.adopted if one.step == 40] == [None]


def condemn(store: Store, names: list[str]) -> str:
    """What a collector leaves: a page with a list of the dead."""
    transaction = key.Transaction(swap.must_read(store).root.sequence)
    page = frame.encode(frame.PAGE, {"dead": names, "noted": [], "since": None, "weightvc": "collector 1"})
    name = transaction.key("page", page)
    store.put(name, page)
    return name


def test_nothing_that_is_condemned_is_named(store, idents):
    """A list of the dead that is newer than the copy: what is on it is being deleted, and counts as gone."""
    keep_copy(store)
    way = add_way(store.url, idents[6])
    entry = fresh(store.url).entry(idents[2])
    condemn(store, [entry.place.manifest])
    # A branch whose versions all have gone since goes back to what is there.
    exp = fresh(store.url).entry("exp")
    condemn(store, [exp.place.manifest])
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root()
    assert sorted(numbers(made.expired)) == [2, 20]
    root = fresh(store.url).refresh()
    named = live.of_root(fresh(store.url)._shelf, root)
    assert entry.place.manifest not in named
    assert exp.place.manifest not in named
    assert root.branches["exp"] == idents[3]
    assert any("'exp'" in note for note in made.notes)
    assert root.collector is None
    for ident in (idents[2], exp.new):
        found = fresh(store.url)._refs().catalogue.find(ident)
        assert found is not None
        assert (found.op, found.place) == ("expired", None)
    store.delete([entry.place.manifest, exp.place.manifest])  # as the collector goes on
    assert reads(store.url, idents[:2]) == [0, 1]
    report = fresh(store.url).fsck(read_data=1)
    assert numbers(report.lost) == [3, 4, 5, 6, 7, 8]
    assert not report.ok
    assert "no way is catalogued" in report.damages[0].fault
    assert way not in {w.manifest for w in fresh(store.url).entry(idents[6]).place.all_ways}


def test_a_list_of_the_dead_that_cannot_be_read(store, idents):
    """It may have anything that began before it: nothing that old is named."""
    keep_copy(store)
    page = condemn(store, [])
    fresh(store.url).commit(Bits(weights(9)), step=9, base=True)
    fresh(store.url).commit(Bits(weights(10)), step=10)
    keep_copy(store)
    spoil(store, page, flip)
    spoil(store, key.ROOT, flip)
    fresh(store.url).rebuild_root()
    root = fresh(store.url).refresh()
    border = key.parse(page).begin
    for entry in fresh(store.url)._refs().catalogue:
        if entry.place is not None:
            assert key.parse(entry.place.manifest).begin >= border
            assert key.parse(entry.place.schema).begin >= border
    assert key.parse(root.tags or page).begin >= border


def test_a_way_that_is_condemned_and_another(store, idents):
    """Compaction gave a version another way since, and the first is being deleted: the version stays."""
    keep_copy(store)
    way = add_way(store.url, idents[4])
    condemn(store, [fresh(store.url).entry(idents[4]).place.manifest])
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root()
    assert made.expired == []
    assert fresh(store.url).entry(idents[4]).place.manifest == way
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)


def test_a_writer_from_before(store, idents):
    """It read the lost root and uploaded, and swaps now: nothing of it is published, and it is told to look."""
    keep_copy(store)

    class Slow(type(store)):
        waited = False

        def swap(self, name, data, etag):
            if not self.waited:
                self.waited = True
                spoil(store, key.ROOT, flip)
                fresh(store.url).rebuild_root()
            return super().swap(name, data, etag)

    slow = Repository(Slow(store.url.removeprefix("memory://")), None)
    with pytest.raises(StateUnknown, match="weightvc log"):
        slow.commit(Bits(weights(9)), step=9)
    assert fresh(store.url).resolve().id == idents[8]
    version = slow.commit(Bits(weights(9)), step=9)
    root = fresh(store.url).refresh()
    assert key.parse(fresh(store.url).entry(version.id).place.manifest).begin >= root.horizon
    # One that has not swapped yet, and reads the new root, is refused by its horizon.
    old = key.Transaction(root.horizon - 1)
    with pytest.raises(Expired):
        swap.change(slow._shelf, lambda now: now.next(), old)
    assert fresh(store.url).refresh() == root
    whole(store.url)


def test_two_who_rebuild(store, idents):
    keep_copy(store)
    spoil(store, key.ROOT, flip)

    class Second(type(store)):
        done = False

        def swap(self, name, data, etag):
            if not self.done:
                self.done = True
                fresh(store.url).rebuild_root()
            return super().swap(name, data, etag)

    with pytest.raises(Conflict):
        Repository(Second(store.url.removeprefix("memory://")), None).rebuild_root()
    assert reads(store.url, idents) == list(range(9))


@pytest.mark.parametrize("fault", ["kill before", "kill after", "fail", "drop", "late"])
def test_every_request_goes_wrong(memory_url, fault, monkeypatch):
    """The old bytes, or a root that is whole: never less. And it can be asked again."""
    monkeypatch.setattr(swap, "_pause", lambda attempt: None)
    with tiny_format():
        k = 0
        while True:
            url = f"{memory_url}-{k}"
            repository = weightvc.init(url, cache=None)
            idents = [repository.commit(Bits(weights(i)), step=i).id for i in range(7)]
            keep_copy(repository.store)
            spoil(repository.store, key.ROOT, flip if k % 2 else None)
            store = Faulty(open_store(url), k, fault)
            outcome: object = None
            try:
                outcome = Repository(store, None).rebuild_root()
            except (Killed, WeightvcError) as error:
                outcome = error
            store.settle()
            try:
                fresh(url).rebuild_root()
            except Refused:
                pass  # it has landed
            else:
                assert not isinstance(outcome, rebuild.Rebuilt)
            assert reads(url, idents) == list(range(7))
            whole(url)
            if k >= len(store.operations):
                assert isinstance(outcome, rebuild.Rebuilt)
                break
            k += 1
        assert k >= 8


def test_damage_beside_the_root(store, idents):
    """A manifest is lost with the root: the version stays catalogued, and is missed."""
    keep_copy(store)
    name = fresh(store.url).entry(idents[5]).place.manifest
    spoil(store, name, None)
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root()
    assert numbers(made.lacking) == [5]
    report = fresh(store.url).fsck()
    assert [found.key for found in report.damages] == [name]
    assert numbers(report.lost) == [5, 6, 7, 8]
    assert reads(store.url, idents) == [0, 1, 2, 3, 4]


def test_a_segment_of_the_copy_is_lost(store, idents):
    """Others tell what it said: those that it replaced, and manifests."""
    keep_copy(store)
    spoil(store, fresh(store.url).refresh().segments[-1].key, flip)
    before = fresh(store.url).branches()
    spoil(store, key.ROOT, flip)
    made = fresh(store.url).rebuild_root(adopt=True)
    assert made.branches == before
    assert reads(store.url, idents) == list(range(9))
    assert [version.id for version in fresh(store.url).log()] == idents[::-1]


def test_on_each_store(place, again):
    url, options = place
    with tiny_format():
        repository = again()
        idents = [repository.commit(Bits(weights(i)), step=i).id for i in range(7)]
        for number, damage in enumerate((lambda data: b"", lambda data: b" " * 900, flip, None)):
            if number != 1:
                keep_copy(repository.store)
            spoil(repository.store, key.ROOT, damage)
            with pytest.raises((Corrupt, KeyNotFound)):
                fresh(url, **options).refresh()
            made = fresh(url, **options).rebuild_root(adopt=True)
            assert (made.kept is None) == (damage is None)
            assert [version.id for version in fresh(url, **options).log()] == idents[::-1]
            idents.append(fresh(url, **options).commit(Bits(weights(len(idents)))).id)
        assert reads(url, idents, **options) == list(range(11))
        whole(url, **options)
