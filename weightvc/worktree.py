"""Checked-out files and loaded tensors: from a version to a directory, a file or a dict, and back to compare."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from weightvc.errors import Corrupt, NotFound, Refused, TensorNotFound
from weightvc.objects import frame, layout
from weightvc.objects.catalogue import Entry
from weightvc.objects.manifest import blocks
from weightvc.objects.schema import Schema
from weightvc.objects.tree import Tree
from weightvc.objects.version import Version
from weightvc.pool import Pool
from weightvc.protocol import checkout as swapping
from weightvc.protocol import files as writing
from weightvc.protocol import parallel, resolve
from weightvc.protocol.checkout import Marker, read_marker, some
from weightvc.protocol.files import File
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.state import Lying, read_chunks
from weightvc.protocol.stored import VersionSource, parts
from weightvc.protocol.workspace import recover
from weightvc.sources.base import Source
from weightvc.sources.paths import MARKER

Progress = Callable[[int, int], None]


def checkout(
    shelf: Shelf,
    refs: Refs,
    entry: Entry,
    target: Path,
    *,
    branch: str | None,
    force: bool,
    replace: bool,
    progress: Progress | None,
    starts: Sequence[Path] = (),
) -> Version:
    """Write a version's files into a directory, or as one file if `target` ends in .safetensors.

    `starts` are other checked-out directories: the one that is the cheapest to begin from is read, not the target.
    """
    made = entry.version
    assert made is not None
    place: swapping.OneFile | swapping.Directory
    if target.suffix == ".safetensors":
        place = swapping.OneFile(target, replace=force or replace)
    else:
        place = swapping.Directory(target, force=force, replace=replace)
        if not (force or replace):
            _check_unchanged(shelf, refs, place)
    with contextlib.ExitStack() as stack:
        lying: resolve.Lying | None = None
        if starts:
            lying = {**_others(refs, starts[1:], stack), **_lying(refs, starts[0], read_marker(starts[0]), stack)}
        elif isinstance(place, swapping.Directory):
            lying = _lying(refs, place.target, place.marker, stack)
        manifest, verified = stack.enter_context(resolve.opened(shelf, refs, entry, lying=lying))
        schema = verified.tree.schema
        plan = writing.files(schema, resolve.layout_of(shelf, manifest))
        if isinstance(place, swapping.OneFile):
            plan = [_one_file(schema, plan)]
        keep = None
        if shelf.cache is not None and not shelf.cache.has_tree(made.tree):
            keep = shelf.cache.write_tree(schema, made.tree)
            if keep is not None:
                stack.callback(keep.drop)

        def fill(directory: Path) -> None:
            writing.write(verified, plan, directory, also=keep.write if keep is not None else None, progress=progress)

        if isinstance(place, swapping.OneFile):
            place.put(plan[0], fill)
        else:
            place.put(plan, fill, Marker(shelf.store.address, made.id, branch, {}))
        if keep is not None:
            keep.commit(made.tree)
    return made


def replace(target: Path, beside: Path) -> None:
    """Put a directory that was checked out under another name, on the same file system, in the target's place.

    Raises Refused for files of the target that no checkout put there, AccessDenied, Unavailable. The target is then
    as it was; what lay beside it may be gone.
    """
    marker = read_marker(beside)
    if marker is None:
        raise Refused(f"{beside} holds no version: check it out anew")
    plan = [File(path, known[0], b"", []) for path, known in marker.files.items()]

    def fill(new: Path) -> None:
        for path in marker.files:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            os.rename(beside / path, new / path)

    place = swapping.Directory(target, force=False, replace=True)
    try:
        place.put(plan, fill, Marker(marker.repository, marker.version, marker.branch, {}))
    finally:
        # Its files have been moved, perhaps not all of them: what is left of it must not pass for the version.
        shutil.rmtree(beside, ignore_errors=True)


def _check_unchanged(shelf: Shelf, refs: Refs, place: swapping.Directory) -> None:
    """Raise Refused if files of a checkout were changed since: they may be somebody's work."""
    if place.marker is None:
        return
    changed = swapping.touched(place.found, place.marker)
    # The version of another repository cannot be compared with: there a touched file counts as changed.
    # So it is for one that has expired.
    entry = refs.catalogue.find(place.marker.version) if changed else None
    if entry is not None and entry.place is not None:
        changed = _differing(shelf, entry, place.target, changed)
    if changed:
        raise Refused(
            f"{place.target} has files that were changed since the checkout: {some(changed)}; commit them, or let go "
            "of them with `weightvc checkout --force` or `weightvc pull`"
        )


def _differing(shelf: Shelf, entry: Entry, directory: Path, paths: Sequence[str]) -> list[str]:
    """Those of a version's files that are not byte for byte as a checkout writes them."""
    manifest = resolve.manifest_of(shelf, entry)
    tree = resolve.tree_of(shelf, manifest, "the manifest")
    files = {file.path: file for file in writing.files(tree.schema, resolve.layout_of(shelf, manifest))}
    with Pool(parallel.workers(), "weightvc-compare") as pool:
        return [p for p in paths if p not in files or not _is_file(directory / p, files[p], tree, pool)]


def _is_file(path: Path, file: File, tree: Tree, pool: Pool) -> bool:
    schema = tree.schema
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False

    def same(place: tuple[int, int]) -> bool:
        tensor, at = place
        for chunk in range(schema.first_chunk[tensor], schema.first_chunk[tensor + 1]):
            _, start, stop = schema.span(chunk)
            if frame.digest(os.pread(descriptor, stop - start, at + start)) != tree.chunk(chunk):
                return False
        return True

    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            return False
        return os.pread(descriptor, len(file.content), 0) == file.content and all(pool.map(same, file.places))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _one_file(schema: Schema, plan: Sequence[File]) -> File:
    """The version's only weights file as it was, or all its tensors in one new file."""
    weights = [file for file in plan if file.places or file.path.endswith(".safetensors")]
    if len(weights) == 1 and len(weights[0].places) == len(schema.tensors):
        only = weights[0]
        return File(only.path.rpartition("/")[2], only.size, only.content, only.places)
    if any(tensor.component for tensor in schema.tensors):
        raise Refused("a version with several components does not fit one file: check it out into a directory")
    return writing.single(schema, schema.tensors, "model.safetensors")


def _lying(refs: Refs, directory: Path, marker: Marker | None, stack: contextlib.ExitStack) -> "resolve.Lying":
    """What a directory holds, if its marker names a version of this repository and its files can be read."""
    entry = refs.catalogue.find(marker.version) if marker is not None else None
    if entry is None or entry.version is None:
        return {}
    try:
        source = _open(directory)
    except (Refused, OSError):
        return {}
    stack.callback(source.close)
    return {entry.version.tree: lambda schema: Lying(schema, source)}


def _others(refs: Refs, directories: Sequence[Path], stack: contextlib.ExitStack) -> "resolve.Lying":
    """The same of directories that are seldom used: opened only then, and no segment is read for them."""

    def of(directory: Path, schema: Schema) -> Lying:
        try:
            source = _open(directory)
        except (Refused, OSError) as error:
            raise Corrupt(str(error)) from None
        stack.callback(source.close)
        return Lying(schema, source)

    out = {}
    for directory in directories:
        if (marker := read_marker(directory)) is not None:
            entry = refs.find(marker.version, 0)
            name = marker.version if entry is None or entry.version is None else entry.version.tree
            out[name] = partial(of, directory)
    return out


def _open(target: Path) -> Source:
    from weightvc.sources import open_source

    return open_source(target)


def load(
    shelf: Shelf,
    refs: Refs,
    entry: Entry,
    names: Sequence[str] | Callable[[Tree], Sequence[str]] | None,
    *,
    component: str,
    framework: Literal["torch", "numpy"],
    progress: Progress | None,
) -> dict[str, Any]:
    """Tensors of one component by name; a function chooses them once the tree is known, for who will read the next
    version, too: with a cache, all of it is read then, and kept."""
    from weightvc.sources import memory

    made = entry.version
    assert made is not None
    make = memory.maker(framework)
    with contextlib.ExitStack() as stack:
        whole = names is None or callable(names)
        _, verified = stack.enter_context(resolve.opened(shelf, refs, entry, whole=whole))
        schema = verified.tree.schema
        chosen = [i for i, tensor in enumerate(schema.tensors) if tensor.component == component]
        if whole and not chosen and (schema.tensors or component):
            raise no_component(made, component, schema)
        if callable(names):
            names = names(verified.tree)
        if names is not None:
            chosen = []
            for name in names:
                i = schema.index.get((component, name))
                if i is None:
                    raise TensorNotFound(f"version {made.short} has no tensor {name!r:.200}: see `weightvc ls`")
                chosen.append(i)
        # A tensor of one chunk is made when its block is there: no other thread has a part of it.
        chunks = schema.first_chunk
        single = {i for i in chosen if chunks[i + 1] - chunks[i] == 1}
        buffers = {i: memory.room(schema.tensors[i].nbytes) for i in chosen if i not in single}
        loaded = {i: make(schema.tensors[i].dtype, schema.tensors[i].shape, buffer) for i, buffer in buffers.items()}
        keep = None
        if whole and not component and shelf.cache is not None and not shelf.cache.has_tree(made.tree):
            keep = shelf.cache.write_tree(schema, made.tree)
            if keep is not None:
                stack.callback(keep.drop)

        def work(block: tuple[int, int]) -> int:
            low, high = block
            data = memoryview(verified.read(low, high))
            with verified.meter.part("apply"):
                if keep is not None:
                    keep.write(schema.position(low), data)
                first, last = schema.tensor_of(low), schema.tensor_of(high - 1) + 1
                here = [i for i in range(first, last) if i in single]
                infos = [schema.tensors[i] for i in here]
                origin = schema.position(low)
                starts = [schema.offset[i] - origin for i in here]
                loaded.update(zip(here, memory.carved(framework, infos, starts, data), strict=True))
                if len(here) < last - first:
                    for tensor, start, part in parts(schema, low, high, data):
                        if tensor in buffers:
                            memory.put(part, buffers[tensor], start)
            return len(data)

        blocks = verified.blocks()
        if names is not None and keep is None:
            spans = [(chunks[i], chunks[i + 1]) for i in sorted({*chosen})]
            blocks = [b for b in blocks if any(b[0] < high and low < b[1] for low, high in spans)]
        done = 0
        with Pool(parallel.workers(), "weightvc-load") as pool:
            for size in parallel.ordered(pool, work, verified.runs(blocks), 2 * parallel.workers() + 2):
                done += size
                if progress is not None:
                    progress(done, schema.nbytes)
        if keep is not None:
            keep.commit(made.tree)
        return {schema.tensors[i][1]: loaded[i] for i in chosen}


def no_component(made: Version, component: str, schema: Schema) -> TensorNotFound:
    """The error that names the components that there are."""
    there = sorted({tensor.component for tensor in schema.tensors})
    what = f"component {component!r:.200}" if component else "tensors outside of components"
    return TensorNotFound(f"version {made.short} has no {what}: name one of {some([repr(name) for name in there])}")


def plan(shelf: Shelf, source: VersionSource) -> list[File]:
    """The files that a checkout of a version writes."""
    return writing.files(source.tree.schema, resolve.layout_of(shelf, source.manifest))


def content(shelf: Shelf, source: VersionSource, path: str, piece: int) -> Iterator[bytes]:
    """One file of a version, in pieces of at most `piece` bytes. Raises NotFound naming those that there are."""
    files = plan(shelf, source)
    file = next((f for f in files if f.path == path), None)
    if file is None:
        names = ", ".join(f.path for f in files[:8])
        raise NotFound(f"the version has no file {path!r:.200}; it has {names}: see `weightvc ls --files`")
    for start in range(0, len(file.content), piece):
        yield bytes(file.content[start : start + piece])
    # A header's tensors cover its file without holes.
    for tensor, _ in sorted(file.places, key=lambda place: place[1]):
        nbytes = source.tensors[tensor].nbytes
        for start in range(0, nbytes, piece):
            yield bytes(source.read(tensor, start, min(start + piece, nbytes)))


@dataclass(slots=True)
class Verification:
    """What differs between files and a version: nothing if `ok`."""

    version: Version
    tensors: list[str] = field(default_factory=list)
    """Tensors whose bytes, dtype or shape differ, or that are missing."""
    files: list[str] = field(default_factory=list)
    """Other files, headers included, that differ or are missing."""
    foreign: list[str] = field(default_factory=list)
    """Files that the version has not."""

    @property
    def ok(self) -> bool:
        """Whether everything is bit for bit the version's."""
        return not (self.tensors or self.files or self.foreign)


def verify(
    shelf: Shelf, refs: Refs, target: Path, ref: str | Version | None, *, progress: Progress | None = None
) -> Verification:
    """Compare a directory or a file with a version, reading every byte of it."""
    recover(target)
    marker = read_marker(target) if target.is_dir() else None
    if not target.exists():
        raise NotFound(f"{target} does not exist")
    entry = _entry(refs, marker, target, ref)
    manifest = resolve.manifest_of(shelf, entry)
    tree = resolve.tree_of(shelf, manifest, "the manifest")
    stored = resolve.layout_of(shelf, manifest)
    result = Verification(manifest.version)
    try:
        source = _open(target)
    except Refused as error:
        # Not as a whole, as where a shard is missing: file by file, then.
        if target.is_dir():
            _compare_directly(shelf, entry, target, result)
        if result.ok:
            result.files.append(str(error))
        return result
    try:
        _compare_tensors(tree, source, result, progress)
        if target.is_dir():
            _compare_files(tree, stored, source, result)
    finally:
        source.close()
    return result


def _entry(refs: Refs, marker: Marker | None, target: Path, ref: str | Version | None) -> Entry:
    if ref is not None:
        return refs.resolve(ref).entry
    if marker is None:
        raise Refused(f"{target} does not say which version it holds (no readable {MARKER}): name one")
    entry = refs.catalogue.find(marker.version)
    if entry is None:
        raise Refused(
            f"{target} holds version {marker.version[:12]} of {marker.repository}, which is not in this repository"
        )
    return entry


def _compare_tensors(tree: Tree, source: Source, result: Verification, progress: Progress | None) -> None:
    schema = tree.schema
    if list(source.tensors) == schema.tensors:
        _compare_blocks(tree, source, result, progress)
        return
    index = {(t.component, t.name): i for i, t in enumerate(source.tensors)}

    def differs(i: int) -> bool:
        tensor = schema.tensors[i]
        j = index.get((tensor.component, tensor.name), -1)
        if j < 0 or source.tensors[j] != tensor:
            return True
        for chunk in range(schema.first_chunk[i], schema.first_chunk[i + 1]):
            _, start, stop = schema.span(chunk)
            if frame.digest(source.read(j, start, stop)) != tree.chunk(chunk):
                return True
        return False

    with Pool(parallel.workers(), "weightvc-verify") as pool:
        for i, different in enumerate(pool.map(differs, range(len(schema.tensors)))):
            if progress is not None:
                progress(schema.offset[i + 1], schema.nbytes)
            if different:
                result.tensors.append(_called(schema.tensors[i].component, schema.tensors[i].name))
    for tensor in source.tensors:
        if (tensor.component, tensor.name) not in schema.index:
            result.tensors.append(_called(tensor.component, tensor.name))


def _compare_blocks(tree: Tree, source: Source, result: Verification, progress: Progress | None) -> None:
    """The same of a source with the very tensors of a tree, a block at a time."""
    schema = tree.schema

    def differing(block: tuple[int, int]) -> tuple[int, set[int]]:
        low, high = block
        data = read_chunks(source, schema, low, high)
        found, known = frame.digests(data, schema.cuts(low, high)), tree.digests[32 * low : 32 * high]
        if found == known:
            return high, set()
        wrong = (i for i in range(low, high) if not found.startswith(tree.chunk(i), 32 * (i - low)))
        return high, {schema.tensor_of(i) for i in wrong}

    wrong: set[int] = set()
    with Pool(parallel.workers(), "weightvc-verify") as pool:
        for high, some_wrong in parallel.ordered(pool, differing, blocks(schema, None), 2 * parallel.workers() + 2):
            wrong |= some_wrong
            if progress is not None:
                progress(schema.position(high), schema.nbytes)
    result.tensors += [_called(*schema.tensors[i][:2]) for i in sorted(wrong)]


def _called(component: str, name: str) -> str:
    return f"{component}/{name}" if component else name


def _compare_files(tree: Tree, stored: layout.Stored | None, source: Source, result: Verification) -> None:
    expected = {file.path: (file.size, frame.digest(file.content)) for file in writing.files(tree.schema, stored)}
    have = {f.path: (f.size, frame.digest(f.content)) for f in source.layout.files} if source.layout else {}
    for path, wanted in expected.items():
        if have.get(path) != wanted:
            result.files.append(path)
    result.foreign += sorted(set(have) - set(expected))


def _compare_directly(shelf: Shelf, entry: Entry, target: Path, result: Verification) -> None:
    manifest = resolve.manifest_of(shelf, entry)
    tree = resolve.tree_of(shelf, manifest, "the manifest")
    expected = [file.path for file in writing.files(tree.schema, resolve.layout_of(shelf, manifest))]
    with swapping.local_errors(target):
        found = swapping.scan(target)
    result.files += _differing(shelf, entry, target, expected)
    result.foreign += sorted(path for path in found if path not in expected and not _left_out(path))


def _left_out(path: str) -> bool:
    parts = path.split("/")
    return MARKER in parts or parts[0] == ".git" or path.endswith("/")


@dataclass(slots=True)
class Status:
    """What a directory holds. `behind` counts versions between it and its branch's head; None if it is not on it."""

    version: Version
    branch: str | None
    head: Version | None
    behind: int | None
    changed: list[str]
    missing: list[str]
    foreign: list[str]


def status(shelf: Shelf, refs: Refs, target: Path) -> Status:
    """Compare a directory with its marker: sizes, times and inodes first, content where those differ."""
    recover(target)
    if not target.exists():
        raise NotFound(f"{target} does not exist")
    marker = read_marker(target)
    if marker is None:
        raise Refused(f"{target} does not say which version it holds (no readable {MARKER}): check one out into it")
    entry = _entry(refs, marker, target, None)
    assert entry.version is not None
    with swapping.local_errors(target):
        found = swapping.scan(target)
    missing = [path for path in marker.files if path not in found]
    changed = swapping.touched(found, marker)
    if changed and entry.place is not None:
        # A touched file is not a changed one: the bytes decide, while there are any to compare with.
        changed = _differing(shelf, entry, target, changed)
    head = behind = None
    if marker.branch is not None and (ident := refs.head(marker.branch)) is not None:
        top = refs.entry(ident)
        head = top.version
        for i, candidate in enumerate(refs.history(top)):
            if candidate.new == marker.version:
                behind = i
                break
    foreign = swapping.foreign(found, marker)
    return Status(entry.version, marker.branch, head, behind, changed, missing, foreign)
