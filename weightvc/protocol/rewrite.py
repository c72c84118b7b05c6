"""Rewriting entries of the catalogue: how a version gets another way, and how it is let go of."""

from collections.abc import Callable, Sequence

from weightvc.errors import Refused
from weightvc.objects import catalogue, key
from weightvc.objects.catalogue import Entry, SegmentRef
from weightvc.objects.root import Root
from weightvc.protocol.shelf import Shelf

Edit = Callable[[Entry], Entry | None]


def rewritten(
    shelf: Shelf,
    root: Root,
    transaction: key.Transaction,
    edit: Edit,
    done: dict[str, tuple[SegmentRef, ...]] | None = None,
) -> tuple[tuple[Entry, ...], tuple[SegmentRef, ...]]:
    """The tail and the segments of `root` after `edit` saw every entry, oldest first: what to swap in for them.

    `edit` returns what stands in an entry's stead, or None to leave it as it is; entries are neither added nor
    removed. Segments without a changed entry keep their keys, the others are put under fresh ones of `transaction`.
    Meant for the `make` of swap.change, which asks again with each root that it has to replace. `done` then spares
    work: what became of each segment, which is taken from there while `edit` does the same to the same entries.
    Raises Corrupt or NotFound for a segment that cannot be read, and what the store raises.
    """
    segments: list[SegmentRef] = []
    for ref in root.segments:
        if done is not None and ref.key in done:
            segments += done[ref.key]
            continue
        new, changed = _edited(shelf.segment(ref), edit)
        made = put(shelf, transaction, new) if changed else [ref]
        segments += made
        if done is not None:
            done[ref.key] = tuple(made)
    tail, _ = _edited(root.tail, edit)
    return tuple(tail), tuple(segments)


def _edited(entries: Sequence[Entry], edit: Edit) -> tuple[list[Entry], bool]:
    out, changed = [], False
    for entry in entries:
        new = edit(entry)
        changed |= new is not None
        out.append(entry if new is None else new)
    return out, changed


def put(shelf: Shelf, transaction: key.Transaction, entries: list[Entry]) -> list[SegmentRef]:
    """Entries as a segment, or as several where they have outgrown one."""
    try:
        data = catalogue.encode_segment(entries)
    except Refused:
        if len(entries) == 1:
            raise
        half = len(entries) // 2
        return put(shelf, transaction, entries[:half]) + put(shelf, transaction, entries[half:])
    return [SegmentRef(shelf.put(transaction, "segment", data), len(entries))]
