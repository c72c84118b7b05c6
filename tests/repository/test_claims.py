"""Claims: a trainer that was restarted goes on, one that was replaced is refused, and going back is a fork to see."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, flipped, held, tensor
from weightvc.errors import BadName, BranchMoved, Conflict, Expired, Fenced, NotPublished, RefNotFound
from weightvc.objects import key
from weightvc.objects.retention import Rules
from weightvc.repository import Repository

START = tensor("BF16", (60,), 0)


def bits(number: int) -> Bits:
    return Bits({("", "w"): flipped(START, 0.1, number)})


def number_of(repository: Repository, ref: str) -> int:
    """Which bits() a version has."""
    found = held(repository, ref)
    return next(n for n in range(100) if found == {("", "w"): flipped(START, 0.1, n)})


def steps(repository: Repository, ref: str = "main") -> list[int | None]:
    return [version.step for version in repository.log(ref)][::-1]


@pytest.fixture
def reopen(memory_url: str) -> Callable[..., Repository]:
    """Open the same repository as another process would."""
    weightvc.init(memory_url, cache=None).close()
    return lambda **more: weightvc.open(memory_url, cache=None, **more)


def run(repository: Repository, numbers: range, branch: str = "main") -> None:
    for number in numbers:
        repository.commit(bits(number), step=number, branch=branch)


def test_a_restarted_trainer_goes_on_from_what_it_finds(reopen):
    assert reopen().claim() is None
    first = reopen()
    assert first.claim("main") is None
    run(first, range(3))
    second = reopen()
    found = second.claim("main")
    assert (found, found.step) == (first.resolve(), 2)
    second.commit(bits(3), step=3)
    assert steps(reopen()) == [0, 1, 2, 3]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_zombie_is_refused(reopen, claimed, moved):
    """Whether or not it had claimed the branch, and whether or not its successor has committed yet."""
    zombie = reopen()
    if claimed:
        zombie.claim()
    run(zombie, range(2))
    trainer = reopen(author="successor")
    trainer.claim()
    if moved:
        run(trainer, range(2, 3))
    head = reopen().resolve()
    written = trainer.store.stats.writes
    for attempt in (
        lambda: zombie.commit(bits(9), step=2),
        lambda: zombie.commit(bits(9), step=2, on_conflict="rebase"),
        lambda: zombie.commit(bits(9), step=2, expect="main"),
        lambda: zombie.commit_async(bits(9), step=2).result(60),
        lambda: zombie.revert("main"),
        lambda: zombie.reset("main", "main~1", rewind=True),
        lambda: zombie.set_default_branch("main") or zombie.delete_branch("main"),
    ):
        with pytest.raises((Fenced, NotPublished)) as caught:
            attempt()
        fenced = caught.value.__cause__ if isinstance(caught.value, NotPublished) else caught.value
        assert isinstance(fenced, Fenced)
        assert (fenced.branch, fenced.claimed) == ("main", reopen().refresh().writers["main"])
        assert (fenced.epoch is not None) == claimed
        assert "by successor" in str(fenced)
    assert trainer.store.stats.writes == written
    assert reopen().resolve() == head
    run(trainer, range(3, 4))


def test_one_that_is_about_to_publish_is_refused(reopen):
    zombie, trainer = reopen(), reopen()
    zombie.claim()
    run(zombie, range(2))
    put = zombie.store.put

    def slow(name: str, data: bytes) -> str:
        if name.startswith("manifest/"):
            trainer.claim()
        return put(name, data)

    zombie.store.put = slow
    with pytest.raises(Fenced, match="end this one"):
        zombie.commit(bits(2), step=2)
    assert steps(reopen()) == [0, 1]
    trainer.commit(bits(2), step=2)


def test_the_first_commit_of_a_run_is_refused_if_the_branch_is_claimed_meanwhile(reopen):
    run(reopen(), range(1))
    plain, trainer = reopen(), reopen()
    put = plain.store.put

    def slow(name: str, data: bytes) -> str:
        trainer.claim()
        return put(name, data)

    plain.store.put = slow
    with pytest.raises(Fenced):
        plain.commit(bits(1), step=1)
    trainer.commit(bits(1), step=1)


def test_others_who_have_not_written_may(reopen):
    """An operator reverts, or resets, a branch that is claimed; the trainer sees that it moved, as ever."""
    trainer = reopen()
    trainer.claim()
    run(trainer, range(3))
    reopen().revert("main~1")
    with pytest.raises(BranchMoved):
        trainer.commit(bits(3), step=3)
    trainer.claim()
    trainer.commit(bits(3), step=3)
    assert steps(reopen()) == [0, 1, 2, 1, 3]
    run(reopen(), range(5, 6), branch="other")
    run(trainer, range(4, 5), branch="other")


def test_a_resume_from_an_older_step_is_a_fork_that_all_can_see(reopen):
    first = reopen()
    first.claim()
    run(first, range(6))
    follower = reopen()
    old = follower.resolve("main")
    second = reopen()
    assert second.claim(at="main@{step=2}").step == 2
    (kept,) = set(second.branches()) - {"main"}
    assert kept == f"main-until-{second.refresh().writers['main']}"
    for number in (13, 14):
        second.commit(bits(number), step=number - 10)
    assert steps(reopen()) == [0, 1, 2, 3, 4]
    assert steps(reopen(), kept) == [0, 1, 2, 3, 4, 5]
    assert [number_of(reopen(), f"{one}@{{step=3}}") for one in ("main", kept)] == [13, 3]
    assert reopen().resolve(kept) == old
    assert [entry.op for entry in reopen().reflog("main")] == ["commit"] * 2 + ["reset"] + ["commit"] * 6
    assert [entry.op for entry in reopen().reflog(kept)] == ["branch"]
    with pytest.raises(Fenced):
        first.commit(bits(6), step=6)


def test_nothing_is_left_behind_where_the_line_goes_on(reopen):
    trainer = reopen()
    run(trainer, range(3))
    ahead = trainer.commit(bits(3), step=3, branch=None, parents=["main"])
    assert trainer.claim(at="main").step == 2
    assert trainer.claim(at=ahead) == ahead
    assert trainer.branches() == {"main": ahead.id}
    trainer.commit(bits(4), step=4)
    assert steps(reopen()) == [0, 1, 2, 3, 4]


def test_a_branch_is_made(reopen):
    trainer = reopen()
    run(trainer, range(3))
    assert trainer.claim("exp") is None
    assert trainer.claim("exp", at="main~1").step == 1
    trainer.commit(bits(7), step=2, branch="exp")
    assert steps(reopen(), "exp") == [0, 1, 2]
    assert [entry.op for entry in reopen().reflog("exp")] == ["commit", "branch"]
    assert set(reopen().branches()) == {"main", "exp"}


def test_what_cannot_be_claimed(reopen):
    trainer = reopen()
    run(trainer, range(4))
    trainer.tag("v1", "main~1")
    before = reopen().refresh()
    with pytest.raises(BadName):
        trainer.claim("a//b")
    with pytest.raises(RefNotFound):
        trainer.claim(at="main@{step=9}")
    with pytest.raises(Conflict, match="tag"):
        trainer.claim("v1")
    with pytest.raises(weightvc.Refused, match="message"):
        trainer.claim(message="x" * 5000)
    trainer.branch(f"main-until-{before.sequence + 2}", "main~2")
    with pytest.raises(Conflict, match="main-until"):
        trainer.claim(at="main~1")
    assert reopen().refresh().writers == {}
    gone = trainer.resolve("main~3").id
    trainer.expire(Rules(last=1))
    with pytest.raises(Expired):
        trainer.claim(at=gone)
    assert steps(reopen()) == [0, 1, 2, 3]
    trainer.commit(bits(4), step=4)


def test_a_deleted_branch_is_nobodys(reopen):
    trainer, operator = reopen(), reopen()
    run(trainer, range(1))
    trainer.claim("exp", at="main")
    operator.delete_branch("exp")
    assert reopen().refresh().writers == {}
    with pytest.raises(Fenced, match="nobody holds it"):
        trainer.commit(bits(1), step=1, branch="exp")
    trainer.claim("exp", at="main")
    trainer.commit(bits(1), step=1, branch="exp")
    trainer.delete_branch("exp")
    trainer.commit(bits(1), step=1, branch="exp", expect="")


def test_a_rebuilt_root_knows_no_claims(reopen):
    zombie, trainer = reopen(), reopen()
    zombie.claim()
    run(zombie, range(2))
    zombie.copy_root()
    trainer.claim()
    run(trainer, range(2, 3))
    trainer.store.put(key.ROOT, b"")
    reopen(lazy=True).rebuild_root(adopt=True)
    for one in (zombie, trainer):
        with pytest.raises(Fenced, match="nobody holds it"):
            one.commit(bits(3), step=3)
    trainer.claim()
    trainer.commit(bits(3), step=3)
    assert steps(reopen()) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["kill before", "kill after", "fail", "drop"])
def test_a_claim_that_goes_wrong_anywhere_is_made_or_not(memory_url, reopen, fault):
    run(reopen(), range(4))
    k, ended = 0, False
    while not ended:
        branch = f"b{k}"
        reopen().branch(branch, "main")
        opened = reopen()
        opened.store = opened._shelf.store = Faulty(opened.store, k, fault)
        try:
            opened.claim(branch, at="main~2")
            ended = k >= len(opened.store.operations)
        except (Killed, weightvc.WeightvcError):
            pass
        now = reopen()
        claimed = branch in now.refresh().writers
        kept = [name for name in now.branches() if name.startswith(f"{branch}-until")]
        assert (steps(now, branch), len(kept)) == (([0, 1], 1) if claimed else ([0, 1, 2, 3], 0))
        assert all(steps(now, name) == [0, 1, 2, 3] for name in kept)
        now.claim(branch)
        now.commit(bits(5), branch=branch)
        k += 1
    assert k >= 2


def test_of_many_that_claim_at_once_one_may_write(place, again):
    run(again(), range(1))
    trainers = [again() for _ in range(4)]
    for trainer in trainers:
        trainer.load(framework="numpy")
    start = threading.Barrier(4)

    def work(i: int) -> bool:
        start.wait()
        trainers[i].claim()
        start.wait()
        try:
            trainers[i].commit(bits(10 + i), step=1)
        except Fenced:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        wrote = list(pool.map(work, range(4)))
    assert sum(wrote) == 1
    assert number_of(again(), "main") == 10 + wrote.index(True)
    assert steps(again()) == [0, 1]
