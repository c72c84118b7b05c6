"""The repository: everything that a user does with one."""

import contextlib
import operator
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from weightvc.cache import Cache, default_directory
from weightvc.errors import (
    BranchMoved,
    Conflict,
    Expired,
    KeyExists,
    KeyNotFound,
    RefNotFound,
    Refused,
    TensorNotFound,
)
from weightvc.objects import dtypes, key
from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.objects.version import Version, check_words
from weightvc.protocol import swap
from weightvc.protocol.refs import Refs, check_name, encode_tags, moved, tag_page
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import Stats, Store

if TYPE_CHECKING:
    from weightvc.comparison import Diff
    from weightvc.protocol.checkout import Stat
    from weightvc.protocol.stored import VersionSource
    from weightvc.sources.base import Source
    from weightvc.worktree import Status, Verification

Progress = Callable[[int, int], None]
Ref = str | Version
HEAD: Final = "HEAD"
RESTARTS: Final = 3


class WeightvcWarning(UserWarning):
    """Something that works and is probably not what was meant."""


def init(
    url: str | os.PathLike[str], *, default_branch: str = "main", exist_ok: bool = False, **options: Any
) -> "Repository":
    """Make a repository at a path or URL and open it.

    The store is probed with parallel conditional writes first, and refused (UnsafeStore) if it breaks their
    promises. `options` are those of open(). If there is a repository already it is opened as it is, with
    `exist_ok`; else KeyExists is raised.
    """
    from weightvc.objects import root as roots
    from weightvc.stores.probe import probe

    check_name(default_branch)
    repository = _connect(url, **options)
    if exist_ok:
        with contextlib.suppress(KeyNotFound):
            repository.refresh()
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

    Options: `cache` is a directory, True for the usual one (~/.cache/weightvc), or None for none; `author` goes
    into versions (user@host unless given); `progress(done, total)` is called with bytes while a commit or checkout
    runs; the rest goes to the store (for S3: endpoint_url, region, access_key, secret_key, session_token, profile).
    Raises KeyNotFound if there is no repository, Corrupt if its root is damaged; with `lazy` nothing is read yet,
    and the first operation raises that, which saves one request.
    """
    repository = _connect(url, **options)
    if not lazy:
        repository.refresh()
    return repository


def _connect(
    url: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | bool | None = True,
    author: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> "Repository":
    from weightvc.stores import open_store

    directory = default_directory() if cache is True else cache
    held = Cache(directory) if isinstance(directory, str | os.PathLike) else None
    return Repository(open_store(os.fspath(url), **options), held, author=author, progress=progress)


def _author() -> str:
    import pwd
    import socket

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # Names of the system may hold bytes that are no text.
    return f"{user}@{socket.gethostname()}"[:200].encode(errors="replace").decode()


class Repository:
    """A repository. Threads may share it; so may processes, each with an object of its own."""

    def __init__(
        self, store: Store, cache: Cache | None, *, author: str | None = None, progress: Progress | None = None
    ) -> None:
        self.store = store
        self.author = _author() if author is None or author == "" else author
        check_words("", self.author)
        self.progress = progress
        self._shelf = Shelf(store, cache)
        self._seen: swap.Seen | None = None
        self._last: Entry | None = None
        self._frozen = 0
        self._heads: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"weightvc.open({self.url!r})"

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.store.url

    @property
    def stats(self) -> Stats:
        """Requests and bytes so far."""
        return self.store.stats

    def close(self) -> None:
        """Release connections."""
        self.store.close()

    def __enter__(self) -> "Repository":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading history

    def refresh(self) -> Root:
        """Read the root, by one conditional request where it was read before."""
        with self._lock:
            if self._frozen and self._seen is not None:
                return self._seen.root
            seen = swap.read_root(self.store, unless_etag=self._seen.etag if self._seen else None)
            if seen is not None:
                self._seen = seen
            assert self._seen is not None
            return self._seen.root

    @contextmanager
    def snapshot(self) -> Iterator[Root]:
        """What is read inside a with block is all of one moment, and reads the root once."""
        root = self.refresh()
        with self._lock:
            self._frozen += 1
        try:
            yield root
        finally:
            with self._lock:
                self._frozen -= 1

    def _refs(self) -> Refs:
        return Refs(self._shelf, self.refresh())

    @property
    def default_branch(self) -> str:
        """The branch that HEAD means."""
        return self.refresh().default

    def branches(self) -> dict[str, str]:
        """Branches and the ids of their heads."""
        return dict(self.refresh().branches)

    def tags(self) -> dict[str, str]:
        """Tags and the ids of their versions."""
        return tag_page(self._shelf, self.refresh())[0]

    def resolve(self, ref: Ref = HEAD) -> Version:
        """The version that a ref means: a branch, tag, id, main~2, main@{1}, main@{step=121}, or a Version.

        Raises RefNotFound, BadName.
        """
        return _version(self._refs().resolve(ref).entry)

    def entry(self, ref: Ref = HEAD) -> Entry:
        """The catalogue's entry of a version: the version, and where it lies."""
        if self._last is not None and self._last.new == (ref.id if isinstance(ref, Version) else ref):
            return self._last
        return self._refs().resolve(ref).entry

    def log(self, ref: Ref = HEAD, n: int | None = None) -> Iterator[Version]:
        """A version and everything that it descends from, newest first; at most `n`."""
        for entry in self.entries(ref, n):
            yield _version(entry)

    def entries(self, ref: Ref | Sequence[Ref] = HEAD, n: int | None = None) -> Iterator[Entry]:
        """As log(), with what the catalogue knows of each version; of several refs, the union of their histories."""
        import heapq

        def order(entry: Entry) -> tuple[int, int, str]:
            return -_version(entry).generation, -entry.sequence, _version(entry).id

        if n is not None and n <= 0:
            return
        refs = self._refs()
        starts = [refs.resolve(one).entry for one in ([ref] if isinstance(ref, Ref) else ref)]
        last: str | None = None
        count = 0
        for entry in heapq.merge(*(refs.ancestors(start) for start in starts), key=order):
            if entry.new != last:  # what several refs descend from comes once from each, side by side
                yield entry
                last = entry.new
                count += 1
                if count == n:
                    return  # before the next one is looked for, which may take another segment

    def reflog(self, branch: str = HEAD) -> Iterator[Entry]:
        """Every move of a branch, newest first."""
        refs = self._refs()
        return refs.moves(refs.name(branch))

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
        expect: Ref | None = None,
        parents: Sequence[Ref] = (),
        on_conflict: Literal["raise", "rebase"] = "raise",
        base: bool = False,
        name: str | None = None,
        exclude: Iterable[str] = (),
    ) -> Version:
        """Commit weights as the next version of a branch and return it.

        `source` is a path or URL (a safetensors file, a directory, a .pt file), a mapping of torch or numpy tensors,
        a torch module, or a Source. `step` and `run` are labels; `metadata` is anything that JSON keeps exactly.
        `dtype` casts floating tensors ("bfloat16", "float16", "float32", or the torch.dtype) with torch's rounding;
        the dtype that a config.json beside them names becomes that as well. `names` says how a module's tensors are
        called: as its save_pretrained would, as in its state_dict, or as a function says. A model of transformers
        has to write itself to disk for the first of these, at every commit.
        Nothing is copied: do not change the tensors (or train on) until it returns.

        The parent is the branch's head, which must be `expect` if that is given (a ref; "" for: no such branch
        yet), else what this object last loaded, checked out or committed there. If somebody else moved the branch,
        BranchMoved is raised and nothing is published; on_conflict="rebase" diffs again on top instead, as often as
        it takes: your weights replace those of the new head; the other's change is not merged, it stays in the
        history. branch=None publishes a detached version on parents[0]. Further `parents` are recorded. `base`
        stores the tree whole as well, so that a cold reader can start here. `name` and `exclude` are for files.

        Raises Refused (and its kinds), BranchMoved, StateUnknown, StoreError. Whatever is raised, the branch reads
        as before, or (StateUnknown) perhaps as after.
        """
        from weightvc.sources import open_source

        if on_conflict not in ("raise", "rebase"):
            raise Refused(f'on_conflict={on_conflict!r:.100}: give "raise" or "rebase"')
        check_words(message, self.author)
        opened = open_source(source, names=names, dtype=dtype, name=name, exclude=exclude)
        try:
            return self._commit(
                opened,
                branch=branch,
                expect=expect,
                parents=parents,
                rebase=on_conflict == "rebase",
                base=base,
                labels=(message, _step(step), run, metadata),
                cast=dtype is not None,
            )
        finally:
            if opened is not source:
                opened.close()

    def _commit(
        self,
        source: "Source",
        *,
        branch: str | None,
        expect: Ref | None,
        parents: Sequence[Ref],
        rebase: bool,
        base: bool,
        labels: tuple[str, int | None, str | None, Mapping[str, Any] | None],
        cast: bool,
    ) -> Version:
        from weightvc.protocol import commit, resolve
        from weightvc.sources.header import collector_paused

        with collector_paused():
            schema = self._shelf.schema_of(source.tensors)
        message, step, run, metadata = labels
        said = commit.Labels(message, step, run, metadata, self.author)
        restarts = 0
        while True:
            root = self.refresh()
            seen = self._seen
            refs = Refs(self._shelf, root)
            if branch is not None:
                target = check_name(root.default if branch == HEAD else branch)
                head = root.branches.get(target)
                wanted = self._wanted(refs, target, head, expect)
                if head != wanted:
                    if not (rebase and expect is None):
                        raise moved(target, wanted, head)
                    self._remember(target, head)
                    wanted = head
                if head is None:
                    _check_no_tag(target, refs.tags())
                first = [refs.entry(head)] if head is not None else []
            else:
                target, wanted, first = None, None, []
            entries = first + [refs.resolve(parent).entry for parent in parents]
            transaction = key.Transaction(root.sequence)
            with ExitStack() as stack:
                parent = None
                if entries:
                    made, verified = stack.enter_context(
                        resolve.opened(self._shelf, refs, entries[0], identify=False)
                    )
                    parent = commit.Baseline(entries[0], verified.tree, made, verified)
                    base = base or commit.outgrown(refs, parent, schema)
                build = commit.Build(
                    self._shelf, source, schema, parent, transaction, base=base, progress=self.progress
                )
                stack.callback(build.drop)
                entry = commit.upload(
                    self._shelf,
                    build,
                    source,
                    transaction,
                    branch=target,
                    parents=[_version(e) for e in entries],
                    parent=parent,
                    labels=said,
                    head=wanted,
                )
                try:
                    entry, self._seen = commit.publish(self._shelf, entry, transaction, seen, expected=wanted)
                except BranchMoved as error:
                    assert target is not None
                    if not rebase or expect is not None:
                        raise
                    self._remember(target, error.head)
                    continue
                except Expired:
                    restarts += 1
                    if restarts > RESTARTS:
                        raise
                    continue
                version = _version(entry)
                self._last = entry
                build.keep(version)
                if target is not None:
                    self._remember(target, version.id)
                if build.unread:
                    warnings.warn(
                        f"parts of the parent could not be read and were stored whole: {build.unread[0]}",
                        WeightvcWarning,
                        stacklevel=3,
                    )
                if not cast and parent is not None and 2 * build.changed_float32 > schema.elements:
                    share = build.changed_float32 / schema.elements
                    warnings.warn(
                        f"{share:.0%} of the elements changed, and they are float32: if what is served is bfloat16, "
                        "commit with dtype='bfloat16' (--dtype bf16), and patches become some hundred times smaller",
                        WeightvcWarning,
                        stacklevel=3,
                    )
                return version

    def _wanted(self, refs: Refs, branch: str, head: str | None, expect: Ref | None) -> str | None:
        if expect is None:
            return self._heads.get(branch, head)
        return refs.resolve(expect).entry.new if expect else None

    def _remember(self, branch: str, head: str | None) -> None:
        with self._lock:
            self._heads[branch] = head

    def revert(self, ref: Ref, *, branch: str = HEAD, message: str | None = None, **options: Any) -> Version:
        """Make a new version on a branch with the tree and layout of `ref`: back, by going forward."""
        refs = self._refs()
        entry = refs.resolve(ref).entry
        old = _version(entry)
        with self._open(refs, entry, whole=True) as source:
            text = f"revert to {old.short}" + (f": {old.message}" if old.message else "")
            return self.commit(
                source, branch=branch, message=text if message is None else message, step=old.step, **options
            )

    def _change(self, make: Callable[..., Root]) -> Root:
        """Swap the root for what `make` returns, beginning again where the collector has passed by."""
        for restart in range(RESTARTS + 1):
            root = self.refresh()
            transaction = key.Transaction(root.sequence)
            try:
                self._seen = swap.change(self._shelf, partial(make, transaction=transaction), transaction, self._seen)
                return self._seen.root
            except Expired:
                if restart == RESTARTS:
                    raise
        raise AssertionError

    def _move(
        self,
        root: Root,
        op: str,
        name: str,
        old: str | None,
        new: str | None,
        message: str,
        **changes: Any,
    ) -> Root:
        check_words(message, self.author)
        entry = Entry(op, root.sequence + 1, time.time_ns() // 1000, self.author, name, old, new, message)
        return root.next(tail=(*root.tail, entry), **changes)

    def branch(self, name: str, ref: Ref = HEAD, *, message: str = "") -> Version:
        """Make a branch at a version.

        Raises Conflict if there is a branch or a tag of that name, BadName, RefNotFound, Refused.
        """
        check_name(name)
        made: list[Version] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            entry = Refs(self._shelf, root).resolve(ref).entry
            made[:] = [_version(entry)]
            if (head := root.branches.get(name)) is not None:
                raise Conflict(
                    f"the branch {name!r} exists, at {head[:12]}: choose another name, or use `weightvc reset`"
                )
            _check_no_tag(name, tag_page(self._shelf, root)[0])
            branches = {**root.branches, name: made[0].id}
            return self._move(root, "branch", name, None, made[0].id, message, branches=branches)

        self._change(make)
        return made[0]

    def delete_branch(self, name: str, *, expect: Ref | None = None) -> str:
        """Delete a branch; its versions stay in the catalogue. Returns the head that it had.

        Raises RefNotFound, BranchMoved (`expect`), and Refused for the default branch: HEAD would mean nothing.
        """
        gone: list[str] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            head = self._head_of(root, name, expect)
            if name == root.default:
                raise Refused(
                    f"{name!r} is the default branch: let another be that first (`weightvc branch --default NAME`)"
                )
            gone[:] = [head]
            branches = {k: v for k, v in root.branches.items() if k != name}
            return self._move(root, "delete", name, head, None, "", branches=branches)

        self._change(make)
        with self._lock:
            self._heads.pop(name, None)
        return gone[0]

    def _head_of(self, root: Root, name: str, expect: Ref | None) -> str:
        head = root.branches.get(name)
        if head is None:
            raise RefNotFound(f"there is no branch {name!r}")
        if expect is not None and (wanted := Refs(self._shelf, root).resolve(expect).entry.new) != head:
            raise moved(name, wanted, head, "expect the new head")
        return head

    def set_default_branch(self, name: str) -> None:
        """Let HEAD mean another branch."""

        def make(root: Root, transaction: key.Transaction) -> Root:
            if name not in root.branches:
                raise RefNotFound(f"there is no branch {name!r}: make it with `weightvc branch {name}`")
            return self._move(root, "default", name, root.default, name, "", default=name)

        self._change(make)

    def reset(
        self, branch: str, ref: Ref, *, rewind: bool = False, expect: Ref | None = None, message: str = ""
    ) -> Version:
        """Move a branch to a version. Refused, without `rewind`, if that would leave versions behind."""
        made: list[Version] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            refs = Refs(self._shelf, root)
            name = refs.name(branch)
            head = self._head_of(root, name, expect)
            entry = refs.resolve(ref).entry
            made[:] = [_version(entry)]
            if not rewind and not refs.descends(entry, head):
                raise Refused(
                    f"{made[0].short} does not descend from {head[:12]}, the head of {name!r}: to go back by a new "
                    "version use `weightvc revert`; to drop what is newer, reset with --rewind"
                )
            branches = {**root.branches, name: made[0].id}
            return self._move(root, "reset", name, head, made[0].id, message, branches=branches)

        root = self._change(make)
        self._remember(Refs(self._shelf, root).name(branch), made[0].id)
        return made[0]

    def tag(self, name: str, ref: Ref = HEAD, *, force: bool = False) -> Version:
        """Name a version. A tag does not move, and a deleted tag's name means no other version, without `force`.

        Raises Conflict for that, and for a branch's name, which would hide the tag; BadName, RefNotFound.
        """
        check_name(name, "tag")
        made: list[Version] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            made[:] = [_version(Refs(self._shelf, root).resolve(ref).entry)]
            if name in root.branches or name == root.default:
                raise Conflict(f"{name!r} is a branch, which would hide a tag of that name: choose another name")
            tags, deleted = tag_page(self._shelf, root)
            old = tags.get(name)
            if (old or deleted.get(name, made[0].id)) != made[0].id and not force:
                what = f"names {old[:12]}" if old else f"named {deleted[name][:12]} before it was deleted"
                raise Conflict(f"the tag {name!r} {what}: choose another name, or --force")
            tags[name] = made[0].id
            deleted.pop(name, None)
            page = self._shelf.put(transaction, "page", encode_tags(tags, deleted))
            return self._move(root, "tag", name, old, made[0].id, "", tags=page)

        self._change(make)
        return made[0]

    def delete_tag(self, name: str) -> str:
        """Delete a tag. Returns the id that it named."""
        gone: list[str] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            tags, deleted = tag_page(self._shelf, root)
            if name not in tags:
                raise RefNotFound(f"there is no tag {name!r}")
            gone[:] = [tags.pop(name)]
            deleted[name] = gone[0]
            page = self._shelf.put(transaction, "page", encode_tags(tags, deleted))
            return self._move(root, "untag", name, gone[0], None, "", tags=page)

        self._change(make)
        return gone[0]

    # Reading weights

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
            checkout.write_marker(beside, checkout.Marker(self.url, version.id, branch, files))
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
                raise TensorNotFound(f"{_said(ref)} has no tensor {name!r:.200}: see `weightvc ls {_said(ref)}`")
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
                raise TensorNotFound(f"{_said(ref)} has no tensor {name!r:.200}: see `weightvc ls {_said(ref)}`")
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


def _step(step: Any) -> Any:
    # numpy counts in integers of its own; what is no integer is refused where the version is made.
    if isinstance(step, bool):
        return step
    try:
        return operator.index(step)
    except TypeError:
        return step


def _said(ref: Ref) -> str:
    return ref.short if isinstance(ref, Version) else ref


def _check_no_tag(branch: str, tags: Mapping[str, str]) -> None:
    if branch in tags:
        raise Conflict(f"{branch!r} is a tag, which a branch of that name would hide: choose another name")


def _version(entry: Entry) -> Version:
    assert entry.version is not None
    return entry.version
