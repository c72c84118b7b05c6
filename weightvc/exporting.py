"""Exports: a branch's versions as directories of slime's layout, for engines with /pull_weights."""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightvc.errors import (
    AccessDenied,
    BadName,
    Refused,
)
from weightvc.history import HEAD, Ref, said, version_of
from weightvc.objects import slime
from weightvc.objects.catalogue import Entry
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.version import Version
from weightvc.pool import Pool
from weightvc.protocol import parallel
from weightvc.protocol.checkout import local_errors, read_marker, sync_directory
from weightvc.protocol.files import File
from weightvc.protocol.refs import Refs
from weightvc.protocol.stored import VersionSource, parts
from weightvc.protocol.workspace import Workspace, clear
from weightvc.repository import Repository
from weightvc.rounds import rounds
from weightvc.sources.files import is_url
from weightvc.sources.header import build_header, order, shown, strict_json

if TYPE_CHECKING:
    from weightvc.cache import TreeWriter

EVERY: Final = 1.0
"""Seconds between two looks at the branch, about."""
SHARD: Final = 256 << 20
"""Bytes of deltas from which a further file is begun: they are held in memory until then."""
ONE_FILE: Final = "model.safetensors"

_log = logging.getLogger("weightvc")


@dataclass(frozen=True, slots=True)
class Exported:
    """A directory that was written."""

    version: Version
    number: int
    path: Path
    full: bool
    why: str | None
    """Why it was written whole; None for a delta."""
    tensors: int
    """Tensors in it: those that changed, or all."""
    nbytes: int
    """Bytes of its files."""


class Export:
    """Writes what a branch gets to a directory, again and again. Not for several threads."""

    def __init__(
        self,
        repository: Repository,
        directory: str | os.PathLike[str],
        ref: Ref = HEAD,
        *,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        full_every: int | None = None,
        last: int | None = None,
    ) -> None:
        """Nothing is read yet. A version's number is its generation + 1, so that the first one is weight_v000001.

        `encoding` and `checksum` are of slime.ENCODINGS and CHECKSUMS. Numbers that `full_every` divides are written
        whole as well as those that have to be. A directory that has none yet begins with the `last` N versions.
        Raises Refused.
        """
        for name, value, known in (
            ("encoding", encoding, slime.ENCODINGS),
            ("checksum", checksum, slime.CHECKSUMS),
        ):
            if value not in known:
                raise Refused(f"{name}={value!r:.100}: give one of {', '.join(known)}")
        for name, count in (("full_every", full_every), ("last", last)):
            if count is not None and (type(count) is not int or count < 1):
                raise Refused(f"{name}={count!r:.100}: give a whole number from 1, or leave it out")
        if is_url(os.fspath(directory)):
            raise Refused(f"{os.fspath(directory)!r:.200} is a URL: only to a local directory can be exported")
        self.repository = repository
        self.directory = Path(directory)
        self._ref = ref
        self._encoding = encoding
        self._checksum = checksum
        self._full_every = full_every
        self._last = last
        self._told: set[str] = set()

    def run(self, stop: threading.Event | None = None) -> Iterator[Exported]:
        """Write the versions that are not there yet, the oldest first, each by one rename. Ends early at `stop`.

        What is there is not read or written again: it goes on behind the newest one, and older ones may be removed.
        Raises Refused for a version that the layout cannot say, and where the newest one that is there is not in the
        history of the ref; RefNotFound, Expired, Corrupt, StoreError.
        """
        refs = self.repository._refs()
        yield from self._run(refs, refs.resolve(self._ref).entry, stop)

    def follow(self, *, every: float = EVERY, stop: threading.Event | None = None) -> Iterator[Exported]:
        """run() whenever the branch moves, for ever. It is looked at every `every` seconds, give or take a quarter.

        What fails is logged (as "weightvc") and tried again, up to half a minute later. It ends when `stop` is set.
        Raises AccessDenied, Refused; of those BadName for what is no branch.
        """
        stop = stop or threading.Event()
        exported: int | None = None

        def news() -> Iterator[Exported]:
            nonlocal exported
            root = self.repository.refresh()
            if root.sequence == exported:
                return
            refs = Refs(self.repository._shelf, root)
            found = refs.resolve(self._ref)
            if found.branch is None:
                raise BadName(f"only a branch can be followed: {self._ref!r:.200} stays what it is")
            yield from self._run(refs, found.entry, stop)
            exported = root.sequence

        return rounds(news, every=every, stop=stop, what="not exported", final=(AccessDenied,))

    def _run(self, refs: Refs, head: Entry, stop: threading.Event | None) -> Iterator[Exported]:
        there = self._newest()
        before: Entry | None = None
        chain: list[Entry] = []
        for entry in refs.history(head):
            if there is not None and _number(entry) <= there[0]:
                before = entry
                break
            chain.append(entry)
        if there is not None and (before is None or (_number(before), before.new) != there):
            raise Refused(
                f"{self.directory / slime.directory(there[0])} is version {there[1][:12]}, which the history of "
                f"{said(self._ref)} does not have: engines cannot be led back. Take a new directory, or bring the "
                "branch back there and `weightvc revert`"
            )
        if there is None and self._last is not None:
            del chain[self._last :]
        for entry in reversed(chain):
            if stop is not None and stop.is_set():
                return
            # One that retention let go of is passed over; what follows it is written whole.
            if not entry.gone or entry is head:
                yield self._write(refs, before, entry)
                before = entry

    def _newest(self) -> tuple[int, str] | None:
        """The number of the newest version that is there, and its id. Raises Refused for one that is not ours."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{self.directory}: {error.strerror}: name a directory") from None
        number = max((n for n in map(slime.number_of, names) if n is not None), default=None)
        if number is None:
            return None
        path = self.directory / slime.directory(number)
        clear(path)  # what a process left that was killed right behind its rename
        marker = read_marker(path)
        ident = marker.version if marker is not None else _made_of(path)
        if ident is None:
            raise Refused(f"{path} was not written by `weightvc export`: choose another directory")
        return number, ident

    def _write(self, refs: Refs, before: Entry | None, entry: Entry) -> Exported:
        """Write a version; `before` is the one that engines have, if there is one."""
        path = self.directory / slime.directory(_number(entry))
        with contextlib.ExitStack() as stack:
            new = stack.enter_context(self._opened(refs, entry))
            self._check(new, entry)
            why = self._due(before, entry)
            if before is not None and why is None:
                why = "the version before it is not there any more"
                if not before.gone and _follows(before, entry):
                    old = stack.enter_context(self._opened(refs, before))
                    why = self._changed(old, new)
                    if why is None:
                        return self._write_delta(path, entry, old, new)
                self._tell(path, why)
        version = self.repository.checkout(version_of(entry), path)
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        return Exported(version, _number(entry), path, True, why, len(new.tensors), sum(sizes))

    def _opened(self, refs: Refs, entry: Entry) -> VersionSource:
        return VersionSource(self.repository._shelf, refs, entry, whole=True)

    def _due(self, before: Entry | None, entry: Entry) -> str | None:
        """Why a version is to be whole, whatever changed."""
        if before is None:
            return "it is the first one here"
        if self._full_every is not None and _number(entry) % self._full_every == 0:
            return f"full_every is {self._full_every}"
        return None

    def _changed(self, old: VersionSource, new: VersionSource) -> str | None:
        """What a delta cannot say of two versions, the first thing; None if it can say all."""
        if old.tensors != new.tensors:
            return _other_tensor(old.tensors, new.tensors)
        if old.manifest.version.layout == new.manifest.version.layout:
            return None
        from weightvc import worktree

        # Engines patch the files that they have: what is in them beside the tensors has to be the same.
        was, now = (worktree.plan(self.repository._shelf, source) for source in (old, new))
        return _other_file(was, now)

    def _tell(self, path: Path, why: str) -> None:
        """Say why a version is whole that might have been a delta: once a reason."""
        if why not in self._told:
            self._told.add(why)
            _log.warning("%s is written whole, as others may be for the same reason: %s", path.name, why)

    def _check(self, source: VersionSource, entry: Entry) -> None:
        """Raise Refused for a version that engines would not read as it is."""
        version = version_of(entry)
        what = f"version {version.short} cannot be exported: "
        from weightvc import worktree

        files = worktree.plan(self.repository._shelf, source)
        weights = [file.path for file in files if file.places or file.path.endswith(".safetensors")]
        if nested := next((path for path in weights if "/" in path), None):
            raise Refused(
                f"{what}it has weights in a folder ({nested!r}), and engines read one directory: commit that alone"
            )
        index = next((file for file in files if file.path == slime.INDEX), None)
        if index is None and weights != [ONE_FILE]:
            raise Refused(
                f"{what}its weights are in {', '.join(map(repr, weights[:3]))}, and engines take {ONE_FILE} alone, "
                f"or shards with {slime.INDEX}: commit it so"
            )
        if index is not None and slime.is_delta(strict_json(bytes(index.content), repr(slime.INDEX))):
            raise Refused(f"{what}its {slime.INDEX} is that of a delta: commit the checkpoint, or `weightvc import`")
        if self._encoding == "overwrite":
            for tensor in source.tensors:
                if tensor.nbytes > slime.OVERWRITE_LIMIT:
                    raise Refused(
                        f"{what}{shown(tensor.name)} is over 4 GiB, beyond what overwrite can say: take xor"
                    )

    def _write_delta(self, path: Path, entry: Entry, old: VersionSource, new: VersionSource) -> Exported:
        with local_errors(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            clear(path)
            with Workspace(path) as work:
                files = self._deltas(work.new, old, new)
                index = slime.Delta(
                    _number(entry), _number(entry) - 1, self._encoding, self._checksum, files, made_of=entry.new
                )
                _write(work.new / slime.INDEX, index.to_json())
                sync_directory(work.new)
                nbytes = sum(file.stat().st_size for file in work.new.iterdir())
                os.rename(work.new, path)
                sync_directory(self.directory)
        count = sum(map(len, files.values()))
        return Exported(version_of(entry), index.version, path, False, None, count, nbytes)

    def _deltas(self, place: Path, old: VersionSource, new: VersionSource) -> dict[str, frozenset[str]]:
        """Write what changed as shards; the tensors of each."""
        schema, shards = new.tree.schema, _Shards(place)
        changed = set(new.tree.differing(old.tree))
        encoder: slime.Encoder | None = None
        with self._kept(new) as keep:
            for i, start, was, now in _pieces(old, new, changed, keep):
                tensor = schema.tensors[i]
                if encoder is None:
                    encoder = slime.Encoder(self._encoding, self._checksum, tensor.nbytes)
                encoder.add(was, now)
                if start + len(now) == tensor.nbytes:
                    shards.add(tensor.name, *encoder.finish())
                    encoder = None
        return shards.finish()

    @contextlib.contextmanager
    def _kept(self, source: VersionSource) -> "Iterator[TreeWriter | None]":
        """What keeps a version in the cache, since the next one is a patch on it; None where it is there."""
        cache, digest = self.repository._shelf.cache, source.tree.digest
        if cache is None or cache.has_tree(digest) or (keep := cache.write_tree(source.tree.schema, digest)) is None:
            yield None
            return
        try:
            yield keep
            keep.commit(digest)
        finally:
            keep.drop()


def _pieces(
    old: VersionSource, new: VersionSource, changed: set[int], keep: "TreeWriter | None"
) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """Of two versions with one schema, the changed tensors, in order and piece by piece: the tensor's number, where
    the piece begins in it, its old bytes and its new ones. All of the new version is written to `keep`."""

    schema = new.tree.schema

    def touched(block: tuple[int, int]) -> bool:
        first, last = schema.tensor_of(block[0]), schema.tensor_of(block[1] - 1)
        return any(i in changed for i in range(first, last + 1))

    def read(run: tuple[int, int]) -> tuple[tuple[int, int], memoryview, memoryview] | None:
        now = new.verified.read(*run)
        if keep is not None:
            keep.write(schema.position(run[0]), now)
        return (run, memoryview(old.verified.read(*run)), memoryview(now)) if touched(run) else None

    blocks = [block for block in new.verified.blocks() if keep is not None or touched(block)]
    with Pool(parallel.workers(), "weightvc-export") as pool:
        for found in parallel.ordered(pool, read, new.verified.runs(blocks), 2 * parallel.workers() + 2):
            if found is None:
                continue
            (low, high), was, now = found
            both = zip(parts(schema, low, high, was), parts(schema, low, high, now), strict=True)
            for (i, start, a), (_, _, b) in both:
                if i in changed:
                    yield i, start, a, b


class _Shards:
    """The files of a delta: frames are held until a file's worth is there."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._held: dict[str, tuple[bytes, str]] = {}
        self._size = 0
        self._written: list[frozenset[str]] = []

    def add(self, name: str, frame: bytes, checksum: str) -> None:
        """Add a tensor's frame, and the checksum of its new bytes."""
        self._held[name] = frame, checksum
        self._size += len(frame)
        if self._size >= SHARD:
            self._flush()

    def _flush(self) -> None:
        infos = [TensorInfo("", name, "U8", (len(frame),), len(frame)) for name, (frame, _) in self._held.items()]
        head = build_header(infos, {name: checksum for name, (_, checksum) in self._held.items()})
        _write(self._place / f"{len(self._written)}", head, *(self._held[info.name][0] for info in order(infos)))
        self._written.append(frozenset(self._held))
        self._held, self._size = {}, 0

    def finish(self) -> dict[str, frozenset[str]]:
        """The tensors of each file; the files have their names now that it is known how many there are."""
        if self._held:
            self._flush()
        out = {}
        for i, names in enumerate(self._written):
            name = f"model-{i:05d}-of-{len(self._written):05d}.safetensors"
            os.rename(self._place / f"{i}", self._place / name)
            out[name] = names
        return out


def _number(entry: Entry) -> int:
    """A version's number in the layout: 0 is what an engine was started from."""
    return version_of(entry).generation + 1


def _follows(before: Entry, entry: Entry) -> bool:
    return version_of(entry).parents[:1] == (before.new,) and _number(entry) == _number(before) + 1


def _other_tensor(old: Sequence[TensorInfo], new: Sequence[TensorInfo]) -> str | None:
    """The first tensor by name that is not in both with one dtype and shape."""
    was, now = ({(tensor.component, tensor.name): tensor for tensor in side} for side in (old, new))
    for key in sorted(was.keys() | now.keys()):
        one, other = was.get(key), now.get(key)
        what = f"the tensor {shown(key[1])}"
        if one is None or other is None:
            return f"{what} is {'new' if one is None else 'gone'}"
        if one.dtype != other.dtype:
            return f"the dtype of {what} changed"
        if one.shape != other.shape:
            return f"the shape of {what} changed"
    return None


def _other_file(old: Sequence[File], new: Sequence[File]) -> str | None:
    """The first file by path that is not in both with the same bytes, beside those of tensors."""
    was, now = ({file.path: file for file in side} for side in (old, new))
    for path in sorted(was.keys() | now.keys()):
        one, other = was.get(path), now.get(path)
        if one == other:
            continue
        happened = "is new" if one is None else "is gone" if other is None else "changed"
        if not any(file is not None and file.places for file in (one, other)):
            return (
                f"the side file {path!r} {happened}, which a delta cannot say: leave it out (--exclude) if engines "
                "can do without it"
            )
        return f"the {'header of' if one and other else 'weights file'} {path!r} {happened}"
    return None


def _made_of(path: Path) -> str | None:
    """The version that a delta directory is of, if we wrote it."""
    try:
        index = json.loads((path / slime.INDEX).read_bytes())
        ident = index["metadata"][slime.VERSION] if slime.is_delta(index) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return ident if isinstance(ident, str) else None


def _write(path: Path, *parts: bytes) -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
