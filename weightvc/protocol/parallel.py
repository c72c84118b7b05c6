"""Ordered parallel work in a bounded window, under our own threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from weightvc.pool import Pool

T = TypeVar("T")
R = TypeVar("R")


def workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered(pool: Pool, work: Callable[[T], R], items: Iterable[T], window: int) -> Iterator[R]:
    """work(item) of every item, in order, with at most `window` of them begun and not yet taken.

    When the caller stops early, or an item fails, what has not begun is cancelled, and the rest waited for. A single
    item is worked on by the caller itself: to begin a thread, and to wait for it, may take longer than the work.
    """
    if isinstance(items, Sequence) and len(items) == 1:
        yield work(items[0])
        return
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for future in waiting:
            if not future.cancelled():
                future.exception()
