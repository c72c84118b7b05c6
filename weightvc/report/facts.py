"""Facts: what a report is made of. Nearly all is in the catalogue, which is read once; nothing is written."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from weightvc.errors import AccessDenied, Corrupt, WeightvcError
from weightvc.history import version_of
from weightvc.objects import key
from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.protocol import live
from weightvc.protocol.plan import Step, needed
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.report.layers import Changes, Weights, changes, weights
from weightvc.report.metrics import Told

VERSIONS: Final = 10_000
"""The newest versions that are drawn."""
SAMPLE: Final = 8
"""The newest versions whose weights are read."""


@dataclass(frozen=True, slots=True)
class Cold:
    """What a reader that holds nothing fetches for a version: bytes, objects, and the patches on the way."""

    nbytes: int
    requests: int
    patches: int


@dataclass(frozen=True, slots=True)
class Row:
    """One version that is drawn: its entry, and how it is reached from nothing (None: it has expired)."""

    entry: Entry
    cold: Cold | None

    @property
    def ident(self) -> str:
        """Its id."""
        return version_of(self.entry).id

    @property
    def smaller(self) -> float | None:
        """How many times smaller than the whole version what its commit stored is; None once it has expired."""
        place = self.entry.place
        return version_of(self.entry).nbytes / place.nbytes if place is not None and place.nbytes else None


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of one kind, and how many there are of it."""

    kind: str
    nbytes: int
    count: int
    garbage: bool = False


@dataclass(slots=True)
class Facts:
    """All that the report shows."""

    url: str
    made: float
    """Seconds since the epoch."""
    sequence: int
    default: str
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    rows: list[Row]
    """Versions of all branches and tags, as the log has them, but oldest first."""
    older: int
    """Versions of branches and tags before those, which are not drawn."""
    stored: list[Stored]
    listed: bool
    """Whether all objects could be listed: otherwise garbage is not among `stored`."""
    weights: Weights | None = None
    changes: Changes | None = None
    told: list[Told] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be had, and why."""

    @property
    def head(self) -> Row | None:
        """The head of the default branch, if it is drawn."""
        ident = self.branches.get(self.default)
        return next((row for row in reversed(self.rows) if row.ident == ident), None)


def gather(
    shelf: Shelf, root: Root, *, count: int = VERSIONS, sample: int = SAMPLE, told: Sequence[Told] = ()
) -> Facts:
    """The facts of a root: of the newest `count` versions; the weights of the newest `sample` of them are read.

    What cannot be had beside the catalogue (objects may not be listed, weights are corrupt) stands in `notes`, and
    the report goes on without it. Raises what reading the catalogue raises.
    """
    refs = Refs(shelf, root)
    tags = refs.tags() if root.tags is not None else {}
    notes: list[str] = []
    # Before the catalogue: what comes meanwhile is then named by it.
    objects = _listed(shelf, notes)
    entries = {entry.new: entry for entry in refs.catalogue if entry.version is not None}
    reached = _reached([*root.branches.values(), *tags.values()], entries)
    drawn = reached[:count]
    cold = _cold(entries.values())
    rows = [Row(entry, cold.get(entry.new or "")) for entry in reversed(drawn)]
    stored = _stored(entries.values())
    if objects is not None:
        stored += _beside(live.of_root(shelf, root), objects)
    facts = Facts(
        url=shelf.store.url,
        made=time.time(),
        sequence=root.sequence,
        default=root.default,
        branches=dict(root.branches),
        tags=tags,
        rows=rows,
        older=len(reached) - len(drawn),
        stored=stored,
        listed=objects is not None,
        told=list(told),
        notes=notes,
    )
    line = _first_parents(root.branches.get(root.default), entries)[:count]
    with _noted(notes, "the patches of each layer are not shown"):
        facts.weights = weights(shelf, line)
    if sample:
        with _noted(notes, "what the newest versions changed is not shown"):
            facts.changes = changes(shelf, refs, line, sample)
    return facts


class _noted:
    """A part of the report that may fail without the rest."""

    def __init__(self, notes: list[str], what: str) -> None:
        self._notes, self._what = notes, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, WeightvcError):
            self._notes.append(f"{self._what}: {error}")
            return True
        return False


def _reached(heads: Iterable[str], entries: Mapping[str | None, Entry]) -> list[Entry]:
    """The versions that heads descend from, in the order of the log."""
    found: dict[str, Entry] = {}
    waiting = list(dict.fromkeys(heads))
    while waiting:
        ident = waiting.pop()
        if ident in found:
            continue
        if ident not in entries:
            raise Corrupt(f"version {ident[:12]} is referred to and not in the catalogue: run `weightvc fsck`")
        found[ident] = entries[ident]
        waiting += version_of(found[ident]).parents
    return sorted(found.values(), key=lambda e: (-version_of(e).generation, -e.sequence, e.new or ""))


def _first_parents(head: str | None, entries: Mapping[str | None, Entry]) -> list[Entry]:
    """A version and its first parents, newest first."""
    out: list[Entry] = []
    while head is not None:
        out.append(entries[head])
        head = next(iter(version_of(out[-1]).parents), None)
    return out


def _cold(entries: Iterable[Entry]) -> dict[str, Cold]:
    """What each version that is stored takes to be read from nothing, by the cheapest way."""
    stored = [entry for entry in entries if entry.place is not None]
    steps = needed(stored, frozenset(entry.new or "" for entry in stored))
    out: dict[str, Cold] = {}
    for ident in steps:
        way: list[tuple[str, Step]] = []
        at: str | None = ident
        while at is not None and at not in out:
            way.append((at, steps[at]))
            at = steps[at].edge.source
        for one, step in reversed(way):
            source = step.edge.source
            before = out[source] if source is not None else Cold(0, 0, 0)
            out[one] = Cold(
                before.nbytes + step.nbytes, before.requests + step.requests, before.patches + (source is not None)
            )
    return out


def _stored(entries: Iterable[Entry]) -> list[Stored]:
    """What versions take, as the catalogue tells it."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry in entries:
        if entry.place is None:
            continue
        for number, way in enumerate(entry.place.all_ways):
            for edge in way.edges:
                kind = "bases" if edge.source is None else "patches of commits" if not number else "longer patches"
                sizes[kind] += edge.nbytes
                counts[kind] += 1
            sizes["digests and the rest"] += max(0, way.nbytes - sum(edge.nbytes for edge in way.edges))
            counts["digests and the rest"] += 1
    kinds = ("bases", "patches of commits", "longer patches", "digests and the rest")
    return [Stored(kind, sizes[kind], counts[kind]) for kind in kinds]


def _listed(shelf: Shelf, notes: list[str]) -> dict[str, int] | None:
    """The bytes of every object that a transaction wrote, by key; None where they may not be listed."""
    try:
        return {one.key: one.size for one in shelf.store.list("") if key.OBJECT.fullmatch(one.key)}
    except AccessDenied as error:
        notes.append(f"garbage is not counted, since objects may not be listed: {error}")
    except WeightvcError as error:
        notes.append(f"garbage is not counted: {error}")
    return None


def _beside(named: live.Live, objects: Mapping[str, int]) -> list[Stored]:
    """What lies there beside versions: the catalogue's own objects, and what nothing names."""
    records = [n for name, n in objects.items() if name.startswith(("segment/", "page/")) and name in named]
    garbage = [n for name, n in objects.items() if name not in named]
    return [
        Stored("segments and pages", sum(records), len(records)),
        Stored("garbage", sum(garbage), len(garbage), garbage=True),
    ]
