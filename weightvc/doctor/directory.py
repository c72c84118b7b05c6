"""Checks of a local directory: what the store there relies on, tried."""

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weightvc.doctor.case import Case
from weightvc.doctor.finding import Finding, amount, ok, problem, skipped, warning
from weightvc.errors import AccessDenied, KeyNotFound, Unavailable, UnsafeStore
from weightvc.objects import key
from weightvc.stores.local import LocalStore

ROUNDS: Final = 16
"""Times that a file is replaced while it is read."""
LEAST: Final = 64 << 20
"""Free bytes that a repository wants, at least: an object, and what it takes the place of."""
_OF_THIS_HOST: Final = ("nolock", "local_lock=all", "local_lock=flock", "localflock")
"""Options of a mount by which locks hold among the processes of one host alone."""


def directory(case: Case) -> Iterator[Finding]:
    """What kind of file system it is."""
    place = _root(case)
    if not os.path.exists(place / key.ROOT):
        case.barred = "there is no repository yet"
    kind, options = mounted(place, _mounts())
    if lone := [one for one in _OF_THIS_HOST if one in options]:
        says = f"{place} is on {kind}, mounted with {lone[0]}: two hosts that write would overwrite each other"
        yield warning("directory", says, "mount it without that option, or write from one host alone", kind=kind)
    else:
        yield ok("directory", f"{place} is on {kind or 'a file system of unknown kind'}", kind=kind)
    yield skipped("bucket", "a directory: no region, clock, lifecycle rules, versioning or uploads to look at")


def locks(case: Case) -> Iterator[Finding]:
    """Whether a lock keeps others out."""
    if why := case.untried:
        yield skipped("locks", why)
        return
    with _lock_file(_root(case)) as (one, other):
        try:
            fcntl.flock(one, fcntl.LOCK_EX)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield ok("locks", "a lock keeps other writers out")
            return
        except OSError as error:
            says = f"there are none ({error.strerror})"
        else:
            says = "they keep nobody out: two writers could overwrite each other"
    yield problem("locks", UnsafeStore, says, "mount with locks, or keep it on a local disk or in an object store")


def rename(case: Case) -> Iterator[Finding]:
    """Whether a reader sees the old file or the new one, and nothing else, while it is replaced and synced."""
    if why := case.untried:
        yield skipped("rename", why)
        return
    store, name = _root_store(case), f"probe/{secrets.token_hex(16)}-rename"
    bodies = [letter * (64 << 10) for letter in (b"a", b"b")]
    over = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not over.is_set():
            try:
                got = store.get(name)
                if got is None or got.data not in bodies:
                    seen.add("a part of it")
            except KeyNotFound:
                seen.add("nothing there")
            except Unavailable as error:
                seen.add(str(error))

    reader = threading.Thread(target=read)
    try:
        store.put(name, bodies[0])
        reader.start()
        for number in range(ROUNDS):
            store.put(name, bodies[number % 2])
    finally:
        over.set()
        if reader.ident is not None:
            reader.join()
        case.left |= store.delete([name]).keys()
    if seen:
        says = f"while a file was replaced, a reader saw {' and '.join(sorted(seen))}"
        yield problem("rename", UnsafeStore, says, "keep it on a local disk or in an object store")
    else:
        yield ok("rename", "files are synced, and replaced in one step")


def space(case: Case) -> Iterator[Finding]:
    """Whether the next commits have room."""
    if case.root is None:
        return
    try:
        status = os.statvfs(_root(case))
    except OSError as error:
        yield problem("space", Unavailable, f"{_root(case)}: {error.strerror}", "look at the mount")
        return
    free = status.f_bavail * status.f_frsize
    whole = case.newest.version.nbytes if case.newest is not None and case.newest.version is not None else 0
    want = max(LEAST, 2 * whole)
    says = f"{amount(free)} free"
    if free < want:
        says += f", where two whole versions take {amount(want)}" if want > LEAST else ""
        yield warning("space", says, "`weightvc expire` and `weightvc gc`, or a larger disk", free=free)
    elif status.f_files and not status.f_favail:
        yield problem(
            "space", Unavailable, f"{says}, and no inodes", "`weightvc gc`, or remove files there", free=free
        )
    else:
        yield ok("space", says, free=free)


def mounted(place: Path, mounts: str) -> tuple[str, frozenset[str]]:
    """Kind and options of the file system that a path lies on, by the text of /proc/self/mountinfo; ("", …) if that
    does not say."""
    found: tuple[str, frozenset[str]] = ("", frozenset())
    longest = -1
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields, last = left.split(), right.split()
        if not separator or len(fields) < 6 or len(last) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        # Of two mounts on one point, the later one hides the other.
        if len(point) >= longest and place.is_relative_to(point):
            longest = len(point)
            found = last[0], frozenset([*fields[5].split(","), *last[2].split(",")])
    return found


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def _root_store(case: Case) -> LocalStore:
    assert isinstance(case.store, LocalStore)
    return case.store


def _root(case: Case) -> Path:
    return Path(os.path.realpath(_root_store(case).root))


@contextmanager
def _lock_file(folder: Path) -> Iterator[tuple[int, int]]:
    """Two descriptors of a file of its own, which the collector would sweep away if we were killed."""
    path = folder / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        one = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AccessDenied(f"{folder}: {error.strerror}: give this user the right to write there") from error
    try:
        other = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield one, other
        finally:
            os.close(other)
    finally:
        os.close(one)
        path.unlink(missing_ok=True)
