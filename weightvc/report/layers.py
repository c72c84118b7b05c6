"""What layers changed. Two answers: of the whole run, roughly, from the block indexes of some manifests; and of the
newest versions exactly, from their weights.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from weightvc.comparison import layer_of, spread
from weightvc.history import version_of
from weightvc.objects import dtypes, manifest
from weightvc.objects.catalogue import Entry
from weightvc.objects.schema import Schema
from weightvc.pool import Pool
from weightvc.protocol import parallel, resolve
from weightvc.protocol.patches import Recent, Side
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.stored import parts

if TYPE_CHECKING:
    from weightvc.sources.base import TensorInfo

COLUMNS: Final = 64
"""Versions whose block index is read."""
READ: Final = 64 << 20
"""Bytes of manifests that are read for that, at most."""
BUDGET: Final = 128 << 20
"""Bytes of a version that are decoded at most; of a larger one, blocks all over it."""
LAYERS: Final = 128
"""Layers that are told apart at most; of more, neighbours are put together."""
FAR: Final = 9
"""Moves of so many representable values, or more, are counted together."""

_EXPONENTS: Final = {
    "BF16": (7, 0xFF, 127),
    "F16": (10, 0x1F, 15),
    "F32": (23, 0xFF, 127),
    "F64": (52, 0x7FF, 1023),
    "F8_E4M3": (3, 0xF, 7),
    "F8_E5M2": (2, 0x1F, 15),
}
"""By dtype, where the exponent begins, its mask, and its bias."""


class Layers:
    """The layers of a schema: their names in natural order, and which of them each tensor belongs to."""

    def __init__(self, schema: Schema) -> None:
        called = [layer_of(tensor.component, tensor.name) for tensor in schema.tensors]
        found = sorted(set(called), key=_natural)
        each = -(-len(found) // LAYERS)
        groups = [found[at : at + each] for at in range(0, len(found), each)] if found else []
        number = {name: i for i, group in enumerate(groups) for name in group}
        self.names = [group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}" for group in groups]
        self.of = [number[name] for name in called]
        self.elements = [0] * len(groups)
        for tensor, layer in zip(schema.tensors, self.of, strict=True):
            self.elements[layer] += lanes(tensor)


def lanes(tensor: "TensorInfo") -> int:
    """Elements, as patches compare them."""
    return tensor.nbytes // dtypes.lane(tensor.dtype)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


# The whole run


@dataclass(slots=True)
class Weights:
    """Bytes of patches by layer, over versions that lie evenly in the run, oldest first."""

    versions: list[Entry]
    layers: list[str]
    elements: list[int]
    nbytes: list[list[float]]
    """By version and layer. A block that holds several small tensors is shared out among them by their bytes."""
    of: int
    """Versions that they were chosen from."""


def weights(shelf: Shelf, line: Sequence[Entry]) -> Weights | None:
    """Of versions, newest first, what the manifests of some tell; None where there is no patch.

    Of a schema other than the newest version's nothing is read.
    """
    stored = [e for e in line if e.place is not None and e.patch is not None and e.expired is None]
    if not stored or stored[0].place is None:
        return None
    key = stored[0].place.schema
    same = [e for e in reversed(stored) if e.place is not None and e.place.schema == key]
    largest = max(e.place.nbytes for e in same if e.place is not None)
    chosen = [same[i] for i in spread(len(same), max(1, min(COLUMNS, READ // max(1, largest))))]
    with Pool(resolve.READERS, "weightvc-report") as pool:
        made = list(parallel.ordered(pool, lambda e: _manifest(shelf, e), chosen, 16))
    schema = shelf.schema(made[0].schema, made[0].schema_digest)
    layers = Layers(schema)
    out = Weights(chosen, layers.names, layers.elements, [], len(same))
    for one in made:
        assert one.patch is not None
        out.nbytes.append(_by_layer(schema, layers, one.patch.stream))
    return out


def _manifest(shelf: Shelf, entry: Entry) -> manifest.Manifest:
    assert entry.place is not None
    # Not kept in the cache, which is for what this host will read again.
    name = entry.place.manifest
    return manifest.decode(shelf.get(name, keep=False), name)


def _by_layer(schema: Schema, layers: Layers, stream: manifest.Stream) -> list[float]:
    manifest.check_blocks(stream, schema, "a patch")
    out = [0.0] * len(layers.names)
    for block, length in enumerate(stream.lengths):
        if not length:
            continue
        low, high = stream.first[block], stream.first[block + 1]
        whole = schema.position(high) - schema.position(low)
        for tensor in range(schema.tensor_of(low), schema.tensor_of(high - 1) + 1):
            begin = max(schema.offset[tensor], schema.position(low))
            end = min(schema.offset[tensor + 1], schema.position(high))
            out[layers.of[tensor]] += length * max(0, end - begin) / whole
    return out


# The newest versions


@dataclass(slots=True)
class Changes:
    """What the newest versions of a line changed against their first parents, oldest first."""

    versions: list[Entry]
    layers: list[str]
    changed: list[list[int]]
    """Elements that changed, by version and layer, of those that were read."""
    read: list[int]
    """Elements that were read of each layer."""
    elements: list[int]
    """Elements of each layer."""
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many floating elements with an exponent (of the old value) moved by so many representable values, up to
    FAR, with the sign of the move."""

    @property
    def whole(self) -> bool:
        """Whether all of every version was read."""
        return self.read == self.elements

    @property
    def share(self) -> float:
        """How much of the weights was read."""
        return sum(self.read) / sum(self.elements) if sum(self.elements) else 0.0


def changes(shelf: Shelf, refs: Refs, line: Sequence[Entry], count: int) -> Changes | None:
    """Of versions, newest first, what the newest `count` changed; None where the newest has no patch.

    All are read at once, each over the one before, so that a patch is decoded once.
    """
    run = list(_patched(line, count))
    if len(run) < 2:
        return None
    run.reverse()
    with ExitStack() as stack:
        sides: list[Side] = []
        for entry in run:
            lying = None
            if sides:
                below = sides[-1]
                lying = {version_of(run[len(sides) - 1]).tree: lambda _, side=below: side}
            _, verified = stack.enter_context(resolve.opened(shelf, refs, entry, lying=lying, whole=False))
            sides.append(Recent(verified))
        schema = sides[0].tree.schema
        layers = Layers(schema)
        out = Changes(run[1:], layers.names, [[0] * len(layers.names) for _ in run[1:]], [], layers.elements)
        out.read = [0] * len(layers.names)
        blocks = list(_within(schema, manifest.blocks(schema, None)))
        with Pool(parallel.workers(), "weightvc-report") as pool:
            made = parallel.ordered(pool, lambda b: _compared(sides, layers, b), blocks, 4)
            for read, changed, steps in made:
                for layer, number in read.items():
                    out.read[layer] += number
                for (version, layer), number in changed.items():
                    out.changed[version][layer] += number
                out.steps.update(steps)
    return out


def _patched(line: Sequence[Entry], count: int) -> Iterator[Entry]:
    """The newest versions that are patches on their first parent, of one schema; and the parent of the last."""
    for at, entry in enumerate(line):
        if entry.gone or entry.place is None or line[0].place is None or entry.place.schema != line[0].place.schema:
            return
        yield entry
        if at == count or entry.patch is None or entry.patch.source != next(iter(version_of(entry).parents), None):
            return


def _within(schema: Schema, blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Blocks from all over a tree, of at most BUDGET bytes together, about."""
    share = min(1.0, BUDGET / max(1, schema.nbytes))
    due = 0.0
    for low, high in blocks:
        nbytes = schema.position(high) - schema.position(low)
        due += share * nbytes
        if 2 * due >= nbytes:
            due -= nbytes
            yield low, high


_Compared = tuple[Counter[int], Counter[tuple[int, int]], Counter[tuple[int, int]]]


def _compared(sides: Sequence[Side], layers: Layers, block: tuple[int, int]) -> _Compared:
    """Of one block: elements by layer; those that changed by version and layer; steps by exponent."""
    import weightvc_kernels as kernels

    low, high = block
    schema = sides[0].tree.schema
    read: Counter[int] = Counter()
    changed: Counter[tuple[int, int]] = Counter()
    steps: Counter[tuple[int, int]] = Counter()
    first = schema.tensor_of(low)
    for tensor in range(first, schema.tensor_of(high - 1) + 1):
        begin = max(schema.offset[tensor], schema.position(low))
        end = min(schema.offset[tensor + 1], schema.position(high))
        read[layers.of[tensor]] += max(0, end - begin) // dtypes.lane(schema.tensors[tensor].dtype)
    for version, (old, new) in enumerate(pairwise(sides)):
        if old.tree.digests[32 * low : 32 * high] == new.tree.digests[32 * low : 32 * high]:
            continue
        before = parts(schema, low, high, memoryview(old.read(low, high)))
        after = parts(schema, low, high, memoryview(new.read(low, high)))
        for (tensor, _, a), (_, _, b) in zip(before, after, strict=True):
            dtype = schema.tensors[tensor].dtype
            lane = dtypes.lane(dtype)
            at = kernels.diff_lanes(a, b, lane)
            if at.size:
                changed[version, layers.of[tensor]] += int(at.size)
                if dtype in _EXPONENTS:
                    steps.update(_steps(kernels, dtype, lane, a, b, at))
    return read, changed, steps


def _steps(kernels: Any, dtype: str, lane: int, a: memoryview, b: memoryview, at: Any) -> "Counter[tuple[int, int]]":
    import numpy as np

    begin, mask, bias = _EXPONENTS[dtype]
    kind = np.dtype(f"<u{lane}")
    was, now = np.frombuffer(a, kind)[at], np.frombuffer(b, kind)[at]
    exponent = ((was >> kind.type(begin)) & kind.type(mask)).astype(np.int64) - bias
    moved = np.clip(kernels.ulp_steps(was, now, lane), -FAR, FAR)
    pairs, counts = np.unique(np.stack([exponent, moved]), axis=1, return_counts=True)
    return Counter(dict(zip(zip(*pairs.tolist(), strict=True), counts.tolist(), strict=True)))
