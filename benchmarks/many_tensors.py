"""What many small tensors cost against one tensor of the same size: commits, metadata, and reading it back.

    python benchmarks/many_tensors.py [--tensors 150000] [--bytes 128 1024] [--rounds 3] [--ways file torch]

For each size of a tensor (4096 bytes make 600 MB) and each way to commit, prints the median seconds of a first commit
and of the next, in which 1 % of the elements changed, of one tensor and of many, and their ratio: by the clock, and
of the processors, which other work on the machine disturbs less. The ways: `command`, a process of its own for each
commit of a file; in this process, with everything imported and compiled, a `file`, a dict of `torch` tensors (bf16),
a dict of `numpy` arrays (f16); `read` is a checkout, a verify and a load of what was committed. One and many take
turns, so that both see the same machine.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import weightvc
from weightvc.sources.base import TensorInfo
from weightvc.sources.header import build_header

WAYS = ("command", "file", "torch", "numpy", "read")


def names(count: int) -> list[str]:
    """Those of a mixture-of-experts model."""
    return [f"model.layers.{i // 1536:03}.mlp.experts.{i % 1536:04}.weight" for i in range(count)]


def states(total: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 values, `total` bytes of them, before and after a step."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(total // 2, "f4").view("<u4") >> 16).astype("<u2")
    new = old.copy()
    new[rng.random(total // 2, "f4") < 0.01] ^= 1
    return old, new


def write(path: Path, values: np.ndarray, count: int) -> Path:
    """A safetensors file of `count` equal tensors."""
    each = values.size // count
    with path.open("wb") as file:
        file.write(build_header([TensorInfo("", name, "BF16", (each,), 2 * each) for name in names(count)]))
        file.write(values)
    return path


def dict_of(kind: str, values: np.ndarray, count: int) -> dict[str, Any]:
    """A dict of `count` equal tensors, each with memory of its own."""
    rows = values.reshape(count, -1)
    if kind == "numpy":
        return {name: row.view("<f2").copy() for name, row in zip(names(count), rows, strict=True)}
    import torch

    return {
        name: torch.from_numpy(row.view("<i2").copy()).view(torch.bfloat16)
        for name, row in zip(names(count), rows, strict=True)
    }


Spent = tuple[float, float]
"""Seconds by the clock, and of the processors, in this process and in those that it waited for."""


def timed(work: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), processors()
    work()
    return time.perf_counter() - wall, processors() - cpu


def processors() -> float:
    """Seconds of processor time so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def command(folder: Path, *arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "weightvc_cli", "-r", str(folder / "repository"), *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "WEIGHTVC_CACHE": str(folder / "cache")},
    )


def measure(way: str, sources: list[Any], folder: Path) -> list[Spent]:
    """What the steps of a way spend, in turn."""
    repository = weightvc.init(folder / "repository", cache=folder / "cache")
    if way == "command":
        return [timed(lambda path=path: command(folder, "commit", path)) for path in sources]
    seconds = [timed(lambda source=source: repository.commit(source, message="m")) for source in sources]
    if way != "read":
        return seconds
    other = weightvc.open(folder / "repository", cache=None)
    return [
        timed(lambda: other.checkout("main", folder / "out")),
        timed(lambda: other.verify(folder / "out")),
        timed(lambda: weightvc.open(folder / "repository", cache=None).load(framework="torch")),
    ]


def metadata(path: Path, second: Path, count: int, folder: Path) -> None:
    """Print the bytes a tensor that a commit writes beside the payload."""
    repository = weightvc.init(folder / "repository", cache=None)
    said = []
    for one in (path, second):
        place = repository.entry(repository.commit(one)).place
        assert place is not None
        said.append((place.nbytes - sum(edge.nbytes for edge in place.edges)) / count)
    print(f"metadata of a file's commits: {said[0]:.1f} and {said[1]:.1f} bytes a tensor")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=150_000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[128, 1024], help="bytes of one tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # What a process does once is not what is asked: compiled code is loaded, or made, here.
        warm = weightvc.init(Path(folder) / "warm", cache=None)
        for made in (lambda values: {"a": values.view("<f2")}, lambda values: dict_of("torch", values, 4096)):
            for values in states(4 << 20):
                warm.commit(made(values))
    for nbytes in arguments.bytes:
        count = arguments.tensors
        total = nbytes * count
        print(f"{count:,} tensors of {nbytes} bytes, {total / 1e6:.0f} MB; 1 % of the elements changed")
        with tempfile.TemporaryDirectory() as folder:
            made = states(total)
            paths = {
                n: [write(Path(folder) / f"{n}-{i}.safetensors", values, n) for i, values in enumerate(made)]
                for n in (1, count)
            }
            with tempfile.TemporaryDirectory() as inner:
                metadata(*paths[count], count, Path(inner))
            for way in arguments.ways:
                sources: dict[int, list[Any]] = dict(paths)
                if way in ("torch", "numpy"):
                    sources = {n: [dict_of(way, values, n) for values in made] for n in (1, count)}
                seconds: dict[int, list[list[Spent]]] = {1: [], count: []}
                for _ in range(arguments.rounds):
                    for n in (1, count):
                        with tempfile.TemporaryDirectory() as inner:
                            seconds[n].append(measure(way, sources[n], Path(inner)))
                labels = ("checkout", "verify", "load") if way == "read" else ("first", "next")
                for i, label in enumerate(labels):
                    for k, by in enumerate(("by the clock", "of the processors")):
                        one, many = (statistics.median(row[i][k] for row in seconds[n]) for n in (1, count))
                        said = f"one {one:7.3f} s   many {many:7.3f} s   ratio {many / one:6.1f}"
                        print(f"  {way:8} {label:9} {said}   {by}")


if __name__ == "__main__":
    main()
