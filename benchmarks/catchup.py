"""What it costs to be 1,000 versions behind: single patches, the ways that compaction adds, one direct patch, a base.

    python benchmarks/catchup.py [--versions 1000] [--elements 8388608]

Makes a run of bf16 weights in a local repository. In a step 0.86 % of them move by one unit in the last place, most
of them back and forth, with rates by a power law, so that what differs grows with distance as k^0.25: as published
for late training (0.86 % after 1 step, 1.17 after 4, 1.40 after 8, 1.96 after 32). Then a reader that holds the first
version loads the last one, and one that holds nothing does, before and after compaction. Every load is checked.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import weightvc
from weightvc.objects import key
from weightvc.protocol import patches
from weightvc.protocol.commit import Packer
from weightvc.repository import Repository
from weightvc.sources.base import TensorInfo


class Run:
    """Weights [elements] that toggle between two neighbouring values, each at a rate of its own."""

    def __init__(self, elements: int) -> None:
        self._rng = rng = np.random.default_rng(0)
        self.now = (rng.normal(0, 0.05, elements).astype("f4").view("<u4") >> 16).astype("<u2")
        # As many rates over x as x^-0.25 says, from 0.5 down; small weights have small units, and move more often.
        scale, least = 0.0108, 1e-4
        live = min(elements, int(scale * least**-0.25 * elements))
        rates = np.minimum(0.5, (np.arange(1, live + 1) / (scale * elements)) ** -4)
        order = np.argsort((self.now & 0x7FFF) + rng.normal(0, 300, elements), kind="stable")[:live]
        self._where, self._rates = order, rates.astype("f4")

    def step(self) -> None:
        """One optimizer step."""
        moved = self._where[self._rng.random(self._rates.size, "f4") < self._rates]
        self.now = self.now.copy()
        self.now[moved] ^= 1

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights as a state dict of bit patterns."""
        parts = np.array_split(self.now, 8)
        return {f"model.layers.{i}.mlp.down_proj.weight": part for i, part in enumerate(parts)}


@dataclass(frozen=True)
class Cost:
    """What one load took."""

    requests: int
    nbytes: int
    seconds: float
    patches: int

    def __str__(self) -> str:
        return f"{self.requests:5,} requests, {self.nbytes:12,} bytes, {self.seconds:6.2f} s; {self.patches} patches"


FIRST = "main@{step=0}"


def load(opened: Callable[..., Repository], cache: Path | None, wanted: np.ndarray, ref: str = "main") -> Cost:
    """Load a version, check it, and say what that took. With a cache, that is taken to hold the first version."""
    with opened(cache=cache) as planner:
        made = planner.plan(FIRST if cache else None, ref)
    with opened(cache=cache) as reader:
        before, start = (reader.stats.reads, reader.stats.bytes_read), time.perf_counter()
        got = reader.load(ref, framework="numpy")
        seconds = time.perf_counter() - start
        assert (np.concatenate([got[name].view("<u2") for name in sorted(got)]) == wanted).all()
        return Cost(reader.stats.reads - before[0], reader.stats.bytes_read - before[1], seconds, made.patches)


def direct(repository: Repository) -> int:
    """Bytes of one patch from the first version to the last."""
    refs = repository._refs()
    old, new = refs.resolve(FIRST).entry, refs.resolve("main").entry
    with patches.opened(repository._shelf, refs, old, new) as span, ThreadPoolExecutor(2) as uploads:
        packer = Packer(repository._shelf, key.Transaction(0), uploads)
        return patches.patch(span, packer, old.new or "").stream.nbytes


def measure(
    init: Callable[..., Repository],
    opened: Callable[..., Repository],
    folder: Path,
    *,
    versions: int,
    elements: int,
    reverse: bool = False,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Make the run in a repository, and load its last version from afar before and after compaction.

    `init` and `opened` make and open it, given cache=…; `folder` is for caches.
    """
    run = Run(elements)
    first, held = run.now, folder / "held"
    with init(cache=folder / "cache") as repository:
        repository.commit(Bits(run.tensors()), step=0)
        load(opened, held, first)
        start = time.perf_counter()
        for step in range(1, versions + 1):
            run.step()
            if step in (1, 4, 8, 32, 100, 1000):
                say(f"{step:5} steps: {(run.now != first).mean():.2%} differ")
            repository.commit(Bits(run.tensors()), step=step)
        seconds = time.perf_counter() - start
        stored = sum(entry.place.nbytes for entry in repository.entries(n=versions) if entry.place)
        say(f"{versions} commits: {stored:,} bytes, {seconds:.0f} s")
        single = load(opened, held, run.now)
        say(f"before, holding the first:  {single}")
        say(f"before, holding nothing:    {load(opened, None, run.now)}")
        start = time.perf_counter()
        done = repository.compact(reverse=reverse)
        seconds = time.perf_counter() - start
        say(
            f"compact: {done.patches} patches, {done.back} back, {done.bases} bases in {done.swaps} swaps: "
            f"{done.nbytes:,} bytes ({done.nbytes / stored:.2f} of the commits), {seconds:.0f} s"
        )
        for tree in (held / "trees").iterdir():  # the first load kept the last version as well
            tree.unlink()
        load(opened, held, first, FIRST)
        caught = load(opened, held, run.now)
        say(f"after, holding the first:   {caught}")
        cold = load(opened, None, run.now)
        say(f"after, holding nothing:     {cold}")
        one = direct(repository)
        say(f"one direct patch:           {one:29,} bytes of payload")
        base = next(edge for edge in repository.entry(FIRST).place.edges if edge.source is None)
        say(f"a base of the last version: {base.nbytes:29,} bytes of payload, about")
    return {
        "versions": versions,
        "single": {"requests": single.requests, "nbytes": single.nbytes},
        "caught_up": {"requests": caught.requests, "nbytes": caught.nbytes, "seconds": caught.seconds},
        "cold": {"requests": cold.requests, "nbytes": cold.nbytes, "seconds": cold.seconds},
        "direct": one,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--reverse", action="store_true", help="patches back as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        url = Path(name) / "repository"
        measure(
            lambda **options: weightvc.init(url, **options),
            lambda **options: weightvc.open(url, **options),
            Path(name),
            versions=arguments.versions,
            elements=arguments.elements,
            reverse=arguments.reverse,
        )


class Bits:
    """bf16 tensors as a source: their bits, by name."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        names = sorted(tensors)
        self._parts = [memoryview(tensors[name]).cast("B") for name in names]
        self.tensors = [TensorInfo("", n, "BF16", tensors[n].shape, tensors[n].nbytes) for n in names]
        self.layout = None

    def read(self, index: int, start: int, stop: int) -> memoryview:
        return self._parts[index][start:stop]

    def check(self) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    main()
