"""What publishing every step costs a trainer, and how soon another process has verified a step.

A model of 100 M parameters is trained on the CPU with AdamW, on one thread, a few steps at a time in turns: without
publishing, and with commit_async on every step, as bfloat16, into a local repository. What is compared are medians of
steps: on a machine that does other things, a turn of each kind meets the same of it. Meanwhile another process
follows the branch and reads every byte of each version that it gets to.

    python benchmarks/trainer.py --turns 4 --steps 5 --json trainer.json
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import weightvc


def follow(url: str, directory: str, pipe: Connection) -> None:
    """Check out each version that appears, and say when every byte of it was checked; until told to stop."""
    torch.set_num_threads(1)
    with weightvc.open(url, cache=Path(directory, "follower"), lazy=True) as repository:
        held = None
        while not pipe.poll(0.05):
            if "main" in repository.branches() and repository.resolve("main") != held:
                held = repository.checkout("main", Path(directory, "served"))
                pipe.send((held.step, time.time()))


def memory() -> int:
    """Bytes of this process in memory, without those of files: the cache is read where the system keeps it."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def main() -> None:
    """Train, publish, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of 2048 × 2048 weights (24: 100 M parameters)")
    parser.add_argument("--batch", type=int, default=1024, help="rows, or tokens, of a step")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--turns", type=int, default=4, help="of each kind")
    parser.add_argument("--follower", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048) for _ in range(given.layers)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    stepped: dict[int, float] = {}
    calls: list[float] = []

    def step(number: int, repository: weightvc.Repository | None) -> tuple[float, float]:
        """Seconds, and those of them in which this thread had a processor."""
        begun, worked = time.perf_counter(), time.thread_time()
        model(torch.randn(given.batch, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped[number] = time.time()
        if repository is not None:
            called = time.perf_counter()
            repository.commit_async(model, step=number, dtype="bfloat16")
            calls.append(time.perf_counter() - called)
        return time.perf_counter() - begun, time.thread_time() - worked

    with tempfile.TemporaryDirectory() as directory:
        repository = weightvc.init(Path(directory, "repository"), cache=Path(directory, "cache"))
        here, there = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=follow, args=(repository.url, directory, there))
        for number in range(2):  # the base, the compiler, the optimizer's state
            step(number, None)
            repository.commit(model, step=number, dtype="bfloat16")
        if given.follower:
            child.start()
            while not here.poll(600) or here.recv()[0] != 1:
                pass
        most = {"without": 0, "with": 0}
        number, seconds = 2, {"without": [], "with": []}  # type: dict[str, list[tuple[float, float]]]
        calls.clear()
        published: list[int] = []
        for _ in range(given.turns):
            for kind in seconds:
                for _ in range(given.steps):
                    seconds[kind].append(step(number, repository if kind == "with" else None))
                    published += [number] if kind == "with" else []
                    number += 1
                    most[kind] = max(most[kind], memory())
                repository.flush()
                if given.follower and kind == "with":
                    time.sleep(2)
        ages: list[float] = []
        if given.follower:
            here.send(None)
            child.join()
            while here.poll():
                seen, at = here.recv()
                ages.append(at - stepped[seen])
        patches = [sum(edge.nbytes for edge in repository.entry(f"main@{{step={n}}}").place.edges) for n in published]
        served = sum(value.numel() for value in model.parameters()) * 2
    medians = {kind: [statistics.median(column) for column in zip(*values)] for kind, values in seconds.items()}
    figures: dict[str, Any] = {
        "parameters": served // 2,
        "step seconds without": medians["without"][0],
        "step seconds with": medians["with"][0],
        "ratio of medians": medians["with"][0] / medians["without"][0],
        "processor seconds of the trainer's thread without": medians["without"][1],
        "processor seconds of the trainer's thread with": medians["with"][1],
        "ratio of these medians": medians["with"][1] / medians["without"][1],
        "seconds of a call, median": statistics.median(calls),
        "seconds of a call, most": max(calls),
        "copies of what is served, in memory": (most["with"] - most["without"]) / served,
        "bytes of a patch": statistics.median(patches),
        "versions": len(published),
        "seconds from step to verified elsewhere, median": statistics.median(ages) if ages else None,
        "seconds from step to verified elsewhere, most": max(ages) if ages else None,
        "versions verified elsewhere": len(ages),
    }
    for name, value in figures.items():
        print(f"{name:50} {value if not isinstance(value, float) else round(value, 3)}")
    if given.json:
        given.json.write_text(json.dumps({**figures, "steps": seconds, "calls": calls, "ages": ages}))


if __name__ == "__main__":
    main()
