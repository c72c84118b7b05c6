"""Orders of a scenario: all of them, those with few interruptions, or one at random.

    explore(scenario)                   # every order, up to what commutes; with `faults=1` one fault as well
    explore(scenario, preemptions=2)    # those in which an actor that could go on is interrupted at most so often
    wander(scenario, seed)              # one random order

What commutes is not tried in both orders (sleep sets), and what was seen is not followed again: a state is the
objects, and for each actor what it did and was answered, since that decides what it does next.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from tests.kit.schedule import Choice, Lost, Operation, Run, Scenario, begin, commute, finish


@dataclass
class _Node:
    enabled: dict[Choice, Operation]
    sleep: dict[Choice, Operation]
    todo: list[Choice]
    chosen: Choice


@dataclass
class Explored:
    """How much was seen."""

    orders: int = 0
    """Whole orders of operations."""
    runs: int = 0
    states: int = 0
    complete: bool = False
    depth: int = 0
    ends: set[int] = field(default_factory=set, repr=False)
    """What the store can be at the end, as hashes."""


def explore(
    scenario: Scenario,
    *,
    preemptions: int | None = None,
    faults: int = 0,
    seconds: float = 1e9,
) -> Explored:
    """All orders, but for no longer than some seconds (then it is not complete). Raises Lost."""
    start = begin(scenario)
    seen: dict[object, list[frozenset[Choice]]] = {}
    spent: dict[object, int] = {}
    stack: list[_Node] = []
    found = Explored()
    until = time.monotonic() + seconds
    position = 0
    used = 0
    last: str | None = None

    def pick(run: Run, enabled: dict[Choice, Operation]) -> Choice | None:
        nonlocal position, used, last
        if run.faults < faults:
            enabled = enabled | run.faulty()
        if not run.late and not any(name in run.actors for name, _ in enabled):
            run.whole = True
            return None
        going = last is not None and (last, "none") in enabled
        if position < len(stack):
            choice = stack[position].chosen
        else:
            sleep: dict[Choice, Operation] = {}
            order = sorted(enabled, key=lambda one: (one[0] != last, one[1] != "none"))
            if preemptions is None:
                if stack:
                    above = stack[-1]
                    taken = above.enabled[above.chosen]
                    sleep = {
                        one: operation
                        for one, operation in above.sleep.items()
                        if commute(operation, taken) and not (one[1] != "none" != above.chosen[1])
                        and one[0] != above.chosen[0]
                    }  # fmt: skip
                names = frozenset(sleep)
                before = seen.setdefault(run.key(), [])
                if any(one <= names for one in before):
                    return None
                if not before:
                    found.states += 1
                before.append(names)
                order = [one for one in order if one not in sleep]
            else:
                state = run.key(), last
                if spent.get(state, 1 << 30) <= used:
                    return None
                found.states += state not in spent
                spent[state] = used
                if going and used >= preemptions:
                    order = [one for one in order if one[0] == last or one[0] == "clock" or one[1] != "none"]
            if not order:
                return None
            choice = order[0]
            stack.append(_Node(enabled, sleep, order[1:], choice))
        position += 1
        if choice[0] in run.actors:
            if going and choice[0] != last and choice[1] != "kill before":
                used += 1
            if choice[1] != "kill before":
                last = choice[0]
        return choice

    while True:
        position, used, last = 0, 0, None
        run = Run(scenario, start, pick)
        run.execute()
        found.runs += 1
        found.depth = max(found.depth, len(stack))
        if run.whole and run.failure is None:
            found.orders += 1
            found.ends.add(run.world.state)
            finish(run)
        if run.failure is not None:
            raise Lost(run.told())
        while stack:
            node = stack[-1]
            if node.todo:
                node.sleep[node.chosen] = node.enabled[node.chosen]
                node.chosen = node.todo.pop(0)
                break
            stack.pop()
        if not stack:
            found.complete = True
            return found
        if time.monotonic() > until:
            return found


def wander(scenario: Scenario, seed: int, *, faults: int = 0, changes: int = 3, depth: int = 60) -> Run:
    """One random order by priorities: the actor with the highest goes on, and at `changes` of the first `depth`
    points it becomes the lowest. Raises Lost, with the seed in its message."""
    start = begin(scenario)
    rng = random.Random(seed)
    ranks = {name: rng.random() for name in [*scenario.actors, "clock"]}
    points = {rng.randrange(depth) for _ in range(changes)}
    bad = {rng.randrange(depth) for _ in range(faults)}
    at = 0
    lowest = 0.0

    def pick(run: Run, enabled: dict[Choice, Operation]) -> Choice | None:
        nonlocal at, lowest
        if not any(name in run.actors for name, _ in enabled) and not run.late:
            run.whole = True
            return None
        at += 1
        if at in bad and run.faulty():
            return rng.choice(list(run.faulty()))
        if run.late and rng.random() < 0.1:
            return "late 0", "none"
        found = max(enabled, key=lambda one: ranks.setdefault(one[0], rng.random()))
        if at in points or found[0] == "clock":
            lowest -= 1
            ranks[found[0]] = lowest
            if found[0] == "clock":
                ranks["clock"] = rng.random()
        return found

    run = Run(scenario, start, pick)
    run.execute()
    if run.failure is None and run.whole:
        finish(run)
    if run.failure is not None:
        raise Lost(f"seed {seed}: {run.told()}")
    return run
