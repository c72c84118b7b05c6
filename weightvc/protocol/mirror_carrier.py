"""How a mirror gets what it lacks: objects are read from the source, checked, and put under keys of the mirror."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from weightvc.errors import Corrupt, Unsupported
from weightvc.objects import frame, key, manifest
from weightvc.objects.catalogue import Entry, Place, Way
from weightvc.pool import Pool
from weightvc.protocol import parallel
from weightvc.protocol.mirror_plan import Item, shared
from weightvc.protocol.shelf import Shelf

MANIFESTS: Final = 8
"""Versions that are copied side by side."""
PACKS: Final = 4
"""Packs in memory at once, of up to 64 MiB each."""


class Carrier:
    """Copies versions; it remembers which small objects the mirror has by now. Thread-safe within copy()."""

    def __init__(self, source: Shelf, target: Shelf, wrote: Callable[[int], None]) -> None:
        """`wrote` is told the bytes of each object that was written, by one thread at a time."""
        self._source = source
        self._target = target
        self._wrote = wrote
        self._shared: dict[tuple[str, str], tuple[str, str | None]] = {}
        """What the mirror has of small objects, by kind and digest: the key, and the version that names it there
        (None while it is on its way)."""
        self._lock = threading.Lock()
        self._counts = threading.Lock()

    def learn(self, there: Entry) -> None:
        """The mirror has a version: what it names need not be copied again."""
        if there.place is not None:
            for name in shared(there.place):
                parsed = key.parse(name)
                self._shared.setdefault((parsed.kind, parsed.digest), (name, there.new))

    def landed(self, item: Item) -> None:
        """A version that was copied is catalogued: what it names can be referred to."""
        if item.place is not None:
            for name in shared(item.place):
                parsed = key.parse(name)
                self._shared[parsed.kind, parsed.digest] = name, item.id

    def copy(self, batch: Sequence[Item], begin: int) -> None:
        """Upload what a batch needs, under transactions that begin at the root numbered `begin`, and give its items
        their places. Raises Corrupt for what is not what its key says, Unsupported, and what the stores raise."""
        todo = [item for item in batch if item.ways]
        if not todo:
            return
        # What was uploaded before and did not land is named by nothing: it must not be referred to.
        self._shared = {what: known for what, known in self._shared.items() if known[1] is not None}
        with (
            Pool(PACKS, "weightvc-mirror-packs") as packs,
            Pool(MANIFESTS, "weightvc-mirror") as pool,
        ):

            def work(item: Item) -> None:
                made = [self._way(item, way, key.Transaction(begin), packs) for way in item.ways]
                (first, schema, layout, files), *more = made
                item.place = Place(
                    first.manifest,
                    schema,
                    layout,
                    files,
                    first.packs,
                    first.edges,
                    first.nbytes,
                    tuple(one[0] for one in more),
                )

            for _ in parallel.ordered(pool, work, todo, MANIFESTS):
                pass

    def _way(
        self, item: Item, way: Way, transaction: key.Transaction, pool: Pool
    ) -> tuple[Way, str, str | None, tuple[str, ...]]:
        """Copy one manifest and what it names. Returns the way, and the mirror's schema, layout and files."""
        name, place = way.manifest, item.entry.place
        assert place is not None
        data = self._get(name)
        made = manifest.decode(data, name)
        said = made.version.id, made.schema, made.layout, sorted(made.files.values())
        if said != (item.id, place.schema, place.layout, sorted(place.files)):
            raise Corrupt(f"{self._source.store.url}: {name} is corrupt: it is not what the catalogue says of it")
        keys: dict[str, str] = {}
        nbytes = 0
        for small in shared(place):
            keys[small], size = self._small(item, small, transaction)
            nbytes += size
        streams = [made.base, made.patch.stream if made.patch is not None else None]
        packs = [pack for stream in streams if stream is not None for pack, _ in stream.packs]
        copied = parallel.ordered(pool, lambda pack: self._object(pack, transaction), packs, PACKS)
        for pack, (to, size) in zip(packs, copied, strict=True):
            keys[pack] = to
            nbytes += size
        head, sections = frame.decode(frame.MANIFEST, data, name)
        new = frame.encode(frame.MANIFEST, _renamed(head, keys, name), sections)
        to = self._put(transaction, "manifest", new)
        nbytes += len(new)
        layout = None if place.layout is None else keys[place.layout]
        return (
            Way(to, way.packs, way.edges, nbytes),
            keys[place.schema],
            layout,
            tuple(keys[file] for file in place.files),
        )

    def _small(self, item: Item, name: str, transaction: key.Transaction) -> tuple[str, int]:
        """The mirror's key of a schema, a layout or a file, and the bytes that were written for it."""
        parsed = key.parse(name)
        what = parsed.kind, parsed.digest
        if item.into is not None and item.into.place is not None:
            there = {key.parse(one).digest: one for one in shared(item.into.place) if one.startswith(parsed.kind)}
            return there[parsed.digest], 0
        with self._lock:
            size = 0
            if what not in self._shared:
                to, size = self._object(name, transaction)
                self._shared[what] = to, None
            to, via = self._shared[what]
            if via is not None:
                item.reused.append((to, via))
            return to, size

    def _object(self, name: str, transaction: key.Transaction) -> tuple[str, int]:
        data = self._get(name)
        return self._put(transaction, key.parse(name).kind, data), len(data)

    def _get(self, name: str) -> frame.Buffer:
        """An object of the source, seen to be what its key says."""
        try:
            return self._source.get(name, keep=False)
        except Corrupt as error:
            raise Corrupt(
                f"{self._source.store.url}: {error}. It is not copied: mend it with `weightvc fsck --repair` there, "
                "then mirror again; what was copied stays"
            ) from None

    def _put(self, transaction: key.Transaction, kind: str, data: frame.Buffer) -> str:
        name = self._target.put(transaction, kind, data, keep=False)
        with self._counts:
            self._wrote(len(data))
        return name


def _renamed(head: Mapping[str, Any], keys: Mapping[str, str], what: str) -> dict[str, Any]:
    """The head of a manifest with the mirror's keys in it; all other fields as they are.

    Raises Unsupported for a key in a field that is not known here.
    """
    new = dict(head)
    new["schema"] = [head["schema"][0], keys[head["schema"][1]]]
    new["layout"] = None if head["layout"] is None else keys[head["layout"]]
    new["files"] = {content: keys[name] for content, name in head["files"].items()}
    for stream in ("base", "patch"):
        if stream in head:
            new[stream] = {**head[stream], "packs": [[keys[name], size] for name, size in head[stream]["packs"]]}
    if set(key.found(new)).difference(keys.values()):
        raise Unsupported(f"{what} names objects in a field that is not known here: upgrade weightvc")
    return new
