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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import weightvc
from weightvc.objects import key
from weightvc.protocol import patches
from weightvc.protocol.commit import Packer
from weightvc.repository import Repository


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


def load(url: Path, cache: Path | None, wanted: np.ndarray, ref: str = "main") -> str:
    """Load a version and say what that took."""
    with weightvc.open(url, cache=cache) as reader:
        before, start = (reader.stats.reads, reader.stats.bytes_read), time.perf_counter()
        got = reader.load(ref, framework="numpy")
        seconds = time.perf_counter() - start
        assert (np.concatenate([got[name].view("<u2") for name in sorted(got)]) == wanted).all()
        requests, nbytes = reader.stats.reads - before[0], reader.stats.bytes_read - before[1]
        return f"{requests:5,} requests, {nbytes:12,} bytes, {seconds:6.2f} s"


def direct(repository: Repository) -> str:
    """One patch from the first version to the last."""
    refs = repository._refs()
    old, new = refs.resolve("main@{step=0}").entry, refs.resolve("main").entry
    with patches.opened(repository._shelf, refs, old, new) as span, ThreadPoolExecutor(2) as uploads:
        packer = Packer(repository._shelf, key.Transaction(0), uploads)
        made = patches.patch(span, packer, old.new or "")
    return f"    1 patch,    {made.stream.nbytes:12,} bytes of payload"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--reverse", action="store_true", help="patches back as well")
    arguments = parser.parse_args()
    run = Run(arguments.elements)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url, held = folder / "repository", folder / "held"
        first = run.now
        with weightvc.init(url, cache=folder / "cache") as repository:
            repository.commit(Bits(run), step=0)
            load(url, held, first)
            start = time.perf_counter()
            for step in range(1, arguments.versions + 1):
                run.step()
                if step in (1, 4, 8, 32, 100, 1000):
                    print(f"{step:5} steps: {(run.now != first).mean():.2%} differ")
                repository.commit(Bits(run), step=step)
            seconds = time.perf_counter() - start
            stored = sum(entry.place.nbytes for entry in repository.entries(n=arguments.versions) if entry.place)
            print(f"{arguments.versions} commits: {stored:,} bytes, {seconds:.0f} s")
            print(f"before, holding the first:  {load(url, held, run.now)}")
            print(f"before, holding nothing:    {load(url, None, run.now)}")
            start = time.perf_counter()
            done = repository.compact(reverse=arguments.reverse)
            seconds = time.perf_counter() - start
            print(
                f"compact: {done.patches} patches, {done.back} back, {done.bases} bases in {done.swaps} swaps: "
                f"{done.nbytes:,} bytes ({done.nbytes / stored:.2f} of the commits), {seconds:.0f} s"
            )
            for tree in (held / "trees").iterdir():  # the first load kept the last version as well
                tree.unlink()
            load(url, held, first, "main@{step=0}")
            made = repository.plan("main@{step=0}")
            print(f"after, holding the first:   {load(url, held, run.now)}; {made.patches} patches")
            made = repository.plan(None)
            print(f"after, holding nothing:     {load(url, None, run.now)}; {made.patches} patches after the base")
            print(f"one direct patch:           {direct(repository)}")
            base = next(edge for edge in repository.entry("main@{step=0}").place.edges if edge.source is None)
            print(f"a base of the last version: {base.nbytes:31,} bytes of payload, about")


class Bits:
    """The run's weights as a source of bf16 tensors."""

    def __init__(self, run: Run) -> None:
        from weightvc.sources.base import TensorInfo

        parts = run.tensors()
        self._parts = [memoryview(parts[name]).cast("B") for name in sorted(parts)]
        self.tensors = [TensorInfo("", n, "BF16", parts[n].shape, parts[n].nbytes) for n in sorted(parts)]
        self.layout = None

    def read(self, index: int, start: int, stop: int) -> memoryview:
        return self._parts[index][start:stop]

    def check(self) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    main()
