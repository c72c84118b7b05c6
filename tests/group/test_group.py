"""Hosts that move together: in threads of this process, with a host that fails at each step."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import weightvc
from tests.engines.conftest import of, weights
from tests.kit.engines import SGLangServer, digest
from weightvc.engines import SGLang
from weightvc.group import Group, Local, Member, Prepared
from weightvc.group_store import StoreMember, serve
from weightvc.repository import Repository
from weightvc.targets import Slots

NAMES = ("a", "b", "c")


class Odd(Member):
    """A member whose calls do something first, or instead: by name, a function that is given the call to make."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.faults: dict[str, Callable[[Callable[[], Any]], Any]] = {}
        self.calls: list[str] = []

    def _do(self, name: str, call: Callable[[], Any]) -> Any:
        self.calls.append(name)
        return self.faults[name](call) if name in self.faults else call()

    def prepare(self, round: str, version: str) -> Prepared:
        found: Prepared = self._do("prepare", lambda: self.member.prepare(round, version))
        return found

    def commit(self, round: str) -> None:
        self._do("commit", lambda: self.member.commit(round))

    def abort(self, round: str) -> str | None:
        held: str | None = self._do("abort", lambda: self.member.abort(round))
        return held

    def holds(self) -> str | None:
        held: str | None = self._do("holds", self.member.holds)
        return held


class Hosts:
    """Three hosts that serve tensors from memory, each with a client of its own."""

    def __init__(
        self, repository: Repository, wrap: Callable[[str, Member], Member] = lambda name, member: member
    ) -> None:
        self.repository = repository
        self.served = {name: {n: torch.zeros_like(v) for n, v in weights(0).items()} for name in NAMES}
        self.local = {name: Local(weightvc.Client(repository, into=self.served[name])) for name in NAMES}
        self.odd = {name: Odd(wrap(name, member)) for name, member in self.local.items()}
        self.group = Group(self.odd)

    def commit(self, step: int) -> str:
        return self.repository.commit(weights(step), step=step).id

    def digests(self) -> list[str]:
        return [digest(self.served[name]) for name in NAMES]


@pytest.fixture(params=["threads", "store"])
def hosts(request: pytest.FixtureRequest, repository: Repository) -> Iterator[Hosts]:
    if request.param == "threads":
        yield Hosts(repository)
        return
    store, stop = HashStore(), threading.Event()

    def remote(name: str, member: Member) -> Member:
        threading.Thread(target=serve, args=(store, name, member), kwargs={"stop": stop}, daemon=True).start()
        return StoreMember(store, name)

    found = Hosts(repository, remote)
    # A server skips what was asked before it began: so it has to have begun.
    for member in found.odd.values():
        while True:
            try:
                StoreMember(store, member.member._name, timeout=0.5).holds()  # type: ignore[attr-defined]
                break
            except weightvc.Unavailable:
                continue
    yield found
    stop.set()


def fail(call: Callable[[], Any]) -> Any:
    raise OSError("the host is gone")


def late(call: Callable[[], Any]) -> Any:
    call()
    raise OSError("the answer was lost")


def test_all_move(hosts: Hosts) -> None:
    for step in range(3):
        version = hosts.commit(step)
        hosts.group.activate(version)
        assert hosts.digests() == [of(step)] * 3
        assert hosts.group.holds() == dict.fromkeys(NAMES, version)
    hosts.group.activate(version)  # again: nothing to do
    first = hosts.repository.resolve("main~2").id
    hosts.group.activate(first)
    assert hosts.digests() == [of(0)] * 3


@pytest.mark.parametrize("fault", [fail, late])
def test_a_host_that_is_missing_leaves_all_where_they_are(hosts: Hosts, fault: Any) -> None:
    old = hosts.commit(0)
    hosts.group.activate(old)
    new = hosts.commit(1)
    hosts.odd["b"].faults["prepare"] = fault
    with pytest.raises(weightvc.GroupNotReady, match="no host has moved") as caught:
        hosts.group.activate(new)
    assert list(caught.value.reasons) == ["b"]
    assert caught.value.exit_code == 4
    assert hosts.digests() == [of(0)] * 3
    assert "commit" not in hosts.odd["a"].calls[-2:]
    # It rejoins.
    hosts.odd["b"].faults.clear()
    hosts.group.activate(new)
    assert hosts.digests() == [of(1)] * 3


def test_a_host_that_hangs_is_not_waited_for(hosts: Hosts) -> None:
    old = hosts.commit(0)
    hosts.group.activate(old)
    new = hosts.commit(1)
    go, over = threading.Event(), threading.Semaphore(0)

    def hang(call: Callable[[], Any]) -> Any:
        go.wait(60)
        try:
            return call()
        finally:
            over.release()

    hosts.odd["c"].faults |= {"prepare": hang, "abort": hang}
    with pytest.raises(weightvc.GroupNotReady, match=r"c \(no answer within 0\.5 s\)"):
        hosts.group.activate(new, timeout=0.5)
    assert hosts.digests() == [of(0)] * 3
    go.set()
    for _ in range(2):  # what comes late is refused, or forgotten
        assert over.acquire(timeout=60)
    assert hosts.digests() == [of(0)] * 3
    hosts.odd["c"].faults.clear()
    hosts.group.activate(new)
    assert hosts.digests() == [of(1)] * 3


def test_other_bytes_under_the_same_name_are_refused(hosts: Hosts) -> None:
    hosts.group.activate(hosts.commit(0))
    new = hosts.commit(1)
    hosts.odd["b"].faults["prepare"] = lambda call: replace(call(), tree="0" * 64)
    with pytest.raises(weightvc.GroupNotReady, match=r"b \(its tree has digest 000000000000"):
        hosts.group.activate(new)
    hosts.odd["b"].faults["prepare"] = lambda call: replace(call(), version="1" * 64)
    with pytest.raises(weightvc.GroupNotReady, match=r"b \(it staged version 111111111111"):
        hosts.group.activate(new)
    assert hosts.digests() == [of(0)] * 3


@pytest.mark.parametrize("fault", [fail, late])
def test_a_commit_that_fails_takes_the_others_back(hosts: Hosts, fault: Any) -> None:
    old = hosts.commit(0)
    hosts.group.activate(old)
    new = hosts.commit(1)
    hosts.odd["b"].faults["commit"] = fault
    with pytest.raises(weightvc.GroupNotReady, match="all hosts hold again") as caught:
        hosts.group.activate(new)
    assert list(caught.value.reasons) == ["b"]
    assert hosts.digests() == [of(0)] * 3
    assert hosts.group.holds() == dict.fromkeys(NAMES, old)
    hosts.odd["b"].faults.clear()
    hosts.group.activate(new)
    assert hosts.digests() == [of(1)] * 3


def test_a_host_that_dies_in_its_commit_is_not_known(hosts: Hosts) -> None:
    old = hosts.commit(0)
    hosts.group.activate(old)
    new = hosts.commit(1)
    hosts.odd["c"].faults |= {"commit": late, "abort": fail}
    with pytest.raises(weightvc.GroupSplit, match="c: not known") as caught:
        hosts.group.activate(new)
    assert caught.value.holds == {"a": old, "b": old, "c": None}
    assert caught.value.exit_code == 5
    assert hosts.digests() == [of(0), of(0), of(1)]
    hosts.odd["c"].faults.clear()
    assert hosts.group.holds() == {"a": old, "b": old, "c": new}
    hosts.group.activate(new)
    assert hosts.digests() == [of(1)] * 3


def test_the_first_version_cannot_be_taken_back(hosts: Hosts) -> None:
    new = hosts.commit(0)
    hosts.odd["c"].faults["commit"] = fail
    with pytest.raises(weightvc.GroupSplit) as caught:
        hosts.group.activate(new)
    assert caught.value.holds == {"a": new, "b": new, "c": None}


def test_a_coordinator_that_died_between_commits_is_followed_by_another(hosts: Hosts) -> None:
    old = hosts.commit(0)
    hosts.group.activate(old)
    new = hosts.commit(1)
    for name in NAMES:
        hosts.odd[name].prepare("the dead one's", new)
    hosts.odd["a"].commit("the dead one's")
    assert hosts.group.holds() == {"a": new, "b": old, "c": old}
    hosts.group.activate(new)
    assert hosts.digests() == [of(1)] * 3
    # What it had asked for and comes late moves nobody.
    with pytest.raises(weightvc.Conflict):
        hosts.odd["b"].commit("the dead one's")


def test_rounds_are_fences(repository: Repository) -> None:
    hosts = Hosts(repository)
    member, old = hosts.local["a"], hosts.commit(0)
    member.prepare("1", old)
    member.commit("1")
    member.commit("1")
    new = hosts.commit(1)
    with pytest.raises(weightvc.Conflict, match="prepare again"):
        member.commit("2")
    member.prepare("3", new)
    assert member.abort("3") == old
    for late in (lambda: member.commit("3"), lambda: member.prepare("3", new)):
        with pytest.raises(weightvc.Conflict, match="aborted"):
            late()
    member.prepare("4", new)
    member.commit("4")
    assert member.abort("4") == old
    assert digest(hosts.served["a"]) == of(0)
    assert member.abort("of another") == old
    restarted = Local(weightvc.Client(repository, into=hosts.served["a"]))
    with pytest.raises(weightvc.Conflict, match="prepare again"):
        restarted.commit("4")


def test_what_was_asked_before_a_host_began_is_left_alone(repository: Repository) -> None:
    store, stop, hosts = HashStore(), threading.Event(), Hosts(repository)
    version = hosts.commit(0)
    with pytest.raises(weightvc.Unavailable, match="does not answer"):
        StoreMember(store, "a", timeout=0.05).prepare("1", version)
    thread = threading.Thread(target=serve, args=(store, "a", hosts.local["a"]), kwargs={"stop": stop})
    thread.start()
    held = "?"
    while held == "?":
        try:
            held = StoreMember(store, "a", timeout=0.5).holds() or "nothing"
        except weightvc.Unavailable:
            continue
    stop.set()
    thread.join()
    assert held == "nothing"
    with pytest.raises(weightvc.Conflict, match="prepare again"):
        hosts.local["a"].commit("1")


def test_bad_groups(repository: Repository) -> None:
    for members, head in (({}, None), ({"a": Hosts(repository).local["a"]}, "b")):
        with pytest.raises(weightvc.Refused):
            Group(members, head=head)


# An engine that spans hosts


class Span:
    """Two hosts with slots, and an SGLang whose first node is on `a`: one call moves it."""

    def __init__(self, repository: Repository, engine: SGLangServer, tmp_path: Path) -> None:
        self.repository = repository
        self.engine = engine
        self.slots = {name: Slots(tmp_path / name) for name in ("a", "b")}
        clients = {name: weightvc.Client(repository, into=slots) for name, slots in self.slots.items()}
        head = SGLang(engine.url, timeout=5, load_timeout=5)
        self.odd = {"a": Odd(Local(clients["a"], engine=head)), "b": Odd(Local(clients["b"]))}
        self.group = Group(self.odd, head="a")

    def commit(self, step: int) -> str:
        return self.repository.commit(weights(step), step=step).id

    def state(self) -> tuple[str, str | None, str | None]:
        return self.engine.digest(), self.slots["a"].holds, self.slots["b"].holds


@pytest.fixture
def span(repository: Repository, tmp_path: Path) -> Iterator[Span]:
    with SGLangServer() as engine:
        yield Span(repository, engine, tmp_path)


def test_one_call_moves_an_engine_that_spans_hosts(span: Span) -> None:
    for step in range(2):
        version = span.commit(step)
        span.group.activate(version)
        assert span.state() == (of(step), version, version)
    assert span.engine.paths().count("/update_weights_from_disk") == 2
    assert span.group.holds() == {"a": version, "b": version}


def test_it_is_not_called_where_a_host_has_nothing_staged(span: Span) -> None:
    old = span.commit(0)
    span.group.activate(old)
    new = span.commit(1)
    span.odd["b"].faults["prepare"] = fail
    before = len(span.engine.calls)
    with pytest.raises(weightvc.GroupNotReady):
        span.group.activate(new)
    assert set(span.engine.paths()[before:]) <= {"/model_info"}
    assert span.state() == (of(0), old, old)


def test_where_the_call_fails_no_other_host_turns_its_link(span: Span) -> None:
    old = span.commit(0)
    span.group.activate(old)
    new = span.commit(1)
    span.engine.faults["/pause_generation"] = "500"
    with pytest.raises(weightvc.GroupNotReady, match=r"a \(SGLang .*status 500"):
        span.group.activate(new)
    assert "commit" not in span.odd["b"].calls[-2:]
    assert span.state() == (of(0), old, old)
    span.engine.faults.clear()
    span.group.activate(new)
    assert span.state() == (of(1), new, new)


def test_where_the_engine_is_half_loaded_the_group_is_split(span: Span) -> None:
    old = span.commit(0)
    span.group.activate(old)
    new = span.commit(1)
    span.engine.faults["/update_weights_from_disk"] = "half"
    with pytest.raises(weightvc.GroupSplit) as caught:
        span.group.activate(new)
    assert caught.value.holds == {"a": None, "b": old}
    span.engine.faults.clear()
    span.group.activate(new)
    assert span.state() == (of(1), new, new)


def test_a_link_that_cannot_be_turned_takes_the_engine_back(span: Span) -> None:
    old = span.commit(0)
    span.group.activate(old)
    new = span.commit(1)
    span.odd["b"].faults["commit"] = fail
    with pytest.raises(weightvc.GroupNotReady, match="all hosts hold again"):
        span.group.activate(new)
    assert span.state() == (of(0), old, old)


def test_an_engine_that_moved_without_saying_so_is_taken_back(span: Span) -> None:
    old = span.commit(0)
    span.group.activate(old)
    new = span.commit(1)
    plain, lost = span.engine.do, []

    def once(method: str, path: str, query: Any, body: Any, *, half: bool) -> tuple[int, Any]:
        # The first question after it went on, which is whether it serves the version.
        if path == "/model_info" and span.engine.version == new and not span.engine.paused and not lost:
            lost.append(path)
            return 500, {"message": "not now"}
        return plain(method, path, query, body, half=half)

    span.engine.do = once  # type: ignore[method-assign]
    with pytest.raises(weightvc.GroupNotReady, match="all hosts hold again"):
        span.group.activate(new)
    assert lost
    assert span.state() == (of(0), old, old)


@pytest.mark.parametrize("hosts", ["store"], indirect=True)
def test_a_coordinator_that_dies_before_it_has_said_what_it_asks(hosts: Hosts) -> None:
    """It has taken a number; those that come after it are served."""
    member = hosts.odd["a"].member
    assert isinstance(member, StoreMember)
    member._store.add("weightvc/a/asked", 1)
    assert StoreMember(member._store, "a", timeout=20).holds() is None
