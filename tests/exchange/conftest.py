"""A chain of checkpoints as a trainer writes them, and a repository that has them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import weightvc
from tests.kit.slime import Plain, checkpoint
from weightvc.repository import Repository

STEPS = 5


def stepped(old: Plain, seed: int) -> Plain:
    """What a step makes of weights: a few bits in all but one tensor, which is another one each time."""
    rng = random.Random(seed)
    new = dict(old)
    for name in sorted(old):
        dtype, shape, data = old[name]
        if data and hash_of(name) != seed % 3:
            changed = bytearray(data)
            for _ in range(4):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            new[name] = (dtype, shape, bytes(changed))
    return new


def hash_of(name: str) -> int:
    return sum(name.encode()) % 3


@pytest.fixture
def line() -> list[Plain]:
    """Weights of STEPS steps, one after the other."""
    rng = random.Random(7)
    shapes = {
        "model.embed": ("BF16", [40, 8]),
        "model.norm": ("F32", [3]),
        "model.scale": ("F32", []),
        "model.none": ("F32", [0, 3]),
        "model.fp8": ("F8_E4M3", [5, 5]),
        "head": ("BF16", [600]),
        'odd "é"/../name': ("I64", [2]),
    }
    width = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}
    first: Plain = {}
    for name, (dtype, shape) in shapes.items():
        count = 1
        for extent in shape:
            count *= extent
        first[name] = (dtype, shape, rng.randbytes(count * width[dtype]))
    out = [first]
    while len(out) < STEPS:
        out.append(stepped(out[-1], len(out)))
    return out


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], Repository]:
    """An empty repository in a directory of this name."""

    def make(name: str) -> Repository:
        return weightvc.init(tmp_path / name, cache=tmp_path / "cache", author="test")

    return make


@pytest.fixture
def repository(fresh: Callable[[str], Repository], line: list[Plain], tmp_path: Path) -> Repository:
    """All of `line` on main, each from a sharded checkpoint, steps 0, 10, 20, …"""
    made = fresh("repository")
    for i, weights in enumerate(line):
        made.commit(checkpoint(tmp_path / "trained" / str(i), weights, shards=2), step=10 * i)
    return made
