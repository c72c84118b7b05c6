"""fsck: whether a repository is whole. A survey of what is there, and if asked for, a reading of what it says.

Reading goes edge by edge: every base, and every patch applied to its source, is built block by block and compared
with the version's digests. Trees that were built are kept a while in a directory of their own, so that the patch on
top of one does not read the chain below again; memory is bounded by blocks and objects, whatever the size of a tree.
"""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from weightvc.cache import Cache
from weightvc.errors import Corrupt, Expired, KeyNotFound, NotFound, Unsupported, WeightvcError
from weightvc.objects import frame, key, layout
from weightvc.objects.catalogue import Entry, Way
from weightvc.objects.manifest import Manifest, Stream, check_blocks
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.pool import Pool
from weightvc.protocol import live, parallel, resolve, salvage, state
from weightvc.protocol.payloads import BasePayloads, PatchPayloads
from weightvc.protocol.rebuild import Rebuilt
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.spool import Spool
from weightvc.protocol.state import Buffer, Chain, Level, Models, State
from weightvc.protocol.survey import (
    READERS,
    Damage,
    Sufferer,
    Survey,
    Witness,
    files_of,
    learn_packs,
    read,
    sufferer,
    survey,
    ways,
)

Progress = Callable[[int, int], None]
TREES: Final = 3
"""Trees that are kept while others are built on them."""
OBJECTS: Final = 256 << 20
"""Bytes of objects that are kept beside them."""


@dataclass(slots=True)
class FsckReport:
    """What fsck found. `damages` is empty for a repository that is whole, as far as it was looked at."""

    url: str
    sequence: int | None
    """The sequence number of the root that was looked at; None if it cannot be read."""
    versions: int = 0
    expired: int = 0
    objects: int = 0
    """Objects that the root keeps alive, itself counted."""
    nbytes: int = 0
    unreferenced: int | None = None
    """Objects that nothing names: uploads that failed, and what waits for collection. None: not known."""
    unreferenced_bytes: int = 0
    share: float = 0.0
    """Which share of objects and trees was read, by `seed`."""
    seed: int = 0
    objects_read: int = 0
    trees_built: int = 0
    """Bases and patches whose trees were built and compared."""
    damages: list[Damage] = field(default_factory=list)
    lost: list[Sufferer] = field(default_factory=list)
    """Versions that no way leads to any more."""
    lost_entries: int = 0
    """Operations in segments that cannot be read; versions among them are not known here."""
    offered: list[Sufferer] = field(default_factory=list)
    """Where the root cannot be read: versions that only their manifests tell of."""
    repaired: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    """What would be needed to repair the rest."""
    notes: list[str] = field(default_factory=list)
    """What was not looked at, and why."""

    @property
    def ok(self) -> bool:
        """Whether nothing is missing or bad."""
        return not self.damages


def rootless(shelf: Shelf, error: WeightvcError, prospect: Rebuilt) -> FsckReport:
    """The report for a root that cannot be read: what could be made of what is there."""
    fault = "missing" if isinstance(error, KeyNotFound) else str(error).partition("is corrupt: ")[2] or str(error)
    made = FsckReport(shelf.store.url, None, prospect.versions, damages=[Damage(key.ROOT, fault, ())])
    origin = "from the catalogue's segments and the manifests"
    if prospect.copy is not None:
        origin = f"from the copy {prospect.copy}"
    made.needed.append(
        f"root: `weightvc fsck --rebuild-root` makes one {origin}, with {prospect.versions} "
        + ("version" if prospect.versions == 1 else "versions")
        + (f"; --adopt adds {len(prospect.offered)} that it does not know" if prospect.offered else "")
    )
    made.offered = prospect.offered
    made.notes = prospect.notes
    return made


def check(shelf: Shelf, *, share: float, seed: int | None, progress: Progress | None) -> tuple[Survey, FsckReport]:
    """Look, and read a share of what is there. Raises what the store raises; the root has to be readable."""
    found = survey(shelf)
    salvage.tell(found)
    seed = secrets.randbits(32) if seed is None else seed
    reading = None
    if share > 0:
        with _scratch(shelf) as kept:
            reading = _Reading(found, kept, share, seed, progress)
            reading.run()
        found.shelf.cache = None
    return found, report(shelf, found, share, seed, reading)


def report(shelf: Shelf, found: Survey, share: float, seed: int, reading: "_Reading | None" = None) -> FsckReport:
    """What is to be said of a survey."""
    made = FsckReport(shelf.store.url, found.root.sequence, len(found.entries), len(found.expired()))
    made.share, made.seed = share, seed
    made.damages, made.lost, made.lost_entries = found.damages(), found.lost(), found.lost_entries
    made.notes = list(dict.fromkeys(found.notes))
    if reading is not None:
        made.objects_read, made.trees_built = len(found.shelf.good), reading.trees
    try:
        alive = live.of_root(found.shelf, found.root)
    except (Corrupt, NotFound):
        return made
    made.unreferenced = 0
    for name, nbytes in found.listed.items():
        if name == key.ROOT or _is_key(name):
            if name in alive:
                made.objects += 1
                made.nbytes += nbytes
            else:
                made.unreferenced += 1
                made.unreferenced_bytes += nbytes
    return made


def _is_key(name: str) -> bool:
    try:
        key.parse(name)
    except Corrupt:
        return False
    return True


@contextmanager
def _scratch(shelf: Shelf) -> Iterator[Cache]:
    """A cache that is empty to begin with: what comes out of it has been read from the store just now."""
    where = shelf.cache.directory if shelf.cache is not None else None
    if where is not None:
        try:
            where.mkdir(parents=True, exist_ok=True)
        except OSError:
            where = None
    with tempfile.TemporaryDirectory(prefix=".fsck-", dir=where) as directory:
        yield Cache(Path(directory), trees=TREES, objects=OBJECTS)


class _SourceLost(Exception):
    """What a patch is against cannot be read; the patch itself may be good."""


class _Source:
    """The tree that a patch is against: its faults are not the patch's."""

    def __init__(self, inner: State) -> None:
        self._inner = inner

    def read(self, low: int, high: int) -> Buffer:
        try:
            return self._inner.read(low, high)
        except (Corrupt, NotFound, Expired) as error:
            raise _SourceLost(str(error)) from None


class _Reading:
    """Reads objects and builds trees: those that the seed chooses."""

    def __init__(self, found: Survey, kept: Cache, share: float, seed: int, progress: Progress | None) -> None:
        self._found = found
        self._shelf: Witness = found.shelf
        self._shelf.cache = kept
        self._kept = kept
        self._share = share
        self._seed = seed
        self._progress = progress
        self._refs: Refs | None = None
        self._bad = 0
        self.trees = 0

    def _chosen(self, name: str) -> bool:
        number = int.from_bytes(frame.digest(f"{self._seed} {name}".encode())[:8], "big")
        return number < self._share * (1 << 64)

    def run(self) -> None:
        """Trees first, oldest first: they read most objects. Then the objects that are left."""
        found = self._found
        chosen = [(e, way) for e in found.entries.values() for way in ways(e) if self._chosen(way.manifest)]
        total = sum(_nbytes(entry) for entry, _ in chosen)
        done = 0
        for entry, way in chosen:
            self._way(entry, way)
            done += _nbytes(entry)
            if self._progress is not None:
                self._progress(done, total)
        seen = found.bad.keys() | self._shelf.good
        left = [name for name in sorted(found.named() - seen) if self._chosen(name)]
        with Pool(READERS, "weightvc-fsck") as pool:
            for _ in parallel.ordered(pool, lambda name: read(self._shelf, name), left, READERS):
                pass

    def _way(self, entry: Entry, way: Way) -> None:
        """One manifest of a version: the objects that it names, its files, and each tree that it can give."""
        found, shelf = self._found, self._shelf
        made = learn_packs(found, entry, way)
        if made is None:
            return
        self._files(entry, made)
        if made.schema in found.bad:
            return
        try:
            schema = shelf.schema(made.schema, made.schema_digest)
        except Unsupported as error:
            found.notes.append(str(error))
            return
        except (Corrupt, NotFound) as error:
            shelf.blame(made.schema, error)
            return
        try:
            tree = resolve.tree_of(shelf, made, way.manifest)
        except Corrupt as error:
            shelf.blame(way.manifest, error)
            return
        for base in (True, False):
            stream = made.base if base else made.patch.stream if made.patch else None
            if stream is not None and not found.broken(entry, way, base=base):
                self._build(entry, way, made, schema, tree, None if base else made)

    def _build(
        self, entry: Entry, way: Way, made: Manifest, schema: Schema, tree: Tree, patched: Manifest | None
    ) -> None:
        """Build a tree from the base, or (`patched`) from the patch, and compare it with its digests."""
        found, shelf = self._found, self._shelf
        with ExitStack() as stack:
            pool = stack.enter_context(Pool(resolve.READERS, "weightvc-read"))
            spool = Spool(self._kept.directory)
            stack.callback(spool.close)
            keep = None if self._kept.has_tree(tree.digest) else self._kept.write_tree(schema)
            if keep is not None:
                stack.callback(keep.drop)
            try:
                if patched is None:
                    assert made.base is not None
                    check_blocks(made.base, schema, way.manifest)
                    payloads = BasePayloads(shelf, made.base, made.digests, pool, spool, whole=True, checked=True)
                    chain = Chain(None, [Level(schema, made.base, payloads, way.manifest, made.writer)])
                else:
                    chain = self._patched(stack, made, schema, way.manifest, spool)
                self._compare(chain, tree, way.manifest, keep)
            except _SourceLost:
                return
            except Unsupported as error:
                found.notes.append(str(error))
                return
            except (Corrupt, NotFound) as error:
                # A pack that is bad has been noted as such; else the manifest does not say what it should.
                packs = found.packs.get((way.manifest, patched is None), ())
                if not any(pack in found.bad for pack in packs) and way.manifest not in found.bad:
                    shelf.blame(way.manifest, error)
                return
            self.trees += 1
            if keep is not None:
                keep.commit(tree.digest)

    def _patched(self, stack: ExitStack, made: Manifest, schema: Schema, what: str, spool: Spool) -> Chain:
        patch = made.patch
        assert patch is not None
        check_blocks(patch.stream, schema, what)
        if self._refs is None or self._bad != len(self._found.bad):
            self._refs, self._bad = self._found.refs(), len(self._found.bad)
        try:
            opened = resolve.opened(self._shelf, self._refs, self._refs.entry(patch.source))
            _, verified = stack.enter_context(opened)
        except (Corrupt, NotFound, Expired) as error:
            raise _SourceLost(str(error)) from None
        mapping = state.chunk_map(schema, verified.tree.schema, patch.moved)
        stream: Stream = replace(patch.stream, inline=b"")
        models = Models(patch.tables, what) if patch.tables else None
        payloads = PatchPayloads(self._shelf, patch.stream, spool, whole=True)
        return Chain(_Source(verified), [Level(schema, stream, payloads, what, made.writer, mapping, models)])

    def _compare(self, chain: Chain, tree: Tree, what: str, keep: "object | None") -> None:
        checked = state.Verified(tree, [lambda: chain], what)
        write = getattr(keep, "write", None)

        def work(block: tuple[int, int]) -> None:
            low, high = block
            data = checked.read(low, high)
            if write is not None:
                write(tree.schema.position(low), data)

        with Pool(parallel.workers(), "weightvc-fsck") as pool:
            window = 2 * parallel.workers() + 2
            for _ in parallel.ordered(pool, work, checked.runs(), window):
                pass

    def _files(self, entry: Entry, made: Manifest) -> None:
        """The layout is the version's, and every content of it is there and right."""
        found, shelf = self._found, self._shelf
        place = entry.place
        assert place is not None
        if place.layout is None or any(name in found.bad for name in files_of(place)):
            return
        todo = [name for name in files_of(place) if name not in shelf.good]
        if not todo:
            return
        try:
            stored = shelf.layout(place.layout)
            if stored.digest != made.version.layout:
                raise Corrupt(f"{place.layout} is corrupt: it is not the layout of version {made.version.short}")
            lengths = {one.content: one.length for one in stored.entries}
        except Unsupported as error:
            found.notes.append(str(error))
            return
        except (Corrupt, NotFound) as error:
            shelf.blame(place.layout, error)
            return
        for content in lengths.keys() - stored.contents.keys():
            name = made.files.get(content)
            if name is None:
                shelf.blame(place.layout, Corrupt(f"the content {content[:12]} is nowhere"))
                continue
            try:
                layout.decode_file(content, lengths[content], shelf.get(name, keep=False), name)
            except (Corrupt, NotFound) as error:
                shelf.blame(name, error)


def _nbytes(entry: Entry) -> int:
    return entry.version.nbytes if entry.version is not None else 0


def described(one: Entry | Sufferer) -> str:
    """A version in a sentence: its first digits, branch, generation and step."""
    made = sufferer(one) if isinstance(one, Entry) else one
    parts = [made.branch or "no branch", f"generation {made.generation}"]
    if made.step is not None:
        parts.append(f"step {made.step}")
    return f"{made.id[:12]} ({', '.join(parts)})"
