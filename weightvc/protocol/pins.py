"""Pins: what a reader or a writer asks the collector to wait for, with a lifetime by the store's clock.

A reader's lease names the objects that it is going to read. It is written, then the root is read, and it holds only
if that root still names them. A writer's pin has its transaction's begin, which the horizon does not pass while the
pin lives. Both are courtesy: without one, a reader may find that its version has expired, and a writer that it has
to begin again; neither can lose anything.

A holder renews its pin by writing it again. It counts its lifetime from before the write, by its own steady clock,
the collector from the store's time of the write, which is later: so whoever believes to hold a pin holds it.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from weightvc.errors import Corrupt, Expired, KeyNotFound, Refused, StoreError, WeightvcError
from weightvc.objects import expect, frame, key
from weightvc.objects.catalogue import Entry
from weightvc.objects.retention import LEASE
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.pool import beside
from weightvc.protocol import live, swap
from weightvc.protocol.live import Live
from weightvc.protocol.plan import plan
from weightvc.protocol.refs import Refs, promised
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.swap import Seen
from weightvc.stores.base import Store

LONGEST: Final = 7 * 86400
"""Seconds that a pin may live: what somebody forgot must not be kept for ever."""
PATIENCE: Final = 300.0
"""Seconds that a commit may take before it pins its transaction, if no collector has passed it before."""
RENEWALS: Final = 4
"""How often a pin is renewed in a lifetime."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin as the collector reads it."""

    name: str
    begin: int | None
    """The transaction's begin, of a writer's pin."""
    names: frozenset[str]
    """Keys that a reader's lease names."""
    versions: frozenset[str]
    """Ids of the versions that it reads them for."""
    renewed: float
    """When it was last written, by the store's clock."""
    lifetime: int
    """Seconds that it lives after that."""
    holder: str | None
    """The host and the process that wrote it; None: an older weightvc did."""
    since: float | None
    """When it was made, by the clock of that host."""

    @property
    def until(self) -> float:
        """When it dies unless it is renewed, by the store's clock."""
        return self.renewed + self.lifetime

    @property
    def told(self) -> str:
        """Whose it is, since when, and until when."""
        whose = f"a {'reader' if self.begin is None else 'writer'} ({self.holder or 'not recorded which'})"
        since = "" if self.since is None else f" since {_utc(self.since)}"
        ends = f"last renewed {_utc(self.renewed)}, and dies at {_utc(self.until)}"
        return f"{self.name} is held by {whose}{since}, {ends}"

    def mend(self, url: str) -> str:
        """What ends it; `url` is the store's."""
        return f"wait for that, or, if its process has surely ended, delete {url.rstrip('/')}/{self.name}"


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins of a repository at one moment."""

    held: tuple[Pin, ...]
    stale: tuple[str, ...]
    """Keys of pins whose time is over."""

    @property
    def live(self) -> Live:
        """What leases keep alive."""
        return live.of_names(name for pin in self.held for name in pin.names)

    @property
    def versions(self) -> dict[str, str]:
        """The versions that leases are for, with the key of one lease each."""
        return {ident: pin.name for pin in self.held for ident in pin.versions}

    @property
    def begin(self) -> int | None:
        """The begin of the oldest transaction that is pinned."""
        return min((pin.begin for pin in self.held if pin.begin is not None), default=None)


def read(store: Store, now: float) -> Pins:
    """All pins, told apart by `now`, the store's clock. To be read after the root that is swapped.

    Raises Corrupt for a pin that cannot be understood: what it protects is not known; and what the store raises.
    """
    held, stale = [], []
    for one in store.list("pin/"):
        if key.PIN.fullmatch(one.key) is None:
            continue
        try:
            got = store.get(one.key)
        except KeyNotFound:
            continue  # let go of meanwhile
        assert got is not None
        pin = _decode(got.data, one.key, one.modified)
        if now < pin.until:
            held.append(pin)
        else:
            stale.append(one.key)
    return Pins(tuple(held), tuple(stale))


def myself() -> str:
    """This host and process, as a pin names its holder."""
    # Names of the system may hold bytes that are no text.
    return f"{socket.gethostname()}, process {os.getpid()}"[-200:].encode(errors="replace").decode()


def _encode(begin: int | None, names: Iterable[str], versions: Iterable[str], lifetime: int) -> bytes:
    head = {
        "begin": begin,
        "holder": myself(),
        "lifetime": lifetime,
        "names": sorted(names),
        "since": time.time_ns() // 1000,
        "versions": sorted(versions),
        "weightvc": "pin 1",
    }
    return frame.encode(frame.PAGE, head)


def _decode(data: frame.Buffer, name: str, modified: float) -> Pin:
    what = f"{name} (a pin: if nobody holds it any more, delete the object)"
    head, _ = frame.decode(frame.PAGE, data, what)
    frame.check_type(head.get("weightvc"), "pin 1", what)
    try:
        begin = head["begin"]
        lifetime = expect.integer(head["lifetime"], "lifetime", 1, LONGEST + 1)
        since = head.get("since")
        names = [expect.text(one, "a name") for one in expect.array(head["names"], "names")]
        for one in names:
            key.parse(one)
        return Pin(
            name,
            None if begin is None else expect.integer(begin, "begin"),
            frozenset(names),
            frozenset([expect.digest(one, "a version") for one in expect.array(head["versions"], "versions")]),
            min(modified, expect.TIME / 1e6 - 2 * LONGEST),  # the time of a file may be any, and calendars end
            lifetime,
            expect.maybe_text(head.get("holder"), "holder"),
            None if since is None else expect.integer(since, "since", 0, expect.TIME) / 1e6,
        )
    except (Corrupt, *expect.MALFORMED) as error:
        raise Corrupt(f"{what} is corrupt: {error!r:.300}") from None


class Holder:
    """Holds one pin: take() it, renew() it in time, release() it. Used as a context it renews by itself."""

    def __init__(
        self,
        store: Store,
        *,
        begin: int | None = None,
        names: Iterable[str] = (),
        versions: Iterable[str] = (),
        lifetime: int = LEASE,
        after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lifetime` is in seconds; with `after`, a context writes its pin only when it has lasted so many seconds,
        and whether it could is nobody's concern. Raises Refused for a lifetime out of range."""
        self.name = f"pin/{secrets.token_hex(16)}"
        self.lifetime = check_lifetime(lifetime)
        self._store = store
        self._body = _encode(begin, names, versions, self.lifetime)
        self._after = after
        self._clock = clock
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def holds(self) -> bool:
        """Whether the pin surely lives now."""
        return self._since is not None and self._clock() < self._since + self.lifetime

    def take(self) -> None:
        """Write the pin for the first time. Raises AccessDenied, Unavailable."""
        began = self._clock()
        self._store.put(self.name, self._body)
        self._since = began

    def ask(self) -> None:
        """Take it unless it is held, for a writer: whether that could be done is nobody's concern."""
        if self._since is None:
            with contextlib.suppress(StoreError):
                self.take()

    def renew(self) -> None:
        """Write it again. Raises Expired once it has lapsed: it is never revived; and what the store raises."""
        self.check()
        began = self._clock()
        self._store.put(self.name, self._body)
        # If that took so long that the collector may have seen it dead, it may have been deleted in between.
        self.check()
        self._since = began

    def check(self) -> None:
        """Raise Expired unless the pin surely lives."""
        if not self.holds:
            raise Expired(f"{self.name}: the lease could not be renewed in time, and has lapsed: take a new one")

    def release(self) -> None:
        """Let go of it; one that cannot be deleted dies by itself."""
        if self._since is None:
            return
        self._since = None
        with contextlib.suppress(WeightvcError):
            self._store.delete([self.name])

    def __enter__(self) -> Self:
        if self._since is None and self._after is None:
            self.take()
        self._thread = beside("weightvc-pin", self._keep)
        return self

    def _keep(self) -> None:
        wait = self.lifetime / RENEWALS if self._after is None else self._after
        while not self._stop.wait(wait):
            wait = self.lifetime / RENEWALS
            try:
                if self._since is None:
                    self.take()
                else:
                    self.renew()
            except Expired:
                return
            except WeightvcError:
                continue  # another attempt is left, or it lapses, and check() says so

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.release()


def lease(
    shelf: Shelf,
    ref: str | Version,
    *,
    lifetime: int = LEASE,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Holder, Seen, Entry]:
    """Take a lease on what a version is read from: the lease, the root that it holds by, and the version's entry.

    While it is held and renewed, everything that this root needs to read the version stays, whatever is let go of
    meanwhile, and `ref` means this version there. Raises Expired if the version has gone, and what resolving and the
    store raise.
    """
    seen = swap.must_read(shelf.store)
    for _ in range(swap.ATTEMPTS):
        refs = Refs(shelf, seen.root)
        entry = promised(refs.resolve(ref).entry)
        leased = entry.new or ""
        needed = _needed(refs, entry, shelf)
        names = {name for one in needed for name in live.named(one)}
        holder = Holder(shelf.store, names=names, versions=[leased], lifetime=check_lifetime(lifetime), clock=clock)
        holder.take()
        try:
            # Only what is still named now, after the lease was there to be seen, is sheltered by it.
            now = swap.must_read(shelf.store)
            if now.root.sequence != seen.root.sequence:
                # And only what may still be read: it may be named as a step to others, and let go of by itself. A
                # branch that has moved means a version that this lease is not for.
                entry = promised(Refs(shelf, now.root).resolve(ref).entry)
            same = now.root.sequence == seen.root.sequence
            if same or (entry.new == leased and names <= _named_by(shelf, now.root, needed)):
                holder.check()
                return holder, now, entry
        except BaseException:
            holder.release()
            raise
        holder.release()
        seen = now
    raise Expired("what the version is read from changes faster than a lease can be taken: try again")


def _needed(refs: Refs, entry: Entry, shelf: Shelf) -> list[Entry]:
    """The entries that a version is read by: with what this host holds, and from the store alone."""
    found = {entry.new: entry}
    for held in (shelf.cache.trees() if shelf.cache is not None else frozenset(), frozenset()):
        way = plan(refs, entry, held)
        steps = [step.entry for step in way.steps]
        found.update({one.new: one for one in (steps if way.start is None else [way.start, *steps])})
    return list(found.values())


def _named_by(shelf: Shelf, root: Root, entries: Iterable[Entry]) -> set[str]:
    refs = Refs(shelf, root)
    found = (refs.catalogue.find(one.new or "") for one in entries)
    return {name for one in found if one is not None for name in live.named(one)}


def check_lifetime(lifetime: int) -> int:
    """`lifetime` itself, in seconds. Raises Refused unless it is a whole number from 1 to LONGEST."""
    if type(lifetime) is not int or not 1 <= lifetime <= LONGEST:
        raise Refused(f"lifetime={lifetime!r:.100}: a pin lives from 1 to {LONGEST} seconds")
    return lifetime
