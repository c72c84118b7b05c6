"""What many small tensors cost against one tensor of the same size: commits, metadata, and reading it back.

    python benchmarks/many_tensors.py [--tensors 150000]

Prints one line a shape: seconds of a first commit, of a following one in which 1 % of the elements changed, and of
reading the result with a cold and a warm cache; bytes of metadata a tensor beside the payload.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import weightvc
from weightvc.sources.base import TensorInfo


class Model:
    """bf16 weights, cut into `count` equal tensors."""

    def __init__(self, values: np.ndarray, count: int) -> None:
        each = values.size // count
        self._nbytes = 2 * each
        self.tensors = [
            TensorInfo("", f"model.layers.{i // 1536:03}.mlp.experts.{i % 1536:04}.weight", "BF16", (each,), 2 * each)
            for i in range(count)
        ]
        self.layout = None
        self._data = memoryview(values[: each * count].view("u1"))

    def read(self, index: int, start: int, stop: int) -> memoryview:
        return self._data[self._nbytes * index + start : self._nbytes * index + stop]

    def check(self) -> None: ...
    def close(self) -> None: ...


def measure(count: int, values: np.ndarray, changed: np.ndarray, folder: Path) -> None:
    repository = weightvc.init(folder / "repository", cache=folder / "cache")
    seconds, metadata = [], []
    for state in (values, changed):
        source = Model(state, count)
        before = repository.stats.bytes_written
        start = time.perf_counter()
        repository.commit(source)
        seconds.append(time.perf_counter() - start)
        place = repository.entry().place
        assert place is not None
        metadata.append((repository.stats.bytes_written - before - sum(e.nbytes for e in place.edges)) / count)
    for cache in (None, folder / "cache"):
        start = time.perf_counter()
        weightvc.open(folder / "repository", cache=cache).load(framework="numpy")
        seconds.append(time.perf_counter() - start)
    print(
        f"{count:7,} tensors: first {seconds[0]:.2f} s, next {seconds[1]:.2f} s, load {seconds[2]:.2f} s, "
        f"with the cache {seconds[3]:.2f} s; {metadata[0]:.1f} and {metadata[1]:.1f} bytes of metadata a tensor"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=150_000)
    parser.add_argument("--elements", type=int, default=512, help="elements of one tensor")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    total = arguments.tensors * arguments.elements
    values = (rng.standard_normal(total, "f4").view("<u4") >> 16).astype("<u2")
    changed = values.copy()
    changed[rng.random(total, "f4") < 0.01] ^= 1
    print(f"{2 * total / 1e6:.0f} MB of bf16, 1 % changed")
    for count in (1, arguments.tensors):
        with tempfile.TemporaryDirectory() as folder:
            measure(count, values, changed, Path(folder))


if __name__ == "__main__":
    main()
