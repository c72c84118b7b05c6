"""Faults at the k-th operation: of a store, and of the files below it.

    store = Faulty(MemoryStore("x"), at=3, fault="kill before")
    with pytest.raises(Killed): ...        # the 3rd operation does not happen, nor does any later one

In forked() a child really dies by SIGKILL; count_file_operations() makes it die at its k-th file operation.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from weightvc.errors import AccessDenied, KeyNotFound, StateUnknown, Unavailable
from weightvc.stores.base import Got, Listed, Store
from weightvc.stores.memory import MemoryStore

Fault = Literal["none", "kill before", "kill after", "fail", "drop", "late"]


def deny_what_is_missing(monkeypatch: Any) -> None:
    """From now on stores in memory say what S3 says of a missing key to whoever may not list: access denied."""
    get = MemoryStore.get

    def denied(self: MemoryStore, key: str, **how: Any) -> Got | None:
        try:
            return get(self, key, **how)
        except KeyNotFound:
            raise AccessDenied(f"cannot read {key!r}: it is missing, or this is all that is said") from None

    monkeypatch.setattr(MemoryStore, "get", denied)


class Killed(BaseException):
    """The process is dead; what it does from here on does not happen."""


class Faulty:
    """A store whose operation number `at` (from 0) goes wrong once.

    "kill before" and "kill after": the operation does not happen, or it does, and then nothing more.
    "fail": it does not happen and its error says so. "drop": it happens and the reply is lost; reads fail.
    "late": as "drop", but it happens only before the `late`-th operation after it. `die` replaces Killed.
    """

    conditional = True

    def __init__(
        self,
        store: Store,
        at: int = -1,
        fault: Fault = "none",
        *,
        late: int = 1,
        die: Callable[[], NoReturn] | None = None,
    ) -> None:
        self.inner = store
        self.url = store.url
        self.address = store.address
        self.stats = store.stats
        self.at, self.fault, self.late = at, fault, late
        self.operations: list[str] = []
        self._die = die or _raise_killed
        self._dead = False
        self._waiting: list[tuple[int, Callable[[], Any]]] = []
        self._lock = threading.Lock()

    def _do(self, what: str, call: Callable[[], Any], *, writes: bool = False, conditional: bool = False) -> Any:
        with self._lock:
            number = len(self.operations)
            self.operations.append(what)
            due = [late for when, late in self._waiting if when <= number]
            self._waiting = [(when, late) for when, late in self._waiting if when > number]
        for late in due:
            _quietly(late)
        if self._dead:
            self._die()
        if number != self.at or self.fault == "none":
            return call()
        if self.fault.startswith("kill"):
            self._dead = True
            if self.fault == "kill after":
                _quietly(call)
            self._die()
        if writes and self.fault == "drop":
            _quietly(call)
        elif writes and self.fault == "late":
            self._waiting.append((number + self.late, call))
        if conditional and self.fault != "fail":
            raise StateUnknown(f"{what}: the reply was lost")
        raise Unavailable(f"{what}: it failed")

    def settle(self) -> None:
        """Let what is late happen now."""
        for _, late in self._waiting:
            _quietly(late)
        self._waiting = []

    def get(
        self, key: str, *, start: int | None = None, length: int | None = None, unless_etag: str | None = None
    ) -> Got | None:
        got: Got | None = self._do(
            f"get {key}", lambda: self.inner.get(key, start=start, length=length, unless_etag=unless_etag)
        )
        return got

    def put(self, key: str, data: bytes) -> str:
        return str(self._do(f"put {key}", lambda: self.inner.put(key, data), writes=True))

    def create(self, key: str, data: bytes) -> str:
        return str(self._do(f"create {key}", lambda: self.inner.create(key, data), writes=True, conditional=True))

    def swap(self, key: str, data: bytes, etag: str) -> str:
        return str(self._do(f"swap {key}", lambda: self.inner.swap(key, data, etag), writes=True, conditional=True))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        listed: Iterator[Listed] = self._do(f"list {prefix}", lambda: self.inner.list(prefix))
        return listed

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        names = [*keys]
        failed: dict[str, Exception] = self._do("delete", lambda: self.inner.delete(names), writes=True)
        return failed

    def close(self) -> None:
        self.inner.close()


class Full:
    """A store with room for `capacity` bytes of objects, as a disk or a bucket with a quota: what does not fit is
    not written, and deleting gives room."""

    conditional = True

    def __init__(self, store: Store, capacity: int) -> None:
        self.inner = store
        self.url = store.url
        self.address = store.address
        self.stats = store.stats
        self.capacity = capacity

    def used(self) -> int:
        """Bytes of all objects."""
        return sum(one.size for one in self.inner.list())

    def _check(self, key: str, data: bytes) -> None:
        old = sum(one.size for one in self.inner.list(key) if one.key == key)
        if self.used() - old + len(data) > self.capacity:
            raise Unavailable(f"cannot write {key!r}: {os.strerror(errno.ENOSPC)}")

    def get(
        self, key: str, *, start: int | None = None, length: int | None = None, unless_etag: str | None = None
    ) -> Got | None:
        return self.inner.get(key, start=start, length=length, unless_etag=unless_etag)

    def put(self, key: str, data: bytes) -> str:
        self._check(key, data)
        return self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> str:
        self._check(key, data)
        return self.inner.create(key, data)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        self._check(key, data)
        return self.inner.swap(key, data, etag)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        return self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()


def _raise_killed() -> NoReturn:
    raise Killed


def die() -> NoReturn:
    """End this process as a kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:  # nobody hears the reply
        pass


def fork(work: Callable[[], Any], result: Path) -> int:
    """Run `work` in a forked child, its result (as JSON) in a file; returns the child's id, for wait()."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        result.write_text(json.dumps(work()))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait(child: int) -> int:
    """The exit status of a child; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def full_disk() -> NoReturn:
    """Fail as a file operation does that finds no space."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die_at_file_operation(number: int, fault: Callable[[], NoReturn] = die) -> list[str]:
    """From here on, SIGKILL (or another `fault`) before the `number`-th operation that changes files, counted from 0.

    With full_disk(), all that need space fail from there on, and those that make some do not.
    For forked children only: the functions stay replaced. Returns the list that the operations are noted in.
    """
    from weightvc.protocol import checkout

    seen: list[str] = []
    lock = threading.Lock()

    def watched(name: str, call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                with lock:
                    if len(seen) == number or (fault is full_disk and len(seen) > number):
                        fault()
                    seen.append(f"{name} {str(arguments[0])[-60:]}")
            return call(*arguments, **options)

        return run

    filling = ("open", "write", "pwrite", "rename", "fsync", "mkdir", "link", "symlink", "truncate", "ftruncate")
    for name in filling if fault is full_disk else (*filling, "replace", "unlink", "rmdir", "chmod"):
        setattr(os, name, watched(name, getattr(os, name)))
    if fault is not full_disk:
        checkout._rename_exchange = watched("exchange", checkout._rename_exchange)
    return seen
