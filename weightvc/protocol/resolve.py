"""Resolve: the cheapest way from what this host holds to a version, and a state that reads it that way."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from weightvc.errors import Corrupt, Expired
from weightvc.objects import layout
from weightvc.objects.catalogue import Entry
from weightvc.objects.manifest import Manifest, check_blocks
from weightvc.objects.tree import Tree
from weightvc.objects.version import Edge
from weightvc.protocol import parallel, state
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.spool import Spool
from weightvc.protocol.state import BasePayloads, Chain, Held, Level, Models, PatchPayloads, State, Verified

REQUEST: Final = 64 << 10
"""What a request weighs beside its bytes, in bytes: some 5 ms of a 100 Mbit/s link."""
READERS: Final = 8


@dataclass(frozen=True, slots=True)
class Way:
    """`start` is read as a base, or as it is `held`; then the patch of each of `steps` is applied in turn."""

    start: Entry
    held: bool
    steps: tuple[Entry, ...]
    nbytes: int
    """Bytes to fetch, manifests not counted."""


def plan(refs: Refs, entry: Entry, held: Callable[[str], bool]) -> Way:
    """The cheapest way to a version by bytes and requests. `held` says whether a tree is at hand, by digest.

    Raises Expired if no way leads to it.
    """
    best: Way | None = None
    best_cost = 0
    steps: list[Entry] = []
    nbytes = cost = 0
    current = entry
    seen: set[str | None] = set()
    while best is None or cost < best_cost:
        if current.new in seen:
            raise Corrupt(f"version {current.new}: the patches that lead to it go round in a circle")
        seen.add(current.new)
        assert current.version is not None
        assert current.place is not None
        if held(current.version.tree):
            return Way(current, True, tuple(reversed(steps)), nbytes)
        base = _edge(current, base=True)
        if base is not None and (best is None or cost + base.nbytes < best_cost):
            best = Way(current, False, tuple(reversed(steps)), nbytes + base.nbytes)
            best_cost = cost + base.nbytes
        patch = _edge(current, base=False)
        if patch is None or patch.source is None:
            break
        steps.append(current)
        nbytes += patch.nbytes
        cost += patch.nbytes + REQUEST
        current = refs.entry(patch.source)
    if best is None:
        raise Expired(f"version {(entry.new or '')[:12]}: no base and no patches lead to it any more")
    return best


def _edge(entry: Entry, *, base: bool) -> Edge | None:
    assert entry.place is not None
    return next((edge for edge in entry.place.edges if (edge.source is None) == base), None)


def manifest_of(shelf: Shelf, entry: Entry) -> Manifest:
    """The manifest of a version, seen to be that version's."""
    assert entry.place is not None
    made = shelf.manifest(entry.place.manifest)
    if made.version.id != entry.new:
        raise Corrupt(f"{entry.place.manifest} is corrupt: it is of version {made.version.short}, not {entry.new}")
    return made


def tree_of(shelf: Shelf, made: Manifest, what: str) -> Tree:
    """The tree that a manifest describes, seen to be the version's: a wrong schema or digest is found here."""
    tree = Tree(shelf.schema(made.schema, made.schema_digest), made.digests)
    if tree.digest != made.version.tree:
        raise Corrupt(f"{what} is corrupt: its digests do not make the tree of version {made.version.short}")
    return tree


def layout_of(shelf: Shelf, made: Manifest) -> layout.Stored | None:
    """The layout of a version with all its contents, or None."""
    if made.layout is None:
        return None
    stored = shelf.layout(made.layout)
    if stored.digest != made.version.layout:
        raise Corrupt(f"{made.layout} is corrupt: it is not the layout of version {made.version.short}")
    for entry in stored.entries:
        if entry.content not in stored.contents:
            name = made.files.get(entry.content)
            if name is None:
                raise Corrupt(f"{made.layout} is corrupt: the content of {entry.path!r} is nowhere")
            stored.contents[entry.content] = layout.decode_file(entry.content, entry.length, shelf.get(name), name)
    return stored


@contextmanager
def opened(
    shelf: Shelf,
    refs: Refs,
    entry: Entry,
    *,
    lying: "tuple[str, Callable[[Tree], State]] | None" = None,
    whole: bool = True,
    identify: bool = True,
) -> Iterator[tuple[Manifest, Verified]]:
    """A version's manifest and a state that reads it, checked: from the cache, from `lying` (the digest of a tree
    that the caller has, and how to read it), or from the store alone if those turn out to be wrong.

    `whole` says that all of it will be read: packs are then fetched whole. Without `identify` the digests are taken
    as the manifest (itself checked) has them, and not seen to make the version's tree: enough for a baseline.
    """
    made = manifest_of(shelf, entry)
    tree = Tree(shelf.schema(made.schema, made.schema_digest), made.digests)
    if identify:
        tree = tree_of(shelf, made, entry.place.manifest if entry.place else "")
    pool = ThreadPoolExecutor(READERS, "weightvc-read")
    spool = Spool(shelf.cache.directory if shelf.cache is not None else None)
    try:

        def at_hand() -> State | None:
            way = plan(
                refs, entry, lambda digest: _cached(shelf, digest) or (lying is not None and digest == lying[0])
            )
            return _chain(shelf, way, pool, spool, lying, whole) if way.held else None

        def from_store() -> State:
            return _chain(shelf, plan(refs, entry, lambda _: False), pool, spool, None, whole)

        # The store twice: ranges of packs are checked only by what they give, and the first may be bad on the way.
        yield made, Verified(tree, [at_hand, from_store, from_store], f"version {made.version.short}")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        spool.close()


def _cached(shelf: Shelf, digest: str) -> bool:
    return shelf.cache is not None and shelf.cache.has_tree(digest)


def _chain(
    shelf: Shelf,
    way: Way,
    pool: ThreadPoolExecutor,
    spool: Spool,
    lying: "tuple[str, Callable[[Tree], State]] | None",
    whole: bool,
) -> State:
    # Manifests carry most patches. They are fetched side by side, and of each only what is needed is kept.
    manifests = parallel.ordered(pool, lambda entry: manifest_of(shelf, entry), (way.start, *way.steps), 2 * READERS)
    first = next(manifests)
    schema = shelf.schema(first.schema, first.schema_digest)
    start: State | None = None
    levels: list[Level] = []
    if way.held:
        tree = Tree(schema, first.digests)
        if lying is not None and first.version.tree == lying[0]:
            start = lying[1](tree)
        else:
            assert shelf.cache is not None
            flat = shelf.cache.open_tree(first.version.tree, schema)
            if flat is None:
                raise Corrupt("a tree has just left the cache")
            start = Held(tree, flat)
    else:
        if first.base is None:
            raise Corrupt(f"{_name(way.start)} is corrupt: the catalogue says that it has a base")
        check_blocks(first.base, schema, _name(way.start))
        levels.append(Level(schema, first.base, BasePayloads(shelf, first.base, pool, whole=whole), _name(way.start)))
        levels[0].writer = first.writer
    for entry, made in zip(way.steps, manifests, strict=True):
        if made.patch is None:
            raise Corrupt(f"{_name(entry)} is corrupt: the catalogue says that it has a patch")
        above = shelf.schema(made.schema, made.schema_digest)
        check_blocks(made.patch.stream, above, _name(entry))
        payloads = PatchPayloads(shelf, made.patch.stream, spool, whole=whole)
        mapping = state.chunk_map(above, schema, made.patch.moved)
        stream = replace(made.patch.stream, inline=b"")
        models = Models(made.patch.tables, _name(entry)) if made.patch.tables else None
        levels.append(Level(above, stream, payloads, _name(entry), made.writer, mapping, models))
        schema = above
    if start is not None and not levels:
        return start
    return Chain(start, levels)


def _name(entry: Entry) -> str:
    return entry.place.manifest if entry.place is not None else ""
