"""Many tensors and large ones: bytes of metadata, and memory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import weightvc
from tests.kit.weights import Bits
from weightvc.objects import manifest
from weightvc.sources.base import TensorInfo


class Many:
    """Small bf16 tensors with the names of a mixture-of-experts model, over one buffer."""

    def __init__(self, count: int, seed: int) -> None:
        names = sorted(
            f"model.layers.{i // 1536}.mlp.experts.{i // 3 % 512}.{('gate', 'up', 'down')[i % 3]}_proj.weight"
            for i in range(count)
        )
        self.tensors = [TensorInfo("", name, "BF16", (8, 4), 64) for name in names]
        self.layout = None
        rng = np.random.default_rng(0)
        values = (rng.standard_normal(32 * count, "f4").view("<u4") >> 16).astype("<u2")
        if seed:
            values[np.random.default_rng(seed).random(values.size) < 0.01] ^= 1
        self._data = memoryview(values.view("u1"))

    def read(self, index: int, start: int, stop: int) -> memoryview:
        return self._data[64 * index + start : 64 * index + stop]

    def check(self) -> None: ...
    def close(self) -> None: ...


def test_metadata_of_150000_small_tensors(memory_url, tmp_path):
    """At most 60 bytes a tensor beside the payload, for the first commit and for the next."""
    count = 150_000
    repository = weightvc.init(memory_url, cache=tmp_path / "cache")
    for seed in (0, 1):
        source = Many(count, seed)
        before = repository.stats.bytes_written
        start = time.perf_counter()
        repository.commit(source)
        seconds = time.perf_counter() - start
        entry = repository.entry()
        (payload,) = [edge.nbytes for edge in entry.place.edges]
        metadata = repository.stats.bytes_written - before - payload
        print(f"commit {seed}: {metadata / count:.1f} bytes a tensor, payload {payload:,} bytes, {seconds:.2f} s")
        assert metadata <= 60 * count
    with repository.source("main", whole=True) as stored:
        assert [*stored.tensors] == [*source.tensors]
        for i in (0, 1, 77_777, count - 1):
            assert bytes(stored.read(i, 0, 64)) == bytes(source.read(i, 0, 64))


# A process of its own starts the commands, since a child's peak counts what its parent held when it was forked.
COMMANDS = """
import resource, subprocess, sys, time
folder = sys.argv[1]
for arguments in (["init"], ["commit", folder + "/model.safetensors"], ["checkout", "main", folder + "/out"]):
    start = time.perf_counter()
    command = [sys.executable, "-m", "weightvc_cli", "-r", folder + "/repository", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)
    print(f"{arguments[0]} {time.perf_counter() - start:.1f} s", end=", ")
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(f"peak {peak:.0f} MiB")
assert peak < 1000, peak
"""


def sparse_checkpoint(path: Path, nbytes: int) -> None:
    """Two bf16 tensors, zeros but for some bytes; takes no disk."""
    from weightvc.sources import header

    half = nbytes // 2
    infos = [TensorInfo("", name, "BF16", (half // 2,), half) for name in ("a", "b")]
    prefix = header.build_header(infos)
    with path.open("wb") as file:
        file.write(prefix)
        for at in (0, 12345, half - 2, half + 7, nbytes - 2):
            file.seek(len(prefix) + at)
            file.write(b"\x81\x3f")
        file.truncate(len(prefix) + nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_a_checkpoint_of_4_gb_in_flat_memory(tmp_path):
    sparse_checkpoint(tmp_path / "model.safetensors", 4 << 30)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "WEIGHTVC_CACHE": "none"},
    )
    assert done.returncode == 0, done.stderr
    print(f"4 GB: {done.stdout}")
    out = tmp_path / "out" / "model.safetensors"
    assert out.stat().st_size == (tmp_path / "model.safetensors").stat().st_size
    assert out.stat().st_blocks * 512 < 64 << 20  # chunks of zeros are holes
    with out.open("rb") as one, (tmp_path / "model.safetensors").open("rb") as other:
        for at in (0, 2 << 30, (4 << 30) - (1 << 20)):
            assert os.pread(one.fileno(), 1 << 20, at) == os.pread(other.fileno(), 1 << 20, at)
    stored = sum(path.stat().st_size for path in (tmp_path / "repository").rglob("*") if path.is_file())
    assert stored < 1 << 20


def test_packs_stay_small(memory_url):
    """No object passes 64 MiB, whatever is committed."""
    rng = np.random.default_rng(0)
    repository = weightvc.init(memory_url, cache=None)
    repository.commit({"w": rng.integers(0, 2**16, 40 << 20, "<u2")})
    sizes = [one.size for one in repository.store.list()]
    assert max(sizes) <= 64 << 20
    assert sum(size > manifest.PACK // 2 for size in sizes) >= 2
    assert Bits({}).tensors == []
