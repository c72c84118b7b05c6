"""Long histories, made by writing manifests, segments and a root directly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

import weightvc_kernels as kernels
from tests.kit.weights import Tensor, Weights
from weightvc.objects import catalogue, frame, key, manifest, version
from weightvc.objects import root as roots
from weightvc.objects.catalogue import SEGMENT, Entry, Place, SegmentRef
from weightvc.objects.manifest import Manifest, Patch, Stream
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.objects.version import Edge, Version
from weightvc.protocol import swap
from weightvc.stores.base import Store
from weightvc.stores.local import LocalStore

RECENT = 8
LANES = 512
BASES = 64
"""Of so many versions that are laid, one is a base."""


def extend(store: Store, count: int, branch: str = "main") -> list[str]:
    """Give `branch`, which has a version, `count` more with that version's place; their ids, oldest first.

    They can be listed, not loaded.
    """
    seen = swap.must_read(store)
    (last,) = [entry for entry in seen.root.tail if entry.new == seen.root.branches[branch]]
    assert last.version is not None
    assert last.place is not None
    parent: Version = last.version
    entries = []
    for i in range(count):
        made = _version(parent, parent.tree, i + 1)
        place = replace(last.place, files=(), packs=0, edges=(Edge(parent.id, 40_000, 30_000),), nbytes=45_000)
        entries.append(_entry(made, parent, place, branch, seen.root.sequence + 1 + i))
        parent = made
    _catalogue(store, seen, entries, branch)
    return [entry.new for entry in entries if entry.new]


def weights(number: int) -> Weights:
    """What the version `number` of a laid history holds: a bf16 tensor of 1 KiB, whose lowest bits count."""
    return {("", "w"): Tensor("BF16", (LANES,), _values(number).tobytes())}


def _values(number: int) -> np.ndarray:
    values = np.arange(0x3F80, 0x3F80 + LANES, dtype="<u2") & np.uint16(0xFFFE)
    bits = np.array([number >> i & 1 for i in range(32)], "<u2")
    values[:: LANES // 32] |= bits
    return values


def lay(store: Store, count: int, branch: str = "main") -> list[str]:
    """Give `branch`, whose only version is weights(0), the versions weights(1) to weights(count), as commits would
    have left them: each a manifest with a patch on the one before, or a base. Their ids, oldest first."""
    seen = swap.must_read(store)
    (last,) = seen.root.tail
    assert last.version is not None
    assert last.place is not None
    schema = Schema([TensorInfo("", "w", "BF16", (LANES,), 2 * LANES)])
    before = seen.root.sequence
    entries: list[Entry] = []

    def objects() -> Iterator[tuple[str, bytes]]:
        parent, old, first = last.version, _values(0).tobytes(), last.place
        assert parent is not None
        assert first is not None
        for number in range(1, count + 1):
            new = _values(number).tobytes()
            tree = Tree(schema, frame.digest(new))
            made = _version(parent, tree.digest, number)
            base = patch = None
            if number % BASES:
                codec, payload, was = kernels.encode_patch(old, new, 2)
                stream = Stream([1], [codec], [len(payload)], [manifest.check(was.tobytes())], inline=payload)
                patch = Patch(parent.id, stream.seal(), {}, len(was))
                edge = Edge(parent.id, len(payload), len(was))
            else:
                codec, payload = kernels.encode_whole(new, 2)
                base = Stream([1], [codec], [len(payload)], [0], inline=payload).seal()
                edge = Edge(None, len(payload), LANES)
            data = manifest.encode(
                Manifest(made, branch, first.schema, schema.digest, None, {}, tree.digests, base, patch)
            )
            name = key.Transaction(before + number - 1).key("manifest", data)
            place = Place(name, first.schema, None, (), 0, (edge,), len(data))
            entries.append(_entry(made, parent, place, branch, before + number))
            yield name, data
            parent, old = made, new

    _put_all(store, objects())
    _catalogue(store, seen, entries, branch)
    return [entry.new for entry in entries if entry.new]


def _put_all(store: Store, objects: Iterator[tuple[str, bytes]]) -> None:
    if isinstance(store, LocalStore):
        # Without a sync for each, which is most of what a write takes.
        for name, data in objects:
            path = Path(store.root, name)
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            path.write_bytes(data)
        return
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda one: store.put(*one), objects):
            pass


def _version(parent: Version, tree: str, number: int) -> Version:
    return version.make(
        tree=tree,
        layout=parent.layout,
        parents=[parent],
        step=number,
        run="history",
        message=f"step {number}",
        author=parent.author,
        metadata=None,
        elements=parent.elements,
        nbytes=parent.nbytes,
        now=parent.time + 1,
    )


def _entry(made: Version, parent: Version, place: Place, branch: str, sequence: int) -> Entry:
    return Entry(
        catalogue.COMMIT, sequence, made.time, made.author, branch, parent.id, made.id, made.message, made, place
    )


def _catalogue(store: Store, seen: swap.Seen, made: list[Entry], branch: str) -> None:
    """Swap in a root that catalogues some entries, the newest of them in its tail, as if each had come by its own."""
    root = seen.root
    entries = [*root.tail, *made]
    transaction = key.Transaction(root.sequence)
    segments: list[SegmentRef] = list(root.segments)
    old, tail = entries[:-RECENT], entries[-RECENT:]
    for at in range(0, len(old), SEGMENT):
        part = old[at : at + SEGMENT]
        data = catalogue.encode_segment(part)
        name = transaction.key("segment", data)
        store.put(name, data)
        segments.append(SegmentRef(name, len(part)))
    head = made[-1].new
    assert head is not None
    new = root.next(tail=tuple(tail), segments=tuple(segments), branches={**root.branches, branch: head})
    new = replace(new, sequence=made[-1].sequence)
    for _ in range(min(len(made), roots.RING)):
        new = replace(new, ring=new.next().ring)
    store.swap(key.ROOT, roots.encode(new), seen.etag)
