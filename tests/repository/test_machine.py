"""A repository against a plain model of it, through any sequence of operations."""

import contextlib
import secrets
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import weightvc
from tests.kit.weights import Bits, Weights, changed, held, lying, tiny_format, trees
from weightvc.errors import BranchMoved, Conflict, Refused

# Hypothesis takes five minutes at most to make a failure small, and has to come to say what it is.
pytestmark = [pytest.mark.filterwarnings("ignore::weightvc.WeightvcWarning"), pytest.mark.timeout(900)]
NAMES = st.sampled_from(["main", "exp", "exp/1", "A", "a"])
TAGS = st.sampled_from(["v1", "best", "exp"])


class Machine(RuleBasedStateMachine):
    """`versions` are id → weights, `parents` id → parent, `branches` and `tags` name → id."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = contextlib.ExitStack()
        self.folder = tempfile.TemporaryDirectory()
        self.url = f"memory://{secrets.token_hex(8)}"
        self.repository = weightvc.init(self.url, cache=Path(self.folder.name) / "cache")
        self.versions: dict[str, Weights] = {}
        self.parents: dict[str, str | None] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.deleted: dict[str, str] = {}

    def teardown(self) -> None:
        self.tiny.close()
        self.folder.cleanup()

    @initialize(weights=trees())
    def first(self, weights: Weights) -> None:
        self.tiny.enter_context(tiny_format())
        self.put("main", Bits(weights), weights)

    def put(self, branch: str, source: Bits, weights: Weights) -> None:
        parent = self.branches.get(branch)
        if parent is None and branch in self.tags:
            with pytest.raises(Conflict):
                self.repository.commit(source, branch=branch, expect="")
            return
        made = self.repository.commit(source, branch=branch, expect=parent or "")
        assert made.parents == ((parent,) if parent else ())
        self.versions[made.id], self.parents[made.id] = weights, parent
        self.branches[branch] = made.id

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.versions)))

    @rule(branch=NAMES, data=st.data())
    def commit(self, branch: str, data: st.DataObject) -> None:
        old = self.versions[self.branches[branch]] if branch in self.branches else {}
        weights = data.draw(changed(old))
        self.put(branch, Bits(weights), weights)

    @rule(branch=NAMES, data=st.data())
    def commit_against_another_head(self, branch: str, data: st.DataObject) -> None:
        wrong = self.some(data)
        if wrong != self.branches.get(branch):
            with pytest.raises(BranchMoved) as caught:
                self.repository.commit(Bits({}), branch=branch, expect=wrong)
            error = caught.value
            assert (error.branch, error.expected, error.head) == (branch, wrong, self.branches.get(branch))

    @rule(data=st.data())
    def commit_detached(self, data: st.DataObject) -> None:
        parent = self.some(data)
        weights = data.draw(changed(self.versions[parent]))
        made = self.repository.commit(Bits(weights), branch=None, parents=[parent])
        self.versions[made.id], self.parents[made.id] = weights, parent

    @rule(name=NAMES, data=st.data())
    def branch(self, name: str, data: st.DataObject) -> None:
        at = self.some(data)
        if name in self.branches or name in self.tags:
            with pytest.raises(Conflict):
                self.repository.branch(name, at)
        else:
            assert self.repository.branch(name, at).id == at
            self.branches[name] = at

    @rule(name=NAMES)
    def delete_branch(self, name: str) -> None:
        if name == "main":
            with pytest.raises(Refused, match="default"):
                self.repository.delete_branch(name)
        elif name in self.branches:
            assert self.repository.delete_branch(name) == self.branches.pop(name)

    @rule(name=NAMES, data=st.data(), rewind=st.booleans())
    def reset(self, name: str, data: st.DataObject, rewind: bool) -> None:
        if name not in self.branches:
            return
        at = self.some(data)
        if not rewind and self.branches[name] not in self.line(at):
            with pytest.raises(Refused):
                self.repository.reset(name, at)
        else:
            self.repository.reset(name, at, rewind=rewind)
            self.branches[name] = at

    @rule(name=NAMES, data=st.data())
    def revert(self, name: str, data: st.DataObject) -> None:
        if name in self.branches:
            back, parent = self.some(data), self.branches[name]
            made = self.repository.revert(back, branch=name, expect=parent)
            assert made.tree == self.repository.resolve(back).tree
            self.versions[made.id], self.parents[made.id] = self.versions[back], parent
            self.branches[name] = made.id

    @rule(name=TAGS, data=st.data(), force=st.booleans())
    def tag(self, name: str, data: st.DataObject, force: bool) -> None:
        at = self.some(data)
        if name in self.branches or (not force and self.tags.get(name, self.deleted.get(name, at)) != at):
            with pytest.raises(Conflict):
                self.repository.tag(name, at, force=force)
        else:
            self.repository.tag(name, at, force=force)
            self.tags[name] = at
            self.deleted.pop(name, None)

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def delete_tag(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tags)))
        self.deleted[name] = self.tags.pop(name)
        assert self.repository.delete_tag(name) == self.deleted[name]

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        ident = self.some(data)
        assert held(self.repository, ident) == self.versions[ident]

    @rule(data=st.data())
    def checkout(self, data: st.DataObject) -> None:
        ident = self.some(data)
        target = Path(self.folder.name) / "out"
        self.repository.checkout(ident, target)
        assert lying(target) == self.versions[ident]

    @rule(cached=st.booleans())
    def open_again(self, cached: bool) -> None:
        self.repository = weightvc.open(self.url, cache=Path(self.folder.name) / "cache" if cached else None)

    def line(self, ident: str | None) -> list[str]:
        found = []
        while ident is not None:
            found.append(ident)
            ident = self.parents[ident]
        return found

    @invariant()
    def refs_and_logs_agree(self) -> None:
        assert self.repository.branches() == self.branches
        assert self.repository.tags() == self.tags
        for name, head in self.branches.items():
            assert [version.id for version in self.repository.log(name)] == self.line(head)
            assert next(self.repository.reflog(name)).new == head


Machine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
