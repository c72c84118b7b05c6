"""Long histories, made by writing segments and a root directly."""

from __future__ import annotations

import time

from weightvc.objects import catalogue, key, version
from weightvc.objects import root as roots
from weightvc.objects.catalogue import SEGMENT, Entry, Place, SegmentRef
from weightvc.objects.version import Edge, Version
from weightvc.protocol import swap
from weightvc.stores.base import Store

RECENT = 8


def extend(store: Store, count: int, branch: str = "main") -> list[str]:
    """Give `branch`, which has a version, `count` more with that version's place; their ids, oldest first.

    They can be listed, not loaded.
    """
    seen = swap.must_read(store)
    root = seen.root
    (last,) = [entry for entry in root.tail if entry.new == root.branches[branch]]
    assert last.version is not None
    assert last.place is not None
    entries: list[Entry] = list(root.tail)
    parent: Version = last.version
    now = time.time_ns() // 1000
    for i in range(count):
        made = version.make(
            tree=parent.tree,
            layout=parent.layout,
            parents=[parent],
            step=i + 1,
            run="history",
            message=f"step {i + 1}",
            author=parent.author,
            metadata=None,
            elements=parent.elements,
            nbytes=parent.nbytes,
            now=now + i,
        )
        place = Place(
            manifest=last.place.manifest,
            schema=last.place.schema,
            layout=last.place.layout,
            files=(),
            packs=0,
            edges=(Edge(parent.id, 40_000, 30_000),),
            nbytes=45_000,
        )
        entries.append(
            Entry(
                catalogue.COMMIT, root.sequence + 1 + i, made.time, made.author, branch, parent.id, made.id,
                made.message, made, place,
            )
        )  # fmt: skip
        parent = made
    transaction = key.Transaction(root.sequence)
    segments: list[SegmentRef] = list(root.segments)
    old, tail = entries[:-RECENT], entries[-RECENT:]
    for at in range(0, len(old), SEGMENT):
        part = old[at : at + SEGMENT]
        data = catalogue.encode_segment(part)
        name = transaction.key("segment", data)
        store.put(name, data)
        segments.append(SegmentRef(name, len(part)))
    new = root.next(tail=tuple(tail), segments=tuple(segments), branches={**root.branches, branch: parent.id})
    store.swap(key.ROOT, roots.encode(new), seen.etag)
    return [entry.new for entry in entries[-count:] if entry.new]
