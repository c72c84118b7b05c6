"""Orphans: what nothing names, and no entry of the catalogue let go of.

Writers that were killed leave them, and so would a root that has lost its history: then they are versions. Two kinds
of transactions cannot be of such a version:

- one without a manifest. It was never published: the manifest goes up before the root is swapped that names it
- one whose manifests are of versions that the catalogue leads to by other ones, as a compaction leaves them that was
  killed before it published its ways
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from weightvc.errors import Corrupt, Refused, Unsupported
from weightvc.objects import key
from weightvc.objects.catalogue import Catalogue
from weightvc.objects.root import Root
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import Listed

RECORDS: Final = ("page", "segment")
"""Kinds that every change of the root leaves behind."""
SHARE: Final = 0.3
"""Share of all bytes that may be of lost versions, as far as one can tell, before that is taken for a mistake."""


def check(
    shelf: Shelf, root: Root, free: Iterable[Listed], listed: Collection[Listed], released: frozenset[str]
) -> None:
    """Raise Refused where much is dead that may be of versions which the root has lost.

    `free` is all that nothing names, and could be condemned, in this run or in the next ones; `listed` is all that
    there is; `released` are the transactions that entries let go of. Reads nothing where little is an orphan. Raises
    StoreError.
    """
    orphans: Counter[str] = Counter()
    for one in free:
        parsed = key.parse(one.key)
        if parsed.kind not in RECORDS and parsed.transaction not in released:
            orphans[parsed.transaction] += one.size
    total = sum(one.size for one in listed if one.key.partition("/")[0] not in RECORDS)
    if orphans.total() <= SHARE * total:
        return
    manifests: dict[str, list[str]] = {}
    for one in listed:
        if one.key.startswith("manifest/") and (transaction := key.parse(one.key).transaction) in orphans:
            manifests.setdefault(transaction, []).append(one.key)
    catalogue = shelf.catalogue(root)
    left, doubtful = orphans.total(), 0
    # The largest first: few have to be read before it is known.
    for transaction, nbytes in orphans.most_common():
        if doubtful > SHARE * total or doubtful + left <= SHARE * total:
            break
        left -= nbytes
        if not all(_led_to(shelf, catalogue, name) for name in manifests.get(transaction, ())):
            doubtful += nbytes
    if doubtful > SHARE * total:
        raise Refused(
            f"{orphans.total()} of {total} bytes are named by nothing, and no retention let go of them: versions of "
            "commits that were killed, or of a history that is lost. If it is whole (`weightvc log`, `weightvc "
            "fsck`), use --force"
        )


def _led_to(shelf: Shelf, catalogue: Catalogue, name: str) -> bool:
    """Whether the catalogue leads to the version that a manifest is of."""
    try:
        ident = shelf.manifest(name).version.id
    except (Corrupt, Unsupported):
        return False
    entry = catalogue.find(ident)
    return entry is not None and entry.place is not None
