"""The care of a repository: what is kept, what is let go of and collected, and the one job that does it all."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

from weightvc.errors import Refused, Unavailable
from weightvc.history import History, Ref, version_of
from weightvc.objects import key, retention
from weightvc.objects import root as roots
from weightvc.objects.retention import Policy, Rules
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.protocol import swap

if TYPE_CHECKING:
    from weightvc.protocol.collect import Collection
    from weightvc.protocol.compact import Compacted
    from weightvc.protocol.expire import Expiry

T = TypeVar("T")
COPIES: Final = 16
"""Copies of the root that are kept."""


class _Unchanged(Exception):
    """Nothing is to be swapped."""


@dataclass(slots=True)
class Maintenance:
    """What one run of maintain() did."""

    expiry: "Expiry | None" = None
    """None: no policy is kept."""
    compaction: "Compacted | None" = None
    """None: it was not asked for."""
    collection: "Collection | None" = None
    copy: str = ""
    """Key of the copy of the root."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part took."""


class Retention(History):
    """Expiry and garbage collection."""

    def compact(self) -> "Compacted":
        """Add ways to versions; Repository has it in full."""
        raise NotImplementedError

    def policy(self) -> Policy | None:
        """The policy that the repository keeps, or None. Raises Unsupported for one of a newer weightvc."""
        kept = self.refresh().retention
        return None if kept is None else retention.from_json(kept)

    def forget_policy(self, branches: Iterable[str] = (), *, dry_run: bool = False) -> Policy | None:
        """Keep no policy any more, or none of these branches' own. Returns what is left of it.

        `dry_run` only says what would be left.
        """
        found: list[Policy | None] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            kept = None
            if named and root.retention is not None:
                old = retention.from_json(root.retention)
                kept = replace(old, branches={k: v for k, v in old.branches.items() if k not in named})
            if kept is not None and not kept.branches:
                kept = None
            found[:] = [kept]
            left = None if kept is None else retention.to_json(kept)
            if dry_run or left == root.retention:
                raise _Unchanged
            return root.next(retention=left)

        named = set(branches)
        with suppress(_Unchanged):
            self._change(make)
        return found[0]

    def expire(
        self,
        given: Policy | Rules | None = None,
        *,
        save: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ) -> "Expiry":
        """Let go of the versions that a policy does not keep: the repository's own, unless one is given.

        Heads of branches and tagged versions always stay, and so does what a lease is held on. A version that others
        are patched from stays as a stepping stone, and is asked for in vain. One swap does all of it or nothing; its
        objects stay until gc() collects them. `save` keeps the policy in the repository. `dry_run` only says what
        would become of each version. Raises Refused without a policy, and without branches unless forced.
        """
        from weightvc.protocol import clock, expire

        if isinstance(given, Rules):
            given = Policy({retention.ALL: given}, retention.UNREACHABLE)
        if given is not None:
            retention.check(given)
        if save and given is None:
            raise Refused("there is no policy to save: say what to keep")
        found: list[Expiry] = []

        def make(root: Root, transaction: key.Transaction) -> Root:
            rules = given
            if rules is None:
                if root.retention is None:
                    raise Refused("no policy is kept here: say what to keep (--keep-last 100, and --save to keep it)")
                rules = retention.from_json(root.retention)
            result, new = expire.plan(self._shelf, root, transaction, rules, now, force=force)
            found[:] = [result]
            kept = retention.to_json(rules) if save else root.retention
            if dry_run or (new is root and kept == root.retention):
                raise _Unchanged
            return root.next(tail=new.tail, segments=new.segments, retention=kept)

        now = clock.now(self.store)
        with suppress(_Unchanged):
            self._change(make)
        return found[0]

    def gc(self, *, grace: float = retention.GRACE, force: bool = False, dry_run: bool = False) -> "Collection":
        """Delete what an earlier run condemned at least `grace` seconds ago, and condemn what is dead now.

        With a grace of 0 all that nothing names goes at once: for a repository that nobody reads from or writes to
        meanwhile (they lose nothing, but may have to begin again). `force` allows what looks like a mistake.
        Interrupted anywhere, the next run goes on. Raises Refused, Corrupt, NotFound, Conflict, StateUnknown and
        StoreError; then nothing was deleted that had not been condemned. The errors of single keys are in `failed`.
        """
        from weightvc.protocol import collect

        return collect.run(self._shelf, grace=grace, force=force, dry_run=dry_run)

    def maintain(
        self,
        *,
        grace: float = retention.GRACE,
        force: bool = False,
        compact: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> Maintenance:
        """All that a repository wants done regularly: expire() by the policy that it keeps, compact(), gc(), and a
        copy of the root. One scheduled job is enough; two at once do no harm. `progress` is told what comes next.
        Raises what its parts raise; what was done before is done.
        """
        done = Maintenance()

        def part(name: str, work: Callable[[], T]) -> T:
            if progress is not None:
                progress(name)
            began = time.monotonic()
            result = work()
            done.seconds[name] = time.monotonic() - began
            return result

        root = self.refresh()
        try:
            if root.retention is not None:
                done.expiry = part("expire", lambda: self.expire(force=force))
            if compact:
                done.compaction = part("compact", self.compact)
        except Unavailable:
            # Perhaps nothing fits any more: what was condemned before makes room, for the next run.
            part("gc", lambda: self.gc(grace=grace, force=force))
            raise
        done.collection = part("gc", lambda: self.gc(grace=grace, force=force))
        done.copy = part("copy", self.copy_root)
        return done

    def copy_root(self) -> str:
        """Write a copy of the root under root.d/, from which it can be rebuilt if it is lost; the oldest copies go.

        Returns its key.
        """
        root = swap.must_read(self.store).root
        name = key.copy(root.sequence, root.write)
        self.store.put(name, roots.encode(root))
        copies = sorted(one.key for one in self.store.list("root.d/") if key.COPY.fullmatch(one.key))
        # By number, not by age: one that is gone too early is of a root that is long past.
        self.store.delete(copies[:-COPIES])
        return name

    @contextmanager
    def lease(self, ref: Ref = "HEAD", *, lifetime: int = retention.LEASE) -> Iterator[Version]:
        """A context in which a version can be read whatever is let go of meanwhile, and this object sees the
        repository as it was when it began.

        The lease is a small object in the store, renewed while the context lasts, that dies `lifetime` seconds (1 to
        604800, a week) after it was last renewed. Reading needs none: without one, a reader that is overtaken by the
        collector gets Expired. Raises Expired if the version has gone, AccessDenied if the store may not be written.
        """
        from weightvc.protocol import pins

        holder, seen, entry = pins.lease(self._shelf, ref, lifetime=lifetime)
        with holder:
            with self._lock:
                kept, self._seen = self._seen, seen
                self._frozen += 1
            try:
                yield version_of(entry)
            finally:
                with self._lock:
                    self._frozen -= 1
                    if not self._frozen:
                        self._seen = kept
