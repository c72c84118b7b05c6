"""Workspaces: hidden directories beside a target, in which one process builds what is to take its place."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Final

from weightvc.objects import frame

ABANDONED: Final = 3600.0
"""Seconds without a change, after which a workspace is nobody's where locks cannot tell,"""
IN_HAND: Final = 10.0
"""and where it has the old target, which is between two renames then."""

_log = logging.getLogger("weightvc")


class Workspace:
    """A directory beside the target to build in. Its process holds its lock: where the lock can be taken, the process
    is gone, on whatever host or in whatever container it ran."""

    def __init__(self, target: Path) -> None:
        self._target = target
        lock = None
        while lock is None:
            self.path = target.parent / f"{prefix(target)}{secrets.token_hex(6)}"
            self.path.mkdir(mode=0o700)
            try:
                lock = _lock(self.path)
            except BaseException:
                _remove(self.path)
                raise
        self._held = lock
        self.new = self.path / "new"
        self.old = self.path / "old"

    def __enter__(self) -> "Workspace":
        try:
            self.new.mkdir()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if os.path.lexists(self._target) or not self.old.exists():
                _remove(self.path)
        finally:
            os.close(self._held)


def prefix(target: Path) -> str:
    """How the names of all workspaces of a target begin. A name may have 255 bytes, and the target's own so many."""
    name = os.fsencode(target.name)
    return f".{os.fsdecode(name[:80])}.weightvc-{frame.digest(name).hex()[:16]}-"


def clear(target: Path) -> None:
    """Remove what killed checkouts into `target` left, and put the target back if one was killed with it in hand."""
    beginning = prefix(target)
    for name in os.listdir(target.parent):
        if not name.startswith(beginning):
            continue
        path = target.parent / name
        with contextlib.suppress(OSError):
            lock = _lock(path)
            if lock is None:
                continue
            try:
                in_hand = (path / "old").is_dir() and not os.path.lexists(target)
                if not _keeps_out(path) and _unchanged(path) < (IN_HAND if in_hand else ABANDONED):
                    continue
                if in_hand:
                    os.rename(path / "old", target)
                    _log.warning("%s was put back: a process was killed while it swapped it for a new one", target)
                _remove(path)
            finally:
                os.close(lock)


def discard(target: Path) -> None:
    """Remove a directory, of which nobody ever sees a part: what is left by a kill, clear() removes."""
    workspace = Workspace(target)
    with workspace:
        os.rename(target, workspace.path / "gone")


def recover(target: Path) -> None:
    """Put a target back that is not there because a process was killed between the two renames of a swap."""
    if not os.path.lexists(target):
        with contextlib.suppress(OSError):
            clear(target)


def _lock(workspace: Path) -> int | None:
    """Take a workspace's lock: a descriptor, or None if somebody has it or the workspace is gone. Anybody gets one
    where the file system has no locks."""
    path = workspace / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        # Whoever clears it away may have removed the file between the two calls.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _keeps_out(workspace: Path) -> bool:
    """Whether the lock that we hold keeps others out: on some file systems it does nothing, or cannot be had."""
    with open(workspace / "lock", "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def _unchanged(workspace: Path) -> float:
    """Seconds since anything in a workspace was last written."""
    newest = os.stat(workspace).st_mtime
    for parent, folders, files in os.walk(workspace):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(parent, name)).st_mtime)
    return time.time() - newest


def _remove(workspace: Path) -> None:
    for directory in (workspace / "new", workspace / "old", workspace / "gone"):
        with contextlib.suppress(OSError):
            # It has the target's mode, which may not allow it.
            os.chmod(directory, 0o700)
    shutil.rmtree(workspace, ignore_errors=True)
