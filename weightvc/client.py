"""The rollout client: keeps one target, tensors that are being served or a directory, at a version of a repository.

client = weightvc.Client("s3://bucket/policy", into=model)
for update in client.follow("main"):
    update.stage()        # fetch, decode, verify: the old version goes on serving
    update.activate()     # the short part
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from weightvc.errors import (
    AccessDenied,
    BadName,
    Conflict,
    Corrupt,
    EngineError,
    Expired,
    NotFound,
    Refused,
    StoreError,
)
from weightvc.history import HEAD, Ref, said, version_of
from weightvc.objects.catalogue import Entry
from weightvc.objects.tree import Tree
from weightvc.objects.version import Version
from weightvc.protocol.meter import PARTS, Meter
from weightvc.protocol.refs import Refs, check_name
from weightvc.repository import Repository, open
from weightvc.targets import Directory, Staged, Target, Tensors
from weightvc.tensor_groups import TensorGroups

T = TypeVar("T")

EVERY: Final = 1.0
"""Seconds between two polls, about."""
SLOWEST: Final = 30.0
"""Seconds between two tries at most, while something fails; more only where polls are further apart."""

LONGEST: Final = 86400.0
"""Seconds between two polls that may be asked for."""

RETRIED: Final = (Conflict, Corrupt, EngineError, Expired, NotFound, StoreError)
"""What ends an update, and not who follows: by the next look the branch may have another head, or the store its bytes
again."""

_log = logging.getLogger("weightvc")


def waits(every: float, failures: int) -> float:
    """Seconds from one try to the next, after so many failures in a row: twice as long each time, up to SLOWEST."""
    return min(max(SLOWEST, every), every * 2.0 ** min(max(failures - 1, 0), 8))


@dataclass(slots=True)
class Timings:
    """Seconds that the parts of one update took, and what it asked of the store."""

    resolve: float = 0.0
    """Reading the root and finding the version in the catalogue."""
    fetch: float = 0.0
    """Waiting for objects, from the store or the cache. This and the next three run side by side in many threads, and
    count while any thread is at it: together they may be more than `stage` and `activate`."""
    decode: float = 0.0
    """Reading what is at hand, decoding patches on it, and comparing live tensors with the result."""
    verify: float = 0.0
    """Hashing: objects as they come, and every block of the result."""
    apply: float = 0.0
    """Writing: files, while the update is staged; live tensors, while it is activated."""
    stage: float = 0.0
    """All that comes before activate(), by the clock; what is served stays as it is."""
    activate: float = 0.0
    """How long a server has to hold still."""
    age: float = 0.0
    """From the commit, by the writer's clock, until the version was verified here, by this host's."""
    requests: int = 0
    nbytes: int = 0
    """Bytes that were fetched."""


class Update:
    """A version that a target may move to. stage() it, then activate() it."""

    def __init__(
        self,
        client: "Client",
        refs: Refs,
        entry: Entry,
        branch: str | None,
        lag: int | None,
        timings: Timings,
        meter: Meter,
    ) -> None:
        self._client = client
        self._meter = meter
        self._refs = refs
        self._entry = entry
        self._staged: Staged | None = None
        self.version: Version = version_of(entry)
        self.branch = branch
        self.lag = lag
        """Versions between what the target holds and this one; None where one does not descend from the other."""
        self.timings = timings

    def __repr__(self) -> str:
        return f"<update to {self.version.short}>"

    @property
    def staged(self) -> bool:
        """Whether activate() is all that is left to do."""
        return self._staged is not None

    @property
    def start(self) -> str | None:
        """The id of the version that the target held when this was staged; None if that was not known."""
        return self._need().start

    @property
    def changed(self) -> list[str]:
        """Of a staged update of tensors, the names (as the version has them) of those that change."""
        return self._need().changed

    @property
    def path(self) -> str | None:
        """Where a staged update of a directory lies, once it is active; None for tensors."""
        path = self._need().path
        return None if path is None else os.fspath(path)

    def stage(self) -> Self:
        """Fetch, decode and verify everything that activate() needs. The target stays as it is.

        Raises Expired, Corrupt, Refused (a target that does not fit the version), StoreError.
        """
        self._client._stage(self)
        return self

    def activate(self) -> Version:
        """Write what was staged; staged first if it was not. Returns the version that the target holds now.

        Raises Conflict if the target has moved since it was staged.
        """
        self._client._activate(self)
        return self.version

    def _need(self) -> Staged:
        if self._staged is None:
            raise Refused("the update is not staged yet: call stage() first")
        return self._staged


class Client:
    """Follows a repository for one target. Threads may share it. A forked child makes one of its own: its parent's is
    Refused there, since both might write to the same memory, and neither would know what the other wrote.

    Coroutines call its methods through asyncio.to_thread(); it blocks on the network and on nothing else.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Repository,
        *,
        into: Any = None,
        names: "Mapping[str, Any] | Callable[[str], Any] | None" = None,
        component: str = "",
        groups: "Mapping[str, Hashable] | Callable[[str], Hashable] | None" = None,
        **options: Any,
    ) -> None:
        """Nothing is read yet.

        `into` is what the client keeps at a version: a dict of torch tensors or numpy arrays, or a module, which are
        written in place; a path, which becomes a checked-out directory; or a Slots. Without it, pull() gives new
        tensors. `names` maps a version's tensor names to those of `into` (see Tensors). `groups` says which tensors
        move together (see TensorGroups): a quantised weight and its scales unless given. `component` is of tensors.
        `options` are those of weightvc.open(). Raises Refused for an `into` that cannot be written.
        """
        self.repository = url if isinstance(url, Repository) else open(url, lazy=True, **options)
        self.timings: Timings | None = None
        """Of the newest update that was staged, or pull; None before the first."""
        self._lock = threading.RLock()
        self._moved = threading.Condition()
        self._moves = 0
        self._process = os.getpid()
        self._component = component
        self._groups = TensorGroups(groups)
        self._pulled: Tree | None = None
        self._target = _target(into, names, component, groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections."""
        self.repository.close()

    @property
    def target(self) -> Target | None:
        """What is kept at a version."""
        return self._target

    def current(self) -> Version | None:
        """The version that the target holds; None if that is not known, or half of another one was written."""
        self._check_process()
        with self._lock:
            ident = self._holds()
        if ident is None:
            return None
        with contextlib.suppress(NotFound):
            return self.repository.resolve(ident)
        return None

    def pull(self, ref: Ref = HEAD, *, changed_only: bool = False) -> Any:
        """Bring the target to a version and return the update, activated; without a target, a dict of torch tensors.

        With `changed_only`, the dict has the tensors that are not what this client's last pull gave, each with all of
        its group; the first pull gives all. (Of a target, only what changes is written in any case.)
        Raises RefNotFound, Expired, Corrupt, Refused, StoreError; the target then holds what it held.
        """
        if self._target is None:
            return self._load(ref, changed_only)
        if changed_only:
            raise Refused(
                "changed_only=True is of a client without into=…, which gives new tensors: of a target only what "
                "changes is written in any case; leave it out, and read the names in the update's `changed`"
            )
        update = self.update(ref)
        update.activate()
        return update

    def _load(self, ref: Ref, changed_only: bool) -> dict[str, Any]:
        from weightvc import worktree

        self._check_process()
        with self._lock:
            timings, meter, last = Timings(), Meter(), self._pulled if changed_only else None
            pulled: list[Tree] = []

            def choose(tree: Tree) -> list[str]:
                pulled.append(tree)
                tensors = tree.schema.tensors
                names = [tensor.name for tensor in tensors if tensor.component == self._component]
                if last is None:
                    return names
                changed = (tensors[i] for i in tree.differing(last))
                return self._groups.whole({t.name for t in changed if t.component == self._component}, names)

            with self._counted(timings, "resolve"):
                repository = self.repository
                shelf = repository._shelf.metered(meter)
                refs = Refs(shelf, repository.refresh())
                found = refs.resolve(ref)
            with self._counted(timings, "stage", meter):
                out = worktree.load(
                    *(shelf, refs, found.entry, choose),
                    component=self._component,
                    framework="torch",
                    progress=repository.progress,
                )
            timings.age = time.time() - version_of(found.entry).time / 1e6
            self.timings, self._pulled = timings, pulled[-1]
        return out

    def update(self, ref: Ref = HEAD) -> Update:
        """The update that would bring the target to a version: nothing but the catalogue is read."""
        if self._target is None:
            raise Refused("this client has no target: make it with into=…, or use pull()")
        self._check_process()
        timings, meter = Timings(), Meter()
        with self._counted(timings, "resolve"):
            refs = Refs(self.repository._shelf.metered(meter), self.repository.refresh())
            found = refs.resolve(ref)
            lag = self._lag(refs, found.entry)
        meter.seconds.clear()
        return Update(self, refs, found.entry, found.branch, lag, timings, meter)

    def stage(self, ref: Ref = HEAD) -> Update:
        """update(ref), staged."""
        return self.update(ref).stage()

    def verify(self) -> list[str]:
        """Read every byte of the target, and name the tensors (or files) that are not what its version has.

        Those are put right by the next pull. Raises Refused if the target holds no version.
        """
        self._check_process()
        with self._lock:
            if self._target is None:
                raise Refused("this client has no target: make it with into=…")
            ident = self._holds()
            if ident is None:
                raise Refused("the target holds no version yet: pull one")
            return self._target.verify(self.repository, ident)

    # Which version is held

    def at_least(self, ref: Ref) -> bool:
        """Whether the target holds a version or one that descends from it.

        Raises RefNotFound, also where the version is not published yet under that name.
        """
        self._check_process()
        held = self._holds()
        if held is None:
            return False
        refs = self.repository._refs()
        wanted, entry = refs.resolve(ref).entry, refs.find(held)
        # A directory may hold a version of another repository.
        return entry is not None and refs.descends(entry, version_of(wanted).id)

    def wait_for(self, ref: Ref, timeout: float | None = None) -> bool:
        """Wait until at_least(ref), for at most `timeout` seconds; somebody else has to move the target, as watch()
        does. Returns whether it is so. A ref that does not exist yet is waited for, and so is a store that cannot be
        reached (that is logged, as "weightvc"); where it still cannot when the time is up, that is raised.
        """
        if timeout is not None and not _is_number(timeout):
            raise Refused(f"timeout={timeout!r:.100}: give seconds, or None to wait for as long as it takes")
        end = None if timeout is None else time.monotonic() + timeout
        failure: StoreError | None = None
        while True:
            # Asked for without the lock: a store that does not answer must not keep who moves the target.
            moves = self._moves
            try:
                if self.at_least(ref):
                    return True
                failure = None
            except NotFound:
                failure = None
            except AccessDenied:
                raise
            except StoreError as error:
                if failure is None:
                    _log.warning("waiting for %s: %s cannot be read: %s", ref, self.repository.url, error)
                failure = error
            left = EVERY if end is None else min(EVERY, end - time.monotonic())
            if left <= 0:
                if failure is not None:
                    raise failure
                return False
            with self._moved:
                if self._moves == moves:
                    self._moved.wait(left)

    # Following

    def follow(
        self,
        branch: str = HEAD,
        *,
        every: float = EVERY,
        max_lag: int = 1,
        stop: threading.Event | None = None,
        also: "Callable[[Client], bool] | None" = None,
    ) -> Iterator[Update]:
        """Updates to the newest version of a branch, for ever; those in between are skipped.

        The branch is looked at every `every` seconds, give or take a quarter, by one conditional read. An update
        comes when the target is `max_lag` versions behind or more, or not on the way to the head at all; and again
        until it is activated. A branch that does not exist yet is waited for, and so is a store that cannot be
        reached (that is logged, as "weightvc"). Where `also` is asked and says True, an update to the head comes
        although the target holds it: what serves it may have been started again (Engine.behind). It ends when `stop`
        is set. Raises AccessDenied, Corrupt, Refused, and of those BadName for what is no branch.
        """
        self._check_process()
        if not _is_number(every) or not 0 < every <= LONGEST:
            raise Refused(f"every={every!r:.100}: give a positive number of seconds between two polls, a day at most")
        if type(max_lag) is not int or max_lag < 1:
            raise Refused(f"max_lag={max_lag!r:.100}: give how many versions behind call for an update, 1 or more")
        if not isinstance(branch, str):
            raise Refused(f"branch={branch!r:.100}: name the branch to follow")
        if branch not in (HEAD, "@"):
            try:
                check_name(branch)
            except BadName as error:
                raise BadName(f"only a branch can be followed: {error}; `pull` takes any ref, once") from None
        stop = stop or threading.Event()
        failures = 0
        while not stop.is_set():
            try:
                update: Update | None = self.update(branch)
                failures = 0
            except NotFound as error:
                if failures == 0:
                    _log.warning("waiting for %s of %s: %s", branch, self.repository.url, error)
                failures, update = 1, None
            except AccessDenied:
                raise
            except StoreError as error:
                failures += 1
                _log.warning("%s cannot be read (attempt %d): %s", self.repository.url, failures, error)
                update = None
            if update is not None and update.branch is None:
                raise BadName(
                    f"only a branch can be followed: {branch!r:.200} is a tag or an id, of {said(update.version)}, "
                    "which stays what it is; `pull` takes any ref, once"
                )
            due = update is not None and (update.lag is None or update.lag >= max_lag)
            held = self._holds()
            if update is not None and due and update.version.id != held:
                yield update
                if update.version.id == self._holds():
                    continue  # something may have come meanwhile
            elif update is not None and update.version.id == held and also is not None and also(self):
                yield update
            stop.wait(waits(every, failures) * random.uniform(0.75, 1.25))

    def watch(
        self, branch: str = HEAD, on_update: Callable[[Update], object] | None = None, **options: Any
    ) -> "Watch":
        """follow() in a thread: each update is given to `on_update`, or activated if there is none.

        `options` are those of follow(). Use it in a with block, or stop() it.
        """
        return Watch(self, branch, on_update or Update.activate, options)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise Refused(
                f"this client belongs to process {self._process}, which forked process {os.getpid()}: make another "
                "one here, with tensors or a directory of its own"
            )

    def _holds(self) -> str | None:
        return self._target.holds if self._target is not None else None

    def _lag(self, refs: Refs, entry: Entry) -> int | None:
        held = self._holds()
        found = refs.catalogue.find(held) if held is not None else None
        if found is None or not refs.descends(entry, str(held)):
            return None
        return version_of(entry).generation - version_of(found).generation

    def _stage(self, update: Update) -> None:
        self._check_process()
        assert self._target is not None
        with self._lock, self._counted(update.timings, "stage", update._meter):
            repository = self.repository._metered(update._meter)
            update._staged = self._target.stage(repository, update._refs, update._entry, update.branch)
            update.timings.age = time.time() - update.version.time / 1e6
            self.timings = update.timings

    @contextlib.contextmanager
    def _counted(self, timings: Timings, whole: str, meter: Meter | None = None) -> Iterator[None]:
        """Note how long something and its parts take, and what it asks of the store."""
        stats = self.repository.stats
        requests, nbytes, began = stats.reads, stats.bytes_read, time.monotonic()
        yield
        setattr(timings, whole, getattr(timings, whole) + time.monotonic() - began)
        if meter is not None:
            for part in PARTS:
                setattr(timings, part, meter.seconds[part])
        timings.requests += stats.reads - requests
        timings.nbytes += stats.bytes_read - nbytes

    def _activate(self, update: Update) -> None:
        self._check_process()
        with self._lock:
            if update._staged is None:
                self._stage(update)
            staged = update._need()
            if staged.start != self._holds():
                raise Conflict(
                    f"the target has moved since {said(update.version)} was staged: stage it again, from where it is"
                )
            with self._counted(update.timings, "activate", update._meter), update._meter.part("apply"):
                staged.activate()
        with self._moved:
            self._moves += 1
            self._moved.notify_all()


def moves(
    client: Client,
    branch: str,
    move: Callable[[Update], T],
    *,
    every: float = EVERY,
    stop: threading.Event | None = None,
    **options: Any,
) -> Iterator[tuple[Update, T]]:
    """follow(), with every update given to `move` until it comes to pass: those that did, and what that returned.

    An update that fails with RETRIED is logged, and comes again after a wait that grows: the target is as it was.
    Raises AccessDenied, what else `move` raises, and what follow() does.
    """
    stop = stop or threading.Event()
    failures = 0
    for update in client.follow(branch, every=every, stop=stop, **options):
        try:
            moved = move(update)
        except AccessDenied:
            raise
        except RETRIED as error:
            failures += 1
            short = update.version.short
            _log.warning("%s; the update to %s is tried again (attempt %d failed)", error, short, failures)
            stop.wait(waits(every, failures))
        else:
            failures = 0
            yield update, moved


class Watch:
    """A thread that follows a branch. `error` is what ended it, if something did."""

    def __init__(self, client: Client, branch: str, on_update: Callable[[Update], object], options: Any) -> None:
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._moves = moves(client, branch, on_update, stop=self._stop, **options)
        self._thread = threading.Thread(target=self._run, name="weightvc-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in self._moves:
                pass
        except BaseException as error:
            self.error = error
            _log.error("no longer following: %s", error)

    def stop(self) -> None:
        """End it, after the update in work, if there is one. Raises what had ended it before.

        Called by `on_update`, it returns at once.
        """
        self._stop.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._stop.set()
            self._thread.join()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _target(into: Any, names: Any, component: str, groups: Any) -> Target | None:
    if into is None:
        if names is not None:
            raise Refused("names=… are of the tensors that are written to: give into=…")
        return None
    if isinstance(into, Target | str | os.PathLike):
        if names is not None or component or groups is not None:
            raise Refused(f"names, component and groups are for tensors, not for {into!r:.200}: see Tensors(…)")
        return into if isinstance(into, Target) else Directory(into)
    return Tensors(into, names=names, component=component, groups=groups)
