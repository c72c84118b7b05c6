"""The publisher: commits snapshots behind the trainer, one after the other, and tells it of those that failed.

A process ends only once what is queued is published, and says on the log `weightvc` what was not. A forked child
begins with an empty queue: its parent publishes what was in it.
"""

import atexit
import contextlib
import importlib
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal

from weightvc.errors import NotPublished, QueueFull, Refused
from weightvc.objects.version import Version
from weightvc.sources.base import Source

NICE: Final = 5
"""How much lower the priority of publishing is than the trainer's: a third of its share, where they compete."""
WhenFull = Literal["wait", "skip", "raise"]
_log: Final = logging.getLogger("weightvc")


def check_queue(queue: Any, when_full: Any) -> None:
    """Raise Refused for what Publisher.submit() has no meaning for."""
    if type(queue) is not int or queue < 1:
        raise Refused(f"queue={queue!r:.100}: give how many commits may wait, 1 at least")
    if when_full not in ("wait", "skip", "raise"):
        raise Refused(f'when_full={when_full!r:.100}: give "wait", "skip" or "raise"')


@dataclass(slots=True)
class _Job:
    """A commit to make: `commit` makes it of `source`, which is then closed."""

    label: str
    source: Source
    commit: Callable[[Source], Version]
    future: "Future[Version]"


class Publisher:
    """A bounded queue of commits, and a thread that makes them while there are any. Threads may share it."""

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._waiting: deque[_Job] = deque()
        self._working: _Job | None = None
        self._thread: threading.Thread | None = None
        self._failures: list[tuple[str, BaseException]] = []
        self._changed = threading.Condition()
        # One call takes its snapshot at a time: room in the queue that was seen is there when it is used.
        self._submitting = threading.Lock()

    def submit(
        self,
        label: str,
        take: Callable[[], Source],
        commit: Callable[[Source], Version],
        *,
        queue: int = 1,
        when_full: WhenFull = "wait",
    ) -> "Future[Version]":
        """Have commit(take()) made behind the caller: take() is called here, and now.

        At most `queue` commits wait beside the one that is being made. If there are as many, "wait" waits, "skip"
        cancels the oldest of them, and "raise" raises QueueFull; nothing is taken before there is room. `label` names
        the commit in what is told of it. Raises NotPublished, and takes nothing, if commits before it have failed;
        Refused once the main thread has ended: who would be told, if it fails, is gone.
        """
        with self._submitting:
            # The process waits for what began before, and for what a future calls.
            if _ended and not self._is_here():
                raise Refused(
                    f"{label} is not published: the main thread has ended, and the process ends with it: let the "
                    "script wait for this thread, by join(), or commit() it, which waits"
                )
            with self._changed:
                self._tell()
                while len(self._waiting) >= queue:
                    if when_full == "raise" or (when_full == "wait" and self._is_here()):
                        raise QueueFull(
                            f"{label} is not published: {len(self._waiting)} before it wait still: try again later, "
                            'let more wait (queue=), or wait for them (when_full="wait")'
                        )
                    if when_full == "skip":
                        self._skip(self._waiting.popleft(), label)
                    else:
                        self._changed.wait()
                        self._tell()
            job = _Job(label, take(), commit, Future())
            with self._changed:
                self._waiting.append(job)
                if self._working is None:
                    self._working = self._waiting.popleft()
                    # Not a daemon: it has to be gone before the interpreter is, whatever memory it lets go of last.
                    self._thread = threading.Thread(
                        target=self._run, args=(self._working,), name="weightvc-publisher"
                    )
                    self._thread.start()
            return job.future

    def flush(self) -> None:
        """Wait until nothing is queued. Raises NotPublished if commits have failed that nobody was told of.

        In what a future calls when it is done, nothing is waited for: it is called by the thread that commits.
        """
        with self._changed:
            while self._working is not None and not self._is_here():
                self._changed.wait()
            self._tell()

    def _is_here(self) -> bool:
        """Whether this is the thread that commits, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def _tell(self) -> None:
        """Raise what failed, once."""
        if self._failures:
            failures, self._failures = self._failures, []
            _untold.discard(self)
            raise NotPublished.of(failures) from failures[0][1]

    def _skip(self, job: _Job, newer: str) -> None:
        if job.future.cancel():
            _log.info("%s is skipped, since %s is here", job.label, newer)
        job.source.close()

    def _run(self, job: _Job | None) -> None:
        if sys.platform == "linux":
            # Of this thread, and of those that it starts to encode: the trainer's come first where cores are few.
            with contextlib.suppress(OSError):
                here = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, here, os.getpriority(os.PRIO_PROCESS, here) + NICE)
        while job is not None:
            self._make(job)
            with self._changed:
                self._working = job = self._waiting.popleft() if self._waiting else None
                self._changed.notify_all()

    def _make(self, job: _Job) -> None:
        begun = job.future.set_running_or_notify_cancel()
        try:
            try:
                version = job.commit(job.source) if begun else None
            finally:
                job.source.close()
        except BaseException as error:  # whatever it is, the trainer has to hear of it
            with self._changed:
                self._failures.append((job.label, error))
                _untold.add(self)
            if begun:
                job.future.set_exception(error)
        else:
            if version is not None:
                job.future.set_result(version)

    def _at_exit(self) -> None:
        """Publish what is queued; say what was not."""
        try:
            with self._submitting:  # what is being copied is queued then
                pass
            self.flush()
        except NotPublished as error:
            _log.error("%s", error)
        except KeyboardInterrupt:
            with self._changed:
                left = [job.label for job in (self._working, *self._waiting) if job is not None]
            _log.error("interrupted: not published: %s", ", ".join(left))


_all: Final["weakref.WeakSet[Publisher]"] = weakref.WeakSet()
_untold: Final[set[Publisher]] = set()
"""Those that have failures to tell, and so may not be forgotten."""


_ended = False
"""Whether the main thread has ended."""


def _at_exit() -> None:
    global _ended
    _ended = True
    for publisher in list(_all):
        publisher._at_exit()


def _in_child() -> None:
    # Locks may be held by threads that there are not any more.
    for publisher in list(_all):
        publisher._begin()
    _untold.clear()


# Threads that work for a commit are to be had until concurrent.futures has been told of the exit. Who registers last
# is told first; before atexit's functions run that has no public name.
try:
    importlib.import_module("concurrent.futures.thread")
    getattr(threading, "_register_atexit", atexit.register)(_at_exit)
except RuntimeError:  # it was told already
    _ended = True
os.register_at_fork(after_in_child=_in_child)
