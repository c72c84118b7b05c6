"""A meter: how long the parts of one read took, though they run side by side in many threads."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PARTS: Final = ("fetch", "decode", "verify", "apply")
"""Waiting for objects; reading and decoding blocks; hashing what came out; writing it."""


class Meter:
    """Seconds by part in which at least one thread was at it. Parts overlap, so they may add up to more than passed.

    A part that begins inside of another one, in the same thread, interrupts that. Thread-safe.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._threads: Counter[str] = Counter()
        self._began: dict[str, float] = {}
        self._lock = threading.Lock()
        self._at = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What this thread does in a with block."""
        outer: str | None = getattr(self._at, "name", None)
        self._switch(outer, name)
        try:
            yield
        finally:
            self._switch(name, outer)

    def _switch(self, old: str | None, new: str | None) -> None:
        self._at.name = new
        now = time.monotonic()
        with self._lock:
            if old is not None:
                self._threads[old] -= 1
                if not self._threads[old]:
                    self.seconds[old] += now - self._began[old]
            if new is not None:
                if not self._threads[new]:
                    self._began[new] = now
                self._threads[new] += 1
