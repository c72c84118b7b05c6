"""Targets of a client: what is kept at a version. Directories, slots of one, and live tensors."""

import contextlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weightvc.errors import Conflict, Corrupt, Refused
from weightvc.history import version_of
from weightvc.objects.catalogue import Entry
from weightvc.objects.version import Version
from weightvc.protocol.checkout import local_errors, read_marker, some, sync_directory
from weightvc.protocol.meter import Meter
from weightvc.protocol.refs import Refs
from weightvc.protocol.workspace import clear, discard, recover
from weightvc.sources.paths import MARKER
from weightvc.stores.base import MISSING
from weightvc.tensor_groups import TensorGroups

if TYPE_CHECKING:
    from weightvc import live
    from weightvc.repository import Repository

__all__ = ["Directory", "Slots", "Staged", "Target", "Tensors"]

_SLOT: Final = re.compile(r"[0-9a-f]{12}")
_WORKSPACE: Final = re.compile(r"\.([0-9a-f]{12})\.weightvc-.*")
CURRENT: Final = "current"
"""Name of the link to the slot in use."""
TOLD: Final = ".told"
"""Name of the file with the id of the version that was told last."""


@dataclass(slots=True)
class Staged:
    """What is ready to be written: `activate` does, from the version `start` (an id, or None)."""

    start: str | None
    activate: Callable[[], None]
    changed: list[str] = field(default_factory=list)
    path: Path | None = None


class Target(ABC):
    """Something that is kept at a version."""

    @property
    @abstractmethod
    def holds(self) -> str | None:
        """The id of the version that it holds, as far as that is known."""

    @abstractmethod
    def stage(self, repository: "Repository", refs: Refs, entry: Entry, branch: str | None) -> Staged:
        """Prepare the move to a version, and write nothing that is in use."""

    @abstractmethod
    def verify(self, repository: "Repository", ident: str) -> list[str]:
        """Read all of it; what differs from version `ident`, by name."""


class Directory(Target):
    """A checked-out directory that is replaced as a whole, by one rename.

    A server that opens its files one after the other may read some of either version: use Slots for that.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))

    @property
    def holds(self) -> str | None:
        """What its marker says."""
        recover(self.path)
        marker = read_marker(self.path) if self.path.is_dir() else None
        return marker.version if marker is not None else None

    def stage(self, repository: "Repository", refs: Refs, entry: Entry, branch: str | None) -> Staged:
        """Build the version beside it, under a hidden name."""
        made, start = version_of(entry), self.holds
        beside = self.path.with_name(f".{self.path.name}.next")
        _build(repository, refs, entry, branch, beside, [self.path])

        def activate() -> None:
            from weightvc import worktree

            _check_staged(beside, made)
            worktree.replace(self.path, beside)

        return Staged(start, activate, path=self.path)

    def verify(self, repository: "Repository", ident: str) -> list[str]:
        """Read all of it; tensors and files that differ."""
        return _verify(repository, self.path, ident)


class Slots(Target):
    """A directory with a checked-out directory a version: DIR/ID, and DIR/current, a link to the one in use.

    A server is told a path that never changes its meaning, DIR/ID. The slot in use and the one before it stay.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))

    @property
    def holds(self) -> str | None:
        """What the marker of the slot in use says."""
        slot = self._slot()
        marker = read_marker(slot) if slot is not None and slot.is_dir() else None
        return marker.version if marker is not None else None

    def _slot(self) -> Path | None:
        link = self.path / CURRENT
        if not link.is_symlink():
            return None
        # However it is spelled: somebody may have turned it by hand.
        slot = Path(os.path.realpath(link))
        return slot if slot.parent == self.path and _SLOT.fullmatch(slot.name) else None

    @property
    def told(self) -> str | None:
        """The id that tell() was last given, by any process."""
        try:
            return (self.path / TOLD).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def tell(self, ident: str) -> None:
        """Remember that who has to know of version `ident` was told, over a kill and a power cut."""
        new = self.path / f"{TOLD}.{os.getpid()}-{threading.get_ident()}"
        with local_errors(self.path / TOLD):
            with new.open("w") as file:
                file.write(f"{ident}\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, self.path / TOLD)
            sync_directory(self.path)

    def stage(self, repository: "Repository", refs: Refs, entry: Entry, branch: str | None) -> Staged:
        """Build the version's slot from patches and a slot that is there, the one in use or another that is nearer.

        Raises Refused, and writes nothing, where the directory has no slots yet and is a checkout or has other files.
        """
        link = self.path / CURRENT
        if os.path.lexists(link) and not link.is_symlink():
            raise Refused(f"{link} is no link, and stands where the link to the slot in use belongs: move it away")
        made, used = version_of(entry), self._slot()
        slot = self.path / made.short
        start = self.holds
        with local_errors(self.path):
            if used is None:
                self._check_free()
            self.path.mkdir(parents=True, exist_ok=True)
            if slot != used:
                self._clear({slot, used})
        # One that is still there is read, and not made again. A damaged one is, also if it is in use: who reads it
        # then gets what its path stands for. What an engine left in it, an index of the weights perhaps, stays. Its
        # name makes it ours, also where half of it is gone, and with that what it says of itself.
        if not _is(repository, refs, slot, made):
            starts = [used] if used is not None else []
            _build(repository, refs, entry, branch, slot, starts + self._others({slot, used}), force=True)
            if slot == used:
                start = self.holds

        def activate() -> None:
            _check_staged(slot, made)
            new = self.path / f".{CURRENT}.{os.getpid()}-{threading.get_ident()}"
            with local_errors(link):
                with contextlib.suppress(FileNotFoundError):
                    new.unlink()
                os.symlink(made.short, new)
                os.rename(new, link)
                sync_directory(self.path)

        return Staged(start, activate, path=slot)

    def _check_free(self) -> None:
        """Raise Refused for a directory that is somebody's, and would become a mix of theirs and slots."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return
        if MARKER in names:
            raise Refused(
                f"{self.path} is a checkout or has a repository in it: name another directory, which gets one "
                "directory a version, or bring this one forward as a whole (`weightvc pull`)"
            )
        # A new volume has its lost+found, and a run that was killed leaves slots and hidden names.
        theirs = [n for n in names if not (n.startswith(".") or _SLOT.fullmatch(n) or n in (CURRENT, "lost+found"))]
        if theirs:
            raise Refused(f"{self.path} has files of its own: {some(theirs)}; name a new or an empty directory")

    def _clear(self, keep: set[Path | None]) -> None:
        """Remove slots but those to keep and the newest other one: a server may still be reading that; and what was
        left of those that killed processes were building, each as large as a slot."""
        for found in {m[1] for m in map(_WORKSPACE.fullmatch, os.listdir(self.path)) if m}:
            clear(self.path / found)
        for slot in sorted(self._others(keep), key=lambda p: p.stat().st_mtime)[:-1]:
            with contextlib.suppress(OSError):
                discard(slot)

    def _others(self, but: set[Path | None]) -> list[Path]:
        """Slots but those."""
        return [p for p in self.path.iterdir() if _SLOT.fullmatch(p.name) and p not in but and read_marker(p)]

    def verify(self, repository: "Repository", ident: str) -> list[str]:
        """Read all of the slot in use; tensors and files that differ."""
        slot = self._slot()
        assert slot is not None
        return _verify(repository, slot, ident)


def _build(
    repository: "Repository",
    refs: Refs,
    entry: Entry,
    branch: str | None,
    place: Path,
    starts: Sequence[Path],
    *,
    force: bool = False,
) -> None:
    from weightvc import worktree

    worktree.checkout(
        repository._shelf,
        refs,
        entry,
        place,
        branch=branch,
        force=force,
        replace=True,
        progress=repository.progress,
        starts=starts,
    )


def _is(repository: "Repository", refs: Refs, path: Path, made: Version) -> bool:
    """Whether a directory holds a version, every byte of it, whatever else lies there."""
    from weightvc import worktree

    marker = read_marker(path) if path.is_dir() else None
    if marker is None or marker.version != made.id:
        return False
    with contextlib.suppress(Corrupt, *MISSING):  # building it tries other ways
        found = worktree.verify(repository._shelf, refs, path, made.id)
        return not (found.tensors or found.files)
    return False


def _check_staged(path: Path, made: Version) -> None:
    """Raise Conflict unless a directory still holds what was staged there: another version may have been since."""
    marker = read_marker(path) if path.is_dir() else None
    if marker is None or marker.version != made.id:
        raise Conflict(f"{path} does not hold version {made.short} any more, which was staged there: stage it again")


def _verify(repository: "Repository", path: Path, ident: str) -> list[str]:
    found = repository.verify(path, ident)
    return [*found.tensors, *found.files, *found.foreign]


class Tensors(Target):
    """Live tensors, written in place: torch tensors (on any device) or numpy arrays by name, or a module's.

    `names` says where a version's tensor goes: a mapping or function from its name to the target's name; or to
    (name, row), where it is rows of a larger tensor, as q, k and v are in a fused one; or to None, where this host
    does not want it. What a mapping does not have keeps its name. Every tensor of the target has to be covered,
    unless it shares its memory with one that is. Dtypes and shapes must be the version's, and the memory contiguous.

    `groups` says which of a version's tensors move together (see TensorGroups): they are written one after the other,
    and where one changes, all stand in `changed`.

    A write is absolute: activate() may be run again after it was interrupted, and the next stage() does so.
    """

    UNDO: Final = 4
    """Updates that can be taken back without fetching anything, at most,"""
    UNDO_SHARE: Final = 0.5
    """and the share of the tensors' own bytes that they may take, in main memory."""

    def __init__(
        self,
        tensors: Any,
        *,
        names: "Mapping[str, Any] | Callable[[str], Any] | None" = None,
        component: str = "",
        groups: "Mapping[str, Hashable] | Callable[[str], Hashable] | None" = None,
    ) -> None:
        from weightvc.live import Live

        self._live = Live(tensors, names, component)
        self._component = component
        self._groups = TensorGroups(groups)
        self._holds: str | None = None
        self._tree: Any = None
        self._begun: Any = None
        self._writes = 0
        self._undo: list[Any] = []

    @property
    def holds(self) -> str | None:
        """The version that it holds; None before the first, and after a write that was interrupted."""
        return self._holds

    def forget(self) -> None:
        """Somebody else wrote to the tensors: compare all of them at the next pull."""
        self._holds, self._tree, self._begun = None, None, None
        self._writes += 1
        self._undo.clear()

    def stage(self, repository: "Repository", refs: Refs, entry: Entry, branch: str | None) -> Staged:
        """Find every write that the version needs, verified, and what it overwrites."""
        from weightvc import live

        made = version_of(entry)
        if self._begun is not None:
            # Half of an update was written. Its writes are absolute, so all of it can be written now.
            self._begun()
        if self._tree is not None and self._tree.digest == made.tree:
            writes: list[live.Write] = []
            tree = self._tree
        else:
            found = self._taken_back(made.tree, repository._shelf.meter)
            if found is None:
                found = live.find(repository._shelf, refs, entry, self._live, self._tree, self._back())
            writes, tree = found
        # What belongs together is written together, and told whole.
        names = self._groups.whole(
            {write.name for write in writes},
            [one.name for one in tree.schema.tensors if one.component == self._component],
        )
        place = {name: i for i, name in enumerate(names)}
        writes = sorted(writes, key=lambda write: place[write.name])
        ready = live.Writes(writes)
        old_tree, start, since = self._tree, self._holds, self._writes

        def activate() -> None:
            # The writes are what differed then: nobody may have written since, but for a part of these.
            if self._begun is not activate and self._writes != since:
                raise Conflict(
                    f"the tensors were written to, or forgotten, since {made.short} was staged: stage it again"
                )
            self._live.check_place()
            self._holds, self._begun = None, activate
            self._writes += bool(writes)
            ready.apply()
            if old_tree is not None and writes:
                self._undo.append((old_tree, [replace(write, new=None) for write in writes]))
                self._forget_oldest()
            elif old_tree is None:
                self._undo.clear()
            self._tree, self._holds, self._begun = tree, made.id, None

        return Staged(start, activate, changed=names)

    def _forget_oldest(self) -> None:
        left = self.UNDO_SHARE * self._live.nbytes
        for count, (_, writes) in enumerate(reversed(self._undo)):
            left -= sum(write.kept for write in writes)
            if left < 0 or count == self.UNDO:
                del self._undo[: len(self._undo) - count]
                break

    def _taken_back(self, digest: str, meter: Meter) -> Any:
        """The writes that lead back to a tree, and the tree; None if it is not so near, or the way is not clear."""
        from weightvc import live

        for back in reversed(self._back()):
            if back[0].digest == digest:
                writes = live.taken_back(self._live, self._tree, back, meter)
                return None if writes is None else (writes, back[0])
        return None

    def _back(self) -> "list[live.Back]":
        """The trees that can be gone back to, oldest first."""
        return [(tree, [w for _, w in reversed(self._undo[at:])]) for at, (tree, _) in enumerate(self._undo)]

    def verify(self, repository: "Repository", ident: str) -> list[str]:
        """Hash all of them; the names, as the version has them, of those that differ. The next pull mends them."""
        from weightvc import live

        if self._tree is None:
            raise Refused("the tensors hold no version yet: pull one")
        wrong = live.differing(self._live, self._tree)
        if wrong:
            self.forget()
        return wrong
