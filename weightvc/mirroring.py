"""Mirrors: a branch of one repository kept in another, so that a region is fed once and its hosts pull near."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

from weightvc.errors import (
    AccessDenied,
    BranchMoved,
)
from weightvc.history import HEAD
from weightvc.protocol.mirror import Mirrored, Mirroring
from weightvc.repository import Repository, open
from weightvc.rounds import rounds

EVERY: Final = 5.0
"""Seconds between two looks at the source, about."""

_log = logging.getLogger("weightvc")


def mirror(
    source: str | os.PathLike[str] | Repository,
    target: str | os.PathLike[str] | Repository,
    *,
    branch: str = HEAD,
    last: int | None = None,
    **options: Any,
) -> Mirrored:
    """Copy what a branch needs to another repository, which has to be there, and let its branch have the same head.

    All of the branch's history that is to be had is copied, by all ways that lead to it, or the `last` versions of
    it; of older ones, only the record. Versions keep their ids. What the target has is not copied again. `options`
    are those of weightvc.open(), for the sides that are given as URLs. Killed at any moment, the next run goes on.

    Raises BranchMoved if the target has versions of its own on the branch, RefNotFound, KeyNotFound, Conflict,
    Refused, Expired, Corrupt for what the source cannot give whole, and StoreError.
    """
    with ExitStack() as stack:
        sides = [
            one if isinstance(one, Repository) else stack.enter_context(open(one, lazy=True, **options))
            for one in (source, target)
        ]
        return Mirror(*sides, branch=branch, last=last).run()


class Mirror:
    """Copies one branch from `source` to `target`, again and again. Not for several threads."""

    def __init__(
        self, source: Repository, target: Repository, *, branch: str = HEAD, last: int | None = None
    ) -> None:
        """Nothing is read yet. Raises Refused for `last` that is no number from 1."""
        self.source = source
        self.target = target
        self.branch = branch
        self._mirroring = Mirroring(
            source._shelf,
            target._shelf,
            branch,
            target.author,
            lambda: time.time_ns() // 1000,
            last=last,
            progress=target.progress,
        )

    def run(self, stop: threading.Event | None = None) -> Mirrored:
        """As mirror(). Once `stop` is set it ends, between two swaps: what was copied stays, the branch too."""
        return self._mirroring.run(stop)

    def follow(self, *, every: float = EVERY, stop: threading.Event | None = None) -> Iterator[Mirrored]:
        """Mirror whenever the source moves, for ever; what was done each time.

        The source is looked at every `every` seconds, give or take a quarter, by one conditional read. What fails is
        logged (as "weightvc") and tried again, up to half a minute later: a store that cannot be reached, a branch or
        repository that is not there yet, an object of the source that is bad. It ends when `stop` is set. Raises
        AccessDenied, Refused, and BranchMoved where the target has versions of its own.
        """
        stop = stop or threading.Event()
        mirrored: int | None = None

        def news() -> Iterator[Mirrored]:
            nonlocal mirrored
            # What is mirrored is this root, or a later one.
            while (sequence := self.source.refresh().sequence) != mirrored:
                done = self.run(stop)
                if stop.is_set():
                    return
                mirrored = sequence
                yield done

        return rounds(news, every=every, stop=stop, what="not mirrored", final=(AccessDenied, BranchMoved))
