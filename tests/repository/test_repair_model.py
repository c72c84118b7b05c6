"""Why an object may be put back under its own key: an exhaustive search over every order of steps of a small model.

One object K that a version names. Somebody lets go of the version, two collectors list, mark, swap and delete, one of
their deletions is as slow as it likes, and a repair that has read the root puts K back, once and again. The rules are
those of docs/design.md; the model leaves out what has no bearing on K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collector:
    step: str = "begin"
    listed: bool = False
    sequence: int = 0
    dead: bool = False


@dataclass(frozen=True)
class State:
    named: bool = True
    """Whether the root names K."""
    sequence: int = 0
    condemned: bool = False
    """Whether K is on the list that the root names."""
    there: bool = False
    """Whether the store has K, with its right bytes; at first it is lost."""
    collectors: tuple[Collector, ...] = (Collector(), Collector())
    slow: bool = False
    """Whether some process holds a list with K on it, and may delete at any time."""
    repair: str = "begin"
    puts: int = 0
    restored: bool = False


LIMIT = 6
"""Changes of the root in one order of steps: each actor acts twice and more."""


def steps(state: State, *, restore: bool) -> Iterator[State]:
    """Every state that one step of somebody leads to. `restore`: a repair also catalogues K again if it is there."""
    if state.named and state.sequence < LIMIT:
        yield replace(state, named=False, sequence=state.sequence + 1)
    for i, one in enumerate(state.collectors):

        def become(new: Collector, i: int = i, **changes: object) -> State:
            others = list(state.collectors)
            others[i] = new
            return replace(state, collectors=tuple(others), **changes)  # type: ignore[arg-type]

        if one.step == "begin":
            yield become(Collector("listed", listed=state.there))
        elif one.step == "listed":
            # A list is not replaced while anything on it is still there.
            waiting = state.condemned and one.listed
            dead = waiting or (one.listed and not state.named)
            yield become(replace(one, step="marked", sequence=state.sequence, dead=dead))
        elif one.step == "marked":
            if one.sequence != state.sequence:
                yield become(replace(one, step="listed"))
            elif state.sequence < LIMIT:
                yield become(Collector(), condemned=one.dead, sequence=state.sequence + 1)
    if state.condemned:
        yield replace(state, slow=True)
    if state.slow:
        yield replace(state, there=False)
    if state.repair == "begin" and state.named:
        yield replace(state, repair="read")
    if state.repair == "read" and state.puts < 2:
        # The put lands now or later, and may land twice: a retry.
        yield replace(state, there=True, puts=state.puts + 1)
    if restore and not state.named and state.there and not state.restored and state.sequence < LIMIT:
        yield replace(state, named=True, restored=True, sequence=state.sequence + 1)


def search(*, restore: bool) -> tuple[int, list[State]]:
    """How many states there are, and those in which data is lost: the root names K, it was put back, and is gone."""
    first = State()
    seen, todo, lost = {first}, [first], []
    while todo:
        state = todo.pop()
        if state.named and state.puts and not state.there:
            lost.append(state)
        for after in steps(state, restore=restore):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), lost


def test_what_was_put_back_stays_as_long_as_it_is_named():
    count, lost = search(restore=False)
    assert lost == []
    assert count > 1000


def test_what_was_let_go_of_is_not_catalogued_again():
    """The same search finds the loss if a repair may do that: the model can tell."""
    _, lost = search(restore=True)
    assert lost
