"""Rounds: work that is done again and again beside a store that may be away for a while."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from weightvc.client import LONGEST, waits
from weightvc.errors import Conflict, Corrupt, Expired, NotFound, Refused, StateUnknown, StoreError

T = TypeVar("T")

_log = logging.getLogger("weightvc")


def rounds(
    once: Callable[[], Iterator[T]],
    *,
    every: float,
    stop: threading.Event,
    what: str,
    final: tuple[type[Exception], ...],
) -> Iterator[T]:
    """What `once` gives, over and over, until `stop` is set; `every` seconds lie between two rounds, give or take a
    quarter.

    What may pass by itself is logged as `what`, and the round tried again after a wait that grows. Raises Refused for
    `every`, what is of `final`, and whatever else `once` raises.
    """
    if not 0 < every <= LONGEST:
        raise Refused(f"every={every!r}: seconds, over 0 and a day at most")
    failures = 0
    while not stop.is_set():
        try:
            for one in once():
                failures = 0
                yield one
            failures = 0
        except final:
            raise
        except (StoreError, NotFound, Conflict, Corrupt, Expired, StateUnknown) as error:
            failures += 1
            _log.warning("%s (attempt %d): %s", what, failures, error)
        stop.wait(waits(every, failures) * random.uniform(0.75, 1.25))
