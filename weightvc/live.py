"""Live tensors: where a version's tensors lie in memory that is being served, and the writes that change them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, Final

from weightvc import device
from weightvc.errors import BadTensor, Corrupt
from weightvc.objects import dtypes, frame
from weightvc.objects.catalogue import Entry
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.pool import Pool
from weightvc.protocol import parallel, resolve
from weightvc.protocol.meter import Meter
from weightvc.protocol.refs import Refs
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.state import Verified
from weightvc.sources import memory

DENSE: Final = 8
"""One changed lane in so many, and the chunk is copied whole."""
SAMPLE: Final = 4096
"""Lanes at a chunk's beginning that may tell so."""


Where = tuple[str, int | None]
"""A tensor of the target, and the row of it where a version's tensor begins; None: it is all of it."""


class Region:
    """`nbytes` bytes of a tensor of the target, from `start`: where one tensor of a version lies."""

    __slots__ = ("_bytes", "_torch")

    def __init__(self, flat: Any, start: int, nbytes: int) -> None:
        """`flat` is the bytes of a tensor: uint8 [n], numpy or torch."""
        self._bytes = flat[start : start + nbytes]
        self._torch = not hasattr(flat, "__array_interface__")

    def read(self, start: int, stop: int) -> frame.Buffer:
        """Bytes [start, stop), a view where they lie in main memory."""
        part = self._bytes[start:stop]
        if self._torch:
            part = part.cpu().numpy()
        return memoryview(part)

    def lanes(self, start: int, stop: int, lane: int) -> Any:
        """Bytes [start, stop) as lanes, to index and to write."""
        part = self._bytes[start:stop]
        if self._torch:
            import torch

            return part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[lane])
        return part.view(f"<i{lane}" if lane > 1 else "u1")


@dataclass(slots=True)
class Write:
    """New lanes of a chunk: `lanes[at] = new`, all of them if `at` is None. `old` is what they were, if kept. `new`
    is None in what is kept only to be taken back. `lanes` are the target's, numpy or torch; the others numpy, in main
    memory."""

    name: str
    tensor: int
    start: int
    lanes: Any
    at: Any
    new: Any
    old: Any

    @property
    def kept(self) -> int:
        """Bytes that it takes to keep it."""
        return sum(int(part.nbytes) for part in (self.at, self.new, self.old) if part is not None)

    def apply(self) -> None:
        """Write them."""
        new = self.new if hasattr(self.lanes, "__array_interface__") else device.of_host(self.new, self.lanes)
        if self.at is None:
            self.lanes[:] = new
        else:
            self.lanes[self.at] = new


Back = tuple[Tree, Sequence[Sequence[Write]]]
"""A tree that tensors held before, and the updates since, newest first: with those taken back it is there again."""


class Writes:
    """Writes, ready to be made: what goes to a few places of a device lies there already."""

    def __init__(self, writes: Sequence[Write]) -> None:
        """Raises what the device does where it has no room for them."""
        there = [write.at is not None and not hasattr(write.lanes, "__array_interface__") for write in writes]
        self._writes = writes
        self._here = [write for write, is_there in zip(writes, there, strict=True) if not is_there]
        self._there = device.Scatters(compress(writes, there))

    def apply(self) -> None:
        """Make them all, and return when they are done. To be called again where that failed, and not else."""
        self._there.apply()
        for write in self._here:
            write.apply()
        device.wait(write.lanes for write in self._writes)
        # What they took of a device is free again, also where somebody keeps this.
        self._writes, self._here, self._there = (), [], device.Scatters(())


class Live:
    """Tensors of a target, and where each tensor of a version lies in them."""

    def __init__(self, tensors: Any, names: Any, component: str) -> None:
        """Raises BadTensor for what cannot be written in place."""
        self._names = names
        self.component = component
        self._tensors = tensors
        values = _named(tensors)
        self._flat: dict[str, Any] = {}
        self._info: dict[str, TensorInfo] = {}
        self._memory: dict[str, tuple[str, int, int]] = {}
        for name, value in values.items():
            if type(name) is not str:
                raise BadTensor(f"the target has a name {name!r:.100}: use str")
            fault = memory.tensor_fault(value) or _fault(value)
            if fault:
                raise BadTensor(f"tensor {name!r:.200} of the target is {fault}")
            self._info[name] = memory.info(name, value)
            self._flat[name], self._memory[name] = _flat(value)
        self._schema = ""
        self._regions: list[Region | None] = []
        self._twins: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the target; those that share their memory count each time."""
        return sum(info.nbytes for info in self._info.values())

    def check_place(self) -> None:
        """Raise BadTensor if the target's tensors lie elsewhere by now: what is written here would serve nobody."""
        values = _named(self._tensors)
        for name, (_, address, nbytes) in self._memory.items():
            if nbytes and _place(values.get(name)) != (address, nbytes):
                raise BadTensor(
                    f"{name!r:.200} of the target does not lie where it did when the client was made (moved to "
                    "another device or dtype, replaced or freed): make another client for what there is now"
                )

    def check_twins(self, tree: Tree, what: str) -> None:
        """Raise BadTensor if tensors that are one here differ in a version."""
        self.regions(tree.schema)
        first = tree.schema.first_chunk
        for one, other in self._twins:
            for i in range(first[one + 1] - first[one]):
                if tree.chunk(first[one] + i) != tree.chunk(first[other] + i):
                    names = [tree.schema.tensors[tensor].name for tensor in (one, other)]
                    raise BadTensor(
                        f"{names[0]!r:.200} and {names[1]!r:.200} are the same memory in the target, and differ in "
                        f"{what}: give them memory of their own, or leave one out with names=…"
                    )

    def regions(self, schema: Schema) -> Sequence[Region | None]:
        """Where each tensor of a version lies; None where it is not wanted. Raises BadTensor if it does not fit."""
        if self._schema != schema.digest:
            self._regions = self._bind(schema)
            self._schema = schema.digest
        return self._regions

    def _bind(self, schema: Schema) -> list[Region | None]:
        covered: dict[str, list[tuple[int, int, str]]] = {}
        regions: list[Region | None] = []
        places: list[tuple[str, int, int, int]] = []
        faults = []
        meant: set[str] = set()
        for i, tensor in enumerate(schema.tensors):
            where = self._where(tensor)
            if where is None:
                regions.append(None)
                continue
            name, row = where
            meant.add(name)
            have = self._info.get(name)
            if have is None:
                faults.append(f"it has no tensor {name!r:.200}")
            elif have.dtype != tensor.dtype:
                faults.append(
                    f"{name!r:.200} has dtype {have.dtype}, the version's {tensor.name!r:.100} {tensor.dtype}"
                )
            elif not _fits(tensor.shape, have.shape, row):
                faults.append(
                    f"{name!r:.200} has shape {list(have.shape)}, the version's {tensor.name!r:.100} "
                    f"{list(tensor.shape)}" + (f" (from row {row})" if row is not None else "")
                )
            else:
                row = row or 0
                width = dtypes.count(tensor.shape[1:]) * dtypes.bits(tensor.dtype)
                if width * row % 8:
                    faults.append(f"row {row} of {name!r:.200} does not begin at a byte")
                    continue
                start = width * row // 8
                covered.setdefault(name, []).append((start, start + tensor.nbytes, tensor.name))
                regions.append(Region(self._flat[name], start, tensor.nbytes))
                where_, address, _ = self._memory[name]
                places.append((where_, address + start, tensor.nbytes, i))
        faults += self._uncovered(covered, meant)
        twins, overlaps = _shared(schema, places)
        faults += overlaps
        if faults:
            more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise BadTensor(
                f"the target does not fit the version: {'; '.join(faults[:8])}{more}; map names with names=…, or "
                "pull into new tensors"
            )
        self._twins = twins
        return regions

    def _where(self, tensor: TensorInfo) -> Where | None:
        if tensor.component != self.component:
            return None
        if self._names is None:
            return tensor.name, None
        if isinstance(self._names, Mapping):
            return _where(tensor.name, self._names.get(tensor.name, tensor.name))
        return _where(tensor.name, self._names(tensor.name))

    def _uncovered(self, covered: Mapping[str, list[tuple[int, int, str]]], meant: set[str]) -> Iterator[str]:
        shared = set()
        for name, parts in covered.items():
            at = 0
            for start, stop, source in sorted(parts):
                if start < at:
                    yield f"{source!r:.100} and another tensor both go to {name!r:.200}"
                elif start > at:
                    break
                at = max(at, stop)
            if at < self._info[name].nbytes:
                yield f"nothing is written to all of {name!r:.200}"
            shared.add(self._memory[name])
        for name, info in self._info.items():
            if name not in meant and info.nbytes and self._memory[name] not in shared:
                yield f"the version has nothing for {name!r:.200}"


def _where(name: str, where: Any) -> Where | None:
    """What `names` gave for a tensor, as (name, row) or None. Raises BadTensor."""
    if where is None:
        return None
    if type(where) is str:
        return where, None
    if isinstance(where, tuple) and len(where) == 2 and type(where[0]) is str and type(where[1]) is int:
        return where[0], where[1]
    raise BadTensor(f"names gave {where!r:.100} for tensor {name!r:.100}: a name, (name, row) or None is wanted")


def _shared(schema: Schema, places: Sequence[tuple[str, int, int, int]]) -> tuple[list[tuple[int, int]], list[str]]:
    """Of tensors, each with device, address, bytes and number: pairs of the very same memory, and what is wrong with
    those that share a part of it."""
    twins, faults = [], []
    last = ("", 0, 0, 0)
    for place in sorted(place for place in places if place[2]):
        if place[:3] == last[:3]:
            twins.append((last[3], place[3]))
        elif place[0] == last[0] and place[1] < last[1] + last[2]:
            one, other = (schema.tensors[i].name for i in (last[3], place[3]))
            faults.append(f"{one!r:.100} and {other!r:.100} go to memory that overlaps")
            continue
        last = place
    return twins, faults


def _fits(shape: tuple[int, ...], have: tuple[int, ...], row: int | None) -> bool:
    if row is None:
        return shape == have
    return bool(shape and have) and shape[1:] == have[1:] and 0 <= row <= have[0] - shape[0]


def _named(tensors: Any) -> Mapping[str, Any]:
    """A target's tensors as they are now: a dict itself, since somebody may put others into it, or a module's."""
    return tensors if isinstance(tensors, Mapping) else _of_module(tensors)


def _place(value: Any) -> tuple[int, int] | None:
    """Address and bytes."""
    if hasattr(value, "__array_interface__"):
        return value.__array_interface__["data"][0], value.nbytes
    return (value.data_ptr(), value.nbytes) if hasattr(value, "data_ptr") else None


def _of_module(module: Any) -> Mapping[str, Any]:
    if not hasattr(module, "state_dict"):
        raise BadTensor(f"a {type(module).__name__} cannot be written in place: give a dict of tensors, or a module")
    values: Mapping[str, Any] = module.state_dict()
    return values


def _fault(value: Any) -> str:
    if hasattr(value, "__array_interface__"):
        if not value.flags.writeable:
            return "read-only: pass an array that may be written"
        if not value.flags.c_contiguous or value.dtype.newbyteorder("<") != value.dtype:
            return "not contiguous and little-endian: pass one that is"
        return ""
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return "not contiguous: pass value.contiguous()"
    return ""


def _flat(value: Any) -> tuple[Any, tuple[str, int, int]]:
    """The bytes of a tensor, numpy where they lie in main memory, and which memory it is."""
    import numpy

    if isinstance(value, numpy.ndarray):
        flat = value.reshape(-1).view("u1")
        return flat, ("cpu", flat.ctypes.data, flat.nbytes)
    flat = memory.torch_bytes(value)
    where = (str(value.device), flat.data_ptr(), flat.numel())
    return (flat.numpy() if value.device.type == "cpu" else flat), where


class _Lying:
    """What the target holds, with the given updates taken back, as a state of a tree with this schema."""

    def __init__(self, schema: Schema, live: Live, back: Sequence[Sequence[Write]]) -> None:
        self._schema = schema
        self._regions = live.regions(schema)
        # By tensor and first byte of the chunk, in the order in which they are taken back. By the tensor's name: its
        # number may have been another one in the versions since.
        self._back: dict[tuple[str, int], list[Write]] = {}
        for writes in back:
            for write in writes:
                self._back.setdefault((write.name, write.start), []).append(write)

    def read(self, low: int, high: int) -> frame.Buffer:
        pieces = []
        for chunk in range(low, high):
            tensor, start, stop = self._schema.span(chunk)
            region = self._regions[tensor]
            if region is None:
                raise Corrupt(f"tensor {self._schema.tensors[tensor].name!r:.200} is not kept here")
            data = region.read(start, stop)
            if undone := self._back.get((self._schema.tensors[tensor].name, start)):
                data = _undo(data, undone)
            pieces.append(data)
        return pieces[0] if len(pieces) == 1 else bytearray().join(pieces)


def _undo(data: frame.Buffer, writes: Sequence[Write]) -> frame.Buffer:
    import numpy

    out = numpy.frombuffer(bytearray(data), numpy.uint8)
    for write in writes:
        try:
            lanes = out.view(write.old.dtype)
            lanes[slice(None) if write.at is None else write.at] = write.old
        except (ValueError, IndexError):
            raise Corrupt(f"{write.name!r:.200} had another shape before") from None
    return memoryview(out)  # type: ignore[arg-type]


def find(
    shelf: Shelf,
    refs: Refs,
    entry: Entry,
    live: Live,
    held: Tree | None,
    back: Iterable[Back] = (),
) -> tuple[list[Write], Tree]:
    """The writes that bring tensors to a version, and its tree. Every byte is checked before this returns.

    `held` is the tree that they hold, as far as is known: what the version has in common with it is not looked at.
    `back` leads to trees that they held before: the way to the version may begin at one of those as well.
    """
    live.check_place()
    lying = {tree.digest: partial(_Lying, live=live, back=writes) for tree, writes in back}
    if held is not None:
        lying[held.digest] = partial(_Lying, live=live, back=())
    with resolve.opened(shelf, refs, entry, lying=lying) as (_, verified):
        return _writes(verified, live, held, f"version {(entry.new or '')[:12]}"), verified.tree


def taken_back(live: Live, held: Tree, back: Back, meter: Meter) -> list[Write] | None:
    """The writes that bring tensors from `held` to the tree that `back` leads to: nothing is read but them. None if
    that does not give the tree's bytes: somebody else has written to them."""
    live.check_place()
    tree, writes = back
    verified = Verified(tree, [lambda: _Lying(tree.schema, live, writes)], "what was overwritten", meter)
    try:
        return _writes(verified, live, held, "the version before")
    except Corrupt:
        return None


def _writes(verified: Verified, live: Live, held: Tree | None, what: str) -> list[Write]:
    tree = verified.tree
    regions = live.regions(tree.schema)
    live.check_twins(tree, what)
    same = _common(tree, held)
    wanted = [
        block
        for block in verified.blocks()
        if any(regions[tree.schema.tensor_of(chunk)] is not None and not same(chunk) for chunk in range(*block))
    ]
    writes: list[Write] = []
    window = 2 * parallel.workers() + 2
    with Pool(parallel.workers(), "weightvc-stage") as pool:
        for found in parallel.ordered(
            pool,
            # Only from a version that is known there is a way back to it.
            lambda run: _of_block(verified, regions, same, run, keep=held is not None),
            verified.runs(wanted),
            window,
        ):
            writes += found
    return writes


def _common(tree: Tree, held: Tree | None) -> Callable[[int], bool]:
    """Whether a chunk of `tree` is in its place already."""
    if held is None:
        return lambda chunk: False
    if held.schema.digest == tree.schema.digest:
        return lambda chunk: tree.chunk(chunk) == held.chunk(chunk)
    return lambda chunk: False


def _of_block(
    verified: Verified,
    regions: Sequence[Region | None],
    same: Callable[[int], bool],
    block: tuple[int, int],
    *,
    keep: bool,
) -> list[Write]:
    low, high = block
    schema = verified.tree.schema
    data = memoryview(verified.read(low, high))
    with verified.meter.part("decode"):
        return _differing_lanes(schema, regions, same, low, high, data, keep=keep)


def _differing_lanes(
    schema: Schema,
    regions: Sequence[Region | None],
    same: Callable[[int], bool],
    low: int,
    high: int,
    data: memoryview,
    *,
    keep: bool,
) -> list[Write]:
    """The writes of chunks [low, high), whose bytes are `data`; with what they overwrite, if that is to be kept."""
    import numpy

    import weightvc_kernels as kernels

    writes, at = [], 0
    for chunk in range(low, high):
        tensor, start, stop = schema.span(chunk)
        piece = data[at : at + stop - start]
        at += stop - start
        region = regions[tensor]
        if region is None or same(chunk) or start == stop:
            continue
        info = schema.tensors[tensor]
        lane = dtypes.lane(info.dtype)
        new = numpy.frombuffer(piece, f"<i{lane}" if lane > 1 else "u1")
        old = numpy.frombuffer(region.read(start, stop), new.dtype)
        lanes = region.lanes(start, stop, lane)
        where = None if _dense(old[:SAMPLE], new[:SAMPLE]) else kernels.diff_lanes(old, new, lane)
        parts: tuple[Any, Any, Any]
        # What changes nearly everywhere is sent to a device only when it is written: it takes as much as the tensors.
        if where is None or where.size * DENSE >= new.size:
            # What was read over nothing that is held lies in no live memory, and may be kept as it is.
            whole = new.copy() if keep or not new.flags.writeable else new
            parts = (None, whole, old.copy() if keep else None)
        elif where.size:
            parts = (where, new[where], old[where] if keep else None)
        else:
            continue
        writes.append(Write(info.name, tensor, start, lanes, *parts))
    return writes


def _dense(old: Any, new: Any) -> bool:
    """Whether so many of some lanes differ that a chunk which begins with them is better copied whole."""
    return bool((old != new).sum() * DENSE >= new.size)


def differing(live: Live, tree: Tree) -> list[str]:
    """Names of a version's tensors that the target does not hold bit for bit."""
    live.check_place()
    regions = live.regions(tree.schema)
    schema = tree.schema

    def wrong(i: int) -> bool:
        region = regions[i]
        if region is None:
            return False
        for chunk in range(schema.first_chunk[i], schema.first_chunk[i + 1]):
            _, start, stop = schema.span(chunk)
            if frame.digest(region.read(start, stop)) != tree.chunk(chunk):
                return True
        return False

    with Pool(parallel.workers(), "weightvc-verify") as pool:
        bad = list(pool.map(wrong, range(len(schema.tensors))))
    return [tensor.name for tensor, is_bad in zip(schema.tensors, bad, strict=True) if is_bad]
