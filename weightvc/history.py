"""The history of a repository: what its branches, tags and log say, and how they are changed."""

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self

from weightvc.cache import Cache
from weightvc.errors import Conflict, Expired, RefNotFound, Refused
from weightvc.objects import key
from weightvc.objects.catalogue import Entry
from weightvc.objects.root import Root
from weightvc.objects.version import Version, check_words
from weightvc.protocol import swap
from weightvc.protocol.meter import Meter
from weightvc.protocol.refs import Refs, check_epoch, check_name, encode_tags, moved, promised, tag_page
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import Stats, Store

Progress = Callable[[int, int], None]
Ref = str | Version
HEAD: Final = "HEAD"
RESTARTS: Final = 3


class History:
    """Branches, tags and versions; the part of a repository that needs no weights."""

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
        self._unsure: dict[str, str] = {}
        """By branch, the last version of our own of which it is not known whether it was published."""
        self._epochs: dict[str, int | None] = {}
        """By branch that we wrote or claimed, the epoch of the claim that held then; None without any."""
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

    def __enter__(self) -> Self:
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

    def _read(self) -> swap.Seen:
        """The root as refresh() reads it, to swap against."""
        self.refresh()
        assert self._seen is not None
        return self._seen

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

    def _metered(self, meter: Meter) -> Self:
        """This repository, for reads whose parts `meter` is to time."""
        made = copy.copy(self)
        made._shelf = self._shelf.metered(meter)
        return made

    @property
    def default_branch(self) -> str:
        """The branch that HEAD means."""
        return self.refresh().default

    def branches(self) -> dict[str, str]:
        """Branches and the ids of their heads."""
        return dict(self.refresh().branches)

    def tags(self) -> dict[str, str]:
        """Tags and the ids of their versions."""
        return self._refs().tags()

    def resolve(self, ref: Ref = HEAD) -> Version:
        """The version that a ref means: a branch, tag, id, main~2, main@{1}, main@{step=121}, or a Version.

        Raises RefNotFound, BadName.
        """
        return version_of(self._refs().resolve(ref).entry)

    def entry(self, ref: Ref = HEAD) -> Entry:
        """The catalogue's entry of a version: the version, and where it lies."""
        if self._last is not None and self._last.new == (ref.id if isinstance(ref, Version) else ref):
            return self._last
        return self._refs().resolve(ref).entry

    def log(self, ref: Ref = HEAD, n: int | None = None) -> Iterator[Version]:
        """A version and everything that it descends from, newest first; at most `n`."""
        for entry in self.entries(ref, n):
            yield version_of(entry)

    def entries(self, ref: Ref | Sequence[Ref] = HEAD, n: int | None = None) -> Iterator[Entry]:
        """As log(), with what the catalogue knows of each version; of several refs, the union of their histories."""
        import heapq

        def order(entry: Entry) -> tuple[int, int, str]:
            return -version_of(entry).generation, -entry.sequence, version_of(entry).id

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

    def _wanted(self, refs: Refs, branch: str, head: str | None, expect: Ref | None) -> str | None:
        if expect is None:
            return self._heads.get(branch, head)
        return refs.resolve(expect).entry.new if expect else None

    def _epoch(self, root: Root, branch: str) -> int | None:
        """The epoch that this object writes a branch with: as it was when it first did, or claimed it.

        Raises Fenced if somebody else has claimed the branch since.
        """
        epoch = self._epochs.setdefault(branch, root.writers.get(branch))
        check_epoch(self._shelf, root, branch, epoch)
        return epoch

    def _is_own(self, branch: str, head: str | None) -> bool:
        """Whether a branch was moved to `head` by a commit of ours that was reported as unknown."""
        return head is not None and self._unsure.get(branch) == head

    def _remember(self, branch: str, head: str | None) -> None:
        with self._lock:
            self._heads[branch] = head

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
            entry = promised(Refs(self._shelf, root).resolve(ref).entry)
            made[:] = [version_of(entry)]
            if (head := root.branches.get(name)) is not None:
                raise Conflict(
                    f"the branch {name!r} exists, at {head[:12]}: choose another name, or use `weightvc reset`"
                )
            check_no_tag(name, tag_page(self._shelf, root)[0])
            branches = {**root.branches, name: made[0].id}
            return self._move(root, "branch", name, None, made[0].id, message, branches=branches)

        self._change(make)
        return made[0]

    def delete_branch(self, name: str, *, expect: Ref | None = None) -> str:
        """Delete a branch. Returns the head that it had.

        Its versions stay in the catalogue until expire() lets them go; restore_branch() brings it back while it can.

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
            writers = {k: v for k, v in root.writers.items() if k != name}
            return self._move(root, "delete", name, head, None, "", branches=branches, writers=writers)

        self._change(make)
        with self._lock:
            self._heads.pop(name, None)
            self._epochs.pop(name, None)
        return gone[0]

    def restore_branch(self, name: str) -> Version:
        """Make a deleted branch again, at the head that it had, as its reflog has it. Returns that version.

        Raises RefNotFound if it was never deleted, Expired if retention has let the version go, and Conflict if
        there is such a branch, or a tag of its name.
        """
        check_name(name)
        made: list[Version] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            refs = Refs(self._shelf, root)
            if (head := root.branches.get(name)) is not None:
                raise Conflict(f"the branch {name!r} exists, at {head[:12]}: it needs no restoring")
            check_no_tag(name, refs.tags())
            last = next(refs.moves(name), None)
            if last is None or last.op != "delete" or last.old is None:
                raise RefNotFound(f"no branch {name!r} was ever deleted here: see `weightvc branch`")
            made[:] = [version_of(promised(refs.entry(last.old)))]
            branches = {**root.branches, name: last.old}
            return self._move(root, "restore", name, None, last.old, "", branches=branches)

        self._change(make)
        return made[0]

    def _head_of(self, root: Root, name: str, expect: Ref | None) -> str:
        head = root.branches.get(name)
        if head is None:
            raise RefNotFound(f"there is no branch {name!r}: see `weightvc branch`")
        if name in self._epochs:
            check_epoch(self._shelf, root, name, self._epochs[name])
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
            entry = promised(refs.resolve(ref).entry)
            made[:] = [version_of(entry)]
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
            made[:] = [version_of(promised(Refs(self._shelf, root).resolve(ref).entry))]
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


def _author() -> str:
    import pwd
    import socket

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # Names of the system may hold bytes that are no text.
    return f"{user}@{socket.gethostname()}"[:200].encode(errors="replace").decode()


def said(ref: Ref) -> str:
    return ref.short if isinstance(ref, Version) else ref


def check_no_tag(branch: str, tags: Mapping[str, str]) -> None:
    if branch in tags:
        raise Conflict(f"{branch!r} is a tag, which a branch of that name would hide: choose another name")


def version_of(entry: Entry) -> Version:
    assert entry.version is not None
    return entry.version
