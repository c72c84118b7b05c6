"""Ranks: a job of any number of them in threads, any of which can die; or in processes that have a gloo group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.kit import faults
from tests.kit.faults import Killed


class ThreadRanks:
    """One rank of a job. One that dies at its `dies`-th exchange is heard of no more; the others learn that then."""

    def __init__(self, job: Job, rank: int, dies: int = -1) -> None:
        self.rank, self.world = rank, job.world
        self.exchanges = 0
        self._job = job
        self._dies = dies

    def exchange(self, parcels: Sequence[bytes]) -> Sequence[bytes]:
        assert len(parcels) == self.world
        if self.exchanges == self._dies:
            raise Killed
        self.exchanges += 1
        self._job.mail[self.rank] = list(parcels)
        self._job.barrier.wait(60)
        got = [self._job.mail[rank][self.rank] for rank in range(self.world)]
        self._job.barrier.wait(60)
        return got


class Job:
    """Runs work(ranks) on `world` ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world)
        self.mail: list[list[bytes]] = [[] for _ in range(world)]

    def run(self, work: Callable[[ThreadRanks], Any], dies: dict[int, int] | None = None) -> list[Any]:
        """What each rank returned or raised. `dies` has ranks, and the exchange before which each dies."""
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadRanks(self, rank, (dies or {}).get(rank, -1)))
            except BaseException as error:
                results[rank] = error
                if isinstance(error, Killed):
                    self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        return results


def processes(world: int, folder: Any, work: Any) -> list[int]:
    """work(rank) in forked processes that have a gloo group; how each ended."""

    def one(rank: int) -> Any:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=world)
        try:
            return work(rank)
        finally:
            dist.destroy_process_group()

    children = [faults.fork(lambda rank=rank: one(rank), folder / f"result{rank}") for rank in range(world)]
    return [faults.wait(child) for child in children]
