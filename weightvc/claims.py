"""Claims: of the processes of a host that want one object, one fetches it, and the others wait for it.

A claim is a file that only one process can create. It needs no lock, which a file system may lack. Nothing depends
on it: who waits in vain fetches for itself, and the worst that a lost claim does is one fetch too many. Its owner
touches it as long as it is at work. Who waits looks whether that goes on, by its own clock, and so finds out about an
owner that was killed or stopped.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from weightvc.pool import beside

T = TypeVar("T")

PULSE: Final = 0.5
"""Seconds between two touches."""
STALE: Final = 2.0
"""Seconds without one, after which the owner is taken to be gone."""
PATIENCE: Final = 30.0
"""Seconds to wait at most for an owner that is there: its network may be worse than ours."""
_LOOK: Final = 0.02


def once(path: Path, look: Callable[[], T | None], fetch: Callable[[], T]) -> T:
    """What look() finds, as soon as it finds something; else fetch(), which leaves it where look() finds it.

    Of all who call this with one `path`, in any process, one is in fetch() and the others wait; if that one fails, or
    leaves nothing, all of them go on. Raises what fetch() raises.
    """
    if (found := look()) is not None:
        return found
    with _turn(path, look):
        # Who had the turn before may have left it.
        found = look()
        return fetch() if found is None else found


@contextlib.contextmanager
def _turn(path: Path, look: Callable[[], object]) -> Iterator[None]:
    """Wait until it is our turn, look() may find something, or there is no use in waiting any more."""
    if not _create(path):
        began = since = time.monotonic()
        seen = _seen(path)
        while True:
            time.sleep(_LOOK)
            now = time.monotonic()
            found = _seen(path)
            # Where the owner has come to an end and left nothing, its disk may be full: one after the other, each
            # would fetch in turn.
            if found is None or now - began > PATIENCE or look() is not None:
                yield
                return
            if found != seen:
                seen, since = found, now
            elif now - since > STALE:
                # Two who find that out at once may both fetch.
                try:
                    path.unlink(missing_ok=True)
                except OSError:
                    # Another user's, or the directory is read-only by now: it will lie there for ever.
                    yield
                    return
                if _create(path):
                    break
                seen, since = _seen(path), now
    ours = _seen(path)
    done = threading.Event()
    beside("weightvc-claim", _touch, path, done)
    try:
        yield
    finally:
        done.set()
        # If it was taken for a dead process's, another one's may lie there by now.
        last = _seen(path)
        if last is not None and ours is not None and last[0] == ours[0]:
            with contextlib.suppress(OSError):
                path.unlink()


def _create(path: Path) -> bool:
    """Whether the claim is ours; also where the file system lets nobody have one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def _seen(path: Path) -> tuple[int, int] | None:
    """Inode and time of modification, by the file system's clock: to be compared with itself only."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(PULSE):
        try:
            os.utime(path)
        except OSError:
            return
