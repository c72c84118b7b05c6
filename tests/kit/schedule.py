"""Schedules: the real code on a store in memory, where others may go on before every operation of the store.

    scenario = Scenario("name", setup, {"A": body, "B": body}, ticks=2)
    run = Run(scenario, begin(scenario), pick)      # one order: `pick` says who goes on, or how an operation fails
    run.execute()

tests/kit/orders.py tries all orders, or random ones. An actor is a thread of its own that holds a baton while it
runs, so that only one ever does. It stands for a process: its repository object, and its thread pools, whose tasks
run at once where they are submitted. Names are random by a counter for each actor, and so the same in every order.
Time stands still but for the ticks of the store's clock, which come between any two operations.

After every swap and every deletion it is looked whether all that the root names is there, and at the end of an order
whether every version reads, bit by bit. A failure has the whole order of operations in its message.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import pkgutil
import secrets
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import weightvc
from tests.kit.faults import Fault, Killed
from tests.kit.weights import Weights, held, tiny_format
from weightvc.errors import (
    Conflict,
    Expired,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    RefNotFound,
    StateUnknown,
    Unavailable,
    WeightvcError,
)
from weightvc.objects import key, manifest
from weightvc.objects import root as roots
from weightvc.protocol import coder, collect, live, pins, swap
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository
from weightvc.stores.base import Got, Listed, Stats

NOON: Final = 1_800_000_000.0
"""When every order begins, in seconds since the epoch."""
GRACE: Final = 3600.0
"""Seconds of a tick, and of the grace period that it is as long as."""
STAMPED: Final = ("probe", "pin", "page", "root.d")
"""Kinds whose time somebody looks at."""


class Lost(AssertionError):
    """An order of operations in which something is lost, or an actor failed as it must not."""


# The store


@dataclass(frozen=True, slots=True)
class Operation:
    """What an actor is about to do."""

    what: str
    keys: tuple[str, ...] = ()
    """For a listing, the prefix."""

    @property
    def writes(self) -> bool:
        return self.what in ("put", "create", "swap", "delete", "tick")

    def __str__(self) -> str:
        return f"{self.what} {' '.join(name[:24] for name in self.keys)}"


def commute(one: Operation, other: Operation) -> bool:
    """Whether the order of two operations makes no difference to anybody."""
    if not one.writes and not other.writes:
        return True
    for a, b in ((one, other), (other, one)):
        if a.what == "tick":
            return b.what != "time" and (b.what != "put" or not any(_stamped(name) for name in b.keys))
        if a.what == "list" and b.writes:
            return not any(_listed(name, a.keys[0]) for name in b.keys)
    return not set(one.keys) & set(other.keys)


def _stamped(name: str) -> bool:
    return name.startswith(STAMPED)


def _listed(name: str, prefix: str) -> bool:
    # That the root is listed, and markers of other runs, is counted, and decides nothing while they are young.
    return name.startswith(prefix) and name != key.ROOT and (prefix != "" or not name.startswith("probe/"))


class World:
    """The objects, and the time. An ETag is of the content: no two roots are the same."""

    def __init__(self, objects: Mapping[str, tuple[bytes, str, float]] = {}, now: float = NOON) -> None:
        self.objects = dict(objects)
        self.now = now
        self.state = 0
        for name, value in self.objects.items():
            self.state ^= _hash(name, value)

    def write(self, name: str, data: bytes) -> str:
        etag = hashlib.blake2b(data, digest_size=12).hexdigest()
        self.remove(name)
        value = self.objects[name] = bytes(data), etag, self.now
        self.state ^= _hash(name, value)
        return etag

    def remove(self, name: str) -> None:
        if (old := self.objects.pop(name, None)) is not None:
            self.state ^= _hash(name, old)

    def tick(self, seconds: float = GRACE) -> None:
        self.now += seconds


def _hash(name: str, value: tuple[bytes, str, float]) -> int:
    return hash((name, value[1], value[2] if _stamped(name) else 0))


class View:
    """The store as one actor sees it; `step` is called before each operation, and says which fault it meets."""

    conditional = True
    url = "memory://scheduled"

    def __init__(self, world: World, actor: Actor | None = None) -> None:
        self.world = world
        self.actor = actor
        self.stats = Stats()

    def _do(self, operation: Operation, call: Callable[[], Any]) -> Any:
        actor = self.actor
        if actor is None:
            return call()
        fault = actor.run.step(actor, operation)
        if fault == "none":
            try:
                got = call()
            except WeightvcError as error:
                actor.heard(operation, type(error).__name__)
                raise
            actor.heard(operation, _answer(operation, got))
            return got
        if operation.writes and fault == "drop":
            with contextlib.suppress(WeightvcError):
                call()
        elif operation.writes and fault == "late":
            actor.run.late.append((operation, call))
        actor.heard(operation, fault)
        if operation.what in ("create", "swap") and fault != "fail":
            raise StateUnknown(f"{operation}: the reply was lost")
        raise Unavailable(f"{operation}: it failed")

    def get(
        self, key: str, *, start: int | None = None, length: int | None = None, unless_etag: str | None = None
    ) -> Got | None:
        def call() -> Got | None:
            if key not in self.world.objects:
                raise KeyNotFound(f"no object {key!r} in {self.url}")
            data, etag, _ = self.world.objects[key]
            if etag == unless_etag:
                return None
            part = data[start or 0 :]
            return Got(part if length is None else part[:length], etag, len(data))

        got: Got | None = self._do(Operation("get", (key,)), call)
        return got

    def _written(self, name: str, data: bytes) -> str:
        self.stats.bytes_written += len(data)
        return self.world.write(name, data)

    def put(self, key: str, data: bytes) -> str:
        self._do(Operation("put", (key,)), lambda: (self._written(key, data), self.world.now if _stamped(key) else 0))
        return "written"

    def create(self, key: str, data: bytes) -> str:
        def call() -> str:
            if key in self.world.objects:
                raise KeyExists(key)
            return self._written(key, data)

        return str(self._do(Operation("create", (key,)), call))

    def swap(self, key: str, data: bytes, etag: str) -> str:
        def call() -> str:
            if key not in self.world.objects or self.world.objects[key][1] != etag:
                raise PreconditionFailed(key)
            return self._written(key, data)

        return str(self._do(Operation("swap", (key,)), call))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        def call() -> list[Listed]:
            return [
                Listed(name, len(data), modified)
                for name, (data, _, modified) in sorted(self.world.objects.items())
                if name.startswith(prefix)
            ]

        return iter(self._do(Operation("list", (prefix,)), call))

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        names = tuple(keys)
        if not names:
            return {}

        def call() -> dict[str, Exception]:
            for name in names:
                self.world.remove(name)
            return {}

        done: dict[str, Exception] = self._do(Operation("delete", names), call)
        return done

    def close(self) -> None:
        """Nothing to release."""


def _answer(operation: Operation, got: Any) -> int:
    if isinstance(got, list):
        prefix = operation.keys[0]
        return hash(
            tuple((one.key, one.modified if _stamped(one.key) else 0) for one in got if _listed(one.key, prefix))
        )
    return hash(got.etag if isinstance(got, Got) else got if isinstance(got, str | float | tuple) else None)


# Actors


@dataclass
class Actor:
    """One process."""

    name: str
    body: Callable[[Actor], Any]
    run: Run
    pending: Operation | None = None
    done: bool = False
    killed: bool = False
    fault: Fault = "none"
    history: int = 0
    result: Any = None
    error: BaseException | None = None
    tokens: int = 0
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def heard(self, operation: Operation, answer: object) -> None:
        self.history = hash((self.history, operation, answer))

    def open(self) -> Repository:
        """The repository, as this process has it; nothing is read yet."""
        return Repository(View(self.run.world, self), None, author=self.name)

    def clock(self) -> float:
        """Its steady clock, which is a point at which others may go on as well."""
        now: float = View(self.run.world, self)._do(Operation("time"), lambda: self.run.world.now)
        return now


Body = Callable[[Actor], Any]


@dataclass(frozen=True, eq=False)
class Scenario:
    """What there is at first, and who acts then."""

    name: str
    setup: Callable[[Repository, World], None]
    actors: Mapping[str, Body]
    ticks: tuple[float, ...] = ()
    """Seconds that the store's clock moves by at any moment, one after the other: it may go wrong, too, and back."""
    skews: Mapping[str, float] = field(default_factory=dict)
    """By how many seconds the clock of an actor's host is wrong."""
    weights: Callable[[str], Weights] | None = None
    """What a version holds, by its message."""


def _version(actor: Actor) -> bool:
    return isinstance(actor.result, weightvc.Version) and actor.name.startswith("commit")


Choice = tuple[str, Fault]


class Run:
    """One order of operations."""

    def __init__(self, scenario: Scenario, start: World, pick: Pick) -> None:
        self.world = World(start.objects, start.now)
        self.scenario = scenario
        self.ticks = [*scenario.ticks]
        self.late: list[tuple[Operation, Callable[[], Any]]] = []
        self.faults = 0
        self.trace: list[str] = []
        self.failure: str | None = None
        self.whole = False
        """Whether it came to its end."""
        self._pick = pick
        self._over = threading.Semaphore(0)
        self.actors = {name: Actor(name, body, self) for name, body in scenario.actors.items()}

    def key(self) -> tuple[object, ...]:
        """The state."""
        # Of one that is done or dead it matters no more what it did, but that a commit returned.
        told = tuple(
            "dead" if one.killed else "done" if one.done and not _version(one) else one.history
            for one in self.actors.values()
        )
        late = tuple(operation for operation, _ in self.late)
        return self.world.state, len(self.ticks), self.faults, told, late

    def execute(self) -> None:
        """Run it, until all actors are done or it is of no further use. Raises nothing; see `failure`."""
        try:
            for actor in self.actors.values():
                actor.thread = threading.Thread(target=self._act, args=(actor,), name=actor.name, daemon=True)
                _current[actor.thread] = actor
                actor.thread.start()
                self._over.acquire()
            self._started = True
            self._go_on(None)
            self._over.acquire()
        finally:
            for actor in self.actors.values():
                if not actor.done:
                    actor.killed = True
                    actor.baton.release()
                assert actor.thread is not None
                actor.thread.join()
                del _current[actor.thread]

    _started = False

    def _act(self, actor: Actor) -> None:
        try:
            actor.result = actor.body(actor)
        except BaseException as error:
            actor.error = error
        actor.done = True
        actor.history = hash((actor.history, "done"))
        if actor.killed:
            return
        if actor.error is not None and not allowed(actor.error, self.faults):
            self.failure = self.failure or f"{actor.name}: {type(actor.error).__name__}: {actor.error}"
        if not self._started:
            self._over.release()
        else:
            self._go_on(None)

    def step(self, actor: Actor, operation: Operation) -> Fault:
        """Wait for this actor's turn."""
        if actor.killed:
            raise Killed
        actor.pending = operation
        if not self._started:
            self._over.release()
            actor.baton.acquire()
        else:
            self._go_on(actor)
        if actor.killed:
            raise Killed
        self.trace.append(f"{actor.name}: {operation}" + (f" [{actor.fault}]" if actor.fault != "none" else ""))
        self._written = operation if operation.writes else None
        return actor.fault

    _written: Operation | None = None

    def _go_on(self, me: Actor | None) -> None:
        """Hand the baton to whoever is next."""
        while True:
            self._look()
            choice = None if self.failure else self._pick(self, self.choices())
            if choice is None:
                self._over.release()
            elif choice[0] == "clock":
                seconds = self.ticks.pop(0)
                self.world.tick(seconds)
                self.trace.append(f"clock: {seconds:+.0f} seconds")
                continue
            elif choice[0].startswith("late "):
                operation, call = self.late.pop(int(choice[0][5:]))
                with contextlib.suppress(WeightvcError):
                    call()
                self._written = operation
                self.trace.append(f"late: {operation}")
                continue
            elif choice[1] == "kill before":
                self.actors[choice[0]].killed = True
                self.faults += 1
                self.trace.append(f"{choice[0]}: killed")
                continue
            else:
                actor = self.actors[choice[0]]
                actor.fault = choice[1]
                self.faults += choice[1] != "none"
                if actor is me:
                    return
                actor.baton.release()
            if me is not None:
                me.baton.acquire()
            return

    def choices(self) -> dict[Choice, Operation]:
        """Who may go on, and what it would do."""
        found: dict[Choice, Operation] = {}
        for actor in self.actors.values():
            if not actor.done and not actor.killed:
                assert actor.pending is not None
                found[actor.name, "none"] = actor.pending
        for i, (operation, _) in enumerate(self.late):
            found[f"late {i}", "none"] = operation
        if self.ticks and any(name in self.actors for name, _ in found):
            found["clock", "none"] = Operation("tick")
        return found

    def faulty(self) -> dict[Choice, Operation]:
        """Who may meet which fault."""
        found: dict[Choice, Operation] = {}
        for actor in self.actors.values():
            if not actor.done and not actor.killed:
                assert actor.pending is not None
                kinds: tuple[Fault, ...] = ("kill before", "fail")
                if actor.pending.writes:
                    kinds += ("drop", "late")
                for kind in kinds:
                    found[actor.name, kind] = actor.pending
        return found

    def _look(self) -> None:
        """All that the root names is there."""
        operation, self._written = self._written, None
        if self.failure or operation is None or not {"swap", "delete"} & {operation.what}:
            return
        root = self.world.objects[key.ROOT]
        try:
            named = _named(root[1], self.world)
        except WeightvcError as error:
            self.failure = f"the root cannot be read: {error}"
            return
        missing = sorted(name for name in named if name not in self.world.objects)
        if missing:
            self.failure = f"the root names {missing}, which is not there"

    def told(self) -> str:
        """The order, for a message."""
        return "\n".join([f"{self.scenario.name}: {self.failure}", *(f"  {line}" for line in self.trace)])


Pick = Callable[[Run, dict[Choice, Operation]], Choice | None]
_current: dict[threading.Thread, Actor] = {}
_named_by: dict[str, frozenset[str]] = {}
_read: dict[tuple[str, int], None] = {}


def allowed(error: BaseException, faults: int) -> bool:
    """Whether an actor may end so: it lost a race, or what it asked for has gone. With faults, the store may have
    failed it."""
    if isinstance(error, StateUnknown | Unavailable):
        return faults > 0
    return isinstance(error, Conflict | Expired | RefNotFound)


def _named(etag: str, world: World) -> frozenset[str]:
    """What a root names, packs as the manifests name them."""
    if etag not in _named_by:
        shelf = Shelf(View(world), None)
        root = swap.must_read(shelf.store).root
        names = set(live.of_root(shelf, root).names)
        for name in [one for one in names if one.startswith("manifest/")]:
            made = shelf.manifest(name)
            for stream in (made.base, made.patch.stream if made.patch is not None else None):
                if stream is not None:
                    names.update(pack for pack, _ in stream.packs)
        _named_by[etag] = frozenset(names)
    return _named_by[etag]


def finish(run: Run) -> None:
    """Every version that the root promises reads exactly, every version that a commit returned is there, and fsck
    finds nothing."""
    root = swap.must_read(View(run.world)).root
    shelf = Shelf(View(run.world), None)
    entries = {entry.new: entry for entry in shelf.catalogue(root)}
    for actor in run.actors.values():
        made = actor.result
        if _version(actor) and made.id not in entries:
            run.failure = f"{actor.name} returned {made.short}, which the root does not have"
            return
    done = run.world.objects[key.ROOT][1], hash(frozenset(run.world.objects))
    if done in _read:
        return
    repository = Repository(View(run.world), None, author="look")
    try:
        for entry in entries.values():
            made = entry.version
            if made is None or entry.place is None or entry.expired is not None:
                continue
            if run.scenario.weights is not None and held(repository, made.id) != run.scenario.weights(made.message):
                run.failure = f"version {made.message} has other bits"
                return
        report = repository.fsck(read_data=1)
    except WeightvcError as error:
        run.failure = f"at the end: {type(error).__name__}: {error}"
        return
    if not report.ok:
        run.failure = f"fsck: {report.damages}"
        return
    _read[done] = None


@cache
def begin(scenario: Scenario) -> World:
    """What the store holds at first."""
    world = World()
    view = View(world)
    swap.create_root(view, roots.first("main", int(NOON) * 1_000_000, {}))
    scenario.setup(Repository(view, None, author="setup"), world)
    return world


# What makes the code a function of the order


class Inline:
    """A pool whose tasks run at once, in the thread that submits them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...


_setup_tokens = 0


def _token(nbytes: int = 16) -> str:
    global _setup_tokens
    actor = _current.get(threading.current_thread())
    if actor is None:
        _setup_tokens += 1
        said = f"setup {_setup_tokens}"
    else:
        actor.tokens += 1
        said = f"{actor.name} {actor.tokens}"
    return hashlib.blake2b(said.encode(), digest_size=nbytes).hexdigest()


def _host_time() -> float:
    """What the clock of the acting host says."""
    actor = _current.get(threading.current_thread())
    return NOON + (0.0 if actor is None else actor.run.scenario.skews.get(actor.name, 0.0))


def _holder_enter(self: pins.Holder) -> pins.Holder:
    if self._since is None and self._after is None:
        self.take()
    return self


@contextlib.contextmanager
def scheduled() -> Iterator[None]:
    """While it lasts the library's pools run inline, nothing is random, nobody sleeps, and formats are tiny."""
    for found in pkgutil.walk_packages(weightvc.__path__, "weightvc."):
        if found.name != "weightvc.engines.vllm_backend":  # which is for vLLM to import
            importlib.import_module(found.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiny_format())

        def put(where: Any, name: str, value: Any) -> None:
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)

        for name, module in list(sys.modules.items()):
            if name.startswith("weightvc.protocol") and hasattr(module, "ThreadPoolExecutor"):
                put(module, "ThreadPoolExecutor", Inline)
        put(secrets, "token_hex", _token)
        put(time, "time_ns", lambda: int(_host_time() * 1e9))
        put(collect, "time", SimpleNamespace(time=_host_time))
        put(swap, "_pause", lambda attempt: None)
        # What a patch is coded with is nobody's concern here, and a run without a grace period is a listing, a list,
        # a second listing and the deletes.
        put(coder, "CONTEXT_FROM", 1 << 40)
        put(collect, "ROUNDS", 2)
        put(manifest, "INLINE", 16)
        # Nobody renews by time here: actors that hold a pin for long say when.
        put(pins.Holder, "__enter__", _holder_enter)
        forget()
        yield


@contextlib.contextmanager
def mutated(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """While it lasts, a function of a module or class is what it is with `old` in its text replaced. Raises
    AssertionError if it has no such text, once: the test that takes it away has to follow the code."""
    function = inspect.getattr_static(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
    module = sys.modules[function.__module__]
    scope: dict[str, Any] = {}
    exec(compile(text.replace(old, new), f"<{name} without {old}>", "exec"), vars(module), scope)
    setattr(owner, name, scope[name])
    forget()
    try:
        yield
    finally:
        setattr(owner, name, function)
        forget()


def forget() -> None:
    """What was learnt of states holds for this code only."""
    begin.cache_clear()
    _named_by.clear()
    _read.clear()
