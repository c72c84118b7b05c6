"""Garbage, as the tests of letting go and collecting make it and look for it."""

from __future__ import annotations

import secrets
from typing import Any, Final

import weightvc
from tests.kit.weights import Weights, flipped, held, tensor
from weightvc.objects import frame, key
from weightvc.protocol import collect, live, swap
from weightvc.protocol.shelf import Shelf
from weightvc.stores.memory import MemoryStore

START: Final[Weights] = {("", "w"): tensor("BF16", (400,), 0)}
HOUR: Final = 3600.0


def step(number: int) -> Weights:
    """What a version holds that differs from START."""
    return {("", "w"): flipped(START["", "w"], 0.2, number)}


class Clock:
    """A clock that stands still until it is moved: a store in memory goes by it."""

    def __init__(self, repository: weightvc.Repository) -> None:
        self.now = 1_800_000_000.0
        assert isinstance(repository.store, MemoryStore)
        repository.store.set_clock(lambda: self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds


def shelf(repository: weightvc.Repository) -> Shelf:
    """A shelf that has read nothing yet."""
    return Shelf(repository.store, None)


def gc(repository: weightvc.Repository, grace: float = HOUR, **options: Any) -> collect.Collection:
    """One run of a collector that has read nothing yet."""
    return collect.run(shelf(repository), grace=grace, **options)


def names(repository: weightvc.Repository) -> set[str]:
    """All keys."""
    return {one.key for one in repository.store.list()}


def dead(repository: weightvc.Repository) -> set[str]:
    """What is ours and named by nothing."""
    made = shelf(repository)
    named = live.of_root(made, swap.must_read(repository.store).root)
    return {
        name
        for name in names(repository)
        if name.partition("/")[0] not in ("pin", "probe", "root.d") and name not in named
    }


def orphan(repository: weightvc.Repository, begin: int | None = None, size: int = 10) -> str:
    """What a writer that was killed leaves: its key."""
    transaction = key.Transaction(repository.refresh().sequence if begin is None else begin)
    data = frame.header(frame.PACK) + secrets.token_bytes(size)
    name = transaction.key("pack", data)
    repository.store.put(name, data)
    return name


def forget(repository: weightvc.Repository, ident: str) -> None:
    """Drop a version's entry, as nothing but retention may."""

    def make(root: Any) -> Any:
        kept = tuple(entry for entry in root.tail if entry.new != ident)
        branches = {name: head for name, head in root.branches.items() if head != ident}
        return root.next(tail=kept, branches=branches)

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))


def read_all(repository: weightvc.Repository) -> None:
    """Every version of every branch can be read."""
    for branch in repository.branches():
        for version in repository.log(branch):
            held(repository, version.id)
