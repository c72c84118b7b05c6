"""Liveness: which objects a root keeps alive. The collector deletes no such object, and fsck expects every one.

Nothing is reasoned about here: an object lives if it is named, by the root, by an entry of its catalogue, or by a
field of either that a later writer added and that we do not know. Packs are named by the manifest's transaction:
they go up under it, and the catalogue only counts them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weightvc.objects import catalogue, key
from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.protocol.refs import tag_page
from weightvc.protocol.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Live:
    """What is alive: keys by name, and packs by the transaction that they were written in."""

    names: frozenset[str]
    packed: frozenset[str]
    """Transactions of manifests."""
    released: frozenset[str] = frozenset()
    """Transactions that entries let go of: that their objects are dead is meant."""

    def __contains__(self, name: str) -> bool:
        """Whether the object under a key is alive. Raises Corrupt for what is no key."""
        if name in self.names:
            return True
        parsed = key.parse(name)
        return parsed.kind == "pack" and parsed.transaction in self.packed

    def __or__(self, other: "Live") -> "Live":
        """What either of two keeps alive."""
        return Live(self.names | other.names, self.packed | other.packed, self.released | other.released)


def of_root(shelf: Shelf, root: Root) -> Live:
    """Everything that a root keeps alive: itself, its pages and segments, and what their entries name.

    Raises Corrupt, NotFound or StoreError if a page or a segment cannot be read: then nothing is known to be dead.
    """
    tag_page(shelf, root)
    parts = [*(shelf.keys(ref) for ref in root.segments), catalogue.keys_of(root.tail)]
    names = frozenset([key.ROOT, *_directly(root)]).union(*(part.names for part in parts))
    released = frozenset[str]().union(*(part.released for part in parts))
    return Live(names, frozenset(transactions(names)), released)


def of_names(names: Iterable[str]) -> Live:
    """What keys keep alive."""
    held = frozenset(names)
    return Live(held, frozenset(transactions(held)))


def transactions(names: Iterable[str]) -> Iterator[str]:
    """The transactions of the manifests among some keys."""
    return (name.split("-")[1] for name in names if name.startswith("manifest/"))


def of_copy(root: Root) -> Live:
    """What a copy of a root needs to be of use: the segments and the page of tags that it names."""
    return Live(frozenset(_directly(root)), frozenset())


def _directly(root: Root) -> Iterator[str]:
    yield from (ref.key for ref in root.segments)
    yield from (name for name in (root.tags, root.collector) if name is not None)
    yield from key.found(root.extra)


def named(entry: Entry) -> list[str]:
    """The keys that an entry names."""
    return sorted(catalogue.keys_of([entry]).names)
