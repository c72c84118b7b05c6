"""Hosts that move to a version together, or not at all.

    group = weightvc.Group({"a": here, "b": StoreMember(store, "b")}, head="a")
    group.activate(version)

One process, the coordinator, calls the members; there is no service besides. An activation has two phases:

    prepare   every member stages the version and reports its id and the digest of its tree. If one is missing, fails,
              or reports something else, all are told to forget it: no host has moved (GroupNotReady).
    commit    every member activates what it staged. Where an engine spans the hosts, the one call that moves it is
              the commit of its `head`, which comes first and alone; the others only turn their links after that.
              If a commit fails, those that went are brought back to what they held.

What holds whatever fails, as long as hosts stop or fall silent, but do not lie:

- No host moves before every host has said, for this very activation, that it has the same verified bytes. So a host
  that is away leaves all of them on the old version.
- Each activation has a fresh name (a *round*), and a member commits only the round that it prepared last, and not
  after it was told to abort. A message that comes late, from a coordinator that has given up or died, moves nobody:
  at worst it displaces what was prepared since, whose commit is then refused. A host that was started again has
  prepared nothing, and refuses.
- Where a member is told to abort after it committed, it goes back.
- activate() may be repeated: members that hold the version already say so, and commit nothing.

What nobody can promise, since a message and its answer can both be lost: that a host which falls silent in its commit
has not moved. Then the others are brought back, and GroupSplit names that host with None. So it is when the
coordinator dies between two commits: who asks holds() next sees which hosts hold what, and activate(), by any
coordinator, mends it. Hosts do not move in the same instant: a request meets either version until the last commit. An
engine that spans the hosts does, as far as it itself swaps at once.
"""

import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from weightvc.errors import Conflict, GroupNotReady, GroupSplit, Refused, WeightvcError

if TYPE_CHECKING:
    from weightvc.client import Client, Update
    from weightvc.engines.base import Engine

__all__ = ["Group", "Local", "Member", "Prepared"]

PREPARE: Final = 600.0
COMMIT: Final = 600.0
ASK: Final = 30.0
"""Seconds that members have: to stage, to activate, to answer what they hold."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a member has staged: the version's id and its tree's digest; and the id of what it holds."""

    version: str
    tree: str
    holds: str | None


class Member(ABC):
    """A host of a group, as the coordinator sees it. Each call may raise anything: that member then counts as
    failed."""

    @abstractmethod
    def prepare(self, round: str, version: str) -> Prepared:
        """Stage a version, in a round."""

    @abstractmethod
    def commit(self, round: str) -> None:
        """Activate what was staged in a round. Raises Conflict if that is not the round prepared last."""

    @abstractmethod
    def abort(self, round: str) -> str | None:
        """Forget a round for ever; if it was committed, go back. What is held then."""

    @abstractmethod
    def holds(self) -> str | None:
        """The id of the version that is held; None if that is not known."""


class Local(Member):
    """This host: a client, and the engine that it moves, if it has one."""

    def __init__(self, client: "Client", *, engine: "Engine | None" = None) -> None:
        self._client = client
        self._engine = engine
        self._lock = threading.Lock()
        self._round = ""
        self._update: Update | None = None
        self._before: str | None = None
        self._committed = False
        self._aborted: dict[str, None] = {}

    def prepare(self, round: str, version: str) -> Prepared:
        """Stage a version, verified. Raises what Update.stage() raises."""
        with self._lock:
            self._check(round)
            self._round, self._update, self._committed = "", None, False
            self._before = self._holds()
            update = self._client.update(version)
            if self._before != update.version.id:
                update.stage()
                if self._engine is not None:
                    self._engine.prepare(update)
            self._round, self._update = round, update
            return Prepared(update.version.id, update.version.tree, self._before)

    def commit(self, round: str) -> None:
        """Activate it. Raises Conflict, and what activating raises."""
        with self._lock:
            self._check(round)
            if self._update is None or round != self._round:
                raise Conflict("this round is not the one that was prepared last here: prepare again")
            if self._committed or self._before == self._update.version.id:
                return
            self._committed = True  # also where it fails half-way: there is something to take back
            self._activate(self._update)

    def abort(self, round: str) -> str | None:
        """Forget the round; go back if it was committed."""
        with self._lock:
            self._aborted[round] = None
            while len(self._aborted) > 64:
                del self._aborted[next(iter(self._aborted))]
            if round == self._round:
                committed, before = self._committed, self._before
                self._round, self._update, self._committed = "", None, False
                if committed and before is not None and self._holds() != before:
                    self._activate(self._client.update(before))
            return self._holds()

    def holds(self) -> str | None:
        """What the engine serves, or the client's target holds where there is none."""
        return self._holds()

    def _activate(self, update: "Update") -> None:
        if self._engine is not None:
            self._engine.activate(update)
        else:
            update.activate()

    def _holds(self) -> str | None:
        held = self._client._holds()
        if held is None or (self._engine is not None and self._engine.serving() != held):
            return None
        return held

    def _check(self, round: str) -> None:
        if round in self._aborted:
            raise Conflict("this round was aborted here: begin another one")


class Group:
    """Members by name, and the one of them, if there is one, whose engine spans them all: the `head`."""

    def __init__(self, members: Mapping[str, Member], *, head: str | None = None) -> None:
        """Raises Refused without members, or if `head` is none of them."""
        if not members or (head is not None and head not in members):
            raise Refused(f"a group of {sorted(members)} with head {head!r:.100}: name one of its members")
        self._members = dict(members)
        self._head = head

    def holds(self, timeout: float = ASK) -> dict[str, str | None]:
        """The id of what each member holds; None where it does not say."""
        got, _ = _all(self._members, lambda member: member.holds(), timeout)
        return {name: got.get(name) for name in self._members}

    def activate(self, version: str, *, timeout: float = PREPARE, commit_timeout: float = COMMIT) -> None:
        """Bring all members to a version, by its full id. Members have `timeout` seconds to stage it and
        `commit_timeout` to activate it.

        Raises GroupNotReady where no host has moved, or all are back; GroupSplit where that is not so, or not known.
        Repeat it then.
        """
        round = secrets.token_hex(16)
        ready, failed = _all(self._members, lambda member: member.prepare(round, version), timeout)
        if not failed:
            failed = _differ(version, ready)
        if failed:
            self._abort(round, min(timeout, ASK))
            raise GroupNotReady(
                f"version {version[:12]} is not ready on {_listed(failed)}; no host has moved: mend that, then "
                "activate it again",
                reasons=failed,
            )
        for names in self._order():
            part = {name: self._members[name] for name in names}
            _, failed = _all(part, lambda member: member.commit(round), commit_timeout)
            if failed:
                self._back(round, version, ready, failed, commit_timeout)

    def _order(self) -> list[list[str]]:
        if self._head is None:
            return [list(self._members)]
        others = [name for name in self._members if name != self._head]
        return [[self._head], *([others] if others else [])]

    def _abort(self, round: str, timeout: float) -> dict[str, str | None]:
        got, _ = _all(self._members, lambda member: member.abort(round), timeout)
        return got

    def _back(
        self,
        round: str,
        version: str,
        ready: Mapping[str, Prepared],
        failed: Mapping[str, str],
        timeout: float,
    ) -> None:
        """Some commits failed: bring all back, and say how that went."""
        after = self._abort(round, timeout)
        holds = {name: after.get(name) for name in self._members}
        wrong = [name for name in self._members if name not in after or holds[name] != ready[name].holds]
        if not wrong:
            raise GroupNotReady(
                f"version {version[:12]} could not be activated on {_listed(failed)}; all hosts hold again what they "
                "held: mend that, then activate it again",
                reasons=failed,
            )
        told = ", ".join(f"{name}: {'not known' if held is None else held[:12]}" for name, held in holds.items())
        raise GroupSplit(
            f"version {version[:12]} could not be activated on {_listed(failed)}, and not all hosts could be brought "
            f"back. They hold: {told}. Send no requests to those that differ; activate a version once all answer",
            holds=holds,
        )


def _differ(version: str, ready: Mapping[str, Prepared]) -> dict[str, str]:
    """Members that did not stage the version that was asked for, or whose tree is not that of most."""
    trees = [prepared.tree for prepared in ready.values()]
    most = max(trees, key=trees.count)
    reasons = {}
    for name, prepared in ready.items():
        if prepared.version != version:
            reasons[name] = f"it staged version {prepared.version[:12]}"
        elif prepared.tree != most:
            reasons[name] = f"its tree has digest {prepared.tree[:12]}, that of others {most[:12]}"
    return reasons


def _listed(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in failed.items())


def _all(
    members: Mapping[str, Member], call: "Callable[[Member], T]", timeout: float
) -> tuple[dict[str, T], dict[str, str]]:
    """What a call of each member gave, all at once, and why there is nothing from the others."""
    answers: queue.SimpleQueue[tuple[str, Any, str | None]] = queue.SimpleQueue()

    def ask(name: str, member: Member) -> None:
        try:
            answers.put((name, call(member), None))
        except WeightvcError as error:
            answers.put((name, None, str(error)))
        except Exception as error:
            answers.put((name, None, f"{type(error).__name__}: {error}"))

    for name, member in members.items():
        # Daemons: one that hangs must not keep the process from ending.
        threading.Thread(target=ask, args=(name, member), name=f"weightvc-group-{name}", daemon=True).start()
    end = time.monotonic() + timeout
    got: dict[str, T] = {}
    failed: dict[str, str] = {}
    while len(got) + len(failed) < len(members):
        try:
            name, value, why = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            failed |= {name: f"no answer within {timeout:g} s" for name in members if name not in got | failed}
            break
        if why is None:
            got[name] = value
        else:
            failed[name] = why
    return got, failed
