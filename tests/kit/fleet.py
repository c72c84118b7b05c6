"""A fleet: rollout hosts as processes of their own that follow one trainer, killed and stopped at random.

    done = run(url, options, folder, seconds=60, seed=1)

The trainer commits, reverts, rewinds and branches; somebody compacts beside it. Eight hosts keep what they serve at
the head: live tensors, a directory, slots, by the library and by the command; some of them share a cache that is far
too small. What a version holds is told by its label `step` alone, so each host compares what it serves with that,
after every update and when it starts again. At the end each has to get to the last head, bit for bit.
`python -m tests.kit.fleet ROLE …` is one of the processes.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import weightvc
from tests.kit.crowd import COMMAND, Actor, Done, Fault, Herd, environment
from tests.kit.servers import die_with_parent
from tests.kit.weights import Bits, Weights, flipped, lying, tensor
from weightvc.errors import Expired, RefNotFound, StoreError, WeightvcError

SMALL: Final = 1_500_000
"""Bytes that the shared cache may take: some two of the trees that it is to hold."""
END: Final = "end"
"""The name of a file: when it is there, hosts get to the head once more, compare, and end."""
LAST: Final = 120.0
"""Seconds that they may take for that."""


@cache
def first() -> Weights:
    return {
        ("", "embed"): tensor("BF16", (1000, 200), 1),
        ("", "w"): tensor("F8_E4M3", (300, 256), 2),
        ("", "w_scale_inv"): tensor("F32", (3, 2), 3),
        ("", "norm"): tensor("BF16", (200,), 4),
    }


def weights(step: int) -> Weights:
    """What a version with this label holds."""
    if step == 0:
        return first()
    share = {"embed": 0.01, "w": 0.005, "w_scale_inv": 0.5, "norm": 0.02}
    return {key: flipped(value, share[key[1]], step) for key, value in first().items()}


# Who writes


def trainer(actor: Actor) -> None:
    """Commits some five times a second, and now and then goes back, by a new version or by a reset."""
    repository = weightvc.open(actor.url, cache=actor.home / "cache", author=actor.role, **actor.options)
    pick = actor.random
    while not ends(actor):
        what = pick.randrange(20)
        if what < 15:
            with actor.racing("commit"):
                step = actor.step()
                repository.commit(Bits(weights(step)), step=step, on_conflict="rebase", base=pick.random() < 0.03)
        elif what < 17:
            with actor.racing("revert"):
                repository.revert(f"main~{pick.randrange(1, 9)}", on_conflict="rebase")
        elif what < 19:
            with actor.racing("reset"):
                repository.reset("main", f"main~{pick.randrange(1, 6)}", rewind=True)
        else:
            with actor.racing("sidestep"):
                step = actor.step()
                made = repository.commit(
                    Bits(weights(step)), branch=None, step=step, parents=[repository.resolve("main~2")]
                )
                repository.reset("main", made.id, rewind=True)
        time.sleep(pick.random() * 0.4)


def compactor(actor: Actor) -> None:
    """Compacts, over and over."""
    while not ends(actor):
        actor.command("compact", "--base-every", actor.random.choice([8, 32, 1024]), "--reverse")
        time.sleep(actor.random.random() * 2)


# Who reads


def served(kind: str) -> Any:
    """Live tensors: zeros, until a version comes."""
    import numpy as np
    import torch

    lanes = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    made: dict[str, Any] = {}
    for (_, name), value in first().items():
        made[name] = torch.from_numpy(np.zeros(len(value.data), "u1")).view(lanes[value.dtype]).view(value.shape)
    if kind == "module":
        module = torch.nn.Module()
        for name, value in made.items():
            module.register_buffer(name, value)
        return module
    return made


def bits(live: Any) -> dict[str, bytes]:
    """Of live tensors, by name."""
    import torch

    values = live if isinstance(live, dict) else live.state_dict()
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in values.items()}


def compare(found: Mapping[str, bytes], step: int | None) -> None:
    """Raise Fault unless these are what was committed with this label."""
    if step is None or found != {name: value.data for (_, name), value in weights(step).items()}:
        raise Fault(f"step {step}: other bits than were committed")


def read(path: Path) -> dict[str, bytes]:
    return {name: value.data for (_, name), value in lying(path).items()}


def host(actor: Actor, kind: str, cached: str) -> None:
    """One host, by the library. `kind`: dict, module, directory or slots; `cached`: shared, own or none."""
    at = {"shared": actor.folder / "shared", "own": actor.home / "cache", "none": None}[cached]
    options: dict[str, Any] = {"cache": at, **actor.options}
    if at is not None:
        options["cache_limit"] = SMALL
    live = served(kind) if kind in ("dict", "module") else None
    path = actor.home / kind
    into = live if live is not None else weightvc.Slots(path) if kind == "slots" else path
    with weightvc.Client(actor.url, into=into, **options) as client:

        def look(what: str, step: int | None) -> None:
            compare(bits(live) if live is not None else read(path / "current" if kind == "slots" else path), step)
            actor.note(what)

        # What a life before this one left is whole.
        if (held := client.current()) is not None:
            look("found", held.step)
        stop = threading.Event()
        threading.Thread(target=partial(wait_for_end, actor, stop), daemon=True).start()
        for update in client.follow("main", every=0.2, stop=stop):
            with actor.racing("update"):
                update.activate()
                look("served", update.version.step)
            if actor.random.random() < 0.1:
                with actor.racing("back"):
                    back = client.pull(f"main~{actor.random.randrange(12)}")
                    look("served", back.version.step)
            if client.current() is not None and actor.random.random() < 0.05 and (bad := client.verify()):
                raise Fault(f"verify names {bad}")
        # The trainer has ended: this is its last head.
        last = time.monotonic() + LAST
        while True:
            with contextlib.suppress(StoreError, Expired, RefNotFound):
                update = client.pull("main")
                look("last", update.version.step)
                if bad := client.verify():
                    raise Fault(f"verify names {bad}")
                actor.note("exact", id=update.version.id)
                return
            if time.monotonic() > last:
                raise Fault("the store cannot be reached at the end")
            time.sleep(0.2)


def commander(actor: Actor) -> None:
    """One host, by the command, with the shared cache."""
    slots = actor.home / "slots"
    surroundings = environment(actor.url, actor.options, actor.home)
    surroundings |= {"WEIGHTVC_CACHE": str(actor.folder / "shared"), "WEIGHTVC_CACHE_LIMIT": str(SMALL)}
    running = subprocess.Popen(
        [*COMMAND, "follow", "main", "--into", slots, "--every", "0.2", "--json"],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=(actor.home / "log").open("ab"),
        text=True,
        preexec_fn=die_with_parent,
    )
    if (slots / "current").exists():
        read(slots / "current")

    def watch() -> None:
        wait_for_end(actor, threading.Event())
        running.terminate()

    threading.Thread(target=watch, daemon=True).start()
    assert running.stdout is not None
    for line in running.stdout:
        told = json.loads(line)
        # It is gone when two later ones have come.
        with contextlib.suppress(FileNotFoundError):
            compare(read(Path(told["path"])), told["step"])
            actor.note("served")
    status = running.wait()
    if not ends(actor):
        raise Fault(f"follow ended with status {status}: see {actor.home / 'log'}")
    done = actor.command("pull", "main", "--into", actor.home / "last", "--json")
    told = json.loads(done.stdout)
    compare(read(actor.home / "last"), told["step"])
    actor.note("exact", id=told["id"])


def ends(actor: Actor) -> bool:
    return (actor.folder / END).exists()


def wait_for_end(actor: Actor, stop: threading.Event) -> None:
    while not ends(actor):
        time.sleep(0.1)
    stop.set()


HOSTS: Final[Mapping[str, Callable[[Actor], None]]] = {
    "dict": partial(host, kind="dict", cached="shared"),
    "twin": partial(host, kind="dict", cached="shared"),
    "module": partial(host, kind="module", cached="none"),
    "directory": partial(host, kind="directory", cached="shared"),
    "far": partial(host, kind="directory", cached="none"),
    "slots": partial(host, kind="slots", cached="own"),
    "sharing": partial(host, kind="slots", cached="shared"),
    "command": commander,
}
PARTS: Final[Mapping[str, Callable[[Actor], None]]] = {"trainer": trainer, "compactor": compactor, **HOSTS}


def main(role: str, given: str) -> None:
    """Be one of the processes until it is killed, the end has come, or something is wrong."""
    actor = Actor(role, json.loads(given), number=list(PARTS).index(role))
    try:
        PARTS[role](actor)
    except (Fault, AssertionError, WeightvcError, OSError) as error:
        actor.note("fault", error=f"{type(error).__name__}: {error}")
        raise


def run(url: str, options: Mapping[str, Any], folder: Path, *, seconds: float, seed: int) -> Done:
    """Let the fleet follow a new repository for some seconds. Raises nothing for what goes wrong: see `faults`."""
    done = Done(seed)
    repository = weightvc.init(url, cache=None, author="fleet", **options)
    repository.commit(Bits(weights(0)), step=0)

    def ended(role: str, status: int) -> None:
        done.faults.append(f"{role} ended with status {status}: see {folder / 'log'}")

    given = {"url": url, "options": dict(options), "folder": str(folder), "seed": seed}
    with Herd("tests.kit.fleet", list(PARTS), given, done) as herd:
        herd.disturb(seconds, random.Random(seed), ended)
        herd.send("trainer", signal.SIGKILL)
        herd.running["trainer"].wait()
        head = _settled(repository)
        (folder / END).touch()
        for role in HOSTS:
            try:
                if status := herd.running[role].wait(2 * LAST):
                    ended(role, status)
            except subprocess.TimeoutExpired:
                done.faults.append(f"{role} did not get to the last head")
    exact = set()
    for line in (folder / "notes").read_text().splitlines():
        told = json.loads(line)
        if told["what"] == "fault":
            done.faults.append(f"{told['role']}: {told['error']}")
        else:
            done.counts[told["what"]] += 1
        if told["what"] == "exact" and told["id"] == head:
            exact.add(told["role"])
    done.faults += [f"{role} does not hold {head[:12]}, the last head" for role in HOSTS if role not in exact]
    kept = sum(file.stat().st_size for file in (folder / "shared").rglob("*") if file.is_file())
    done.counts["bytes in the shared cache"] = kept
    return done


def _settled(repository: weightvc.Repository) -> str:
    """The head, once a server has done what its killed client had asked for."""
    head = ""
    while head != (now := repository.resolve("main").id):
        head = now
        time.sleep(2)
    return head


if __name__ == "__main__":
    main(*sys.argv[1:])
