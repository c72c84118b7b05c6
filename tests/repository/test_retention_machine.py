"""Letting go and collecting against a plain model of them, through any sequence of operations."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.garbage import HOUR, START, dead, step
from tests.kit.weights import Bits, Weights, held, tiny_format
from weightvc.errors import Conflict, Expired, RefNotFound, Refused
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import pins
from weightvc.stores.memory import MemoryStore

# Hypothesis takes five minutes at most to make a failure small, and has to come to say what it is.
pytestmark = [pytest.mark.filterwarnings("ignore::weightvc.WeightvcWarning"), pytest.mark.timeout(900)]
BRANCHES = st.sampled_from(["main", "a", "b"])
TAGS = st.sampled_from(["one", "two"])
FAULTS = st.sampled_from(["kill before", "kill after", "fail", "drop", "late"])


def weights(number: int) -> Weights:
    return step(number) if number else START


class Machine(RuleBasedStateMachine):
    """What the repository promises: `numbers` is what each version holds, `parents` what it was made on, `branches`,
    `tags` and `deleted` (branches) name versions, `leases` are those that are held, and `gone` was let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.url = f"memory://{secrets.token_hex(8)}"
        self.repository = weightvc.init(self.url, cache=None)
        # Ahead of the clock that versions are stamped by, so that none is of a time to come.
        self.now = time.time() + HOUR
        assert isinstance(self.repository.store, MemoryStore)
        self.repository.store.set_clock(lambda: self.now)
        self.numbers: dict[str, int] = {}
        self.parents: dict[str, str | None] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.deleted: dict[str, str] = {}
        self.gone: set[str] = set()
        self.leases: list[tuple[str, weightvc.Repository, AbstractContextManager[weightvc.Version]]] = []
        self.read: object = None

    def teardown(self) -> None:
        for _, _, lease in self.leases:
            lease.__exit__(None, None, None)
        self.stack.close()

    @initialize()
    def first(self) -> None:
        self.stack.enter_context(tiny_format())
        self.commit("main", base=True)

    def line(self, ident: str | None) -> Iterator[str]:
        while ident is not None:
            yield ident
            ident = self.parents[ident]

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.numbers)))

    @contextlib.contextmanager
    def unless_gone(self, ident: str) -> Iterator[bool]:
        """What is done inside fails, and says why, if the version has gone; else it does not."""
        if ident in self.gone:
            with pytest.raises(Expired):
                yield False
        else:
            yield True

    def made(self, version: weightvc.Version, parent: str | None) -> str:
        assert version.parents == ((parent,) if parent else ())
        self.numbers[version.id], self.parents[version.id] = int(version.message), parent
        return version.id

    # What writers do

    @rule(branch=BRANCHES, base=st.booleans())
    def commit(self, branch: str, base: bool) -> None:
        number = len(self.numbers)
        parent = self.branches.get(branch)
        version = self.repository.commit(
            Bits(weights(number)), message=str(number), branch=branch, expect=parent or "", base=base
        )
        self.branches[branch] = self.made(version, parent)

    @rule(data=st.data())
    def commit_detached(self, data: st.DataObject) -> None:
        parent, number = self.some(data), len(self.numbers)
        with self.unless_gone(parent):
            self.made(
                self.repository.commit(Bits(weights(number)), message=str(number), branch=None, parents=[parent]),
                parent,
            )

    @rule(at=st.integers(0, 3))
    def commit_killed(self, at: int) -> None:
        store = Faulty(self.repository.store, at, "kill before")
        number, parent = len(self.numbers), self.branches["main"]
        try:
            version = weightvc.repository.Repository(store, None).commit(
                Bits(weights(number)), message=str(number), branch="main", base=True
            )
        except Killed:
            return
        self.branches["main"] = self.made(version, parent)

    @rule(name=BRANCHES, data=st.data())
    def branch(self, name: str, data: st.DataObject) -> None:
        at = self.some(data)
        if name in self.branches:
            with pytest.raises(Conflict):
                self.repository.branch(name, self.branches[name])
            return
        with self.unless_gone(at) as there:
            self.repository.branch(name, at)
        if there:
            self.branches[name] = at

    @rule(name=BRANCHES, data=st.data())
    def reset(self, name: str, data: st.DataObject) -> None:
        at = self.some(data)
        if name not in self.branches:
            return
        with self.unless_gone(at) as there:
            self.repository.reset(name, at, rewind=True)
        if there:
            self.branches[name] = at

    @rule(name=BRANCHES)
    def delete(self, name: str) -> None:
        if name == "main":
            with pytest.raises(Refused, match="default"):
                self.repository.delete_branch(name)
        elif name in self.branches:
            self.deleted[name] = self.branches.pop(name)
            assert self.repository.delete_branch(name) == self.deleted[name]

    @rule(name=BRANCHES)
    def restore(self, name: str) -> None:
        if name in self.branches:
            with pytest.raises(Conflict):
                self.repository.restore_branch(name)
        elif name not in self.deleted:
            with pytest.raises(RefNotFound):
                self.repository.restore_branch(name)
        else:
            at = self.deleted[name]
            with self.unless_gone(at) as there:
                assert self.repository.restore_branch(name).id == at
            if there:
                self.branches[name] = at

    @rule(name=TAGS, data=st.data())
    def tag(self, name: str, data: st.DataObject) -> None:
        at = self.some(data)
        with self.unless_gone(at) as there:
            self.repository.tag(name, at, force=True)
        if there:
            self.tags[name] = at

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def delete_tag(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tags)))
        assert self.repository.delete_tag(name) == self.tags.pop(name)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        at = self.some(data)
        reader = weightvc.open(self.url, cache=None)
        held_by = reader.lease(at, lifetime=pins.LONGEST)
        with self.unless_gone(at) as there:
            assert held_by.__enter__().id == at
        if there:
            self.leases.append((at, reader, held_by))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go_of_a_lease(self, data: st.DataObject) -> None:
        _, _, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.__exit__(None, None, None)

    # What maintenance does

    @rule(last=st.integers(1, 3), unreachable=st.sampled_from([0, None]), dry_run=st.booleans())
    def expire(self, last: int, unreachable: int | None, dry_run: bool) -> None:
        kept = {*self.branches.values(), *self.tags.values(), *(ident for ident, _, _ in self.leases)}
        for head in self.branches.values():
            kept.update(list(self.line(head))[:last])
        if unreachable is None:
            led_to = {ident for at in (*self.branches.values(), *self.tags.values()) for ident in self.line(at)}
            kept.update(self.numbers.keys() - led_to)
        kept -= self.gone
        result = self.repository.expire(Policy({"*": Rules(last=last)}, unreachable), dry_run=dry_run)
        assert {one.version.id for one in result.decisions if one.state == "kept"} == kept
        if not dry_run:
            self.gone = self.numbers.keys() - kept

    @rule(grace=st.sampled_from([0, HOUR]), dry_run=st.booleans())
    def gc(self, grace: float, dry_run: bool) -> None:
        before = {one.key for one in self.repository.store.list()}
        weightvc.open(self.url, cache=None).gc(grace=grace, force=True, dry_run=dry_run)
        if dry_run:
            assert {one.key for one in self.repository.store.list()} == before
        elif not grace and not self.leases:
            assert dead(self.repository) == set()

    @rule(grace=st.sampled_from([0, HOUR]), at=st.integers(0, 25), fault=FAULTS)
    def gc_goes_wrong(self, grace: float, at: int, fault: str) -> None:
        store = Faulty(self.repository.store, at, fault)
        with contextlib.suppress(Killed, weightvc.WeightvcError):
            weightvc.repository.Repository(store, None).gc(grace=grace, force=True)
        store.settle()

    @rule(hours=st.sampled_from([0.5, 1, 5]))
    def later(self, hours: float) -> None:
        self.now += hours * HOUR

    @rule(reverse=st.booleans())
    def compact(self, reverse: bool) -> None:
        weightvc.open(self.url, cache=None).compact(base_every=4, share=50, reverse=reverse)

    # What is promised

    @invariant()
    def all_that_is_promised_is_there(self) -> None:
        reader = weightvc.open(self.url, cache=None)
        now = reader.refresh().write, frozenset(one.key for one in reader.store.list()), len(self.leases)
        if now == self.read or not self.numbers:
            return
        self.read = now
        assert reader.branches() == self.branches
        assert reader.tags() == self.tags
        for ident, number in self.numbers.items():
            with self.unless_gone(ident):
                assert held(reader, ident) == weights(number)
        for ident, leased, _ in self.leases:
            assert held(leased, ident) == weights(self.numbers[ident])
        assert {version.id for head in self.branches for version in reader.log(head)} == {
            ident for head in self.branches.values() for ident in self.line(head)
        }


Machine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
