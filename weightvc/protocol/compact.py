"""Compaction: makes the ways that the ladder wants, and publishes them beside those that there are.

A way is a manifest of its own, with a patch from another version or a base. It is made of what is read, checked
against digests on both sides, and goes up under a fresh transaction. The catalogue's entries of some versions are
then written anew by one swap. Version ids, and the ways that there were, stay as they are; killed at any moment, the
next run goes on from the last swap.

A swap writes every segment that has a changed entry again, some MB each: so ways are published in batches, and what
is lost by a kill or a collector is one batch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from weightvc import __version__
from weightvc.cache import Cache
from weightvc.errors import Corrupt, Expired, NotFound, Unsupported
from weightvc.objects import frame, key, manifest
from weightvc.objects import policy as policies
from weightvc.objects.catalogue import Entry, SegmentRef, Way
from weightvc.objects.manifest import Patch, Stream
from weightvc.objects.policy import Policy
from weightvc.objects.root import Root
from weightvc.objects.version import Edge
from weightvc.pool import Pool
from weightvc.protocol import parallel, patches, resolve, swap
from weightvc.protocol.commit import Packer
from weightvc.protocol.ladder import Ladder, Wanted
from weightvc.protocol.pins import Holder
from weightvc.protocol.refs import Refs
from weightvc.protocol.rewrite import rewritten
from weightvc.protocol.shelf import Shelf

BATCH: Final = 256
"""Ways that are published by one swap at most: those of some 800 versions."""
SECONDS: Final = 120.0
"""And how long the first of them waits."""
TREES: Final = 5
"""Trees that are kept in the cache meanwhile: what the lowest two rungs start from."""

RESTARTS: Final = 3
"""Times that it begins again where the collector has passed by."""

Report = Callable[[Wanted, Way], None]


@dataclass(slots=True)
class Compacted:
    """What a run did."""

    patches: int = 0
    """Patches forward."""
    back: int = 0
    """Patches back."""
    bases: int = 0
    nbytes: int = 0
    """Bytes stored for them, all objects together."""
    swaps: int = 0
    skipped: list[str] = field(default_factory=list)
    """Why ways that were wanted could not be made: objects that cannot be read, versions that are gone."""


@dataclass(frozen=True, slots=True)
class _Made:
    wanted: Wanted
    way: Way
    schema: str
    layout: str | None
    files: frozenset[str]


class _Nothing(Exception):
    """None of a batch's ways is of use any more."""


class _Overlay(Refs):
    """Versions as they will be catalogued: ways that are made, and not published yet, are read by as well."""

    def __init__(self, shelf: Shelf, root: Root, ladder: Ladder) -> None:
        super().__init__(shelf, root)
        self._ladder = ladder

    @property
    def unread(self) -> int:
        return 0

    def find(self, ident: str, most: int | None = None) -> Entry | None:
        return self._ladder.entries.get(ident)


def compact(
    shelf: Shelf,
    read: Callable[[], swap.Seen],
    pin: Holder,
    given: Mapping[str, Any],
    *,
    save: bool = False,
    report: Report | None = None,
) -> tuple[Compacted, swap.Seen]:
    """Compact by the kept policy and what is `given` of one, which `save` keeps. `read` reads the root.

    It may take longer than a grace period: before it uploads anything, it takes `pin`. Where a collector has passed
    by all the same it begins again, a few times. Returns what was done, and the last root seen.
    """
    seen = read()
    policy = replace(policies.of(seen.root.extra), **given)
    if save and policy != policies.of(seen.root.extra):
        transaction = key.Transaction(seen.root.sequence)

        def keep(root: Root) -> Root:
            kept = replace(policies.of(root.extra), **given)
            return root.next(extra=policies.to_json(kept, root.extra))

        seen = swap.change(shelf, keep, transaction, seen)
    work = Compaction(shelf, policy, pin, report)
    for restart in range(RESTARTS + 1):
        try:
            return work.done, work.run(seen)
        except Expired:
            if restart == RESTARTS:
                raise
            seen = swap.must_read(shelf.store)
    raise AssertionError


class Compaction:
    """One run. `shelf` is the repository's; `pin` begins at the root that it starts from, or before; `report` is
    called with each way that was made."""

    def __init__(self, shelf: Shelf, policy: Policy, pin: Holder, report: Report | None = None) -> None:
        self._shelf = shelf
        self._pin = pin
        # Trees of its own beside the cache's, so that those of a trainer on this host are not driven out.
        scratch = None
        if shelf.cache is not None:
            scratch = Cache(shelf.cache.directory / "compaction", trees=TREES, limit=shelf.cache.limit)
        self._scratch = Shelf(shelf.store, scratch)
        self._policy = policy
        self._report = report
        self._pending: list[_Made] = []
        self._since = 0.0
        self.done = Compacted()

    def run(self, seen: swap.Seen) -> swap.Seen:
        """Make and publish everything that is wanted of the versions in a root. Returns the last root seen.

        Raises Expired if the collector passed by a batch: then run another. Raises StoreError, StateUnknown, Conflict
        as a swap does, and Corrupt or NotFound if the catalogue itself cannot be read.
        """
        ladder = Ladder(self._shelf.catalogue(seen.root), self._policy)
        refs = _Overlay(self._shelf, seen.root, ladder)
        wants = ladder.wanted()
        way: Way | None = None
        asked = False
        while True:
            try:
                wanted = wants.send(way)
            except StopIteration:
                return self._publish(seen)
            if not asked:
                self._pin.ask()
                asked = True
            way = self._make(refs, wanted, seen.root.sequence)
            if len(self._pending) >= BATCH or (self._pending and time.monotonic() - self._since > SECONDS):
                seen = self._publish(seen)

    def _make(self, refs: Refs, wanted: Wanted, begin: int) -> Way | None:
        target = refs.entry(wanted.target)
        transaction = key.Transaction(begin)
        try:
            described = resolve.manifest_of(self._scratch, target)
            if not wanted.back:
                self._keep(refs, target)
            if wanted.source is None:
                base: Stream | None = self._base(refs, target, transaction)
                patch: Patch | None = None
            else:
                base, patch = None, self._patch(refs, refs.entry(wanted.source), target, transaction)
        except (Corrupt, NotFound, Expired, Unsupported) as error:
            source = wanted.source[:12] if wanted.source is not None else "nothing"
            self.done.skipped.append(f"from {source} to {wanted.target[:12]}: {error}")
            return None
        made = replace(described, base=base, patch=patch, writer=f"weightvc {__version__}")
        data = manifest.encode(made)
        name = self._scratch.put(transaction, "manifest", data)
        stream = patch.stream if patch is not None else base
        assert stream is not None
        changed = patch.changed if patch is not None else described.version.elements
        nbytes = len(data) + sum(frame.HEADER_SIZE + size for _, size in stream.packs)
        way = Way(name, len(stream.packs), (Edge(wanted.source, stream.nbytes, changed),), nbytes)
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(_Made(wanted, way, made.schema, made.layout, frozenset(made.files.values())))
        return way

    def _patch(self, refs: Refs, source: Entry, target: Entry, transaction: key.Transaction) -> Patch:
        with (
            patches.opened(self._scratch, refs, source, target) as span,
            Pool(2, "weightvc-upload") as uploads,
        ):
            return patches.patch(span, Packer(self._scratch, transaction, uploads), source.new or "")

    def _base(self, refs: Refs, target: Entry, transaction: key.Transaction) -> Stream:
        with (
            resolve.opened(self._scratch, refs, target) as (_, verified),
            Pool(2, "weightvc-upload") as uploads,
        ):
            return patches.base(verified, Packer(self._scratch, transaction, uploads))

    def _keep(self, refs: Refs, entry: Entry) -> None:
        """Have a version's tree in the cache, if there is one: the next patches start from it."""
        cache = self._scratch.cache
        assert entry.version is not None
        if cache is None or cache.has_tree(entry.version.tree):
            return
        with resolve.opened(self._scratch, refs, entry) as (_, verified):
            schema = verified.tree.schema
            writer = cache.write_tree(schema)
            if writer is None:
                return

            def copy(block: tuple[int, int]) -> None:
                writer.write(schema.position(block[0]), verified.read(*block))

            try:
                with Pool(parallel.workers(), "weightvc-keep") as pool:
                    for _ in parallel.ordered(pool, copy, verified.runs(), 2 * parallel.workers()):
                        pass
                writer.commit(entry.version.tree)
            finally:
                writer.drop()

    def _publish(self, seen: swap.Seen) -> swap.Seen:
        """Swap in what is pending: what still has its version and its source, and is not there by now."""
        pending, self._pending = self._pending, []
        if not pending:
            return seen
        # All of the batch began at this root; the horizon may not have passed it.
        transaction = key.Transaction(seen.root.sequence)
        landing: list[_Made] = []
        done: dict[str, tuple[SegmentRef, ...]] = {}

        def make(root: Root) -> Root:
            entries = {entry.new: entry for entry in self._shelf.catalogue(root) if entry.version is not None}
            before = list(landing)
            landing[:] = [made for made in pending if _of_use(made, entries)]
            if landing != before:
                done.clear()
            if not landing:
                raise _Nothing
            gained: dict[str, tuple[Way, ...]] = {}
            for made in landing:
                gained[made.wanted.target] = (*gained.get(made.wanted.target, ()), made.way)

            def edit(entry: Entry) -> Entry | None:
                ways = gained.get(entry.new or "")
                if ways is None or entry.place is None:
                    return None
                return replace(entry, place=replace(entry.place, ways=(*entry.place.ways, *ways)))

            tail, segments = rewritten(self._shelf, root, transaction, edit, done)
            return root.next(tail=tail, segments=segments)

        try:
            seen = swap.change(self._shelf, make, transaction, seen)
        except _Nothing:
            landing = []
        else:
            self.done.swaps += 1
        for made in landing:
            self._count(made)
        gone = len(pending) - len(landing)
        if gone:
            self.done.skipped.append(f"{gone} ways to or from versions that have gone, or had got them, meanwhile")
        return seen

    def _count(self, made: _Made) -> None:
        if made.wanted.source is None:
            self.done.bases += 1
        elif made.wanted.back:
            self.done.back += 1
        else:
            self.done.patches += 1
        self.done.nbytes += made.way.nbytes
        if self._report is not None:
            self._report(made.wanted, made.way)


def _of_use(made: _Made, entries: Mapping[str | None, Entry]) -> bool:
    target = entries.get(made.wanted.target)
    if target is None or target.place is None or target.gone:
        return False
    # The swap rule: what the manifest names besides its own packs is what this root names for that version.
    place = target.place
    if (place.schema, place.layout, frozenset(place.files)) != (made.schema, made.layout, made.files):
        return False
    if made.wanted.source is not None:
        source = entries.get(made.wanted.source)
        if source is None or source.gone:
            return False
    return all(edge.source != made.wanted.source for way in target.place.all_ways for edge in way.edges)
