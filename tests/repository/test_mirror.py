"""Mirrors: the same versions in another repository, whatever happens meanwhile on either side."""

import secrets
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, Weights, flipped, held, tensor, tiny_format, write_shards
from weightvc.cache import Cache
from weightvc.errors import BranchMoved, Conflict, Corrupt, Expired, KeyNotFound, RefNotFound, Refused, WeightvcError
from weightvc.objects import catalogue, frame, key
from weightvc.protocol import coder, mirror_plan, swap
from weightvc.protocol.collect import Collection
from weightvc.repository import Repository
from weightvc.stores import open_store

START: Weights = {("", "w"): tensor("BF16", (600,), 0), ("draft", "v"): tensor("F32", (100,), 1)}


def step(number: int) -> Weights:
    return {name: flipped(value, 0.05, number) for name, value in START.items()}


def fresh(url: str | None = None, **options) -> Repository:
    return weightvc.init(url or f"memory://{secrets.token_hex(8)}", cache=None, author="test", **options)


def commits(repository: Repository, numbers: range, **options) -> list[str]:
    return [repository.commit(Bits(step(i)), step=i, **options).id for i in numbers]


def again(repository: Repository) -> Repository:
    """The same repository, opened anew: nothing is remembered."""
    return Repository(open_store(repository.url), None, author="test")


def log(repository: Repository, ref: str = "main") -> list[str]:
    """Ids by generation: of versions side by side, repositories have their own order."""
    versions = sorted(again(repository).log(ref), key=lambda version: (-version.generation, version.id))
    return [version.id for version in versions]


def gone(repository: Repository) -> list[str]:
    return [entry.new for entry in again(repository).entries("main") if entry.gone]


def check(source: Repository, target: Repository, branch: str = "main", *, files: bool = False) -> None:
    """The target holds what the source does, bit for bit, and is whole."""
    source, target = again(source), again(target)
    assert log(target, branch) == log(source, branch)
    for entry in target.entries(branch):
        if entry.gone:
            continue
        assert held(target, entry.new) == held(source, entry.new)
        if files:
            assert target.files(entry.new) == source.files(entry.new)
            for path in target.files(entry.new):
                assert target.cat(entry.new, path) == source.cat(entry.new, path)
    report = target.fsck(read_data=1)
    assert report.ok, report.damages
    # First ways alone lead to a base, for readers that know of no others.
    for entry in target.entries(branch):
        while entry.place is not None and all(edge.source is not None for edge in entry.place.edges):
            entry = target.entry(entry.place.edges[0].source)
        assert entry.place is not None or entry.op == catalogue.EXPIRED


def whole(source: Repository, target: Repository) -> None:
    """The target has the same head, and all that it names is there. That bits are right needs no second look where
    only the order of requests differs: what is stored is checked against its name when it is copied."""
    assert log(target) == log(source)
    assert held(again(target)) == held(source)
    assert again(target).fsck().ok


@pytest.fixture(autouse=True)
def _small(request):
    """Blocks and packs of some bytes, unless a test is about real sizes."""
    if "memory_is_bounded" in request.node.name or "costs_few" in request.node.name:
        yield
        return
    with tiny_format():
        # How patches are coded is nobody's concern here. (It is put back with the rest.)
        coder.CONTEXT_FROM = 1 << 40
        yield


@pytest.mark.parametrize(
    ("left", "right"), [("memory", "memory"), ("local", "s3"), ("s3", "local"), ("s3", "s3"), ("local", "memory")]
)
def test_a_branch_is_copied_and_then_what_is_missing(left, right, tmp_path, request):
    def place(kind: str, name: str) -> Repository:
        if kind == "s3":
            found = request.getfixturevalue("s3_server").place()
            return fresh(found.url, **found.options)
        return fresh(str(tmp_path / name) if kind == "local" else None)

    source, target = place(left, "a"), place(right, "b")
    for number in range(3):
        folder = tmp_path / f"checkpoint-{number}"
        write_shards(folder, {k: v for k, v in step(number).items() if not k[0]}, 2)
        (folder / "tokenizer.json").write_bytes(b"[" + b"1,\n" * 40_000 + b"1]")
        (folder / "config.json").write_text(f'{{"number": {number}}}')
        source.commit(folder, step=number, message=f"number {number}", metadata={"reward": 0.5})
        done = weightvc.mirror(source, target)
        assert (done.head, done.versions, done.records, done.swaps) == (source.resolve("main"), 1, 0, 1)
        assert target.resolve("main") == source.resolve("main")
    idle = weightvc.mirror(source, target)
    assert not idle.changed
    assert idle.objects == 0
    assert [v.id for v in target.log()] == [v.id for v in source.log()]
    for version in source.log():
        assert {p: target.cat(version, p) for p in target.files(version)} == {
            p: source.cat(version, p) for p in source.files(version)
        }
    assert target.resolve("main").metadata == {"reward": 0.5}
    assert target.fsck(read_data=1).ok
    # The file object and the schema are there once, however many versions share them.
    kinds = [one.key.partition("/")[0] for one in target.store.list()]
    assert (kinds.count("file"), kinds.count("schema"), kinds.count("manifest")) == (1, 1, 3)
    # What is committed there goes on from the mirrored head.
    made = target.commit(Bits(step(9)), branch="own", parents=["main"])
    assert made.parents == (source.resolve("main").id,)


def test_branches_merges_and_what_they_share():
    source, target = fresh(), fresh()
    commits(source, range(2))
    source.branch("exp")
    commits(source, range(2, 4), branch="exp")
    commits(source, range(4, 6), branch="main")
    source.commit(Bits(step(6)), branch="main", parents=["exp"])
    commits(source, range(7, 9), branch="exp")
    done = weightvc.mirror(source, target)
    assert done.versions == 7
    assert target.branches() == {"main": source.branches()["main"]}
    check(source, target)
    done = weightvc.mirror(source, target, branch="exp")
    assert done.versions == 2
    check(source, target, "exp")
    source.branch("late", "main~1")
    assert weightvc.mirror(source, target, branch="late").versions == 0
    assert target.branches() == source.branches()
    assert [entry.op for entry in target.reflog("late")] == ["branch"]
    assert target.fsck(read_data=1).ok


def test_what_compaction_adds_is_copied_too_and_a_reader_far_behind_uses_it(tmp_path):
    source, target = fresh(), fresh()
    ids = commits(source, range(9))
    told: list[tuple[int, int]] = []
    target.progress = lambda done, total: told.append((done, total))
    done = weightvc.mirror(source, target)
    assert done.ways == 0
    assert told == sorted(told)
    assert told[-1][0] == done.nbytes <= told[-1][1] < 2 * done.nbytes
    source.compact(reverse=True, share=100)
    done = weightvc.mirror(source, target)
    assert done.ways == sum(len(e.place.ways) for e in source.entries()) > 5
    assert not weightvc.mirror(source, target).changed
    check(source, target)
    whole = fresh()
    assert weightvc.mirror(source, whole).ways == 0
    for mirrored in (target, whole):
        check(source, mirrored)
        for old, new in ((None, "main"), (ids[0], "main"), ("main", ids[1])):
            assert mirrored.plan(old, new).patches == source.plan(old, new).patches
    # The mirror may compact itself: what is there is not copied once more.
    commits(source, range(9, 17))
    weightvc.mirror(source, target)
    target.compact(reverse=True, share=100)
    source.compact(reverse=True, share=100)
    assert weightvc.mirror(source, target).ways == 0
    check(source, target)


def test_what_expired_is_in_the_log_of_the_mirror_and_steps_come_along():
    source, target = fresh(), fresh()
    ids = commits(source, range(8))
    source.tag("best", ids[3])
    source.expire(weightvc.Rules(last=2))
    done = weightvc.mirror(source, target)
    assert (done.versions, done.records) == (8, 0)  # steps are needed to read those that stay
    assert gone(target) == gone(source) == [ids[i] for i in (5, 4, 2, 1, 0)]
    check(source, target)
    source.compact(share=1)
    source.expire(weightvc.Rules(last=2))
    source.gc(grace=0, force=True)
    small = fresh()
    done = weightvc.mirror(source, small)
    assert done.records > 0
    assert gone(small) == gone(source)
    check(source, small)
    with pytest.raises(Expired):
        small.load(ids[0], framework="numpy")
    # Its own rules are its own business.
    assert small.expire(weightvc.Rules(last=1)).changed > 0
    small.gc(grace=0, force=True)
    commits(source, range(8, 10))
    assert weightvc.mirror(source, small).versions == 2
    assert small.fsck(read_data=1).ok
    assert held(small) == held(source)


def test_the_last_versions_alone():
    source, target = fresh(), fresh()
    ids = commits(source, range(10))
    source.compact(share=100)
    done = weightvc.mirror(source, target, last=3)
    assert set(gone(target)) == set(ids[:7])
    assert done.versions < 10
    check_held = [held(target, ident) == held(source, ident) for ident in ids[7:]]
    assert all(check_held)
    assert log(target) == log(source)
    assert target.fsck(read_data=1).ok
    new = commits(source, range(10, 15))
    assert weightvc.mirror(source, target, last=3).versions == 5  # two of them are steps to the others
    assert gone(target)[:2] == new[1::-1]
    assert not weightvc.mirror(source, target).changed
    assert target.fsck(read_data=1).ok
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(Refused, match="last="):
            weightvc.mirror(source, target, last=bad)


def test_a_rewind_is_followed_and_stands_in_the_reflog():
    source, target = fresh(), fresh()
    ids = commits(source, range(5))
    weightvc.mirror(source, target)
    source.reset("main", ids[1], rewind=True)
    done = weightvc.mirror(source, target)
    assert done.rewound
    assert (done.old, target.resolve("main").id) == (ids[4], ids[1])
    move = next(target.reflog())
    assert (move.op, move.old, move.new) == ("reset", ids[4], ids[1])
    assert source.url in move.message
    assert held(target, ids[4]) == held(source, ids[4])  # what was left behind is there until it expires
    # To the side: the source went on from an older version.
    source.reset("main", ids[3])
    weightvc.mirror(source, target)
    source.reset("main", ids[0], rewind=True)
    new = commits(again(source), range(20, 22))
    done = weightvc.mirror(source, target)
    assert (done.rewound, done.versions) == (True, 2)
    assert (next(target.reflog()).op, next(target.reflog()).new) == ("reset", new[1])
    assert target.resolve("main@{1}").id == ids[3]
    check(source, target)


@pytest.mark.parametrize("collected", [False, True])
def test_a_rewind_to_what_the_mirror_let_go_of(collected):
    source, target = fresh(), fresh()
    ids = commits(source, range(6))
    source.commit(Bits(step(50)), base=True)
    weightvc.mirror(source, target)
    if collected:
        target.expire(weightvc.Policy({"*": weightvc.Rules(last=1)}, unreachable=0))
        target.gc(grace=0, force=True)
        assert target.entry(ids[2]).place is None
    else:
        target.expire(weightvc.Policy({"*": weightvc.Rules(last=1)}, unreachable=0))
    source.reset("main", ids[2], rewind=True)
    assert weightvc.mirror(source, target).rewound
    assert held(target) == held(source)
    assert target.fsck(read_data=1).ok
    commits(again(source), range(70, 72))
    weightvc.mirror(source, target)
    assert held(target) == held(source)
    assert target.fsck(read_data=1).ok


def test_a_mirror_with_versions_of_its_own_is_left_as_it_is():
    source, target = fresh(), fresh()
    ids = commits(source, range(3))
    weightvc.mirror(source, target)
    own = target.commit(Bits(step(100))).id
    source.commit(Bits(step(3)))
    before = {one.key: one.size for one in target.store.list()}
    with pytest.raises(BranchMoved, match=r"versions of its own.*weightvc branch") as error:
        weightvc.mirror(source, target)
    assert (error.value.head, error.value.branch) == (own, "main")
    assert {one.key: one.size for one in target.store.list()} == before
    # What the message says mends it, and loses nothing.
    target.branch("kept", "main")
    target.reset("main", ids[2], rewind=True)
    weightvc.mirror(source, target)
    assert target.branches() == {"main": source.resolve("main").id, "kept": own}
    assert target.fsck(read_data=1).ok


def test_what_is_refused_before_anything_is_written():
    source, target = fresh(), fresh()
    with pytest.raises(RefNotFound, match="no version on it yet"):
        weightvc.mirror(source, target)
    commits(source, range(2))
    with pytest.raises(RefNotFound):
        weightvc.mirror(source, target, branch="nobody")
    with pytest.raises(Refused, match="is the repository that is mirrored"):
        weightvc.mirror(source, source)
    with pytest.raises(KeyNotFound, match="weightvc init"):
        weightvc.mirror(source, f"memory://{secrets.token_hex(8)}")
    target.commit(Bits(step(0)), branch="other")
    target.tag("main-copy", "other")
    source.branch("main-copy")
    with pytest.raises(Conflict, match="has a tag"):
        weightvc.mirror(source, target, branch="main-copy")
    assert target.branches() == {"other": target.resolve("other").id}


# Faults


def history(source: Repository) -> None:
    """Bases, patches, ways, steps and records."""
    commits(source, range(5))
    source.compact(share=60, reverse=True)
    source.expire(weightvc.Rules(last=3))
    commits(source, range(5, 7))


def copied(repository: Repository) -> Repository:
    """The same objects in another place."""
    made = fresh()
    made.store.delete([key.ROOT])
    for one in repository.store.list():
        made.store.put(one.key, repository.store.get(one.key).data)
    return again(made)


@pytest.mark.parametrize(
    ("side", "first", "fault"),
    [("source", True, "fail")]
    + [("target", True, f) for f in ("kill after", "fail", "late")]
    + [("target", False, f) for f in ("kill after", "drop")],
)
def test_every_request_goes_wrong_once(side, first, fault, monkeypatch):
    """For each k: the branch of the mirror is the old one or the new one whole, and the next run completes it."""
    monkeypatch.setattr(swap, "_pause", lambda attempt: None)
    monkeypatch.setattr(mirror_plan, "BATCH", 3)
    source, template = fresh(), fresh()
    history(source)
    if not first:
        weightvc.mirror(source, template)
        source.compact(reverse=True)
        commits(source, range(7, 9))
    k = 0
    while True:
        target = copied(template)
        began = target.branches().get("main")
        store = Faulty(open_store(source.url if side == "source" else target.url), k, fault, late=1 + k % 3)
        faulty = Repository(store, None, author="test")
        try:
            sides = (faulty, target) if side == "source" else (source, faulty)
            weightvc.mirror(*sides)
            failed = False
        except (WeightvcError, Killed):
            failed = True
        store.settle()
        seen = again(target)
        assert seen.branches().get("main") in (began, source.resolve("main").id)
        # (The branch is the last to move; what is catalogued before that is whole, too.)
        assert failed or seen.branches()["main"] == source.resolve("main").id
        assert seen.fsck().ok
        weightvc.mirror(source, target)
        whole(source, target)
        if k >= len(store.operations):
            break
        k += 1
    check(source, target)
    assert k >= 9


def test_killed_between_batches_it_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr(mirror_plan, "BATCH", 2)
    source, target = fresh(), fresh()
    commits(source, range(9))
    store = Faulty(open_store(target.url), at=16, fault="kill before")
    with pytest.raises(Killed):
        weightvc.mirror(source, Repository(store, None))
    kept = sum(entry.version is not None for entry in again(target)._refs().catalogue)
    assert 0 < kept < 9
    assert again(target).branches() == {}
    assert weightvc.mirror(source, target).versions == 9 - kept
    check(source, target)


def test_what_is_rotten_is_named_and_not_copied(tmp_path):
    source = fresh(str(tmp_path / "source"))
    commits(source, range(3))
    objects = [one.key for one in source.store.list() if one.key != key.ROOT]
    assert {name.partition("/")[0] for name in objects} == {"manifest", "pack", "schema"}
    for name in objects:
        good = (tmp_path / "source" / name).read_bytes()
        target = fresh()
        (tmp_path / "source" / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(Corrupt, match=name):
            weightvc.mirror(again(source), target)
        assert target.branches() == {}
        assert all(frame.digest(target.store.get(one.key).data).hex() == key.parse(one.key).digest
                   for one in target.store.list() if one.key != key.ROOT)  # fmt: skip
        (tmp_path / "source" / name).unlink()
        with pytest.raises(KeyNotFound, match="fsck"):
            weightvc.mirror(again(source), target)
        (tmp_path / "source" / name).write_bytes(good)
        weightvc.mirror(again(source), target)
        check(source, target)


# Collectors and others beside it


class Beside(Faulty):
    """A store beside whose k-th operation, or each that is called so, something else happens first."""

    def __init__(self, store, at: int | str, what: Callable[[], object]) -> None:
        super().__init__(store)
        self._at, self._what = at, what

    def _do(self, what, call, **options):
        if what == self._at:
            self._what()
        elif len(self.operations) == self._at:
            self._at = -1
            self._what()
        return super()._do(what, call, **options)


def beside(repository: Repository, at: int | str, what: Callable[[], object]) -> Repository:
    return Repository(Beside(open_store(repository.url), at, what), None, author="test")


def test_the_collector_of_the_source_takes_what_is_being_copied():
    k = 0
    while True:
        source, target = fresh(), fresh()
        commits(source, range(5))

        def let_go(source: Repository = source) -> None:
            other = again(source)
            other.commit(Bits(step(30)), base=True)
            other.expire(weightvc.Rules(last=1))
            other.gc(grace=0, force=True)

        reading = beside(source, k, let_go)
        weightvc.mirror(reading, target)
        assert target.fsck().ok
        if k < len(reading.store.operations):
            weightvc.mirror(source, target)
        whole(source, target)
        if k >= len(reading.store.operations):
            break
        k += 1
    assert k >= 7


def test_the_collector_of_the_mirror_waits_for_what_is_not_published_yet(monkeypatch):
    """With no grace at all: uploads that it takes are made again under other names."""
    monkeypatch.setattr(mirror_plan, "BATCH", 2)
    source = fresh()
    commits(source, range(5))
    k = 0
    while True:
        target = fresh()
        commits(target, range(200, 202), branch="other")

        def gc(target: Repository = target) -> None:
            other = again(target)
            other.commit(Bits(step(201)), branch="other")
            other.gc(grace=0, force=True)

        writing = beside(target, k, gc)
        weightvc.mirror(source, writing)
        whole(source, target)
        if k >= min(len(writing.store.operations), 40):
            break
        k += 1
    assert k >= 12
    check(source, target)
    assert not list(target.store.list("pin/"))


def test_a_mirror_that_was_overtaken_asks_the_collector_to_wait():
    """Before each of its swaps a collector without grace comes by, until there is a pin that it had to mind."""
    source, target = fresh(), fresh()
    commits(source, range(2))
    minded: set[str] = set()
    collections = 0

    def overtake() -> None:
        nonlocal collections
        held = {one.key for one in target.store.list("pin/")}
        if held & minded:
            return
        minded.update(held)
        other = again(target)
        other.commit(Bits({("", "else"): tensor("U8", (9,), collections)}), branch="own")
        other.gc(grace=0, force=True)
        collections += 1

    weightvc.mirror(source, beside(target, "swap root", overtake))
    assert collections > 1
    check(source, target)
    assert not list(target.store.list("pin/"))


def test_two_mirrors_at_once():
    """At every request of one, the other does all of its work."""
    source = fresh()
    history(source)
    k = 0
    while True:
        target = fresh()

        def other(target: Repository = target) -> None:
            weightvc.mirror(again(source), again(target))

        writing = beside(target, k, other)
        weightvc.mirror(source, writing)
        whole(source, target)
        # No version stands twice.
        ids = [entry.new for entry in again(target)._refs().catalogue if entry.version is not None]
        assert len(ids) == len(set(ids))
        if k >= len(writing.store.operations):
            break
        k += 1
    assert k >= 9


def test_mirrors_beside_a_trainer_never_go_back():
    """Two of them, while the source is committed to: the mirror's branch only moves on."""
    source, target = fresh(), fresh()
    commits(source, range(2))
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                weightvc.mirror(again(source), again(target))
            weightvc.mirror(again(source), again(target))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    commits(source, range(2, 10))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    check(source, target)
    assert {entry.op for entry in target.reflog()} == {"commit"}
    generations = [entry.version.generation for entry in target.reflog()]
    assert generations == sorted(generations, reverse=True)


def in_turn(*works: Callable[[], object] | None) -> Callable[[], None]:
    """Does the first of these when it is called first, and so on; then nothing."""
    left = list(works)

    def turn() -> None:
        work = left.pop(0) if left else None
        if work is not None:
            work()

    return turn


def hourly(repository: Repository) -> Callable[[], Collection]:
    """A collector with a grace period of an hour, which then passes."""
    now = [time.time()]
    repository.store.set_clock(lambda: now[0])

    def collect() -> Collection:
        done = again(repository).gc(grace=3600, force=True)
        now[0] += 3600
        return done

    return collect


def test_another_mirror_brings_a_newer_head_between_the_two_roots():
    """The mirror's root is read before the source's: else its head would look like a version of its own."""
    source, target = fresh(), fresh()
    commits(source, range(2))
    weightvc.mirror(source, target)

    def faster() -> None:
        commits(again(source), range(2, 3))
        weightvc.mirror(again(source), again(target))

    turn = in_turn(None, faster)
    weightvc.mirror(beside(source, "get root", turn), beside(target, "get root", turn))
    assert again(target).branches() == again(source).branches()
    check(source, target)


def test_a_schema_is_let_go_of_and_collected_while_a_version_is_copied_that_would_name_it():
    """The collector goes by a number that was noted before the mirror began: the horizon alone does not stop it."""
    source, target = fresh(), fresh()
    commits(source, range(1), branch="old")
    source.branch("exp", "old")
    commits(source, range(1, 2), branch="exp", base=True)
    weightvc.mirror(source, target, branch="old")
    collect = hourly(target)
    # What a killed writer left is dead, so that a number is noted.
    target._shelf.put(key.Transaction(1), "file", b"left behind")
    again(target).commit(Bits({("", "else"): tensor("U8", (9,), 1)}), branch="own")
    collect()

    def let_go() -> None:
        other = again(target)
        other.delete_branch("old")
        other.expire(weightvc.Policy({"*": weightvc.Rules(last=1)}, unreachable=0))
        assert collect().condemned.objects["schema"] == 1

    weightvc.mirror(source, beside(target, "swap root", in_turn(let_go)), branch="exp")
    assert collect().deleted.objects["schema"] == 1
    assert again(target).fsck(read_data=1).ok
    assert held(again(target), "exp") == held(source, "exp")


def test_a_version_is_let_go_of_while_a_patch_on_it_is_copied():
    source, target = fresh(), fresh()
    (first,) = commits(source, range(1), branch="old")
    source.branch("exp", "old")
    # With another schema, so that nothing else of that version is named.
    new = source.commit(Bits({**step(1), ("", "more"): tensor("U8", (9,), 1)}), branch="exp")
    assert [edge.source for edge in source.entry(new).place.edges] == [first]
    weightvc.mirror(source, target, branch="old")

    def let_go() -> None:
        other = again(target)
        other.commit(Bits({("", "else"): tensor("U8", (9,), 1)}), branch="own")
        other.delete_branch("old")
        other.expire(weightvc.Policy({"*": weightvc.Rules(last=1)}, unreachable=0))
        assert other.entry(first).place is None

    weightvc.mirror(source, beside(target, "swap root", in_turn(let_go)), branch="exp")
    assert again(target).fsck(read_data=1).ok
    assert held(again(target), "exp") == held(source, "exp")


def test_what_one_batch_uploaded_in_vain_is_not_named_by_the_next(monkeypatch):
    """Another mirror publishes the version with a schema first, so that the collector may take this one's schema."""
    monkeypatch.setattr(mirror_plan, "BATCH", 2)
    source, target = fresh(), fresh()
    commits(source, range(1))
    source.branch("first", "main")
    source.commit(Bits({("", "else"): tensor("U8", (9,), 1)}), base=True)
    commits(source, range(2, 3), base=True)

    def other() -> None:
        weightvc.mirror(source, again(target), branch="first")

    collect = hourly(target)

    def condemn() -> None:
        collect()
        assert collect().condemned.objects["schema"] == 1

    # The first swap fails, since the other one was faster; the second lands, and the third is of the second batch.
    done = weightvc.mirror(source, beside(target, "swap root", in_turn(other, None, condemn)))
    assert done.swaps == 2
    assert collect().deleted.objects["schema"] == 1
    check(source, target)


def test_ways_from_versions_of_a_later_batch_come_after_these(monkeypatch):
    """All that the mirror names is catalogued there after every swap."""
    monkeypatch.setattr(mirror_plan, "BATCH", 2)
    source, target = fresh(), fresh()
    commits(source, range(5))
    source.compact(reverse=True, share=100)
    looks: list[bool] = []
    looking = beside(target, "swap root", lambda: looks.append(again(target).fsck().ok))
    done = weightvc.mirror(source, looking)
    assert looks == [True] * done.swaps
    assert done.swaps == 3
    assert done.ways > 0
    check(source, target)


# What it costs, and what it is for


def test_a_version_behind_costs_few_requests_and_an_idle_look_one(tmp_path):
    source, target = fresh(str(tmp_path / "a")), fresh(str(tmp_path / "b"))
    commits(source, range(3))
    mirroring = weightvc.Mirror(again(source), again(target))
    mirroring.run()
    reads, writes = mirroring.source.stats, mirroring.target.stats
    for i in range(3, 6):
        commits(source, range(i, i + 1))
        before = reads.reads, writes.reads, writes.writes, writes.lists
        assert mirroring.run().versions == 1
        found = reads.reads, writes.reads, writes.writes, writes.lists
        # The source's root and manifest; the mirror's root; its manifest and the swap.
        assert [b - a for a, b in zip(before, found)] == [2, 1, 2, 0]
    following = mirroring.follow(every=0.001, stop=(stop := threading.Event()))
    next(following)
    before = reads.reads, reads.bytes_read, writes.reads
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    assert list(following) == []
    assert reads.reads > before[0]
    assert (reads.bytes_read, writes.reads) == before[1:]


def test_memory_is_bounded(tmp_path, monkeypatch):
    from weightvc.objects import manifest

    monkeypatch.setattr(manifest, "PACK", 256 << 10)
    source, target = fresh(str(tmp_path / "a")), fresh(str(tmp_path / "b"))
    big = {("", f"w{i}"): tensor("BF16", (512 << 10,), i) for i in range(24)}
    source.commit(Bits(big))
    assert source.entry().place.packs == 24
    del big
    tracemalloc.start()
    weightvc.mirror(again(source), again(target))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert target.resolve().nbytes == 24 << 20
    assert peak < 10 << 20


def test_a_host_pulls_from_the_mirror_by_patches_on_what_it_has_of_the_source(tmp_path):
    import numpy as np

    source, target = fresh(str(tmp_path / "a")), fresh(str(tmp_path / "b"))
    served = {"w": np.zeros(600, np.uint16)}
    commit = lambda i: source.commit({"w": np.full(600, i, np.uint16)}, step=i)  # noqa: E731
    commit(0)
    weightvc.mirror(source, target)
    # A cache and a target that were filled from the source go on with the mirror.
    cache = Cache(tmp_path / "cache")
    assert Repository(open_store(source.url), cache).load(framework="numpy")["w"][0] == 0
    last = commit(1)
    weightvc.mirror(source, target)
    near = Repository(open_store(target.url), cache)
    assert near.load(framework="numpy")["w"][0] == 1
    assert near.plan("main~1").patches == 1
    assert near.stats.bytes_read < 2 * near.entry().place.nbytes + 2000  # root and patch: no base
    with weightvc.Client(near, into=served) as client:
        assert client.pull("main").version.id == last.id
        assert served["w"][0] == 1
        new = commit(2)
        weightvc.mirror(source, target)
        update = client.pull("main")
        assert (update.version.id, update.lag) == (new.id, 1)
        assert client.verify() == []
        source.reset("main", "main~1", rewind=True)
        weightvc.mirror(source, target)
        assert client.pull("main").version.id == last.id


def test_following_waits_logs_and_goes_on(caplog, monkeypatch):
    source, target = fresh(), fresh()
    monkeypatch.setattr("weightvc.client.SLOWEST", 0.01)
    store = Faulty(open_store(target.url), 3, "fail")
    mirroring = weightvc.Mirror(again(source), Repository(store, None))
    stop = threading.Event()
    following = mirroring.follow(every=0.001, stop=stop)
    committing = threading.Timer(0.1, lambda: commits(source, range(2)))
    committing.start()
    first = next(following)
    assert first.head.id in log(source)
    text = caplog.text
    assert "no version on it yet" in text
    assert "it failed" in text
    committing.join()
    commits(again(source), range(2, 3))
    while first.head != again(source).resolve("main"):
        first = next(following)
    check(source, target)
    again(target).commit(Bits(step(99)))
    again(source).commit(Bits(step(98)))
    with pytest.raises(BranchMoved):
        list(following)
    for every in (0, float("nan"), 1e300):
        with pytest.raises(Refused, match="every"):
            next(mirroring.follow(every=every))


def test_a_stop_ends_it_between_two_swaps(monkeypatch):
    monkeypatch.setattr(mirror_plan, "BATCH", 1)
    source, target = fresh(), fresh()
    commits(source, range(5))
    stop = threading.Event()
    puts = 0

    class Counting(Faulty):
        def put(self, name: str, data: bytes) -> str:
            nonlocal puts
            puts += name.startswith("manifest/")
            if puts == 2:
                stop.set()
            return super().put(name, data)

    done = weightvc.Mirror(source, Repository(Counting(open_store(target.url)), None)).run(stop)
    assert done.versions == 2
    assert target.branches() == {}
    assert weightvc.mirror(source, target).versions == 3
    check(source, target)
