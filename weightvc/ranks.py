"""Ranks: the processes that have a model together, and how they give each other bytes."""

import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from weightvc.errors import NotPublished, Refused

if TYPE_CHECKING:
    import torch.distributed

T = TypeVar("T")
_FAILED: Final = b"!"
_DONE: Final = b"."


class Ranks(Protocol):
    """All processes of a job, each of which has such an object. They trust each other: what they give is unpickled.

    Implement it for what connects yours. With mpi4py, exchange is `comm.alltoall`.
    """

    rank: int
    """The number of this process, from 0."""
    world: int
    """How many there are."""

    def exchange(self, parcels: Sequence[bytes]) -> Sequence[bytes]:
        """Give parcels[i] to rank i, on all ranks at once; returns what each has for this one, in order of ranks.

        It has to raise, sooner or later, if a rank is gone.
        """
        ...


class Alone:
    """A job of one process."""

    rank = 0
    world = 1

    def exchange(self, parcels: Sequence[bytes]) -> Sequence[bytes]:
        """Nobody else is there."""
        return parcels


class TorchRanks:
    """The ranks of a process group of torch.distributed, over its CPU backend."""

    def __init__(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """None is the default group. Raises Refused if it moves nothing between CPUs, or if we are not in it."""
        import torch.distributed as dist

        self._group = group
        backend = str(dist.get_backend_config(group))
        if not any(name in backend for name in ("gloo", "mpi")):
            raise Refused(
                f"the process group has the backend {backend}, which moves nothing between CPUs: make one with "
                'torch.distributed.new_group(backend="gloo"), once, on all ranks, and give it as ranks='
            )
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise Refused("this process is not in the process group that was given as ranks=")

    def exchange(self, parcels: Sequence[bytes]) -> Sequence[bytes]:
        """Two collectives: of sizes, and of bytes."""
        import torch
        import torch.distributed as dist

        given = torch.tensor([len(parcel) for parcel in parcels], dtype=torch.int64)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=self._group)
        sent = bytearray(b"".join(parcels))
        data = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
        sizes: list[int] = got.tolist()
        room = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(room, data, sizes, given.tolist(), group=self._group)
        view = memoryview(room.numpy().data)
        ends = [*accumulate(sizes, initial=0)]
        return [bytes(view[start:end]) for start, end in pairwise(ends)]


def open_ranks(given: Any = None) -> Ranks:
    """The ranks that a caller means: a Ranks, a process group, or None for torch.distributed's default group, or for
    this process alone where that is not set up. Raises Refused."""
    if given is not None and all(hasattr(given, part) for part in ("rank", "world", "exchange")):
        made: Ranks = given
        return made
    import torch.distributed as dist

    if given is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise Refused(f"ranks={given!r:.100}: give a process group of torch.distributed, or a weightvc.ranks.Ranks")
    return TorchRanks(given)


class Call:
    """One call that all ranks make: its exchanges, one after the other.

    Each parcel says in which exchange it was given: one rank's call may have been interrupted, so that its next one
    begins where the others are in the middle of that.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        self._ranks = ranks
        self._exchanges = 0

    def exchange(self, work: Callable[[], Sequence[bytes]]) -> list[bytes]:
        """Exchange what `work` gives, a parcel for each rank. If it raises on any rank, all ranks raise: that one its
        own error, the others NotPublished, which names it. Where ranks are in different exchanges, all raise
        Refused."""
        self._exchanges += 1
        failure: Exception | None = None
        parcels: Sequence[bytes] = ()
        try:
            parcels = [_DONE + parcel for parcel in work()]
        except Exception as error:  # whatever it is, the others wait to hear of it
            failure = error
            parcels = [_FAILED + f"{type(error).__name__}: {error}".encode(errors="replace")] * self.world
        at = bytes([self._exchanges])
        got = self._ranks.exchange([at + parcel for parcel in parcels])
        if failure is not None:
            raise failure
        for rank, one in enumerate(got):
            if one[:1] != got[0][:1]:
                raise Refused(
                    f"ranks are out of step (in exchange {one[0]} of a call on rank {rank}, {got[0][0]} on rank 0), "
                    "since a call was interrupted on some: see what the branch has, and call again on all"
                )
        told = [(f"rank {i}", RuntimeError(one[2:].decode())) for i, one in enumerate(got) if one[1:2] != _DONE]
        if told:
            said = "; ".join(f"{who} failed ({error})" for who, error in told)
            raise NotPublished(f"no version is published, since {said}", failures=told)
        return [one[2:] for one in got]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on all ranks; raises as exchange() does."""
        return [pickle.loads(one) for one in self.exchange(lambda: [pickle.dumps(work())] * self.world)]

    def tell(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on rank 0; the others get nothing. Raises as exchange() does."""

        def parcels() -> list[bytes]:
            return [pickle.dumps(work()), *[b""] * (self.world - 1)]

        return [pickle.loads(one) for one in self.exchange(parcels) if one]
