"""Recovery: what a repository does about stored bytes that are missing or bad."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightvc.errors import Corrupt, KeyNotFound, Refused
from weightvc.history import History

if TYPE_CHECKING:
    from weightvc.doctor import Finding
    from weightvc.protocol.fsck import FsckReport
    from weightvc.protocol.rebuild import Rebuilt

Place = str | os.PathLike[str]


class Recovery(History):
    """fsck and its mends; the part of a repository that works where the root cannot be read."""

    def fsck(
        self,
        *,
        read_data: float = 0,
        seed: int | None = None,
        repair: bool = False,
        sources: Iterable[Place] = (),
    ) -> "FsckReport":
        """Whether all is there that the root names, and is what its name says. Works where the root is unreadable.

        Without `read_data` that takes one listing and reads of the root, segments and pages; sizes of objects are
        compared with what the catalogue says. `read_data` is a share from 0 to 1 of objects and trees to read as
        well, chosen by `seed` (random unless given, and told in the report): objects are compared with their digests,
        manifests with the catalogue, and trees, built from every base and patch, with their digests. That needs room
        for some trees in the cache's directory, and little memory.

        `repair` puts back what is bad, and leads the catalogue around it: from the cache, from `sources` (checkouts,
        files, caches, copies of the repository), from other ways to the same weights. Nothing is made up, and what
        is put there has been compared with its digest. What cannot be mended is in the report, with what it takes.

        Raises KeyNotFound if nothing is there at all, Refused for sources that cannot be used, Conflict or Expired if
        somebody else changed the same meanwhile, and StoreError.
        """
        from weightvc.protocol import fsck
        from weightvc.protocol.repair import Repair, needed
        from weightvc.protocol.stock import Stock
        from weightvc.protocol.survey import read_root

        if isinstance(read_data, bool):
            read_data = float(read_data)
        if not 0 <= read_data <= 1:
            raise Refused(f"read_data={read_data!r}: give a share from 0 to 1")
        stock = Stock(self._shelf.cache, [Path(place) for place in sources]) if repair else None
        try:
            try:
                read_root(self._shelf)
            except (Corrupt, KeyNotFound) as error:
                return self._rootless(error)
            found, report = fsck.check(self._shelf, share=read_data, seed=seed, progress=self.progress)
            if stock is None or report.ok:
                report.needed = needed(found)
                return report
            mend = Repair(self._shelf, found, stock, self.progress)
            mend.run()
            after = fsck.report(self._shelf, mend.found, read_data, report.seed)
            after.objects_read, after.trees_built = report.objects_read, report.trees_built
            after.repaired, after.needed = mend.done, needed(mend.found)
            return after
        finally:
            if stock is not None:
                stock.close()

    def examine(self, *, read_only: bool = False, nbytes: int = 16_000_000) -> "Iterator[Finding]":
        """What may be wrong with the store, the repository and this host: one Finding after the other.

        Works without a repository, and for who may only read: what needs more rights is `skipped`. Unless
        `read_only`, small objects and one of `nbytes` bytes are written under probe/, and deleted at once. Objects
        that the repository names are fsck()'s concern. What is found is not raised: a problem has its error's class.
        """
        from weightvc.doctor import examine

        return examine(self._shelf, read_only=read_only, nbytes=nbytes)

    def _rootless(self, error: Corrupt | KeyNotFound) -> "FsckReport":
        from weightvc.protocol import fsck, rebuild

        try:
            prospect = rebuild.prospect(self._shelf)
        except KeyNotFound:
            raise error from None
        return fsck.rootless(self._shelf, error, prospect)

    def rebuild_root(self, *, adopt: bool = False) -> "Rebuilt":
        """Write the root anew where it is missing or corrupt: from its newest copy, the segments, and the manifests.

        Versions that no operation tells of, since they came after the copy or were never published, are listed; with
        `adopt` those whose parents are known are catalogued, on their branch where it is clear that they were there.
        The old root's bytes are kept under lost/. Stop collection before, and run fsck afterwards.

        Raises Refused if the root can be read, or if without `adopt` there would be nothing in it; KeyNotFound if
        there is nothing to make one of; Conflict, StateUnknown, StoreError.
        """
        from weightvc.protocol import rebuild

        made = rebuild.rebuild(self._shelf, adopt=adopt)
        with self._lock:
            self._seen, self._last = None, None
            self._heads.clear()
        return made
