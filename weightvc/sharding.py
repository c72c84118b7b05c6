"""Sharding: the commit that all ranks of a job make together."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from weightvc.errors import Conflict, Refused, StateUnknown, WeightvcWarning
from weightvc.history import HEAD, History, check_no_tag, version_of
from weightvc.objects import key, version
from weightvc.objects.version import Version
from weightvc.options import Sharded
from weightvc.protocol import commit, pins, resolve
from weightvc.protocol.commit import Baseline, Labels
from weightvc.protocol.refs import Refs, check_name, moved
from weightvc.protocol.shares import Division, Kept, Owned, Plan, Receipt, Share, Whole, blocks_of, layout_of
from weightvc.ranks import Call, Ranks
from weightvc.sources.shards import Offered, Shards

if TYPE_CHECKING:
    from weightvc.sources.base import Source
    from weightvc.writer import Added
    from weightvc_kernels.context import Stats


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What rank 0 lets all build upon."""

    repository: str
    sequence: int
    transaction: str
    branch: str
    head: str | None
    epoch: int | None


class Sharding:
    """What a rank remembers from one commit to the next: who has what, and its own part of the last version."""

    def __init__(self) -> None:
        self._offers: Sequence[Sequence[Offered]] = ()
        self._plan: Plan | None = None
        self._division: Division | None = None
        self._kept = Kept()

    def commit(
        self,
        repository: History,
        open_shards: "Callable[[], Shards | Added]",
        ranks: Ranks,
        check: Callable[[], Sharded],
        number: int,
        *,
        replicas: bool,
    ) -> Version:
        """Commit what all ranks have, each of which `open_shards` gives, having called the transform. `check` says
        how, and raises for what cannot be asked for. It is this rank's call of that number.

        Each returns the version, or raises: the rank that failed, its own error, and the others NotPublished; all
        Refused where they ask for different things. Every step ends in an exchange, so that nobody waits for one that
        has failed.
        """
        shelf = repository._shelf
        call = Call(ranks)
        opened: list[Shards | Added] = []
        checked: list[Sharded] = []

        def offer() -> tuple[int, Mapping[str, str], list[Offered]]:
            # Opened first: others may wait for this rank in what the transform calls.
            opened.append(open_shards())
            checked.append(check())
            kind = "commit_sharded" if replicas else "writer"
            return number, {**checked[0].same, "by": kind}, list(opened[0].offered)

        told = call.gather(offer)
        (asked,) = checked
        _check_same([said for _, said, _ in told])
        if asked.labels[1] is None:
            _check_numbers([one for one, _, _ in told])
        branch, labels, transform = asked.branch, Labels(*asked.labels, repository.author), asked.transform
        offers = [offered for _, _, offered in told]
        if transform is not None and not any(offers):
            raise Refused(
                f"what transform {transform.name!r:.100} gave is empty on all ranks: let it give what is served"
            )
        (shards,) = opened
        plan = self._planned(offers, replicas=replicas)
        schema = shelf.schema_of(plan.tensors)
        ticket = call.gather(lambda: _begin(repository, branch) if ranks.rank == 0 else None)[0]
        assert ticket is not None
        transaction = key.Transaction(ticket.sequence, ticket.transaction, number=ranks.rank, step=ranks.world)
        with ExitStack() as stack:
            if ranks.rank == 0:
                stack.enter_context(pins.Holder(repository.store, begin=ticket.sequence, after=pins.PATIENCE))
            parents: list[Baseline] = []
            bases: list[bool] = []

            def give() -> list[bytes]:
                refs = _refs(repository, ticket)
                if ticket.head is not None:
                    parents.append(self._parent(repository, refs, ticket.head, stack))
                parent = parents[0] if parents else None
                bases.append(asked.base or (parent is not None and commit.outgrown(refs, parent, schema)))
                blocks = blocks_of(schema, None if parent is None else parent.tree)
                known = self._division
                if known is None or known.schema is not schema or known.blocks != blocks:
                    self._division = Division(plan, schema, blocks, ranks.world)
                assert self._division is not None
                return self._division.parcels(shards, ranks.rank, ranks.world)

            parcels = call.exchange(give)
            division = self._division
            assert division is not None
            parent = parents[0] if parents else None
            made: list[Share] = []

            def sample() -> "list[tuple[str, Stats | None]]":
                share = Share(
                    *(shelf, Owned(division, shards, ranks.rank, parcels), schema, parent, transaction),
                    base=bases[0],
                    codec=asked.codec,
                    progress=None,
                    keep=self._kept,
                )
                stack.callback(share.drop)
                share.take(division.owned[ranks.rank])
                made.append(share)
                return share.sample(division.blocks)

            samples = call.gather(sample)

            def make() -> Receipt:
                made[0].learn([*chain.from_iterable(samples)])
                receipt = made[0].make()
                receipt.files = shards.files
                return receipt

            receipts = call.tell(make)

            def publish() -> str | None:
                if ranks.rank:
                    return None
                source = Owned(division, shards, 0, parcels)
                source.layout = layout_of(schema, receipts)
                return _publish(
                    repository,
                    Whole(shelf, division, receipts, parent, transaction),
                    source,
                    receipts,
                    parent,
                    transaction,
                    ticket,
                    labels,
                )

            record = call.gather(publish)[0]
            assert record is not None
            published = version.read(record)
            self._kept.commit(published.tree)
        repository._remember(ticket.branch, published.id)
        return published

    def _planned(self, offers: Sequence[Sequence[Offered]], *, replicas: bool) -> Plan:
        if self._plan is None or offers != self._offers:
            self._plan = None
            self._plan = Plan(offers, replicas=replicas)
            self._offers, self._division = offers, None
        return self._plan

    def _parent(self, repository: History, refs: Refs, head: str, stack: ExitStack) -> Baseline:
        entry = refs.entry(head)
        # Its bytes are looked at if and when they are read.
        lying = None if self._kept.tree is None else {self._kept.tree: self._kept.of}
        made, verified = stack.enter_context(
            resolve.opened(repository._shelf, refs, entry, lying=lying, identify=False, whole=False)
        )
        return Baseline(entry, verified.tree, made, verified)


def _check_same(said: Sequence[Mapping[str, str]]) -> None:
    """Raise Refused where ranks ask for different things: their next calls may be of two steps, and the version says
    of one transform that it made all."""
    for rank, one in enumerate(said):
        differ = [name for name in one if one[name] != said[0][name]]
        if differ:
            here, first = (", ".join(f"{name}={given[name]:.100}" for name in differ) for given in (one, said[0]))
            said_so = f"ranks ask for different versions ({here} on rank {rank}; {first} on rank 0)"
            mend = "give all the same"
            if "step" in differ:
                mend += ", and where a rank is ahead, let it make this call again until the others come there"
            raise Refused(f"{said_so}, so nothing is published: {mend}")


def _check_numbers(numbers: Sequence[int]) -> None:
    """Raise Refused where it is one rank's seventh call and another's eighth."""
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise Refused(
                f"ranks are out of step (at call {number} of its repository on rank {rank}, at call {numbers[0]} on "
                "rank 0), so nothing is published: give step=, which says what belongs together, or open the "
                "repository anew on all ranks, where they are in step"
            )


def _begin(repository: History, branch: str) -> _Ticket:
    """Look at the branch, as a commit by one process does, and begin a transaction."""
    root = repository.refresh()
    refs = Refs(repository._shelf, root)
    target = check_name(root.default if branch == HEAD else branch)
    head = root.branches.get(target)
    epoch = repository._epoch(root, target)
    wanted = repository._wanted(refs, target, head, None)
    if head != wanted:
        if not repository._is_own(target, head):
            raise moved(target, wanted, head)
        repository._remember(target, head)
    if head is None:
        check_no_tag(target, refs.tags())
    return _Ticket(root.repository, root.sequence, key.Transaction(root.sequence).id, target, head, epoch)


def _refs(repository: History, ticket: _Ticket) -> Refs:
    root = repository.refresh()
    if root.repository != ticket.repository or root.sequence < ticket.sequence:
        raise Conflict(
            f"{repository.url} holds another repository, or an older state, than rank 0 sees: open the same"
        )
    return Refs(repository._shelf, root)


def _publish(
    repository: History,
    whole: Whole,
    source: "Source",
    receipts: Sequence[Receipt],
    parent: Baseline | None,
    transaction: key.Transaction,
    ticket: _Ticket,
    labels: Labels,
) -> str:
    """Upload what is left, and swap the root. Returns the version's record."""
    shelf = repository._shelf
    entry = commit.upload(
        shelf,
        whole,
        source,
        transaction,
        branch=ticket.branch,
        parents=[] if parent is None else [version_of(parent.entry)],
        parent=parent,
        labels=labels,
        head=ticket.head,
    )
    assert entry.place is not None
    written = sum(receipt.written for receipt in receipts)
    entry = replace(entry, place=replace(entry.place, nbytes=entry.place.nbytes + written))
    try:
        entry, repository._seen = commit.publish(
            shelf, entry, transaction, None, expected=ticket.head, epoch=ticket.epoch
        )
    except StateUnknown:
        if entry.new is not None:
            repository._unsure[ticket.branch] = entry.new
        raise
    repository._last = entry
    # Now, since this is where to go on, also if another rank is not there to hear of it.
    repository._remember(ticket.branch, entry.new)
    if unread := [why for receipt in receipts for why in receipt.unread]:
        warnings.warn(
            f"parts of the parent could not be read and were stored whole: {unread[0]}", WeightvcWarning, stacklevel=6
        )
    return version_of(entry).record
