"""Weights as raw bits: a model to compare with, a source, files, and hypothesis strategies for trees and changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from weightvc.objects import dtypes
from weightvc.sources import header
from weightvc.sources.base import Layout, Source, TensorInfo


@dataclass(frozen=True)
class Tensor:
    """A tensor by dtype name, shape and canonical bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Key = tuple[str, str]
"""Component and name."""
Weights = dict[Key, Tensor]


class Bits:
    """A source of exactly these bits."""

    def __init__(self, weights: Mapping[Key, Tensor]) -> None:
        self._items = [weights[key] for key in sorted(weights)]
        self.tensors: Sequence[TensorInfo] = [
            TensorInfo(*key, weights[key].dtype, weights[key].shape, len(weights[key].data))
            for key in sorted(weights)
        ]
        self.layout: Layout | None = None

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        return memoryview(self._items[index].data)[start:stop]

    def check(self) -> None:
        """They do not change."""

    def close(self) -> None:
        """Nothing to release."""


def contents(source: Source) -> Weights:
    """What a source holds, byte for byte."""
    return {
        (t.component, t.name): Tensor(t.dtype, t.shape, bytes(source.read(i, 0, t.nbytes)))
        for i, t in enumerate(source.tensors)
    }


def held(repository: Any, ref: str = "HEAD") -> Weights:
    """What a version holds, read as a source."""
    with repository.source(ref, whole=True) as source:
        return contents(source)


def lying(path: Path) -> Weights:
    """What a checkpoint on disk holds."""
    from weightvc.sources import open_source

    source = open_source(path)
    try:
        return contents(source)
    finally:
        source.close()


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits."""
    return Tensor(dtype, shape, np.random.default_rng(seed).bytes(dtypes.nbytes(dtype, shape)))


def bf(*patterns: int) -> Tensor:
    """A 1-dim bf16 tensor from raw 16-bit patterns."""
    return Tensor("BF16", (len(patterns),), np.array(patterns, "<u2").tobytes())


def flipped(old: Tensor, density: float, seed: int) -> Tensor:
    """One bit flipped in about `density` of the lanes, and in one at least."""
    lane = dtypes.lane(old.dtype)
    values = np.frombuffer(old.data, f"<u{lane}").copy()
    if not values.size:
        return old
    rng = np.random.default_rng(seed)
    chosen = rng.random(values.size) < density
    chosen[rng.integers(values.size)] = True
    bits = rng.integers(0, 8 * lane, values.size).astype(values.dtype)
    values[chosen] ^= (np.ones_like(values) << bits)[chosen]
    return replace(old, data=values.tobytes())


def file_bytes(weights: Mapping[Key, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors file of one component's tensors."""
    infos = [TensorInfo(*key, t.dtype, t.shape, len(t.data)) for key, t in sorted(weights.items())]
    ordered = [weights[info.component, info.name].data for info in header.order(infos)]
    return header.build_header(infos, metadata) + b"".join(ordered)


def write_shards(directory: Path, weights: Mapping[Key, Tensor], count: int) -> None:
    """A sharded checkpoint with its index, as transformers lays it."""
    import json

    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    index = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {key: weights[key] for key in names[i::count]}
        (directory / file).write_bytes(file_bytes(part))
        index |= {name: file for _, name in part}
    size = sum(len(t.data) for t in weights.values())
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )


def files_below(directory: Path) -> dict[str, bytes]:
    """All files of a directory but the marker."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".weightvc"
    }


@contextlib.contextmanager
def tiny_format() -> Iterator[None]:
    """Chunks, blocks and packs of some bytes and short tails, so that small trees and histories have many of each."""
    from weightvc.objects import manifest, schema
    from weightvc.protocol import coder, swap

    small = {(schema, "CHUNK"): 64, (manifest, "CHUNK"): 64, (manifest, "BLOCK"): 256, (manifest, "LONE"): 48}
    small |= {(manifest, "INLINE"): 120, (manifest, "PACK"): 300}
    small |= {(swap, "TAIL"): 4, (swap, "RECENT"): 2, (coder, "CONTEXT_FROM"): 0, (coder, "FEW"): 0}
    old = {where: getattr(*where) for where in small}
    try:
        for where, value in small.items():
            setattr(*where, value)
        yield
    finally:
        for where, value in old.items():
            setattr(*where, value)


# Strategies

_SHAPES = [(), (1,), (3,), (0,), (0, 3), (2, 0), (2, 2), (5, 7), (33,), (64,), (3, 1, 50), (400,)]
_PACKED = [(4,), (2, 4), (0, 4), (3, 8), (128,), (0,)]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random bits of any dtype, packed ones in shapes that fill whole bytes."""
    dtype = draw(st.sampled_from(sorted(dtypes.BITS)))
    shape = draw(st.sampled_from(_PACKED if dtypes.bits(dtype) < 8 else _SHAPES))
    return tensor(dtype, shape, draw(st.integers(0, 1 << 20)))


_KEYS = st.tuples(st.sampled_from(["", "", "draft", "text/encoder"]), st.sampled_from([*"abcd", "é", "x.y", "../z"]))


@st.composite
def trees(draw: st.DrawFn) -> Weights:
    """Some tensors, in one or more components; sometimes none."""
    return {key: draw(tensors()) for key in draw(st.sets(_KEYS, max_size=5))}


@st.composite
def changed(draw: st.DrawFn, old: Weights) -> Weights:
    """`old` after some tensors were flipped, removed, renamed, reshaped, retyped, tied; and some added."""
    new: Weights = {}
    for key, value in old.items():
        seed = draw(st.integers(0, 1 << 20))
        match draw(
            st.sampled_from(["flip", "flip", "keep", "remove", "rename", "reshape", "retype", "again", "tie"])
        ):
            case "flip":
                new[key] = flipped(value, draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])), seed)
            case "keep":
                new[key] = value
            case "rename":
                new[draw(_KEYS)] = value
            case "reshape":
                new[key] = replace(value, shape=(1, *value.shape))
            case "retype":
                same = [d for d in dtypes.BITS if dtypes.bits(d) == dtypes.bits(value.dtype)]
                new[key] = replace(value, dtype=draw(st.sampled_from(same)))
            case "again":
                new[key] = draw(tensors())
            case "tie":
                new[draw(_KEYS)] = new[key] = value
    if draw(st.booleans()):
        new[draw(_KEYS)] = draw(tensors())
    return new
