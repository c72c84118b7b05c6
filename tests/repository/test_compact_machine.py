"""Any history, compacted at any time: every version is exact by every way, for whoever holds whatever."""

import contextlib
import secrets
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import weightvc
from tests.kit.weights import Bits, Weights, changed, held, lying, tiny_format, trees
from tests.repository.test_compact import read_by
from weightvc.protocol import compact
from weightvc.protocol.plan import steps_to

# Hypothesis takes five minutes at most to make a failure small, and has to come to say what it is.
pytestmark = [pytest.mark.filterwarnings("ignore::weightvc.WeightvcWarning"), pytest.mark.timeout(900)]
BRANCHES = st.sampled_from(["main", "a", "b"])


class Machine(RuleBasedStateMachine):
    """`versions` are id → weights, `branches` name → id."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=self.folder / "cache")
        self.versions: dict[str, Weights] = {}
        self.branches: dict[str, str] = {}
        self.checked: set[str] = set()

    def teardown(self) -> None:
        self.stack.close()

    @initialize(weights=trees())
    def first(self, weights: Weights) -> None:
        self.stack.enter_context(tiny_format())
        self.put("main", weights, False)

    def put(self, branch: str, weights: Weights, base: bool) -> None:
        made = self.repository.commit(Bits(weights), branch=branch, expect=self.branches.get(branch, ""), base=base)
        self.versions[made.id], self.branches[branch] = weights, made.id

    @rule(branch=BRANCHES, count=st.integers(1, 5), base=st.booleans(), data=st.data())
    def commit(self, branch: str, count: int, base: bool, data: st.DataObject) -> None:
        if branch not in self.branches:
            at = data.draw(st.sampled_from(list(self.versions)))
            self.repository.branch(branch, at)
            self.branches[branch] = at
        for _ in range(count):
            weights = data.draw(changed(self.versions[self.branches[branch]]))
            self.put(branch, weights, base)
            base = False

    @rule(branch=BRANCHES, data=st.data())
    def revert(self, branch: str, data: st.DataObject) -> None:
        if branch in self.branches:
            back = data.draw(st.sampled_from(list(self.versions)))
            made = self.repository.revert(back, branch=branch)
            self.versions[made.id], self.branches[branch] = self.versions[back], made.id

    @rule(
        share=st.sampled_from([10, 50, 10_000]),
        base_every=st.sampled_from([4, 16, 1024]),
        reverse=st.booleans(),
        cached=st.booleans(),
    )
    def compact(self, share: int, base_every: int, reverse: bool, cached: bool) -> None:
        cache = self.folder / "cache" if cached else None
        worker = weightvc.open(self.repository.url, cache=cache)
        assert worker.compact(share=share, base_every=base_every, reverse=reverse).skipped == []
        assert worker.compact(share=share, base_every=base_every, reverse=reverse) == compact.Compacted()

    @rule(data=st.data())
    def read_cold(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(list(self.versions)))
        assert held(weightvc.open(self.repository.url, cache=None), ident) == self.versions[ident]

    @rule(data=st.data())
    def read_holding(self, data: st.DataObject) -> None:
        reader = weightvc.open(self.repository.url, cache=None)
        target = self.folder / secrets.token_hex(4)
        for _ in range(2):
            ident = data.draw(st.sampled_from(list(self.versions)))
            reader.checkout(ident, target)
            assert lying(target) == self.versions[ident]

    @invariant()
    def every_edge_is_exact(self) -> None:
        for ident in self.versions:
            for step in steps_to(self.repository.entry(ident)):
                if step.way.manifest not in self.checked:
                    assert read_by(self.repository, step, self.versions) == self.versions[ident]
            if (place := self.repository.entry(ident).place) is not None:
                self.checked |= {way.manifest for way in place.all_ways}


Machine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase
