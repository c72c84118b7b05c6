"""Hosts that are processes of a torch.distributed group over gloo; one of them is killed and comes back."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import weightvc
from tests.engines.conftest import weights
from weightvc.group import Group, Local
from weightvc.group_store import StoreMember, serve
from weightvc.targets import Slots

NAMES = ("b", "c")
MINUTE = timedelta(seconds=60)


def run_host(rank: int, port: int, world: int, repository: str, name: str, slots: str, exit_in: str) -> None:
    """A host: of the process group, with `world`; started again later, of its store alone."""
    store = distributed.TCPStore("127.0.0.1", port, None, False, MINUTE, False)
    if world:
        distributed.init_process_group(
            "gloo", store=distributed.PrefixStore("group", store), rank=rank, world_size=world, timeout=MINUTE
        )
        total = torch.ones(1)
        distributed.all_reduce(total)  # it is a real one
        assert int(total) == world
    member = Local(weightvc.Client(repository, into=Slots(slots), cache=None))

    class Dies(Local):
        def prepare(self, *args: Any) -> Any:
            found = member.prepare(*args)
            if exit_in == "prepare":
                os._exit(1)
            return found

        def commit(self, *args: Any) -> None:
            if exit_in == "commit":
                os._exit(1)
            member.commit(*args)

        abort = staticmethod(member.abort)  # type: ignore[assignment]
        holds = staticmethod(member.holds)  # type: ignore[assignment]

    serve(store, name, Dies(None))  # type: ignore[arg-type]


@pytest.fixture
def spawn() -> Iterator[Callable[..., BaseProcess]]:
    # It imports torch once; forks of this process would have its threads' locks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started: list[BaseProcess] = []

    def one(*args: Any) -> BaseProcess:
        started.append(context.Process(target=run_host, args=args, daemon=True))
        started[-1].start()
        return started[-1]

    yield one
    for process in started:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def answers(group: Group, wanted: dict[str, str | None]) -> None:
    """Wait until the hosts say so, for a minute at most."""
    end = time.monotonic() + 60
    while group.holds(1) != wanted:
        assert time.monotonic() < end, wanted


def test_processes_move_together_and_one_dies_and_rejoins(tmp_path: Path, spawn: Callable[..., BaseProcess]) -> None:
    url = str(tmp_path / "repository")
    repository = weightvc.init(url, cache=None)
    versions = [repository.commit(weights(step), step=step).id for step in range(3)]
    server = distributed.TCPStore("127.0.0.1", 0, None, True, MINUTE, False)
    slots = {name: Slots(tmp_path / name) for name in ("a", *NAMES)}
    start = {
        "b": (1, server.port, 3, url, "b", str(slots["b"].path), ""),
        "c": (2, server.port, 3, url, "c", str(slots["c"].path), "commit"),
    }
    for name in NAMES:
        spawn(*start[name])
    distributed.init_process_group(
        "gloo", store=distributed.PrefixStore("group", server), rank=0, world_size=3, timeout=MINUTE
    )
    try:
        distributed.all_reduce(torch.ones(1))
        here = Local(weightvc.Client(url, into=slots["a"], cache=None))
        group = Group({"a": here, **{name: StoreMember(server, name) for name in NAMES}})
        answers(group, dict.fromkeys(("a", *NAMES)))

        # c dies as it is told to commit: whether it has moved is not known, and nothing could be taken back to.
        with pytest.raises(weightvc.GroupSplit) as caught:
            group.activate(versions[0], commit_timeout=1)
        assert caught.value.holds["c"] is None
        assert slots["c"].holds is None

        # It is started again, and is there for the next.
        again = spawn(2, server.port, 0, url, "c", str(slots["c"].path), "")
        answers(group, {"a": versions[0], "b": versions[0], "c": None})
        group.activate(versions[0])
        assert {name: found.holds for name, found in slots.items()} == dict.fromkeys(slots, versions[0])

        # Away, it leaves all on the old version.
        assert again.pid is not None
        os.kill(again.pid, signal.SIGKILL)
        again.join()
        with pytest.raises(weightvc.GroupNotReady, match=r"c \(no answer"):
            group.activate(versions[1], timeout=1)
        assert {name: found.holds for name, found in slots.items()} == dict.fromkeys(slots, versions[0])
        spawn(2, server.port, 0, url, "c", str(slots["c"].path), "")
        answers(group, dict.fromkeys(("a", *NAMES), versions[0]))
        group.activate(versions[2])
        for name, found in slots.items():
            assert found.holds == versions[2], name
            assert repository.verify(found.path / "current", versions[2]).ok
    finally:
        distributed.destroy_process_group()
