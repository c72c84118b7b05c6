"""The repository: everything that a user does with one."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weightvc.cache import LEAST, Cache, default_directory
from weightvc.errors import (
    KeyExists,
    KeyNotFound,
    Refused,
    TensorNotFound,
)
from weightvc.history import HEAD, Progress, Ref, said, version_of
from weightvc.objects import dtypes
from weightvc.objects.catalogue import Entry
from weightvc.objects.version import Version, check_words, copied
from weightvc.options import check_choices, step_of
from weightvc.protocol import swap
from weightvc.protocol.refs import Refs, check_name
from weightvc.publishing import Publishing
from weightvc.recovery import Recovery
from weightvc.retention import Retention

if TYPE_CHECKING:
    from weightvc.auditing import Audit
    from weightvc.comparison import Diff
    from weightvc.protocol.checkout import Stat
    from weightvc.protocol.compact import Compacted, Report
    from weightvc.protocol.fsck import FsckReport
    from weightvc.protocol.plan import Plan
    from weightvc.protocol.stored import VersionSource
    from weightvc.report import Facts
    from weightvc.sources.transform import Transform
    from weightvc.worktree import Status, Verification


def init(
    url: str | os.PathLike[str], *, default_branch: str = "main", exist_ok: bool = False, **options: Any
) -> "Repository":
    """Make a repository at a path or URL and open it.

    The store is probed with parallel conditional writes first, and refused (UnsafeStore) if it breaks their
    promises. `options` are those of open(). If there is a repository already it is opened as it is, with
    `exist_ok`; else KeyExists is raised. Refused where manifests of a repository lie whose root is lost.
    """
    from weightvc.objects import root as roots
    from weightvc.stores.probe import probe

    check_name(default_branch)
    repository = _connect(url, **options)
    if exist_ok:
        with contextlib.suppress(KeyNotFound):
            repository.refresh()
            return repository
    try:
        _refuse_remains(repository)
    except KeyExists:
        if not exist_ok:
            raise
        return repository
    result = {} if repository.store.conditional else probe(repository.store)
    try:
        swap.create_root(repository.store, roots.first(default_branch, time.time_ns() // 1000, result))
    except KeyExists:  # somebody made it meanwhile
        if not exist_ok:
            raise
    return repository


def open(url: str | os.PathLike[str], *, lazy: bool = False, **options: Any) -> "Repository":
    """Open the repository at a path or URL.

    Options: `cache` is a directory, True for the usual one (~/.cache/weightvc), or None for none; `cache_limit` is
    how many bytes it may take, about (half of the disk that it lies on unless given); `author` goes into versions
    (user@host unless given); `progress(done, total)` is called with bytes while a commit or checkout runs; the rest
    goes to the store (for S3: endpoint_url, region, access_key, secret_key, session_token, profile).
    Raises KeyNotFound if there is no repository, Corrupt if its root is damaged; with `lazy` nothing is read yet,
    and the first operation raises that, which saves one request.
    """
    repository = _connect(url, **options)
    if not lazy:
        repository.refresh()
    return repository


def fsck(
    url: str | os.PathLike[str], *, read_data: float = 0, seed: int | None = None, **options: Any
) -> "FsckReport":
    """Whether the repository at a path or URL is whole: see Repository.fsck. `options` are those of open()."""
    with open(url, lazy=True, **options) as repository:
        return repository.fsck(read_data=read_data, seed=seed)


def _refuse_remains(repository: "Repository") -> None:
    """Raise Refused where a repository has lost its root: a new, empty one would let its versions be collected.

    Raises KeyExists if there is a root.
    """
    store = repository.store
    if next(iter(store.list("manifest/")), None) is None:
        return
    with contextlib.suppress(KeyNotFound):  # somebody made it, and committed, meanwhile
        swap.must_read(store)
        raise KeyExists(f"{store.url} holds a weightvc repository already: open it instead")
    raise Refused(
        f"{store.url} has versions and no root: `weightvc fsck` says what one can be made of. To begin anew, choose "
        "another place"
    )


def _connect(
    url: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | bool | None = True,
    cache_limit: int | None = None,
    author: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> "Repository":
    from weightvc.stores import open_store

    directory = default_directory() if cache is True else cache
    if cache_limit is not None and (type(cache_limit) is not int or cache_limit < LEAST):
        raise Refused(f"cache_limit={cache_limit!r:.100}: give bytes, {LEAST} at least; None or --no-cache: no cache")
    held = Cache(directory, limit=cache_limit) if isinstance(directory, str | os.PathLike) else None
    return Repository(open_store(os.fspath(url), **options), held, author=author, progress=progress)


class Repository(Publishing, Retention, Recovery):
    """A repository. Threads may share it; so may processes, each with an object of its own."""

    # Writing

    def commit(
        self,
        source: Any,
        *,
        branch: str | None = HEAD,
        message: str = "",
        step: int | None = None,
        run: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        dtype: Any = None,
        names: "Literal['hf', 'as-is'] | Callable[[str], str]" = "hf",
        transform: "Transform | None" = None,
        expect: Ref | None = None,
        parents: Sequence[Ref] = (),
        on_conflict: Literal["raise", "rebase"] = "raise",
        base: bool = False,
        codec: Literal["small", "fast", "auto"] = "small",
        name: str | None = None,
        exclude: Iterable[str] = (),
    ) -> Version:
        """Commit weights as the next version of a branch and return it.

        `source` is a path or URL (a safetensors file, a directory, a .pt file), a mapping of torch or numpy tensors,
        a torch module, or a Source. `step` and `run` are labels; `metadata` is anything that JSON keeps exactly.
        `dtype` casts floating tensors ("bfloat16", "float16", "float32", or the torch.dtype) with torch's rounding;
        the dtype that a config.json beside them names becomes that as well. `names` says how a module's tensors are
        called: as its save_pretrained would, as in its state_dict, or as a function says. A model of transformers
        has to write itself to disk for the first of these, at every commit. `transform`, a Transform, makes what is
        served of what was opened so: the tensors that it gives are committed alone, without files beside them.
        Nothing is copied: do not change the tensors (or train on) until it returns; commit_async() copies them. What
        was committed so before is waited for, and NotPublished raised if it failed.

        The parent is the branch's head, which must be `expect` if that is given (a ref; "" for: no such branch
        yet), else what this object last loaded, checked out or committed there. If somebody else moved the branch,
        BranchMoved is raised and nothing is published; on_conflict="rebase" diffs again on top instead, as often as
        it takes: your weights replace those of the new head; the other's change is not merged, it stays in the
        history. branch=None publishes a detached version on parents[0]. Further `parents` are recorded. `base`
        stores the tree whole as well, so that a cold reader can start here. `codec` says what the patch should be:
        "small"; "fast", for readers to apply it several times as fast, at half as many bytes again; or "auto", fast
        only where that costs next to nothing. `name` and `exclude` are for files.

        Raises Refused (and its kinds), BranchMoved, Fenced (after another's claim()), StateUnknown, StoreError.
        Whatever is raised, the branch reads as before, or (StateUnknown) perhaps as after.
        """
        from weightvc.protocol.stored import VersionSource
        from weightvc.sources import open_source
        from weightvc.sources.transform import checked

        check_choices(on_conflict, codec)
        check_words(message, self.author)
        metadata = checked(transform, dtype, metadata)
        self.flush()
        opened = open_source(source, names=names, dtype=dtype, name=name, exclude=exclude, transform=transform)
        try:
            return self._commit(
                opened,
                branch=branch,
                expect=expect,
                parents=parents,
                rebase=on_conflict == "rebase",
                base=base,
                codec=codec,
                labels=(message, step_of(step), run, metadata),
                # A version that is committed again is as it was served.
                castable=dtype is None and transform is None and not isinstance(opened, VersionSource),
            )
        finally:
            if opened is not source:
                opened.close()

    def revert(self, ref: Ref, *, branch: str = HEAD, message: str | None = None, **options: Any) -> Version:
        """Make a new version on a branch with the tree and layout of `ref`: back, by going forward.

        Its metadata says which transform made it, as that of `ref` does.
        """
        from weightvc.sources.transform import kept

        refs = self._refs()
        entry = refs.resolve(ref).entry
        old = version_of(entry)
        with self._open(refs, entry, whole=True) as source:
            text = f"revert to {old.short}" + (f": {old.message}" if old.message else "")
            options["metadata"] = {**kept(old.metadata), **copied(options.get("metadata"))}
            return self.commit(
                source, branch=branch, message=text if message is None else message, step=old.step, **options
            )

    def compact(
        self,
        *,
        share: int | None = None,
        base_every: int | None = None,
        reverse: bool | None = None,
        save: bool = False,
        report: "Report | None" = None,
    ) -> "Compacted":
        """Add ways to versions: a reader any distance behind then needs few patches, and a new one few after a base.

        Each version whose generation 4^k divides gets a patch from the one 4^k before it, along first parents. A
        version is stored whole as well where the patches from the last base outweigh `share` percent of it, and at
        least every `base_every` versions. With `reverse`, each patch gets one that leads back. What is not given is
        as the repository keeps it (50, 1024, False at first); `save` keeps what is given there. `report` is called
        with what was made (a Wanted and a Way) once it is published.

        No version changes: not its id, its content, or the ways that there were. It may be run anywhere, again and
        again, beside writers and other runs; interrupted, the next one goes on. Memory is bounded by some blocks of
        4 MiB and packs; with a cache, five trees are kept on disk in its folder `compaction`.
        Raises Refused, StoreError, StateUnknown, Conflict; Corrupt where the catalogue itself cannot be read. A
        version that cannot be read is skipped, and stands in what is returned.
        """
        from weightvc.protocol import pins
        from weightvc.protocol.compact import compact

        given = {"share": share, "base_every": base_every, "reverse": reverse}
        with pins.Holder(self.store, begin=self.refresh().sequence, after=pins.PATIENCE) as pin:
            done, self._seen = compact(
                self._shelf,
                self._read,
                pin,
                {name: value for name, value in given.items() if value is not None},
                save=save,
                report=report,
            )
        return done

    # Reading weights

    def plan(self, old: Ref | None, new: Ref = HEAD) -> "Plan":
        """The cheapest way to the version `new`, by bytes and requests, for a host that holds `old` (None: nothing).

        Raises RefNotFound, Expired if there is none any more.
        """
        from weightvc.protocol.plan import plan

        refs = self._refs()
        held = frozenset() if old is None else frozenset({version_of(refs.resolve(old).entry).tree})
        return plan(refs, refs.resolve(new).entry, held)

    def source(self, ref: Ref = HEAD, *, whole: bool = False) -> "VersionSource":
        """A version as a source: its tensors and layout, every byte checked. Close it after use."""
        refs = self._refs()
        return self._open(refs, refs.resolve(ref).entry, whole=whole)

    def _open(self, refs: Refs, entry: Entry, *, whole: bool) -> "VersionSource":
        from weightvc.protocol.stored import VersionSource

        return VersionSource(self._shelf, refs, entry, whole=whole)

    def checkout(
        self, ref: Ref, target: str | os.PathLike[str], *, force: bool = False, replace: bool = False
    ) -> Version:
        """Write a version's files: into a directory as they were committed, or (*.safetensors) as one file.

        What the directory holds already is used, so that going to the next version fetches one patch. Everything is
        built beside the target and checked, and then swapped in by a rename: the old files or the new, never a mix.
        Files that no checkout put there are refused, and so are files that were changed since; `replace` lets go of
        changed ones (a rollout host's directory heals so), `force` of changed ones and keeps foreign ones beside.
        A single file that exists is refused without one of the two. What appears or changes in the directory while
        this runs is not lost either: it is refused, and the directory is as it was.
        Raises RefNotFound, Refused, Corrupt, StoreError.
        """
        from weightvc import worktree

        refs = self._refs()
        found = refs.resolve(ref)
        version = worktree.checkout(
            self._shelf,
            refs,
            found.entry,
            Path(target),
            branch=found.branch,
            force=force,
            replace=replace,
            progress=self.progress,
        )
        if found.branch is not None:
            self._remember(found.branch, version.id)
        return version

    def mark(
        self,
        target: str | os.PathLike[str],
        version: Version,
        *,
        branch: str | None,
        found: "Mapping[str, Stat]",
        exact: bool = True,
    ) -> None:
        """Let a checked-out directory's marker say that it holds `version`, which was just committed from it.

        `found` is checkout.scan() of it from before the commit: what was changed since is then seen to be. `exact`
        False says that its files are not the version's bytes (they were cast), so that status() compares them.
        """
        import secrets

        from weightvc.protocol import checkout
        from weightvc.sources.paths import MARKER

        directory = Path(target)
        paths = self.files(version.id)
        files = {path: found.get(path, checkout.UNKNOWN) if exact else checkout.UNKNOWN for path in paths}
        with checkout.local_errors(directory):
            beside = directory / f"{MARKER}.{secrets.token_hex(6)}"
            checkout.write_marker(beside, checkout.Marker(self.store.address, version.id, branch, files))
            beside.rename(directory / MARKER)

    def load(
        self,
        ref: Ref = HEAD,
        names: Iterable[str] | None = None,
        *,
        component: str = "",
        framework: Literal["torch", "numpy"] = "torch",
    ) -> dict[str, Any]:
        """A version's tensors (of one component; only `names`, if given) as a dict of torch tensors or numpy arrays.

        Shapes and dtypes are those committed; every byte is checked. Raises RefNotFound, TensorNotFound (also where
        the version has tensors and the component has none), Refused, Corrupt.
        """
        refs = self._refs()
        found = refs.resolve(ref)
        wanted = [names] if isinstance(names, str) else None if names is None else list(names)
        from weightvc import worktree

        out = worktree.load(
            self._shelf, refs, found.entry, wanted, component=component, framework=framework, progress=self.progress
        )
        if found.branch is not None and wanted is None:
            self._remember(found.branch, found.entry.new)
        return out

    def tensor(
        self,
        ref: Ref,
        name: str,
        *,
        rows: slice | None = None,
        component: str = "",
        framework: Literal["torch", "numpy"] = "torch",
    ) -> Any:
        """One tensor, or its rows [start, stop) along the first dimension: fetches only the chunks that hold them.

        Raises RefNotFound, TensorNotFound, Refused (`rows` that are no slice, have a step or split bytes), Corrupt.
        """
        from weightvc.sources import memory

        make = memory.maker(framework)
        with self.source(ref) as source:
            i = source.tree.schema.index.get((component, name))
            if i is None:
                raise TensorNotFound(f"{said(ref)} has no tensor {name!r:.200}: see `weightvc ls {said(ref)}`")
            info = source.tensors[i]
            shape, start, stop = info.shape, 0, info.nbytes
            if rows is not None:
                if not shape or not isinstance(rows, slice) or rows.step not in (None, 1):
                    raise Refused(f"rows={rows!r:.100} of a tensor of shape {list(shape)}: give slice(start, stop)")
                try:
                    first, last, _ = rows.indices(shape[0])
                except TypeError:
                    raise Refused(f"rows={rows!r:.100}: start and stop are whole numbers") from None
                last = max(first, last)
                width = dtypes.count(shape[1:]) * dtypes.bits(info.dtype)
                if width * first % 8 or width * last % 8:
                    raise Refused(f"rows={rows!r}: rows of {info.dtype} do not fill whole bytes")
                start, stop, shape = first * width // 8, last * width // 8, (last - first, *shape[1:])
            data = bytearray(source.read(i, start, stop))
            return make(info.dtype, shape, data)

    def tensor_bytes(self, ref: Ref, name: str, *, component: str = "", piece: int = 64 << 20) -> Iterator[bytes]:
        """The canonical bytes of one tensor, in pieces of at most `piece` bytes."""
        with self.source(ref) as source:
            i = source.tree.schema.index.get((component, name))
            if i is None:
                raise TensorNotFound(f"{said(ref)} has no tensor {name!r:.200}: see `weightvc ls {said(ref)}`")
            nbytes = source.tensors[i].nbytes
            for start in range(0, nbytes, piece):
                yield bytes(source.read(i, start, min(nbytes, start + piece)))

    def diff(self, old: Any, new: Any, **options: Any) -> "Diff":
        """What changed between two versions, or anything that can be committed: density by tensor, steps, weight."""
        from weightvc import comparison

        with ExitStack() as stack:
            sides = []
            for side in (old, new):
                if isinstance(side, Version) or (isinstance(side, str) and not os.path.exists(side)):
                    sides.append(stack.enter_context(self.source(side, whole=True)))
                else:
                    sides.append(side)
            return comparison.diff(sides[0], sides[1], **options)

    def report(self, *, count: int = 10_000, sample: int = 8, metrics: Sequence[str] = ()) -> "Facts":
        """What `weightvc report` draws: the newest `count` versions of all branches and tags, what storing and
        reading them takes, and what layers change; `metrics` are files that jobs and hosts wrote.

        Reads the catalogue, a list of all objects where that is allowed, 64 MiB of manifests at most, and of the
        newest `sample` versions of the default branch 128 MiB of the weights each at most. What cannot be had is in
        `notes`. Raises Corrupt, NotFound, BadFile, StoreError.
        """
        from weightvc.report import gather
        from weightvc.report.metrics import read

        told = [read(path) for path in metrics]
        with self.snapshot() as root:
            return gather(self._shelf, root, count=count, sample=sample, told=told)

    def audit(self, ref: Ref = HEAD, *, run: str | None = None, last: int | None = None, **options: Any) -> "Audit":
        """What the updates of a run look like, and whether patches pay: of the versions that `ref` descends from, by
        first parents; of those labelled `run` if that is given; of the newest `last` of them.

        Versions that have expired are passed over. `options` are those of weightvc.audit. Raises Refused for less
        than two versions.
        """
        from weightvc.auditing import audit

        refs = self._refs()
        found: list[Entry] = []
        for entry in refs.history(refs.resolve(ref).entry):
            if not entry.gone and (run is None or version_of(entry).run == run):
                found.append(entry)
                if len(found) == last:
                    break
        found.reverse()
        versions = [version_of(entry) for entry in found]
        steps = [version.step for version in versions if version.step is not None]
        named = {
            version.short: partial(self._open, refs, entry, whole=True)
            for version, entry in zip(versions, found, strict=True)
        }
        if len(named) < 2:
            label = f" labelled run={run!r:.100}" if run is not None else ""
            raise Refused(
                f"an audit compares versions, and {said(ref)} has {len(named) or 'none'}{label}: commit two at least"
            )
        return audit(named, steps=steps if len(steps) == len(versions) else None, **options)

    def files(self, ref: Ref = HEAD) -> dict[str, int]:
        """The files that a checkout would write, with their sizes in bytes."""
        from weightvc import worktree

        with self.source(ref) as source:
            return {file.path: file.size for file in worktree.plan(self._shelf, source)}

    def cat(self, ref: Ref, path: str) -> bytes:
        """The content of one file of a version, as a checkout would write it.

        Raises RefNotFound, NotFound, Corrupt.
        """
        return b"".join(self.file_bytes(ref, path))

    def file_bytes(self, ref: Ref, path: str, *, piece: int = 64 << 20) -> Iterator[bytes]:
        """What cat() gives, in pieces of at most `piece` bytes."""
        from weightvc import worktree

        with self.source(ref, whole=True) as source:
            yield from worktree.content(self._shelf, source, path, piece)

    def verify(self, target: str | os.PathLike[str], ref: Ref | None = None) -> "Verification":
        """Compare a checked-out directory (or file) with its version, or with `ref`, reading every byte."""
        from weightvc import worktree

        return worktree.verify(self._shelf, self._refs(), Path(target), ref, progress=self.progress)

    def status(self, target: str | os.PathLike[str]) -> "Status":
        """Which version a directory holds, what was changed in it, and how far behind its branch it is."""
        from weightvc import worktree

        return worktree.status(self._shelf, self._refs(), Path(target))
