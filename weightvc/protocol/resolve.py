"""Resolve: a state that reads a version by the cheapest way from what this host holds, or by another if need be."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from weightvc.errors import Corrupt, WeightvcError
from weightvc.objects import layout
from weightvc.objects.catalogue import Entry, Way
from weightvc.objects.manifest import Manifest, check_blocks
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.pool import Pool
from weightvc.protocol import parallel, state, swap
from weightvc.protocol.payloads import BasePayloads, PatchPayloads
from weightvc.protocol.plan import Plan, plan
from weightvc.protocol.refs import Refs, promised
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.spool import Spool
from weightvc.protocol.state import Chain, Held, Level, Models, State, Verified
from weightvc.sources.header import collector_paused
from weightvc.stores.base import MISSING

READERS: Final = 8
OTHERS: Final = 4
"""Ways that are tried instead of those that turned out to be bad."""


def renewed(shelf: Shelf, refs: Refs, entry: Entry) -> tuple[Refs, Entry] | None:
    """Where a version lies by now, for a reader that missed an object and may have been overtaken by the collector;
    None if the root that the reader goes by is the newest. Raises Expired if the version has gone."""
    root = swap.must_read(shelf.store).root
    if root.sequence == refs.sequence:
        return None
    now = Refs(shelf, root)
    found = now.catalogue.find(entry.new or "")
    return None if found is None else (now, promised(found))


def manifest_of(shelf: Shelf, entry: Entry, way: Way | None = None) -> Manifest:
    """The manifest of a version (that of its commit unless a way is named), seen to be that version's.

    Raises Expired if the version has gone.
    """
    if entry.place is None:
        promised(entry)
    assert entry.place is not None
    name = entry.place.manifest if way is None else way.manifest
    made = shelf.manifest(name)
    if made.version.id != entry.new:
        raise Corrupt(f"{name} is corrupt: it is of version {made.version.short}, not {entry.new}")
    return made


def tree_of(shelf: Shelf, made: Manifest, what: str) -> Tree:
    """The tree that a manifest describes, seen to be the version's: a wrong schema or digest is found here."""
    tree = Tree(shelf.schema(made.schema, made.schema_digest), made.digests)
    with collector_paused():
        digest = tree.digest
    if digest != made.version.tree:
        raise Corrupt(f"{what} is corrupt: its digests do not make the tree of version {made.version.short}")
    return tree


def layout_of(shelf: Shelf, made: Manifest) -> layout.Stored | None:
    """The layout of a version with all its contents, or None."""
    if made.layout is None:
        return None
    try:
        return _layout_of(shelf, made, made.layout)
    except MISSING:
        found = Refs(shelf, swap.must_read(shelf.store).root).catalogue.find(made.version.id)
        if found is not None:
            promised(found)
        raise


def _layout_of(shelf: Shelf, made: Manifest, name: str) -> layout.Stored:
    stored = shelf.layout(name)
    if stored.digest != made.version.layout:
        raise Corrupt(f"{made.layout} is corrupt: it is not the layout of version {made.version.short}")
    for entry in stored.entries:
        if entry.content not in stored.contents:
            file = made.files.get(entry.content)
            if file is None:
                raise Corrupt(f"{name} is corrupt: the content of {entry.path!r} is nowhere")
            stored.contents[entry.content] = layout.decode_file(entry.content, entry.length, shelf.get(file), file)
    return stored


Lying = Mapping[str, Callable[[Schema], State]]
"""Trees that a caller has, by digest or by a version's id, and how to read each."""


@contextmanager
def opened(
    shelf: Shelf,
    refs: Refs,
    entry: Entry,
    *,
    lying: Lying | None = None,
    whole: bool = True,
    identify: bool = True,
) -> Iterator[tuple[Manifest, Verified]]:
    """A version's manifest and a state that reads it, checked: from the cache or from one of `lying`, whichever is
    the cheapest to begin from, or from the store alone if two of those turn out to be wrong, by another way if the
    cheapest one does.

    `whole` says that all of it will be read: packs are then fetched whole. Without `identify` the digests are taken
    as the manifest (itself checked) has them, and not seen to make the version's tree: enough for a baseline.

    A version that is let go of while it is read is looked for in the newest root, where it may lie elsewhere, and is
    Expired, on the call or on a later read, if it has gone.
    """
    promised(entry)
    held = shelf.cache.trees() if shelf.cache is not None else frozenset()
    lying = lying or {}
    held |= lying.keys()
    try:
        made, name, tree = _identified(shelf, refs, entry, held if whole else None, identify=identify)
    except MISSING:
        found = renewed(shelf, refs, entry)
        if found is None:
            raise
        refs, entry = found
        made, name, tree = _identified(shelf, refs, entry, held if whole else None, identify=identify)
    pool = Pool(READERS, "weightvc-read")
    spool = Spool(shelf.cache.directory if shelf.cache is not None else None)
    tried: list[Plan] = []
    begun: set[str] = set()
    failed: Counter[str] = Counter()

    def at_hand() -> State | None:
        way = plan(refs, entry, held - begun)
        if way.start is None:
            return None
        assert way.start.version is not None
        begun.update((way.start.version.tree, way.start.new or ""))
        return _chain(shelf, way, pool, spool, lying, whole, {name: made})

    def from_store(*, checked: bool = False) -> State:
        tried.append(plan(refs, entry))
        return _chain(shelf, tried[-1], pool, spool, {}, whole, {name: made}, checked=checked)

    def from_store_again() -> State:
        return from_store(checked=True)

    def otherwise() -> State | None:
        # Which object is to blame is not known: a wrong state in between shows in the end.
        for step in tried[-1].steps if tried else ():
            failed[step.way.manifest] += 1
        if not failed or (way := plan(refs, entry, failed=failed)) in tried:
            return None
        tried.append(way)
        return _chain(shelf, way, pool, spool, {}, whole, {name: made})

    def from_newest() -> State | None:
        found = renewed(shelf, refs, entry)
        return None if found is None else _chain(shelf, plan(*found), pool, spool, {}, whole, {name: made})

    try:
        # What is at hand twice: a slot or a way back that was damaged is no reason to fetch a base.
        # The store twice: ranges of packs are checked only by what they give, and the first may be bad on the way.
        # The second time packs are fetched whole, so that one which is bad at rest is named.
        ways = [at_hand, at_hand, from_store, from_store_again, *[otherwise] * OTHERS, from_newest]
        with pool:
            try:
                yield made, Verified(tree, ways, f"version {made.version.short}", shelf.meter)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        spool.close()


def _identified(
    shelf: Shelf, refs: Refs, entry: Entry, held: Set[str] | None, *, identify: bool
) -> tuple[Manifest, str, Tree]:
    made, name = _described(shelf, refs, entry, held)
    if identify:
        return made, name, tree_of(shelf, made, name)
    return made, name, Tree(shelf.schema(made.schema, made.schema_digest), made.digests)


def _described(shelf: Shelf, refs: Refs, entry: Entry, held: Set[str] | None) -> tuple[Manifest, str]:
    """A manifest of a version, and its key: that by which it will be read from what is `held`, so that no other has
    to be fetched; another one where that cannot be had. None says that it will not be read as a whole."""
    ways: tuple[Way | None, ...] = (None,)
    if entry.place is not None and entry.place.ways:
        ways = entry.place.all_ways
        if held is not None:
            # Without a plan it is still known what the version is; reading it then tells what is wrong.
            with suppress(WeightvcError):
                steps = plan(refs, entry, held).steps
                ways = (steps[-1].way, *ways) if steps else ways
    failure: WeightvcError | None = None
    for way in ways:
        try:
            made = manifest_of(shelf, entry, way)
        except (Corrupt, *MISSING) as error:
            failure = failure or error
        else:
            return made, way.manifest if way is not None else _name(entry)
    assert failure is not None
    raise failure


def _chain(
    shelf: Shelf,
    way: Plan,
    pool: Pool,
    spool: Spool,
    lying: Lying,
    whole: bool,
    known: Mapping[str, Manifest],
    *,
    checked: bool = False,
) -> State:
    start: State | None = None
    schema: Schema | None = None
    if way.start is not None:
        assert way.start.version is not None
        assert way.start.place is not None
        schema = shelf.schema_at(way.start.place.schema)
        digest = way.start.version.tree
        read = lying.get(digest) or lying.get(way.start.new or "")
        if read is not None:
            start = read(schema)
        else:
            flat = shelf.cache.open_tree(digest, schema) if shelf.cache is not None else None
            if flat is None:
                raise Corrupt("a tree has just left the cache")
            start = Held(schema, flat)
        if not way.steps:
            return start
    levels: list[Level] = []
    # Manifests carry most patches. They are fetched side by side, and of each only what is needed is kept.
    manifests = parallel.ordered(
        pool,
        lambda step: known.get(step.way.manifest) or manifest_of(shelf, step.entry, step.way),
        way.steps,
        2 * READERS,
    )
    for step, made in zip(way.steps, manifests, strict=True):
        name = step.way.manifest
        above = shelf.schema(made.schema, made.schema_digest)
        if step.edge.source is None:
            if made.base is None:
                raise Corrupt(f"{name} is corrupt: the catalogue says that it has a base")
            check_blocks(made.base, above, name)
            if whole:
                from weightvc_kernels import planes

                planes.load(above.nbytes)
            content = BasePayloads(shelf, made.base, made.digests, pool, spool, whole=whole, checked=checked)
            levels.append(Level(above, made.base, content, name, made.writer))
        else:
            if made.patch is None or made.patch.source != step.edge.source:
                raise Corrupt(f"{name} is corrupt: the catalogue says that it has a patch from {step.edge.source}")
            assert schema is not None
            check_blocks(made.patch.stream, above, name)
            payloads = PatchPayloads(shelf, made.patch.stream, spool, whole=whole)
            mapping = state.chunk_map(above, schema, made.patch.moved)
            stream = replace(made.patch.stream, inline=b"")
            models = Models(made.patch.tables, name) if made.patch.tables else None
            levels.append(Level(above, stream, payloads, name, made.writer, mapping, models))
        schema = above
    return Chain(start, levels)


def _name(entry: Entry) -> str:
    return entry.place.manifest if entry.place is not None else ""
