"""Checkout: files are built beside the target, checked, and swapped in by a rename; nobody's work goes with the old.

A checked-out directory also has a small file, .weightvc, that says which version of which repository it holds, and
what its files looked like when they were written. What has appeared or changed since is somebody's work: it is looked
for before anything is fetched, before the swap, and once more in what was swapped out, which goes back if need be.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from weightvc.errors import AccessDenied, BadFile, Refused, Unavailable, WeightvcError
from weightvc.protocol.files import File
from weightvc.protocol.workspace import Workspace, clear
from weightvc.sources.paths import MARKER

_MARKER_LIMIT: Final = 256 << 20
_ID: Final = re.compile(r"[0-9a-f]{64}")

Stat = tuple[int, int, int, int]
"""Size in bytes, time of modification and of change (ns), inode: what differs once a file was touched."""
UNKNOWN: Final[Stat] = (-1, -1, -1, -1)
"""No file looks like this: its bytes have to be compared."""
Fill = Callable[[Path], None]


@contextlib.contextmanager
def local_errors(what: object) -> Iterator[None]:
    """Turn an OSError of a local file operation into the typed error for it, naming `what`."""
    try:
        yield
    except WeightvcError:
        raise  # a store's errors are OSErrors too
    except OSError as error:
        raise local_error(error, str(what)) from error


def local_error(error: OSError, what: str) -> Exception:
    """The typed error for a local file operation that failed."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(f"{what}: {error.strerror}: choose a place that may be written")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Unavailable(f"{what}: {error.strerror}: make space and run it again; what was there is as it was")
    if error.errno in (errno.EBUSY, errno.EXDEV):
        return Refused(f"{what} is a mount point, which cannot be swapped by a rename: name a directory inside it")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return Refused(f"{what}: {error.strerror}: choose another path")
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return Refused(f"{what}: {error.strerror}: something is in the way: move it away, or choose another path")
    return Unavailable(f"{what}: {error}")


# What a directory holds


@dataclass(slots=True)
class Marker:
    """What .weightvc in a checked-out directory says. `files` has each file as it was when it was written."""

    repository: str
    version: str
    branch: str | None
    files: Mapping[str, Stat]


def read_marker(directory: Path) -> Marker | None:
    """The marker of a directory, or None; a marker that cannot be read counts as none."""
    try:
        # Whatever lies there under this name must neither hang us nor fill the memory.
        descriptor = os.open(directory / MARKER, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MARKER_LIMIT:
                return None
            fields: Any = json.loads(file.read(_MARKER_LIMIT))
        made = Marker(fields["repository"], fields["version"], fields["branch"], _stats(fields["files"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    named = isinstance(made.repository, str) and made.repository and isinstance(made.version, str)
    on = made.branch is None or isinstance(made.branch, str)
    return made if named and on and _ID.fullmatch(made.version) else None


def _stats(fields: Any) -> dict[str, Stat]:
    found = {}
    for path, (size, modified, changed, inode) in fields.items():
        if not all(type(number) is int for number in (size, modified, changed, inode)):
            raise ValueError(path)
        found[path] = (size, modified, changed, inode)
    return found


def write_marker(path: Path, marker: Marker) -> None:
    """Write a marker as the file `path`, and sync it. Raises OSError."""
    with path.open("x") as file:
        file.write(json.dumps(asdict(marker), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def scan(directory: Path) -> dict[str, Stat]:
    """Everything below a directory that is no folder, by path; nothing if there is no such directory.

    Links are not followed. An empty folder stands there too, with a slash behind its path. Raises OSError for a
    folder that cannot be listed: what is in it is not known to be nothing.
    """
    found: dict[str, Stat] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(directory / folder) as entries:
                listed = list(entries)
        except FileNotFoundError:
            continue
        if folder and not listed:
            found[f"{folder}/"] = UNKNOWN
        for entry in listed:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    found[path] = _stat(directory / path)
    return found


def _stat(path: Path) -> Stat:
    status = os.lstat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def foreign(found: Mapping[str, Stat], marker: Marker | None) -> list[str]:
    """Of what a scan found, the files that the marker does not list: no checkout put them there."""
    known: Mapping[str, Stat] = marker.files if marker else {}
    return sorted(path for path in found if path not in known and path[-1] != "/" and not (marker and path == MARKER))


def touched(found: Mapping[str, Stat], marker: Marker) -> list[str]:
    """Files of the marker that do not look as they did when they were written; those that are gone do not count."""
    return [path for path, known in marker.files.items() if found.get(path, known) != known]


def some(paths: Sequence[str]) -> str:
    """A few paths for a message."""
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def _above(paths: Iterable[str]) -> set[str]:
    """The folders that paths lie in."""
    found: set[str] = set()
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in found:
            found.add(path)
    return found


# Swapping in


class Directory:
    """A directory to check out into: as it is found now, so that what appears in it later is not lost."""

    def __init__(self, target: Path, *, force: bool, replace: bool) -> None:
        """With `force`, foreign files are kept beside the version's, and those in the way of one of its files go.
        With `force` or `replace`, files that were changed since their checkout go.

        Raises Refused for foreign files without `force`, and for a target that cannot be swapped; BadFile for a file;
        AccessDenied, Unavailable.
        """
        self.target = target = Path(os.path.realpath(target))
        self._force = force
        self._replace = replace
        with local_errors(target):
            if target.parent.is_dir():
                clear(target)
            self._check()
            self.found = scan(target)
            self.marker = read_marker(target)
        self._foreign = foreign(self.found, self.marker)
        if self._foreign and not force:
            raise Refused(
                f"{target} has files that no checkout put there: {some(self._foreign)}; choose another directory, or "
                "--force to keep them beside the version's"
            )

    def _check(self) -> None:
        target = self.target
        if os.path.lexists(target) and not target.is_dir():
            raise BadFile(f"{target} is a file, not a directory: name a directory, or a path ending in .safetensors")
        if target.parent == target or os.path.ismount(target):
            raise Refused(
                f"{target} is a mount point, which cannot be swapped by a rename: name a directory inside it"
            )
        if (target / MARKER).is_dir():
            raise Refused(f"{target} has a repository in it ({MARKER}): choose another directory, or one inside it")
        try:
            here = Path(os.getcwd())
        except OSError:
            return
        if here == target or target in here.parents:
            # The swap would leave it, and the shell around it, in a directory that is deleted.
            raise Refused(
                f"the working directory lies in {target}, which a checkout puts a new directory in place of: go out "
                "of it first (cd ..)"
            )

    def put(self, plan: Sequence[File], fill: Fill, marker: Marker) -> None:
        """Have fill() write the files of `plan` into an empty directory, and put that in the target's place.

        The marker's `files` are filled in. Raises Refused, AccessDenied, Unavailable, and what fill() raises; then
        the target is as it was.
        """
        self._check_ways({file.path for file in plan})
        with local_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            with Workspace(self.target) as work:
                fill(work.new)
                carried = self._carry(work.new)
                self._keep_modes(work.new, plan)
                marker.files = {file.path: _stat(work.new / file.path) for file in plan}
                write_marker(work.new / MARKER, marker)
                if self.target.exists():
                    os.chmod(work.new, self.target.stat().st_mode & 0o7777)
                for parent, _, _ in os.walk(work.new):
                    sync_directory(Path(parent))
                self._swap(work, carried)

    def _check_ways(self, coming: set[str]) -> None:
        """Refuse where a foreign file and the version's need one path to be a file and a folder."""
        folders = _above(coming)
        for path in self._foreign:
            if path in folders or not coming.isdisjoint(_above([path])):
                raise Refused(f"{self.target / path} is in the way of the version's files: move it away")

    def _carry(self, new: Path) -> dict[str, tuple[bool, Stat]]:
        """Give foreign files a second name in the new directory: until the swap they stand in both. Empty folders are
        made anew. Returns whether each file was linked (or else copied), and how it then looks in the old one."""
        carried = {}
        for path in self._foreign:
            if path != MARKER and not os.path.lexists(new / path):
                self._make_folder(new, path.rpartition("/")[0])
                carried[path] = _carried(self.target / path, new / path)
        left = _above(self.marker.files) if self.marker else set()
        for path in self.found:
            if path[-1] == "/" and path[:-1] not in left:
                # Something of the version's may be in the way: there is nothing in the folder that could be lost.
                with contextlib.suppress(FileExistsError, NotADirectoryError):
                    self._make_folder(new, path[:-1])
        return carried

    def _make_folder(self, new: Path, path: str) -> None:
        if path and not (new / path).is_dir():
            self._make_folder(new, path.rpartition("/")[0])
            (new / path).mkdir()
            with contextlib.suppress(FileNotFoundError):
                os.chmod(new / path, os.stat(self.target / path).st_mode & 0o7777)

    def _keep_modes(self, new: Path, plan: Sequence[File]) -> None:
        for file in plan:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                old = os.stat(self.target / file.path)
                if stat.S_ISREG(old.st_mode):
                    os.chmod(new / file.path, old.st_mode & 0o7777)

    def _swap(self, work: "Workspace", carried: Mapping[str, tuple[bool, Stat]]) -> None:
        target, new = self.target, work.new
        self._look(target, new, carried)
        if _rename_free(new, target):
            pass
        elif _rename_exchange(new, target):
            # What is looked through now is out of everybody's way: nothing more appears under the target's name.
            try:
                self._look(new, target, carried)
            except BaseException as error:
                if not _rename_exchange(new, target):
                    raise self._stuck(work) from error
                raise
        else:
            # No exchange on this file system: for an instant there is no target, never a mixed one. Killed in it, the
            # next checkout puts the old one back.
            os.rename(target, work.old)
            try:
                self._look(work.old, new, carried)
                os.rename(new, target)
            except BaseException:
                if not os.path.lexists(target):
                    os.rename(work.old, target)
                raise
        sync_directory(target.parent)

    def _look(self, going: Path, coming: Path, carried: Mapping[str, tuple[bool, Stat]]) -> None:
        """Raise Refused if something in `going` would be lost that was not there, or was not like this, before."""
        # Another checkout may have been first: what it put there is nobody's work.
        marker = read_marker(going)
        known: Mapping[str, Stat] = marker.files if marker else {}
        left = _above(known)
        lost = []
        for path, now in scan(going).items():
            before = self.found.get(path)
            if path == MARKER:
                continue
            if path[-1] == "/":
                kept = before is not None or path[:-1] in left or (coming / path).is_dir()
            elif path in carried:
                linked, then = carried[path]
                kept = now[3] == then[3] if linked else now == then
            elif path in known:
                kept = self._force or self._replace or now in (before, known[path])
            else:
                kept = self._force and before is not None
            if not kept:
                lost.append(path)
        if lost:
            raise Refused(
                f"{self.target} has files that appeared or changed while the checkout ran: {some(sorted(lost))}; "
                "they are as they were: run it again"
            )

    def _stuck(self, work: "Workspace") -> Unavailable:
        # Under another name, so that no checkout clears it away.
        kept = work.path.with_name(work.path.name.removeprefix("."))
        os.rename(work.path, kept)
        return Unavailable(
            f"{self.target} has the new version, but files appeared or changed meanwhile in the old one, which could "
            f"not be put back: it lies in {kept / 'new'}: take them from there"
        )


class OneFile:
    """A single file to check out to."""

    def __init__(self, target: Path, *, replace: bool) -> None:
        """Raises Refused for a file that is there, without `replace`; BadFile for what is no file."""
        self.target = target = Path(os.path.realpath(target))
        self._replace = replace
        with local_errors(target):
            if os.path.lexists(target):
                if not target.is_file():
                    raise BadFile(f"{target} is no file: choose another name than one ending in .safetensors")
                if not replace:
                    raise self._exists()

    def _exists(self) -> Refused:
        return Refused(f"{self.target} exists: choose another name, or --force to replace it")

    def put(self, file: File, fill: Fill) -> None:
        """Have fill() write `file` into an empty directory, and put it in the target's place by a rename."""
        target = self.target
        with local_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            clear(target)
            with Workspace(target) as work:
                fill(work.new)
                new = work.new / file.path
                if self._replace:
                    with contextlib.suppress(FileNotFoundError):
                        os.chmod(new, target.stat().st_mode & 0o7777)
                    os.replace(new, target)
                else:
                    self._create(new)
                sync_directory(target.parent)

    def _create(self, new: Path) -> None:
        try:
            # Not a rename: that would replace a file that has appeared meanwhile.
            os.link(new, self.target)
        except FileExistsError:
            raise self._exists() from None
        except OSError:
            # A file system without hard links.
            if os.path.lexists(self.target):
                raise self._exists() from None
            os.rename(new, self.target)


def _carried(old: Path, new: Path) -> tuple[bool, Stat]:
    try:
        os.link(old, new, follow_symlinks=False)
        return True, _stat(new)
    except OSError:
        before = _stat(old)
        shutil.copy2(old, new, follow_symlinks=False)
        return False, before


def _rename_free(new: Path, target: Path) -> bool:
    """Rename a directory to a name that is free, or that of an empty directory. False, and nothing is done, if it is
    not, or no longer: another checkout may be first at any moment."""
    if os.path.lexists(target) and any(target.iterdir()):
        return False
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _rename_exchange(one: Path, other: Path) -> bool:
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
