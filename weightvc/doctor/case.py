"""What the checks share: the repository that is looked at, and what earlier ones learnt of it."""

from dataclasses import dataclass, field
from typing import Final

from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.protocol.plan import Plan
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import Got, Store

DAY: Final = 86400.0
"""Seconds after which what lies about is nobody's any more."""


@dataclass(slots=True)
class Case:
    """One examination."""

    shelf: Shelf
    nbytes: int
    """Bytes of the large object."""
    barred: str = ""
    """Why nothing is written for a try, if that is so whatever the identity may do."""
    usable: bool = True
    """Whether the store can be read at all: else nothing more is asked of it."""
    rights: set[str] = field(default_factory=set)
    """What the identity may do: read, list, write, delete."""
    ahead: float = 0.0
    """Seconds that the store's clock is ahead of this host's."""
    found: Got | None = None
    """The root as it was read."""
    root: Root | None = None
    newest: Entry | None = None
    """The head of the default branch."""
    cold: Plan | None = None
    """The way to it from nothing."""
    request: float | None = None
    """Seconds that a small read takes."""
    throughput: float | None = None
    """Bytes a second that a large read brings."""
    left: set[str] = field(default_factory=set)
    """Names of what was written and could not be deleted."""

    @property
    def store(self) -> Store:
        """Where the repository lies."""
        return self.shelf.store

    @property
    def bucket(self) -> bool:
        """Whether it is a bucket of S3."""
        return self.store.url.startswith("s3://")

    @property
    def untried(self) -> str:
        """Why nothing is written for a try; empty if it may be. What cannot be deleted again is not written."""
        if self.barred:
            return f"nothing is written for a try: {self.barred}"
        if "write" not in self.rights:
            return "not allowed to write, which is fine for a reader"
        if "delete" not in self.rights:
            return "what is written for a try could not be deleted again, which is fine for a trainer"
        return ""
