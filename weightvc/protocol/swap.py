"""Reading the root, and changing it by compare-and-swap: the only step that publishes anything.

An ambiguous swap is decided, not guessed. A PUT whose reply was lost may have landed, and one that timed out can
land later; so each attempt is a single request, and after any doubt the root is read. Our write id in its ring: we
landed. The root unmoved: the same bytes are sent again with the same ETag, so that at most one of them can ever
land. The root moved and its ring reaches back to where we began without our id: somebody else won. Else: unknown.
"""

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weightvc.errors import (
    Conflict,
    Corrupt,
    Expired,
    KeyExists,
    KeyNotFound,
    NotFound,
    PreconditionFailed,
    Refused,
    StateUnknown,
    Unavailable,
)
from weightvc.objects import catalogue, key
from weightvc.objects import root as roots
from weightvc.objects.catalogue import SEGMENT, TAIL, Entry, SegmentRef
from weightvc.objects.root import Root
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import MISSING, Store

ATTEMPTS: Final = 8
"""Times that one root body is sent, and times that another writer's root is built upon, before giving up."""
UNREACHED: Final = 2
"""Failures to reach the store, when a repository is made, after which that is told."""
RECENT: Final = 8
"""Entries that stay in the root when it spills, so that a reader a few versions behind needs no segment."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A root as it was read, with the ETag to swap it against."""

    root: Root
    etag: str


def read_root(store: Store, *, unless_etag: str | None = None) -> Seen | None:
    """Read the root; None if its ETag is still `unless_etag`. Raises KeyNotFound where there is no repository."""
    try:
        got = store.get(key.ROOT, unless_etag=unless_etag)
    except KeyNotFound:
        raise KeyNotFound(
            f"{store.url} holds no weightvc repository: make one with `weightvc init {store.url}`; if there was one, "
            "see `weightvc fsck`"
        ) from None
    if got is None:
        return None
    return Seen(roots.decode(got.data, f"{store.url}: root"), got.etag)


def must_read(store: Store) -> Seen:
    """Read the root."""
    seen = read_root(store)
    assert seen is not None
    return seen


def create_root(store: Store, root: Root) -> None:
    """Write the first root. Raises KeyExists if there is one; safe to ask twice."""
    body = roots.encode(root)
    for attempt in range(ATTEMPTS):
        try:
            store.create(key.ROOT, body)
            return
        except Unavailable:
            # Surely not written: a store that cannot be reached says why.
            if attempt == UNREACHED:
                raise
        except (KeyExists, StateUnknown):
            try:
                found = must_read(store).root
            except KeyNotFound:
                _pause(attempt)
                continue
            if found.repository == root.repository:
                return
            raise KeyExists(f"{store.url} holds a weightvc repository already: open it instead") from None
    raise StateUnknown(f"{store.url}: whether the repository was made is unknown: run `weightvc init` again")


def change(
    shelf: Shelf,
    make: Callable[[Root], Root],
    transaction: key.Transaction,
    seen: Seen | None = None,
) -> Seen:
    """Swap the root for `make(root)`, which is asked again whenever somebody else was first.

    `seen` is a root at hand, to spare the first read. `make` checks on each root that the change still applies
    (it raises Conflict if not) and calls root.next(). Raises Expired if the collector's horizon has passed the
    transaction: begin again. Raises StateUnknown, AccessDenied, Unavailable, Conflict.
    """
    repository: str | None = None
    for attempt in range(8 * ATTEMPTS):
        if seen is None:
            seen = must_read(shelf.store)
        if repository not in (None, seen.root.repository):
            raise Conflict(f"{shelf.store.url} holds another repository than before: open it anew")
        repository = seen.root.repository
        if seen.root.horizon > transaction.begin:
            raise Expired("the collector has passed this transaction: it begins again under new names")
        try:
            new = _spilled(shelf, make(seen.root), transaction)
        except MISSING as error:
            # Collected since that root was read: there is a newer one, which names what took its place.
            shelf.newer(seen.root, error)
            seen = None
            continue
        landed = _swap(shelf.store, seen, new)
        if landed is not None:
            return landed
        seen = None
        _pause(min(attempt, 4))
    raise Conflict(f"{shelf.store.url}: too many writers: the root moved {8 * ATTEMPTS} times under this change")


def _swap(store: Store, seen: Seen, new: Root) -> Seen | None:
    """Swap, and be sure: the root that `new` became, or a later one with it inside; None if somebody else won."""
    body = roots.encode(new)
    doubt: Exception | None = None
    sent = False
    for attempt in range(ATTEMPTS):
        try:
            return Seen(new, store.swap(key.ROOT, body, seen.etag))
        except (PreconditionFailed, StateUnknown) as error:
            doubt, sent = error, True
        except Unavailable as error:
            doubt = error
            _pause(attempt)
        try:
            now = must_read(store)
        except Unavailable as error:
            doubt = error
            continue
        if new.write in now.root.ring:
            return now
        moved = now.root.sequence - seen.root.sequence
        if now.etag == seen.etag or moved == 0:
            _pause(attempt)
            continue
        if moved <= len(now.root.ring):
            return None
        break
    if not sent and isinstance(doubt, Unavailable):
        raise doubt
    raise StateUnknown(
        f"{store.url}: whether the change landed is unknown ({doubt}): look at `weightvc log` before you try again"
    )


def _spilled(shelf: Shelf, root: Root, transaction: key.Transaction) -> Root:
    """The root with its tail moved into a segment, if it has grown too long."""
    # Branches stay in the root whatever is done, so only the rest is weighed.
    large = len(roots.encode(replace(root, branches={}, writers={}))) > roots.LIMIT
    recent = 1 if large else RECENT
    if len(root.tail) <= recent or (len(root.tail) < TAIL + RECENT and not large):
        return root
    old, tail = root.tail[:-recent], root.tail[-recent:]
    segments: Sequence[SegmentRef] = root.segments
    entries: list[Entry] = list(old)
    data = b""
    # The last segment grows until it is full: few segments, and at most one read and one write a spill.
    if segments and segments[-1].count + len(old) <= SEGMENT:
        # One that cannot be read, or would grow too large, stays as it is: it must not stop those who write.
        with contextlib.suppress(Corrupt, NotFound, Refused):
            merged = [*shelf.segment(segments[-1]), *old]
            data = catalogue.encode_segment(merged)
            entries, segments = merged, segments[:-1]
    name = shelf.put(transaction, "segment", data or catalogue.encode_segment(entries))
    return replace(root, tail=tail, segments=(*segments, SegmentRef(name, len(entries))))


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.5, 1.0) * 0.02 * 2**attempt)
