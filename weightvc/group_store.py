"""Members of a group that are reached through a store of torch.distributed.

A process group has one (`torch.distributed.distributed_c10d._get_default_store()`, or the TCPStore that it was made
with), over gloo as over NCCL. Collectives would not do: they wait for a host that is away until the whole group is
torn down.

    here:   StoreMember(store, "b").prepare(…)        on host b:  serve(store, "b", Local(client))
"""

import json
import threading
import time
from dataclasses import asdict
from typing import Any, Final

from weightvc.errors import Conflict, Unavailable, WeightvcError
from weightvc.group import Member, Prepared

LOOK: Final = 0.01
"""Seconds between two looks at the store."""
LOST: Final = 1.0
"""Seconds to wait for what was to be asked under a number, once later ones have been taken: it is set right after."""
_CALLS: Final = ("prepare", "commit", "abort", "holds")


class StoreMember(Member):
    """The host called `name`, where serve() runs. A host that does not answer is waited for until `timeout`, in
    seconds."""

    def __init__(self, store: Any, name: str, *, timeout: float = 3600.0) -> None:
        self._store = store
        self._name = name
        self._timeout = timeout

    def prepare(self, round: str, version: str) -> Prepared:
        """Stage a version there."""
        return Prepared(**self._ask("prepare", round, version))

    def commit(self, round: str) -> None:
        """Activate it there."""
        self._ask("commit", round)

    def abort(self, round: str) -> str | None:
        """Forget it there."""
        held: str | None = self._ask("abort", round)
        return held

    def holds(self) -> str | None:
        """What it holds."""
        held: str | None = self._ask("holds")
        return held

    def _ask(self, call: str, *args: str) -> Any:
        number = self._store.add(_count(self._name), 1)
        key = _key(self._name, number)
        self._store.set(key, json.dumps([call, *args]))
        end = time.monotonic() + self._timeout
        while not self._store.check([f"{key}/answer"]):
            if time.monotonic() > end:
                raise Unavailable(f"host {self._name} does not answer: see whether weightvc serves there")
            time.sleep(LOOK)
        answer = json.loads(self._store.get(f"{key}/answer"))
        for used in (key, f"{key}/answer"):
            self._store.delete_key(used)
        if "error" in answer:
            raise Conflict(answer["error"])
        return answer["value"]


def serve(store: Any, name: str, member: Member, *, stop: threading.Event | None = None) -> None:
    """Do what a coordinator asks of the host called `name`, until `stop` is set.

    What was asked before it began is left alone: it was meant for a process that is no more.
    """
    stop = stop or threading.Event()
    done = store.add(_count(name), 0)
    since = time.monotonic()
    while not stop.is_set():
        key = _key(name, done + 1)
        if not store.check([key]):
            if store.add(_count(name), 0) <= done + 1:
                since = time.monotonic()
            elif time.monotonic() - since > LOST:
                done += 1  # whoever took it has died
            stop.wait(LOOK)
            continue
        since = time.monotonic()
        call, *args = json.loads(store.get(key))
        done += 1
        store.set(f"{key}/answer", json.dumps(_do(member, call, args)))


def _do(member: Member, call: str, args: list[str]) -> dict[str, Any]:
    if call not in _CALLS:
        return {"error": f"{call!r:.50} is not something that this weightvc does: upgrade it"}
    try:
        value = getattr(member, call)(*args)
    except WeightvcError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": asdict(value) if isinstance(value, Prepared) else value}


def _count(name: str) -> str:
    return f"weightvc/{name}/asked"


def _key(name: str, number: int) -> str:
    return f"weightvc/{name}/{number}"
