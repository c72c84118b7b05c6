"""Imports: numbered checkpoints that a trainer writes to a directory, each committed as a version, in order."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from weightvc.delta import DeltaFiles, DeltaSource, open_delta
from weightvc.errors import (
    AccessDenied,
    BadFile,
    BadName,
    BadTensor,
    BranchMoved,
    Fenced,
    Refused,
)
from weightvc.history import HEAD, version_of
from weightvc.objects.catalogue import Entry
from weightvc.objects.version import Version
from weightvc.protocol.checkout import Stat, local_errors, scan
from weightvc.protocol.refs import Refs
from weightvc.protocol.stock import digest_of
from weightvc.protocol.stored import VersionSource
from weightvc.repository import Repository
from weightvc.rounds import rounds
from weightvc.sources import open_source
from weightvc.sources.base import Source
from weightvc.sources.files import INDEX, WEIGHTS, is_url

EVERY: Final = 5.0
"""Seconds between two looks at the directory, about."""
DIGITS: Final = 18
"""Digits that a number may have: a step is below 2^63."""

_NUMBERED: Final = re.compile(r"(?P<stem>.*?)(?P<number>[0-9]+)(\.safetensors)?", re.DOTALL)
_SHARD: Final = re.compile(r"(.*-)([0-9]+)-of-([0-9]+)\.safetensors", re.DOTALL)
_UNWHOLE: Final = (BadFile, BadName, BadTensor)
"""What reading a checkpoint raises that is not whole, or never will be."""

_log = logging.getLogger("weightvc")


@dataclass(frozen=True, slots=True)
class Numbered:
    """A checkpoint in the directory, by the number in its name."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """What it is called."""
        return self.path.name


def numbered(directory: Path, only: str = "*") -> list[Numbered]:
    """What is numbered in a directory, in order, of names that match `only`. Raises BadFile, BadName."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise BadFile(
            f"{directory}: cannot be listed: {error.strerror}: name the directory that has the checkpoints"
        ) from None
    found: dict[int, Numbered] = {}
    stems: dict[str, str] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or name.startswith((".", "tmp")) or not fnmatchcase(name, only):
            continue
        if match[3] and _SHARD.fullmatch(name):
            continue
        if not match[3] and not (directory / name).is_dir():
            continue
        if len(match["number"]) > DIGITS:
            raise BadName(f"{name!r:.200}: its number has over {DIGITS} digits: rename it, or choose others (--only)")
        one = Numbered(int(match["number"]), directory / name)
        stems.setdefault(match["stem"], name)
        if len(stems) > 1 or one.number in found:
            other = found[one.number].name if one.number in found else next(iter(stems.values()))
            raise BadName(f"{directory}: {other!r} and {name!r} are both numbered: say which to take (--only)")
        found[one.number] = one
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that was committed."""

    version: Version
    number: int
    path: Path


Look = Mapping[str, Stat]
"""What a checkpoint's files look like: sizes, times, inodes."""


class Import:
    """Commits what is in a directory to a branch, again and again. Not for several threads."""

    def __init__(
        self,
        repository: Repository,
        directory: str | os.PathLike[str],
        *,
        branch: str = HEAD,
        base: str | os.PathLike[str] | None = None,
        run: str | None = None,
        dtype: Any = None,
        only: str = "*",
        exclude: Sequence[str] = (),
    ) -> None:
        """Nothing is read yet.

        Checkpoints are what is numbered in the directory: folders or safetensors files whose names end in a number,
        and match `only`; names that begin with a dot or with tmp are passed over. `base` is the checkpoint that the
        first delta was made on, for a branch that has no step yet. `run`, `dtype`, `exclude` are those of commit().
        Raises Refused for a URL.
        """
        if is_url(os.fspath(directory)):
            raise Refused(f"{os.fspath(directory)!r:.200} is a URL: only a local directory can be imported from")
        self.repository = repository
        self.directory = Path(directory)
        self._branch = branch
        self._base = None if base is None else Path(base)
        self._run = run
        self._dtype = dtype
        self._only = only
        self._exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._known: tuple[int, dict[int, Entry], int] | None = None
        self._in: dict[int, Look] = {}

    def run(self, stop: threading.Event | None = None) -> Iterator[Imported]:
        """Commit what is not in the branch yet, in order. Ends early at `stop`, between two versions.

        A number that the branch has as a step is not committed again: its weights are compared, by the tree digest.
        Raises, naming the checkpoint: BadFile, BadName, BadTensor for one that is malformed, not whole, or has wrong
        checksums; Refused for one that has other weights than the branch's version of that step, that comes before
        what the branch has, or whose base is missing; and what commit() raises. Those before it are in.
        """
        found = numbered(self.directory, self._only)
        if not found:
            raise BadFile(
                f"{self.directory}: has no checkpoint whose name ends in a number (step_000120, checkpoint-120, "
                "weight_v000120): `weightvc commit` takes one of any name"
            )
        for one in found:
            if stop is not None and stop.is_set():
                return
            look = self._look(one)
            if look is None:
                _log.warning("%s was removed before it was read", one.path)
            else:
                yield from self._take(one, look, found)

    def follow(self, *, every: float = EVERY, stop: threading.Event | None = None) -> Iterator[Imported]:
        """Commit each checkpoint that appears, once it is whole, in order and for ever; looks every `every` seconds.

        One is whole when it can be read and its files have looked the same twice: no other size, time or inode. While
        one changes, later ones wait. One that does not change and is not whole is told once (on the log "weightvc"),
        and passed over when a later one is whole; a delta waits for the one that it is made on. Checkpoints may be
        removed at any time. A store that fails is told and tried again. It ends when `stop` is set.
        Raises AccessDenied, BranchMoved, Fenced, and Refused as run() does, but for what is not whole.
        """
        stop = stop or threading.Event()
        watch = _Watch()
        final = (AccessDenied, BranchMoved, Fenced)
        return rounds(lambda: self._round(watch, stop), every=every, stop=stop, what="not imported", final=final)

    def _round(self, watch: "_Watch", stop: threading.Event) -> Iterator[Imported]:
        """Take what is whole by now."""
        if not self.directory.is_dir():
            watch.tell("", "", f"waiting for {self.directory}: there is no such directory")
            return
        found = numbered(self.directory, self._only)
        looks = {one: look for one in found if (look := self._look(one)) is not None}
        for one in watch.gone(looks):
            if one.number not in self._steps()[0]:
                watch.tell(one.name, "gone", f"{one.name} was removed before it was committed")
        still = watch.still(looks)
        for one in looks:
            look = looks[one]
            if stop.is_set():
                return
            if look in (self._in.get(one.number), watch.unwhole.get(one)):
                continue
            steps, newest = self._steps()
            if one not in still:
                if one.number in steps:
                    continue
                return
            if one.number not in steps and one.number < newest:
                watch.tell(one.name, "late", f"{one.name} is passed over: step {newest} is in already")
                continue
            try:
                yield from self._take(one, look, found)
            except _NotYet as error:
                watch.tell(one.name, "base", str(error))
            except _UNWHOLE as error:
                watch.unwhole[one] = look
                if one.number not in steps:  # one that is in may be half removed
                    text = f"{one.name} is not whole: {error}; it is passed over once a later one is"
                    watch.tell(one.name, "unwhole", text)

    # What is there

    def _look(self, one: Numbered) -> Look | None:
        """What its files look like now; None if it is gone."""
        with local_errors(one.path):
            if one.path.is_dir():
                return scan(one.path) or None
            try:
                status = one.path.stat()
            except FileNotFoundError:
                return None
            return {"": (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)}

    def _steps(self) -> tuple[dict[int, Entry], int]:
        """The newest version of each step that the branch has, and its greatest step; -1 if it has none."""
        root = self.repository.refresh()
        if self._known is None or self._known[0] != root.sequence:
            refs = Refs(self.repository._shelf, root)
            head = root.branches.get(root.default if self._branch == HEAD else self._branch)
            steps: dict[int, Entry] = {}
            for entry in refs.history(refs.entry(head)) if head is not None else ():
                step = version_of(entry).step
                if step is not None:
                    steps.setdefault(step, entry)
            self._known = root.sequence, steps, max(steps, default=-1)
        return self._known[1], self._known[2]

    # Taking one

    def _take(self, one: Numbered, look: Look, found: Sequence[Numbered]) -> Iterator[Imported]:
        """Commit a checkpoint, or see that it is in. Raises what run() says."""
        steps, newest = self._steps()
        entry = steps.get(one.number)
        if entry is None and one.number < newest:
            raise Refused(
                f"{one.path} comes before step {newest}, which the branch has already: import it into another branch "
                "(-b), or move it away"
            )
        with contextlib.ExitStack() as stack, local_errors(one.path), _named(one.path):
            delta = open_delta(one.path)
            if delta is not None:
                stack.callback(delta.close)
                base = self._base_of(one, delta, found)
                if isinstance(base, Path):
                    given = stack.enter_context(contextlib.closing(self._given(base)))
                    # All of it is decoded before anything is committed: a wrong base leaves no step behind.
                    source: Source = self._fitting(one, delta, base, given)
                    stack.callback(source.close)
                    yield self._commit(Numbered(delta.index.base, base), given)
                elif entry is not None and base.gone:
                    # What it was made on cannot be had any more to compare it.
                    self._in[one.number] = look
                    return
                else:
                    source = self._made(delta, self.repository.source(version_of(base), whole=True))
            else:
                source = self._plain(one.path)
            stack.callback(source.close)
            if self._look(one) != look:
                raise BadFile(f"{one.path}: changed while it was read")
            if entry is not None:
                _compare(one, source, version_of(entry))
            else:
                made = self._commit(one, source)
        self._in[one.number] = look
        if entry is None:
            yield made

    def _commit(self, one: Numbered, source: Source) -> Imported:
        version = self.repository.commit(
            source, branch=self._branch, step=one.number, run=self._run, message=f"imported {one.name}"
        )
        return Imported(version, one.number, one.path)

    def _plain(self, path: Path) -> Source:
        """A checkpoint that stands alone. Raises BadFile for one that lacks shards, or their index."""
        source = open_source(path, dtype=self._dtype, exclude=self._exclude if path.is_dir() else ())
        try:
            _check_shards(source, path)
        except BaseException:
            source.close()
            raise
        return source

    def _base_of(self, one: Numbered, delta: DeltaFiles, found: Sequence[Numbered]) -> Entry | Path:
        """What a delta was made on: a version of the branch; where that has no step yet, the base that was given."""
        steps, newest = self._steps()
        number = delta.index.base
        if delta.index.version != one.number:
            raise BadFile(f"{one.path}: its index says that it is version {delta.index.version}: rename it back")
        if self._dtype is not None:
            raise Refused(f"{one.path} is a delta, which has the dtypes of its base: leave the dtype out")
        here = any(other.number == number for other in found)
        if number in steps:
            if not here:
                self._check_given(one, number)
            return steps[number]
        if here:
            raise _NotYet(f"{one.path} is a delta on version {number}, which is not in yet")
        if self._base is not None and not steps:
            return self._base
        mend = "give the checkpoint that it was made on (--base)"
        if steps:
            mend = (
                f"the branch goes on from its step {newest}, whatever --base says; bring that one back, or begin a "
                "new branch with a whole checkpoint (-b, --base)"
            )
        raise Refused(
            f"{one.path} is a delta on version {number}, which is neither a step of the branch nor in "
            f"{self.directory}: {mend}"
        )

    def _given(self, base: Path) -> Source:
        """The base that was given. Raises Refused, also in place of what tells a delta that is not whole."""
        try:
            return self._plain(base)
        except _UNWHOLE as error:
            raise Refused(f"{base} (--base) cannot be taken: {error}") from None

    def _fitting(self, one: Numbered, delta: DeltaFiles, base: Path, given: Source) -> Source:
        """What the first delta makes of the base that was given. Raises Refused if they do not go together."""
        try:
            return self._made(delta, given)
        except BadFile as error:
            raise Refused(
                f"{one.path} does not fit {base} (--base): {error}. Nothing was committed: give the checkpoint that "
                "it was made on"
            ) from None

    def _check_given(self, one: Numbered, number: int) -> None:
        """Raise Refused if a base was given that is not among what the branch has; it is looked at once."""
        base = self._base
        if base is None:
            return
        steps, newest = self._steps()
        if not base.exists():
            _log.warning(
                "%s (--base) is not there, and not needed: the branch goes on from its step %d", base, newest
            )
            self._base = None
            return
        with contextlib.closing(self._given(base)) as given:
            tree = digest_of(given)
        if tree not in {version_of(entry).tree for entry in steps.values()}:
            raise Refused(
                f"{base} (--base) has other weights than version {version_of(steps[number]).short}, step {number} of "
                f"the branch, which {one.path} would go on from: leave --base out to go on from that; if that is the "
                "wrong one, import into another branch (-b), or `weightvc reset` this one to the right weights"
            )
        self._base = None

    def _made(self, delta: DeltaFiles, base: Source | VersionSource) -> Source:
        cache = self.repository._shelf.cache
        return DeltaSource(base, delta, cache.directory if cache is not None else None)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a checkpoint's files names the checkpoint."""
    try:
        yield
    except _UNWHOLE as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


class _NotYet(BadFile):
    """A delta whose base is there and not in yet."""


class _Watch:
    """What a follower has seen so far."""

    def __init__(self) -> None:
        self._looks: Mapping[Numbered, Look] = {}
        self._told: set[tuple[str, str]] = set()
        self.unwhole: dict[Numbered, Look] = {}
        """How those looked that turned out not to be whole."""

    def gone(self, looks: Mapping[Numbered, Look]) -> list[Numbered]:
        """Those that were there the last time."""
        return [one for one in self._looks if one not in looks]

    def still(self, looks: Mapping[Numbered, Look]) -> set[Numbered]:
        """Those that look as they did the last time."""
        before, self._looks = self._looks, looks
        return {one for one, look in looks.items() if before.get(one) == look}

    def tell(self, name: str, what: str, text: str) -> None:
        """Say something of a checkpoint, once."""
        if (name, what) not in self._told:
            self._told.add((name, what))
            _log.warning("%s", text)


def _check_shards(source: Source, path: Path) -> None:
    """Raise BadFile where numbered shards are missing, or the index that is written after them."""
    files = [file.path for file in source.layout.files] if source.layout is not None else []
    indexed = {file.rpartition("/")[0] for file in files if file.endswith(INDEX)}
    sets: dict[tuple[str, int], int] = {}
    for match in filter(None, map(_SHARD.fullmatch, files)):
        kind = match[1], int(match[3])
        sets[kind] = sets.get(kind, 0) + 1
    for (stem, count), have in sets.items():
        if have != count:
            raise BadFile(f"{path}: has {have} of the {count} shards {stem}…{WEIGHTS}")
        if stem.rpartition("/")[0] not in indexed:
            raise BadFile(f"{path}: has the shards {stem}…{WEIGHTS}, and no *{INDEX} beside them")


def _compare(one: Numbered, source: Source, version: Version) -> None:
    """Raise Refused for a checkpoint whose weights are not those of the version that has its number."""
    if digest_of(source) != version.tree:
        raise Refused(
            f"{one.path} has other weights than version {version.short}, which is step {one.number} of the branch: "
            "import it into another branch (-b), or `weightvc reset` the branch to the step before it"
        )
