"""Garbage collection: what neither the root nor a pin names is condemned by a swap, and deleted a grace period later.

    look      note the root's sequence number; write a marker, for the store's time; list everything
    condemn   read root r, then the pins. H is a sequence number that was noted at least one grace period ago, and at
              most the begin of any pinned transaction. Dead is what was listed, began before H, and neither r nor a
              pin names. Write the list; swap {horizon = max(horizon, H), list} against r. Lost the swap: the same
              from the new root
    delete    a list that is at least one grace period old, in batches, without conditions

Why nothing is lost (docs/gc.md has it in full): what is on a list began before the horizon that was swapped in with
it, and the root that was swapped out does not name it. A writer that published earlier is in that root, or made the
swap fail; one that comes later is refused by the horizon. Names are never used twice. So nothing on a list can ever
be named again, whenever and by whomever it is deleted. Grace and clocks only decide who is disturbed, and when.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Final

from weightvc.errors import Corrupt, Expired, KeyNotFound, Refused, Unavailable, Unsupported
from weightvc.objects import expect, frame, key
from weightvc.objects import root as roots
from weightvc.objects.key import Transaction
from weightvc.objects.retention import GRACE
from weightvc.objects.root import Root
from weightvc.protocol import clock, live, orphans, pins, swap
from weightvc.protocol.live import Live
from weightvc.protocol.orphans import RECORDS
from weightvc.protocol.pins import Pin
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.swap import Seen
from weightvc.sources.header import collector_paused
from weightvc.stores.base import Listed, Store, Sweeps

LIST: Final = 1 << 16
"""Keys that one list has at most: its page has to stay within what readers accept."""
BATCH: Final = 1000
"""Keys that are deleted at once."""
NOTES: Final = 16
"""Sequence numbers noted in a grace period: more would only move the root."""
PAGES: Final = 16
"""Dead pages and segments that are worth a swap of the root, which itself leaves one."""
DAY: Final = 86400.0
"""Seconds after which what a killed process left lying in the store is nobody's any more."""
ROUNDS: Final = 8
"""How often one run without a grace period begins again."""
COPIES: Final = 2
"""Newest copies of the root that keep the segments that they name."""


# The collector's page


@dataclass(frozen=True, slots=True)
class Page:
    """What a run leaves to the next ones."""

    noted: tuple[tuple[int, int], ...] = ()
    """Sequence numbers of roots, and when (microseconds since the epoch, the store's clock) they were there."""
    dead: tuple[str, ...] = ()
    """Keys of which no root will ever name one again."""
    since: int | None = None
    """When the list was made (microseconds since the epoch, the store's clock); None: with the page itself, whose
    time the store tells later."""


def encode_page(page: Page) -> bytes:
    """The collector's page as a stored object."""
    head = {
        "dead": list(page.dead),
        "noted": [list(one) for one in page.noted],
        "since": page.since,
        "weightvc": "collector 1",
    }
    return frame.encode(frame.PAGE, head)


def read_page(shelf: Shelf, root: Root) -> Page:
    """The collector's page of a root. Raises Corrupt, and what reading raises."""
    if (name := root.collector) is None:
        return Page()
    head = shelf.page(name)
    frame.check_type(head.get("weightvc"), "collector 1", name)
    try:
        noted = []
        for sequence, time in expect.array(head["noted"], "noted"):
            noted.append((expect.integer(sequence, "a sequence"), expect.integer(time, "a time", 0, expect.TIME)))
        dead = tuple([expect.text(one, "a key") for one in expect.array(head["dead"], "dead")])
        for one in dead:
            key.parse(one)
        since = head["since"]
        if since is not None:
            expect.integer(since, "since", 0, expect.TIME)
    except (Corrupt, *expect.MALFORMED) as error:
        raise Corrupt(f"{name} is corrupt: {error!r:.300}") from None
    return Page(tuple(noted), dead, since)


# Look


@dataclass(slots=True)
class Tally:
    """Objects and bytes by kind."""

    objects: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, listed: Iterable[Listed]) -> None:
        """Count objects."""
        for kind, group in groupby(listed, lambda one: _kind(one.key)):
            sizes = [one.size for one in group]
            self.objects[kind] += len(sizes)
            self.bytes[kind] += sum(sizes)


@dataclass(frozen=True, slots=True)
class Sight:
    """What a run saw of the store before it read the root that it swaps against."""

    before: Root
    """The root before anything was listed: its sequence number is what the run notes."""
    now: float
    """The store's time when the listing began."""
    objects: Mapping[str, Listed]
    """What may be condemned: everything under a key that a transaction made."""
    copies: tuple[str, ...]
    """Copies of the root, newest first."""
    probes: tuple[Listed, ...]
    """What was written to learn something of the store; this run's own marker is not among them."""
    tally: Tally
    foreign: Tally
    """What is not ours, and is never touched."""


def look(store: Store, now: float | None = None) -> Sight:
    """Note the root, and list everything. `now` is the time where the store cannot be asked for it.

    Raises Unavailable for a listing that is not complete, AccessDenied.
    """
    before = swap.must_read(store).root
    marker = clock.marker()
    if now is None:
        store.put(marker, b"now")
    try:
        listed = list(store.list(""))
    finally:
        if now is None:
            store.delete([marker])
    objects: dict[str, Listed] = {}
    copies, probes, others, foreign = [], [], [], []
    for one in listed:
        name = one.key
        if key.OBJECT.fullmatch(name):
            objects[name] = one
        elif name == marker:
            now = one.modified
        elif key.COPY.fullmatch(name):
            copies.append(one)
        elif key.PROBE.fullmatch(name):
            probes.append(one)
        elif name == key.ROOT or key.PIN.fullmatch(name):
            others.append(one)
        else:
            foreign.append(one)
    if now is None:
        raise clock.not_listed(store)
    tally, strange = Tally(), Tally()
    tally.add(chain(objects.values(), copies, probes, others))
    strange.add(foreign)
    newest = tuple(sorted((one.key for one in copies), reverse=True))
    return Sight(before, now, objects, newest, tuple(probes), tally, strange)


# Condemn


@dataclass(frozen=True, slots=True)
class Marked:
    """What one root, the pins that were read after it, and a sight say of every object."""

    page: Page
    """What is to be swapped in, with the new list or the one that waits."""
    horizon: int
    live: tuple[str, ...]
    pinned: tuple[str, ...]
    """Named by a pin, or by one of the newest copies of the root, and not by the root."""
    held: tuple[str, ...]
    """Named by nothing, and old enough to be condemned, but for a writer's pin that keeps the horizon behind them."""
    young: tuple[str, ...]
    """Named by nothing, and left to a later run."""
    waiting: tuple[str, ...]
    """On the list of an earlier run, and not old enough to be deleted."""
    dead: tuple[str, ...]
    """What is condemned now."""
    pins: tuple[Pin, ...]
    """Those without which something of this would be condemned: what is held, or pinned."""
    note: bool
    """Whether the root has to move for the sake of the note alone."""


def mark(
    shelf: Shelf,
    root: Root,
    sight: Sight,
    *,
    grace: float,
    force: bool = False,
    failed: Iterable[str] = (),
    page: Page | None = None,
) -> Marked:
    """What is dead if `root` is the one that is swapped out. Changes nothing.

    `failed` could not be deleted; `page` is the root's, where it is not stored. Raises Refused for what looks like a
    mistake, without `force`; Corrupt, NotFound or StoreError if anything that has to be read cannot be: then nothing
    is known to be dead.
    """
    # The pins after the root: who writes a lease, and then finds its objects named by a root, is seen here, or has
    # read a later root than this one, and the swap will fail.
    held = pins.read(shelf.store, sight.now)
    named = check(shelf, root, sight, force=force)
    kept = held.live | _of_copies(shelf.store, sight.copies)
    page = read_page(shelf, root) if page is None else page
    # A page that came after the listing: another run is ahead of this one, and knows more.
    ahead = root.collector is not None and root.collector not in sight.objects
    noted = _noted(page, sight)
    passed = max(root.horizon, _passed(noted, sight, grace))
    horizon = passed if held.begin is None else max(root.horizon, min(passed, held.begin))
    listed = set(page.dead).difference(failed)
    alive = [name for name in sight.objects if name in named.names]
    pinned: list[str] = []
    waiting: list[str] = []
    free: list[str] = []
    for name in [name for name in sight.objects if name not in named.names]:
        # What is on a list stays on it until it is gone, so that all lists that may be worked through can be found.
        where = alive if name in named else waiting if name in listed else pinned if name in kept else free
        where.append(name)
    dead: list[str] = []
    if not waiting and not ahead:
        dead = [name for name in free if key.parse(name).begin < horizon]
    behind = [] if passed == horizon else [name for name in free if horizon <= key.parse(name).begin < passed]
    behind = behind if _worth([*dead, *behind], grace) else []
    dead = dead if _worth(dead, grace) else []
    if dead:
        if not force:
            # All of it, not what fits on one list or began before the horizon: the next runs would have the rest.
            # (What an older root that was put back has lost began at it, or later.)
            sizes = sight.objects.values()
            orphans.check(shelf, root, [sight.objects[name] for name in free], sizes, named.released)
        dead = dead[:LIST]
        own = root.collector
        if own is not None and own in sight.objects and own not in kept and key.parse(own).begin < horizon:
            # The root that this one is swapped for will not name the page: it goes as the others do.
            dead.append(own)
            alive.remove(own)
    newest = max((key.parse(name).begin for name in behind), default=-1)
    reasons = [
        pin
        for pin in held.held
        if (pin.begin is not None and pin.begin <= newest) or not pin.names.isdisjoint(pinned)
    ]
    gone = {*dead, *behind}
    young = [name for name in free if name not in gone]
    last = next((one for one in reversed(noted) if one in page.noted), (-1, 0))
    unseen = any(one.begin >= last[0] and one.kind not in RECORDS for one in map(key.parse, young))
    return Marked(
        Page(_trimmed(noted, sight.now, grace), tuple(dead or waiting), None if dead else _since(page, root, sight)),
        horizon if dead else root.horizon,
        tuple(alive),
        tuple(pinned),
        tuple(behind),
        tuple(young),
        tuple(waiting),
        tuple(dead),
        tuple(sorted(reasons, key=lambda pin: pin.until)),
        unseen and not ahead and _age(sight.now, last[1]) >= grace / NOTES,
    )


def check(shelf: Shelf, root: Root, sight: Sight, *, force: bool = False) -> Live:
    """What a root keeps alive, once that is seen to be believable. Raises Refused, without `force`, if it is not."""
    named = live.of_root(shelf, root)
    if not root.branches and (root.segments or root.tail) and not force:
        raise Refused(
            f"{shelf.store.url} has no branches: nothing is let go of or collected there, since that looks like a "
            "mistake: make a branch (`weightvc branch`), or use --force"
        )
    before = named if root.sequence == sight.before.sequence else live.of_root(shelf, sight.before)
    missing = (named.names & before.names).difference(sight.objects, [key.ROOT])
    if missing and not force:
        raise Refused(
            f"{shelf.store.url} lacks {len(missing)} objects that the root names ({min(missing)}): nothing is "
            "collected before `weightvc fsck` has looked at it, or with --force"
        )
    return named


def _of_copies(store: Store, copies: Iterable[str]) -> Live:
    """What the newest copies of the root need to be of use. One that cannot be understood is of none."""
    found = Live(frozenset(), frozenset())
    for name in list(copies)[:COPIES]:
        with contextlib.suppress(Corrupt, Unsupported, KeyNotFound):
            got = store.get(name)
            assert got is not None
            found |= live.of_copy(roots.decode(got.data, name))
    return found


def _noted(page: Page, sight: Sight) -> tuple[tuple[int, int], ...]:
    """The notes at hand, and this run's own. Those of a time to come are of a clock that was wrong."""
    past = tuple(one for one in page.noted if _age(sight.now, one[1]) >= 0)
    if past and past[-1][0] >= sight.before.sequence:
        return past
    return *past, (sight.before.sequence, _micros(sight.now))


def _worth(names: Iterable[str], grace: float) -> bool:
    """Whether that these are dead is worth a swap of the root."""
    kinds = Counter(map(_kind, names))
    return grace <= 0 or kinds.total() >= PAGES or any(kind not in RECORDS for kind in kinds)


def _passed(noted: Sequence[tuple[int, int]], sight: Sight, grace: float) -> int:
    """H, but for pins: transactions that began before it have had their time."""
    old = [sequence for sequence, time in noted if _age(sight.now, time) >= grace]
    # Not past the run's own transaction either: so a page has begun no earlier than anything on its list.
    return min(max(old, default=0), sight.before.sequence)


def _since(page: Page, root: Root, sight: Sight) -> int | None:
    """When the list on the page of a root was made; None if that is not known yet."""
    if page.since is not None or root.collector is None or root.collector not in sight.objects:
        return page.since
    return _micros(sight.objects[root.collector].modified)


def _trimmed(noted: Sequence[tuple[int, int]], now: float, grace: float) -> tuple[tuple[int, int], ...]:
    """The notes that later runs may need: those younger than the grace period, and the newest of the others."""
    old = [one for one in noted if _age(now, one[1]) >= grace]
    return tuple(old[-1:] + [one for one in noted if _age(now, one[1]) < grace])


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)


def _age(now: float, micros: int) -> float:
    """Seconds since a time in microseconds, exactly 0 for now itself."""
    return (_micros(now) - micros) / 1e6


# Run


@dataclass(slots=True)
class Collection:
    """What a run found and did: objects and bytes by kind."""

    listed: Tally = field(default_factory=Tally)
    live: Tally = field(default_factory=Tally)
    pinned: Tally = field(default_factory=Tally)
    held: Tally = field(default_factory=Tally)
    young: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    condemned: Tally = field(default_factory=Tally)
    deleted: Tally = field(default_factory=Tally)
    foreign: Tally = field(default_factory=Tally)
    failed: dict[str, Exception] = field(default_factory=dict)
    """The errors of keys that could not be deleted."""
    pins: tuple[Pin, ...] = ()
    """Those that something is held or pinned by, the first to die first."""
    sequence: int = 0
    horizon: int = 0
    now: float = 0.0
    """The store's time when the run began."""


class _Nothing(Exception):
    """There is nothing to swap the root for."""


def run(shelf: Shelf, *, grace: float = GRACE, force: bool = False, dry_run: bool = False) -> Collection:
    """Delete what an earlier run condemned, and condemn what is dead now; without a grace period, until all is gone.

    `grace` is in seconds. Interrupted anywhere, the next run goes on. Raises Refused, Corrupt, NotFound, StoreError
    (nothing was deleted that had not been condemned), and Conflict or StateUnknown where the root could not be moved.
    """
    if not grace >= 0:
        raise Refused(f"grace={grace!r:.100}: seconds, 0 at least")
    total = Collection()
    with collector_paused():
        try:
            _run(shelf, total, grace=grace, force=force, dry_run=dry_run)
        except KeyNotFound:
            # Another collector was faster than this one read its root. If an object is lost, this says so.
            total = Collection() if dry_run else total
            _run(shelf, total, grace=grace, force=force, dry_run=dry_run)
    return total


def _run(shelf: Shelf, total: Collection, *, grace: float, force: bool, dry_run: bool) -> None:
    for _ in range(ROUNDS):
        try:
            sight = look(shelf.store)
        except Unavailable:
            # Perhaps there is no room to write. What is ripe can be deleted without: docs/gc.md, "A full store".
            if dry_run or not _delete_ripe(shelf, total, look(shelf.store, time.time()), grace=grace, force=force)[0]:
                raise
            sight = look(shelf.store)
        gone, failed, seen = _delete_ripe(shelf, total, sight, grace=grace, force=force, dry_run=dry_run)
        left = replace(sight, objects={name: one for name, one in sight.objects.items() if name not in gone})
        if dry_run:
            _foretell(shelf, total, left, seen.root, grace=grace, force=force)
            break
        marked, root = condemn(shelf, left, seen, grace=grace, force=force, failed=failed)
        _sweep(shelf.store, left, grace, total)
        _report(total, left, marked, root)
        if grace > 0 or not (marked.dead or marked.note):
            break


def _foretell(shelf: Shelf, total: Collection, left: Sight, root: Root, *, grace: float, force: bool) -> None:
    """What a run would do with what is left: each round sees what the one before would have left and swapped in. But
    for the lists that a run makes on its way: those are not there to be counted."""
    _sweep(shelf.store, left, grace, total, dry_run=True)
    now, page = root, None
    for at in range(ROUNDS):
        marked = mark(shelf, now, left, grace=grace, force=force, page=page)
        _report(total, left, marked, root)
        if grace > 0 or not (marked.dead or marked.note) or at == ROUNDS - 1:
            return
        total.deleted.add(left.objects[name] for name in marked.dead)
        now, page = now.next(horizon=marked.horizon, collector=None), replace(marked.page, dead=(), since=None)
        gone = set(marked.dead)
        left = replace(left, before=now, objects={k: v for k, v in left.objects.items() if k not in gone})


def _delete_ripe(
    shelf: Shelf, total: Collection, sight: Sight, *, grace: float, force: bool, dry_run: bool = False
) -> tuple[set[str], dict[str, Exception], Seen]:
    """Delete what is ripe: the keys that have gone (with `dry_run`: would have), the errors of those that could not
    be deleted, and the root that was gone by."""
    seen = swap.must_read(shelf.store)
    named = check(shelf, seen.root, sight, force=force)
    due = ripe(shelf, seen.root, sight, named, grace=grace)
    failed = {} if dry_run else delete(shelf.store, due)
    total.deleted.add(sight.objects[name] for name in due if name not in failed)
    total.failed = failed
    return set(due).difference(failed), failed, seen


def ripe(shelf: Shelf, root: Root, sight: Sight, named: Live, *, grace: float) -> list[str]:
    """What may be deleted: the list of an earlier run that is one grace period old, as far as it is still there.

    Raises Corrupt if the root names any of it, which no root can that came by swaps.
    """
    if root.collector is None or root.collector not in sight.objects:
        return []
    page = read_page(shelf, root)
    since = _since(page, root, sight)
    # A list from far in the future is of a clock that was wrong.
    if since is None or (grace > 0 and -DAY < _age(sight.now, since) < grace):
        return []
    due = [name for name in page.dead if name in sight.objects]
    for name in due:
        if name in named:
            raise Corrupt(
                f"{root.collector} has {name} on its list, which the root names: the root was put back by hand; "
                "nothing is deleted: run `weightvc fsck`"
            )
    return due


def delete(store: Store, names: Sequence[str]) -> dict[str, Exception]:
    """Delete what is on a list, in batches; the errors of keys that could not be."""
    failed: dict[str, Exception] = {}
    for at in range(0, len(names), BATCH):
        failed |= store.delete(names[at : at + BATCH])
    return failed


def condemn(
    shelf: Shelf,
    sight: Sight,
    seen: Seen,
    *,
    grace: float,
    force: bool = False,
    failed: Iterable[str] = (),
) -> tuple[Marked, Root]:
    """Mark, and swap the list and the horizon into the root, from each new root again until it lands. Nothing is
    swapped if nothing is dead, and nothing has to be noted. Returns what was marked, and the root."""
    last: list[tuple[Marked, Root]] = []
    for attempt in range(swap.ATTEMPTS):
        transaction = Transaction(seen.root.sequence)

        def make(root: Root, transaction: Transaction = transaction) -> Root:
            marked = mark(shelf, root, sight, grace=grace, force=force, failed=failed)
            last[:] = [(marked, root)]
            if not marked.dead and not marked.note:
                raise _Nothing
            page = shelf.put(transaction, "page", encode_page(marked.page), keep=False)
            return root.next(horizon=marked.horizon, collector=page)

        try:
            landed = swap.change(shelf, make, transaction, seen)
        except _Nothing:
            return last[0]
        except Expired:
            # Another collector was faster, and its horizon has passed this one.
            if attempt == swap.ATTEMPTS - 1:
                raise
            seen = swap.must_read(shelf.store)
            continue
        return last[0][0], landed.root
    raise AssertionError


def _sweep(store: Store, sight: Sight, grace: float, total: Collection, *, dry_run: bool = False) -> None:
    """Delete what no root ever names: pins that have died, probes and half-written files that were left lying."""
    stale = list(pins.read(store, sight.now - grace).stale)
    old = sight.now - max(grace, DAY)
    stale += [one.key for one in sight.probes if one.modified < old]
    failed = {} if dry_run else delete(store, stale)
    total.failed = {**total.failed, **failed}
    total.deleted.add(Listed(name, 0, 0.0) for name in stale if name not in failed)
    if isinstance(store, Sweeps):
        total.deleted.add(Listed("temporary", size, 0.0) for size in store.sweep(old, dry_run=dry_run))


def _report(total: Collection, left: Sight, marked: Marked, root: Root) -> None:
    if not total.sequence:
        total.listed, total.foreign, total.now = left.tally, left.foreign, left.now
    total.sequence, total.horizon, total.pins = root.sequence, root.horizon, marked.pins
    for what in ("live", "pinned", "held", "young", "waiting"):
        tally = Tally()
        tally.add(left.objects[name] for name in getattr(marked, what))
        setattr(total, what, tally)
    total.condemned.add(left.objects[name] for name in marked.dead)
