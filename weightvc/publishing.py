"""Publishing: how a commit is made, and what a repository offers to a trainer that does not wait for its commits."""

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

from weightvc import options
from weightvc.errors import BranchMoved, Conflict, Expired, NotPublished, Refused, StateUnknown, WeightvcWarning
from weightvc.history import HEAD, RESTARTS, History, Ref, check_no_tag, version_of
from weightvc.objects import key
from weightvc.objects.catalogue import CLAIM, Entry
from weightvc.objects.root import Root
from weightvc.objects.version import Version, check_words
from weightvc.options import Labels, Sharded
from weightvc.protocol.refs import Refs, check_name, moved, promised

if TYPE_CHECKING:
    from weightvc.publisher import Publisher, WhenFull
    from weightvc.ranks import Ranks
    from weightvc.sharding import Sharding
    from weightvc.sources.base import Source
    from weightvc.sources.shards import Shards
    from weightvc.sources.snapshot import Arenas
    from weightvc.sources.transform import Transform
    from weightvc.writer import Added, Writer

_log: Final = logging.getLogger("weightvc")


class Publishing(History):
    """Commits, at once or behind the caller."""

    _behind: "tuple[Publisher, Arenas] | None" = None
    _sharding: "Sharding | None" = None
    _calls = 0
    """How many calls this object has made together with other ranks, with those that failed before they heard."""

    def commit_async(
        self,
        source: Any,
        *,
        branch: str = HEAD,
        message: str = "",
        step: int | None = None,
        run: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        dtype: Any = None,
        names: "Literal['hf', 'as-is'] | Callable[[str], str]" = "hf",
        transform: "Transform | None" = None,
        on_conflict: Literal["raise", "rebase"] = "raise",
        base: bool = False,
        codec: Literal["small", "fast", "auto"] = "small",
        queue: int = 1,
        when_full: "WhenFull" = "wait",
    ) -> "Future[Version]":
        """Copy the weights, return at once, and commit the copy behind the caller. Arguments are those of commit().

        Once it returns, the tensors may change: the version has what they held when it was called. Tensors of a CUDA
        device are copied there, in the current stream, and cross the bus behind the caller. Files are not copied:
        leave them until the future is done. Copies take (`queue` + 1) times the bytes that are committed, at most, of
        main memory (pinned, for tensors of a CUDA device), kept for the next ones until close(). A transform is
        called before it returns, and what it gives is copied.

        Commits are made in order, one after the other, each as a whole. At most `queue` wait beside the one that is
        being made; if there are as many, `when_full` says what happens: "wait" for room, "skip" the oldest that waits
        (its future is cancelled; the next version has its changes too), or "raise" QueueFull.

        The future gives the Version, or raises what commit() would. It may be ignored: the next commit, flush() or
        close() raises NotPublished then, which names the steps that failed, and takes nothing: call it again. The
        branch is as before, so that the next version has the changes of those that failed as well.

        Raises Refused (and its kinds) at once for what cannot be committed; NotPublished; QueueFull.
        """
        from weightvc.sources import open_source, snapshot
        from weightvc.sources.cast import cast
        from weightvc.sources.files import FileSource
        from weightvc.sources.module import SavedSource

        labels = options.behind(
            self.author,
            branch=branch,
            message=message,
            step=step,
            run=run,
            metadata=metadata,
            dtype=dtype,
            names=names,
            transform=transform,
            on_conflict=on_conflict,
            codec=codec,
            queue=queue,
            when_full=when_full,
        )
        publisher, arenas = self._made_behind()

        def take() -> "Source":
            # Opened without a dtype: rounding is part of the copy.
            opened = open_source(source, names=names, transform=transform)
            if opened is not source and isinstance(opened, FileSource | SavedSource):
                return opened if dtype is None else cast(opened, dtype)
            try:
                return snapshot.take(opened, dtype, arenas)
            finally:
                if opened is not source:
                    opened.close()

        def commit(taken: "Source") -> Version:
            castable = dtype is None and transform is None
            return self._commit_next(taken, branch, on_conflict, base, codec, labels, castable=castable)

        label = f"a commit to {branch}" if step is None else f"step {step}"
        return publisher.submit(label, take, commit, queue=queue, when_full=when_full)

    def writer(
        self,
        branch: str = HEAD,
        *,
        message: str = "",
        step: int | None = None,
        run: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        dtype: Any = None,
        transform: "Transform | None" = None,
        on_conflict: Literal["raise", "rebase"] = "raise",
        base: bool = False,
        codec: Literal["small", "fast", "auto"] = "small",
        ranks: Any = None,
    ) -> "Writer":
        """A context in which a version's tensors are added one by one, for who never has all of them at once:

            with repository.writer("main", step=n) as out:
                for name, tensor in export():
                    out.add(name, tensor)

        At the end of the block they are committed, as commit() does it, and `out.version` is the version. If the
        block ends in an error, or an add() has raised one, nothing is published. Tensors may come in any order; a
        name that comes twice is refused. Arguments are those of commit(). A transform is given what one add(), or one
        add_all(), was given, and what it makes of that is added.

        With `ranks` (as of commit_sharded()), all ranks have such a block, and add different tensors, or different
        parts of them; at the end, where all have to come, it is committed as commit_sharded() does it, and a tensor
        or part that two ranks added is refused. Where the block of one ends in an error, those of the others do too.

        Raises Refused, and without ranks Fenced and NotPublished (as commit() does), at once; at the end of the block
        what commit() or commit_sharded() raises. With ranks, Refused is raised once the others have come to the end
        of their blocks, so that they hear of it.
        """
        from weightvc.writer import Writer, raise_again

        def check() -> Sharded:
            return options.sharded(
                self.author,
                branch=branch,
                message=message,
                step=step,
                run=run,
                metadata=metadata,
                dtype=dtype,
                transform=transform,
                on_conflict=on_conflict,
                base=base,
                codec=codec,
            )

        cache = self._shelf.cache
        directory = None if cache is None else cache.directory
        if ranks is not None:
            from weightvc.ranks import open_ranks

            opened, number = open_ranks(ranks), self._next_call()

            def together(added: "Callable[[], Added]") -> Version:
                return self._commit_shards(added, opened, check, number, replicas=False)

            def made() -> Writer:
                check()
                if on_conflict != "raise":
                    raise Refused("on_conflict is not for ranks: see what moved the branch, and add all again")
                return Writer(together, directory=directory, dtype=dtype, transform=transform, apart=True)

            try:
                return made()
            except Exception as error:
                # The others come to the end of their blocks, and wait there: they are to hear of it.
                raise_again(together, error)
                raise
        labels = check().labels
        self.flush()
        root = self.refresh()
        # Who is fenced off hears of it before he has exported everything.
        self._epoch(root, check_name(root.default if branch == HEAD else branch))

        def commit(added: "Callable[[], Added]") -> Version:
            source = added()
            self.flush()
            castable = dtype is None and transform is None
            return self._commit_next(source, branch, on_conflict, base, codec, labels, castable=castable)

        return Writer(commit, directory=directory, dtype=dtype, transform=transform, apart=False)

    def commit_sharded(
        self,
        tensors: Mapping[str, Any],
        *,
        ranks: Any = None,
        branch: str = HEAD,
        message: str = "",
        step: int | None = None,
        run: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        dtype: Any = None,
        transform: "Transform | None" = None,
        base: bool = False,
        codec: Literal["small", "fast", "auto"] = "small",
    ) -> Version:
        """Commit a model that lies on many ranks, as one version, which each of them returns. All call it, at once.

        `tensors` is what this rank has by name, such as its state_dict(): DTensors, and plain tensors, which are on
        one rank, or the same on several. `ranks` is a process group of torch.distributed that can move bytes between
        CPUs (gloo), None for the default one, or a weightvc.ranks.Ranks of your own. Each rank opens the repository
        for itself. The other arguments are those of commit(). All ranks give the same, but for `message` and
        `metadata`, of which rank 0's are used. Give `step`: by it ranks see that they publish the same one; else they
        count their calls. Do not change the tensors before it returns. A transform is called on each rank, with what
        that has: what is done to a DTensor is done to the whole of it, by all ranks together. It gives what this rank
        has of what is served.

        Each rank reads, hashes, diffs and uploads its own part; rank 0 publishes once all have. The version is that
        of the whole model: its tree is what commit() makes of the gathered tensors. A rank keeps its part of the last
        version in main memory, to compare the next one with; while one is made, both.

        If a rank fails, also for its arguments, it raises its own error, and the others NotPublished; if one dies,
        the others raise what `ranks` raises then. No version is published, unless rank 0 fails or dies in the last
        step, which publishes.
        Raises BadTensor also where ranks differ about a tensor, or a part of it is nowhere, or is twice; replicas of
        a part are not compared, and may be read from any rank that has it. Raises Refused on all ranks where their
        arguments differ, or their counts; and for a module, whose state_dict() is to be given.
        """
        from weightvc.ranks import open_ranks
        from weightvc.sources.shards import Shards, open_shards
        from weightvc.sources.transform import check_transform

        number = self._next_call()

        def check() -> Sharded:
            return options.sharded(
                self.author,
                branch=branch,
                message=message,
                step=step,
                run=run,
                metadata=metadata,
                dtype=dtype,
                transform=transform,
                base=base,
                codec=codec,
            )

        def opened() -> Shards:
            return open_shards(tensors, dtype, check_transform(transform))

        return self._commit_shards(opened, open_ranks(ranks), check, number, replicas=True)

    def _next_call(self) -> int:
        """The number of a call that all ranks make. It is taken before anything can fail, so that ranks of which one
        has not heard of the others have different ones."""
        with self._lock:
            self._calls += 1
            return self._calls

    def _commit_shards(
        self,
        shards: "Callable[[], Shards | Added]",
        ranks: "Ranks",
        check: Callable[[], Sharded],
        number: int,
        *,
        replicas: bool,
    ) -> Version:
        from weightvc.sharding import Sharding

        def opened() -> "Shards | Added":
            self.flush()
            return shards()

        if self._sharding is None:
            self._sharding = Sharding()
        return self._sharding.commit(self, opened, ranks, check, number, replicas=replicas)

    def flush(self) -> None:
        """Wait until all commits that were made with commit_async() are published.

        Raises NotPublished if some have failed since that was told last.
        """
        if self._behind is not None:
            self._behind[0].flush()

    def close(self) -> None:
        """Wait for commits that are being made, and release connections. Raises NotPublished as flush() does."""
        try:
            self.flush()
        finally:
            if self._behind is not None:
                self._behind[1].clear()
            super().close()

    def __exit__(self, *raised: object) -> None:
        try:
            self.close()
        except NotPublished as error:
            if raised[0] is None:
                raise
            # What ended the block is what the caller is to hear of first.
            _log.error("%s", error)

    def claim(self, branch: str = HEAD, *, at: Ref | None = None, message: str = "") -> Version | None:
        """Become the one who writes a branch. Returns the version to go on from; None if there is none yet.

        Whoever wrote to it before, by another Repository, is refused from now on: its commits raise Fenced, also
        those that it has begun. Others, who have not, may still commit to it. A trainer claims its branch when it
        starts, and then goes on from what it finds there.

        `at` is a version to go on from instead: the branch is moved to it. What it leaves behind stays, on a branch
        that is named after this one and the operation (main-until-57); so the two lines are a fork that all can see.

        Waits for what commit_async() took, as commit() does. Raises RefNotFound, Expired, BadName, NotPublished;
        Conflict if a tag has the branch's name.
        """
        check_words(message, self.author)
        self.flush()
        found: list[tuple[str, Entry | None, int]] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            refs = Refs(self._shelf, root)
            name = check_name(root.default if branch in (HEAD, "@") else branch)
            head = root.branches.get(name)
            if head is None:
                check_no_tag(name, refs.tags())
            start = refs.entry(head) if head is not None else None
            branches = dict(root.branches)
            moves: list[tuple[str, tuple[str, str | None, str | None]]] = []
            if at is not None:
                start = promised(refs.resolve(at).entry)
                if start.new != head:
                    moves.append(("branch" if head is None else "reset", (name, head, start.new)))
                    if head is not None and not refs.descends(start, head):
                        kept = check_name(f"{name[:100]}-until-{root.sequence + 1}")
                        check_no_tag(kept, refs.tags())
                        if kept in branches:
                            raise Conflict(f"the branch {kept!r} exists: give it another name, and claim again")
                        branches[kept] = head
                        moves.insert(0, ("branch", (kept, None, head)))
                    branches[name] = version_of(start).id
            now, sequence = time.time_ns() // 1000, root.sequence + 1
            found[:] = [(name, start, sequence)]
            moves.append((CLAIM, (name, head, None if start is None else start.new)))
            entries = [Entry(op, sequence, now, self.author, *names, message) for op, names in moves]
            return root.next(tail=(*root.tail, *entries), branches=branches, writers={**root.writers, name: sequence})

        self._change(make)
        ((name, start, sequence),) = found
        self._epochs[name] = sequence
        self._remember(name, None if start is None else start.new)
        return None if start is None else version_of(start)

    def _made_behind(self) -> "tuple[Publisher, Arenas]":
        from weightvc.publisher import Publisher
        from weightvc.sources.snapshot import Arenas

        with self._lock:
            if self._behind is None:
                self._behind = Publisher(), Arenas()
            return self._behind

    def _commit(
        self,
        source: "Source",
        *,
        branch: str | None,
        expect: Ref | None,
        parents: Sequence[Ref],
        rebase: bool,
        base: bool,
        codec: str,
        labels: Labels,
        castable: bool,
    ) -> Version:
        """Commit a source, as often as it takes where another writer or the collector comes between."""
        from weightvc.protocol import commit, pins, resolve
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
                epoch = self._epoch(root, target)
                wanted = self._wanted(refs, target, head, expect)
                if head != wanted:
                    if expect is not None or not (rebase or self._is_own(target, head)):
                        raise moved(target, wanted, head)
                    self._remember(target, head)
                    wanted = head
                if head is None:
                    check_no_tag(target, refs.tags())
                first = [refs.entry(head)] if head is not None else []
            else:
                target, wanted, epoch, first = None, None, None, []
            entries = first + [refs.resolve(parent).entry for parent in parents]
            transaction = key.Transaction(root.sequence)
            with ExitStack() as stack:
                # One that takes long asks the collector to wait: its horizon would only make it begin again. So does
                # one that was passed already, since the grace period is shorter than it takes.
                pin = stack.enter_context(pins.Holder(self.store, begin=transaction.begin, after=pins.PATIENCE))
                if restarts:
                    pin.ask()
                parent = None
                if entries:
                    made, verified = stack.enter_context(
                        resolve.opened(self._shelf, refs, entries[0], identify=False)
                    )
                    parent = commit.Baseline(entries[0], verified.tree, made, verified)
                    base = base or commit.outgrown(refs, parent, schema)
                build = commit.Build(
                    *(self._shelf, source, schema, parent, transaction),
                    base=base,
                    codec=codec,
                    progress=self.progress,
                )
                stack.callback(build.drop)
                entry = commit.upload(
                    self._shelf,
                    build,
                    source,
                    transaction,
                    branch=target,
                    parents=[version_of(e) for e in entries],
                    parent=parent,
                    labels=said,
                    head=wanted,
                )
                try:
                    entry, self._seen = commit.publish(
                        self._shelf, entry, transaction, seen, expected=wanted, epoch=epoch
                    )
                except BranchMoved as error:
                    assert target is not None
                    if expect is not None or not (rebase or self._is_own(target, error.head)):
                        raise
                    self._remember(target, error.head)
                    continue
                except StateUnknown:
                    if target is not None and entry.new is not None:
                        # Should the branch turn out to be there, it was not somebody else who moved it.
                        self._unsure[target] = entry.new
                    raise
                except Expired:
                    restarts += 1
                    if restarts > RESTARTS:
                        raise
                    continue
                version = version_of(entry)
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
                if castable and parent is not None and 2 * build.changed_float32 > schema.elements:
                    share = build.changed_float32 / schema.elements
                    warnings.warn(
                        f"{share:.0%} of the elements changed, and they are float32: if what is served is bfloat16, "
                        "commit with dtype='bfloat16' (--dtype bf16), and patches become some hundred times smaller",
                        WeightvcWarning,
                        stacklevel=3,
                    )
                return version

    def _commit_next(
        self,
        source: "Source",
        branch: str,
        on_conflict: str,
        base: bool,
        codec: str,
        labels: Labels,
        *,
        castable: bool,
    ) -> Version:
        """Commit a source on top of what this object has seen of a branch."""
        return self._commit(
            source,
            branch=branch,
            expect=None,
            parents=(),
            rebase=on_conflict == "rebase",
            base=base,
            codec=codec,
            labels=labels,
            castable=castable,
        )


def check_async(repository: Any, given: Mapping[str, Any]) -> None:
    """Raise Refused for what is no repository, and for options that commit_async() would refuse for any source."""
    asked = _bound(Publishing.commit_async, repository, given)
    options.behind(repository.author, **asked)


def check_sharded(repository: Any, given: Mapping[str, Any]) -> Sharded:
    """What options of commit_sharded() ask for, for who has shards in another form than it takes. Raises Refused."""
    if isinstance(repository, Publishing):
        repository._next_call()  # who is refused here is out of step with those who are not
    asked = _bound(Publishing.commit_sharded, repository, given)
    return options.sharded(repository.author, **asked)


def _bound(method: Callable[..., Any], repository: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a method. Raises Refused for those that it has not, and for what is no repository."""
    if not isinstance(repository, Publishing):
        raise Refused(f"repository={repository!r:.100}: give a Repository, such as weightvc.open() returns")
    try:
        asked = inspect.signature(method).bind(repository, None, **given)
    except TypeError as error:
        raise Refused(f"{error}: give options of Repository.{method.__name__}()") from None
    asked.apply_defaults()
    return asked.kwargs
