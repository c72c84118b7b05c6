"""Tensors in memory: torch tensors and numpy arrays by name, and tensors built over given bytes.

torch is never imported to read: a torch tensor in the mapping means that it is loaded already.
"""

import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, islice
from operator import attrgetter, gt, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from weightvc.errors import BadFile, BadName, BadTensor, Refused
from weightvc.objects import dtypes
from weightvc.objects.tensor import INFO
from weightvc.sources.base import Layout, TensorInfo
from weightvc.sources.header import METADATA, collector_paused, shown
from weightvc.sources.paths import check_files, weights_of

if TYPE_CHECKING:
    import numpy
    import torch

TORCH_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Format names by torch's. A float4_e2m1fn_x2 element is two of F4: the last extent doubles."""

_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# The packed type has no counterpart: ml_dtypes keeps one float4 a byte, safetensors two.
NUMPY_DTYPES = {name: dtype for name, dtype in TORCH_DTYPES.items() if dtype != "F4"}
"""Format names by numpy's and ml_dtypes'."""
_NUMPY_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

_MANY = 1000
_AT_ONCE = 512
_SEEN = 4
"""Components of so many tensors that are remembered."""

_KEPT = 2
_KEPT_BYTES = 256 << 20
_LARGE = 1 << 16
"""Bytes from which a copy by numpy, which lets other threads run, costs less than it gains."""

_ALIKE, _SMALL = 16, 16 << 10
"""Tensors of one shape that are made together, and their bytes: with fewer, or larger ones, that takes longer."""
_COPIED = frozenset({"U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"})
"""Dtypes that every torch copies, bit for bit."""

_ASIDE, _TENSOR, _ARRAY = 0, 1, 2
"""Where a tensor's bytes are: to be asked for one by one, or as they are kept in a torch tensor or numpy array."""
_Kind = tuple[int, str, tuple[int, ...], int]
"""Where its bytes are, dtype, shape and canonical bytes."""
_PASSED: _Kind = (_ASIDE, "", (), 0)


def open_tensors(tensors: Mapping[str, Any], where: str = "the mapping") -> "MemorySource":
    """A source over `{name: tensor}`, or `{component: {name: tensor}}`.

    Values are torch tensors (any device; Parameters and Buffers too) or numpy arrays, dense, of a dtype that
    safetensors has. Nothing is copied here: do not change the tensors before the commit returns. Raises
    BadTensor naming up to ten keys that cannot be kept, BadName for components that cannot be folders together.
    """
    nested = bool(tensors) and all(isinstance(value, Mapping) for value in tensors.values())
    components: Mapping[str, Mapping[str, Any]] = tensors if nested else {"": tensors}
    infos: list[TensorInfo] = []
    held: list[Any] = []
    lying = bytearray()
    faults: list[str] = []
    check_components(components, where)
    with collector_paused():
        for component, values in sorted(components.items()):
            if nested and not values:
                faults.append(f"component {component!r} has no tensors")
            made, chosen = _component(component, values, faults)
            infos += made.infos
            held += chosen if made.order is None else itemgetter(*made.order)(chosen)
            lying += made.lying
    if faults:
        more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise BadTensor(f"{where} has what cannot be kept: {'; '.join(faults[:10])}{more}")
    return MemorySource(infos, held, bytes(lying))


class _Made(NamedTuple):
    """A component's tensors in order: what they are, where their bytes are, and their places in the mapping."""

    infos: list[TensorInfo]
    lying: bytes
    order: list[int] | None


_Look = tuple[str, list[Any], bytes, list[Any], list[Any]]
"""A component, its names, and what _look() says of the values."""
_seen: list[tuple[_Look, _Made]] = []
"""The last components of many tensors: a trainer commits the same step after step."""


def _component(component: str, values: Mapping[str, Any], faults: list[str]) -> tuple[_Made, list[Any]]:
    """The tensors of a component, and its values as they stand; `faults` of those that cannot be kept are added."""
    names = list(values)
    chosen = list(values.values()) if type(values) is dict else [values[name] for name in names]
    look = (component, names, *_look(chosen))
    return next((made for seen, made in _seen if seen == look), None) or _made(look, chosen, faults), chosen


def _made(look: _Look, values: list[Any], faults: list[str]) -> _Made:
    """The tensors of a component, and `faults` of those that cannot be kept."""
    global _seen
    component, names, lying, types, shapes = look
    keys = list(zip(types, shapes, strict=True))
    known = {key: _plain(value) for key, value in dict(zip(keys, values, strict=True)).items() if key[1] is not None}
    found = [known.get(key, _PASSED) for key in keys]
    strings = {*map(type, names)} <= {str}
    order = None
    if strings and any(map(gt, names, islice(names, 1, None))):
        order = sorted(range(len(names)), key=names.__getitem__)
        names, values, found = ([*itemgetter(*order)(column)] for column in (names, values, found))
    plain = strings and METADATA not in names and all(map(str.isascii, names)) and _PASSED not in found
    if not plain:
        # Another look at each, and a fault for what cannot be kept.
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            fault = name_fault(name) or tensor_fault(value)
            if fault:
                prefix = f"component {component!r}, " if component else ""
                faults.append(f"{prefix}{shown(name) if type(name) is str else repr(name)}: {fault}")
            elif found[i] is _PASSED:
                found[i] = (_ASIDE, *_kind(value))
    infos = [
        INFO((component, name, dtype, shape, nbytes))
        for name, (_, dtype, shape, nbytes) in zip(names, found, strict=True)
    ]
    made = _Made(infos, bytes(map(itemgetter(0), found)), order)
    if plain and len(names) >= _MANY:
        # The shapes of few kinds, instead of one a tensor.
        _seen = [((component, look[1], lying, types, [known[key][2] for key in keys]), made), *_seen[: _SEEN - 1]]
    return made


def check_components(components: Mapping[str, Any], where: str) -> None:
    """Refuse components that could be committed and never be checked out."""
    for component in components:
        if type(component) is not str:
            raise BadName(f"component {component!r} of {where} is no string: use str")
    try:
        check_files([weights_of(component) for component in components])
    except (BadName, BadFile) as error:
        raise BadName(f"a component of {where} is a folder of the checkout, and cannot be: {error}") from None


class MemorySource:
    """Tensors in memory. Made by open_tensors()."""

    def __init__(self, tensors: list[TensorInfo], values: list[Any], lying: bytes) -> None:
        """`values[i]` is the tensor that `tensors[i]` describes; `lying[i]` tells where its bytes are."""
        self.tensors: Sequence[TensorInfo] = tensors
        self.layout: Layout | None = None
        self._values = values
        self._lying = lying
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def value(self, index: int) -> Any:
        """The tensor or array itself."""
        return self._values[index]

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of `tensors[index]`; a view of the tensor itself where that is possible."""
        info = self.tensors[index]
        if not 0 <= start <= stop <= info.nbytes:
            raise IndexError(f"bytes {start} to {stop} of tensor {shown(info.name)}")
        if start == stop:
            return b""
        value = self._values[index]
        if is_torch(value):
            if value.is_contiguous() and not value.is_conj() and not value.is_neg():
                flat = torch_bytes(value)[start:stop]
                return memoryview(flat.cpu().numpy())
            return self._materialised(index, value)[start:stop]
        if value.flags.c_contiguous and value.dtype.newbyteorder("<") == value.dtype:
            return _numpy_bytes(value)[start:stop]
        return self._materialised(index, value)[start:stop]

    def read_run(self, first: int, last: int) -> memoryview | bytes:
        """Bytes of `tensors[first:last]`, one after the other: a view if it is one tensor."""
        if last - first == 1:
            return self.read(first, 0, self.tensors[first].nbytes)
        values, lying = self._values[first:last], self._lying[first:last]
        if {*lying} == {_ARRAY}:
            return b"".join(values)
        import numpy

        from weightvc_kernels import pieces

        # Without a view of each, which takes longer than to copy what is small.
        sizes = numpy.fromiter(map(itemgetter(4), self.tensors[first:last]), numpy.int64, len(values))
        addresses = numpy.zeros(len(values), numpy.int64)
        plain = numpy.frombuffer(lying, numpy.uint8) == _TENSOR
        addresses[plain] = _addresses([*compress(values, plain.tolist())], sizes[plain])
        others = []
        for i in numpy.flatnonzero(addresses == 0).tolist():
            data = self.read(first + i, 0, int(sizes[i]))
            sizes[i] = len(data)
            if data:
                others.append(numpy.frombuffer(data, numpy.uint8))
                addresses[i] = others[-1].ctypes.data
        return pieces.gather(addresses, sizes)

    def check(self) -> None:
        """Nothing to check: the caller keeps the tensors as they are."""

    def close(self) -> None:
        """Forget the tensors that were laid out anew; idempotent."""
        with self._lock:
            self._kept.clear()

    def _materialised(self, index: int, value: Any) -> memoryview:
        # One lock for all, so that threads reading ranges of one tensor lay it out once.
        with self._lock:
            view = self._kept.get(index)
            if view is None:
                view = _laid_out(value)
                self._kept[index] = view
                while len(self._kept) > _KEPT and sum(map(len, self._kept.values())) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
            return view


def _look(values: list[Any]) -> tuple[bytes, list[Any], list[Any]]:
    """Of each value that lies in main memory just as it is kept: where, its dtype and its shape; else _ASIDE and None
    twice: such a value needs another look before it is refused, or laid out anew. There may be hundreds of thousands,
    so each question is put to all of them at once."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    sorts: list[tuple[set[type], Callable[[list[Any]], tuple[bytes, list[Any], list[Any]]]]] = []
    # Half loaded in another thread, they may lack these yet.
    if torch is not None and hasattr(torch, "nn") and hasattr(torch.nn, "Parameter"):
        sorts.append(({torch.Tensor, torch.nn.Parameter}, _look_at_tensors))
    if numpy is not None and hasattr(numpy, "memmap"):
        sorts.append(({numpy.ndarray, numpy.memmap}, _look_at_arrays))
    kinds = list(map(type, values))
    distinct = {*kinds}
    lying, types, shapes = bytearray(len(values)), [None] * len(values), [None] * len(values)
    for accepted, look in sorts:
        if distinct <= accepted:
            return look(values)
        if distinct & accepted:
            at = [i for i, kind in enumerate(kinds) if kind in accepted]
            for i, *said in zip(at, *look([values[i] for i in at]), strict=True):
                lying[i], types[i], shapes[i] = said
    return bytes(lying), types, shapes


def _some(values: list[Any]) -> Iterator[list[Any]]:
    """Some values at a time: what one question brings into the processor's cache is still there for the next."""
    return (values[at : at + _AT_ONCE] for at in range(0, len(values), _AT_ONCE))


def _look_at_tensors(values: list[Any]) -> tuple[bytes, list[Any], list[Any]]:
    import torch

    shape, near, dtype = map(attrgetter, ("shape", "is_cpu", "dtype"))
    asked: list[Callable[[Any], Any]] = [shape, torch.Tensor.data_ptr, near, torch.Tensor.is_neg, dtype]
    answers: list[list[Any]] = [[] for _ in asked]
    try:
        # To ask a sparse tensor for its address raises, or a nested one for its shape. The address of a ZeroTensor, a
        # meta tensor or an empty one is 0. Whether it is contiguous is asked when it is read.
        for some in _some(values):
            for column, ask in zip(answers, asked, strict=True):
                column += map(ask, some)
    except RuntimeError:
        if len(values) == 1:
            return bytes([_ASIDE]), [None], [None]
        half = len(values) // 2
        one, two = _look_at_tensors(values[:half]), _look_at_tensors(values[half:])
        return one[0] + two[0], one[1] + two[1], one[2] + two[2]
    shapes, addresses, on_cpu, negative, types = answers
    if all(addresses) and all(on_cpu) and not any(negative):
        return bytes([_TENSOR]) * len(values), types, shapes
    plain = [bool(address) and cpu and not flip for address, cpu, flip in zip(*answers[1:4], strict=True)]
    return _without(_TENSOR, plain, types, shapes)


def _look_at_arrays(values: list[Any]) -> tuple[bytes, list[Any], list[Any]]:
    plain = list(map(attrgetter("flags.c_contiguous"), values))
    types, shapes = list(map(attrgetter("dtype"), values)), list(map(attrgetter("shape"), values))
    return (bytes([_ARRAY]) * len(values), types, shapes) if all(plain) else _without(_ARRAY, plain, types, shapes)


def _without(where: int, plain: list[Any], types: list[Any], shapes: list[Any]) -> tuple[bytes, list[Any], list[Any]]:
    """The columns, without what is not plain."""
    for i, is_plain in enumerate(plain):
        if not is_plain:
            types[i] = shapes[i] = None
    return bytes([where if is_plain else _ASIDE for is_plain in plain]), types, shapes


def _addresses(tensors: list[Any], sizes: Any) -> Any:
    """Where torch tensors lie, 0 for one that is not contiguous memory of that size.

    Asked just before they are copied, since nothing else would keep us inside of memory that was let go of meanwhile.
    """
    import numpy

    if not tensors:
        return 0
    import torch

    asked = attrgetter("nbytes"), torch.Tensor.is_contiguous, torch.Tensor.data_ptr
    columns = [[numpy.fromiter(map(ask, some), numpy.int64, len(some)) for ask in asked] for some in _some(tensors)]
    nbytes, whole, addresses = map(numpy.concatenate, zip(*columns, strict=True))
    return numpy.where((whole != 0) & (nbytes == sizes), addresses, 0)


def _plain(value: Any) -> "_Kind":
    """A tensor's kind, if all that are contiguous and of its dtype and shape lie as they are kept; or _PASSED."""
    if tensor_fault(value):
        return _PASSED
    dtype, shape, nbytes = _kind(value)
    if is_torch(value):
        # Complex ones may be conjugated; packed ones have a shape of their own.
        return _PASSED if dtype in ("C64", "F4") else (_TENSOR, dtype, shape, nbytes)
    return (_ARRAY, dtype, shape, nbytes) if value.dtype.newbyteorder("<") == value.dtype else _PASSED


def is_torch(value: Any) -> bool:
    """Whether it is a torch tensor; torch is not imported to say no."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def name_fault(name: Any) -> str:
    """Why `name` cannot name a tensor, with the mend; "" if it can."""
    if type(name) is not str:
        return f"a name of type {type(name).__name__}: use str"
    if name == METADATA:
        return "a name that safetensors keeps for itself: rename it"
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            return "a name that is not valid Unicode: rename it"
    return ""


def tensor_fault(value: Any) -> str:
    """Why `value` cannot be kept as a tensor, with the mend; "" if it can."""
    if is_torch(value):
        return _torch_fault(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "ndarray") and isinstance(value, numpy.ndarray):
        if type(value) not in (numpy.ndarray, numpy.memmap):
            return f"a {_type_name(value)}: pass a plain numpy.ndarray"
        if value.dtype.name not in NUMPY_DTYPES:
            return f"dtype {value.dtype.name}, which safetensors does not have: convert it"
        return ""
    return f"a {_type_name(value)}, not a tensor: take it out, or make it one"


def gather_fault(value: Any) -> str:
    """Why a torch tensor has no bytes here (meta, sharded), with the mend; "" if it has."""
    if any(kind.__name__ == "DTensor" for kind in type(value).__mro__):
        return "a DTensor, of which this process has a shard: gather it first with .full_tensor()"
    if value.is_meta:
        return "a meta tensor, which has no bytes: load the weights first"
    return ""


def _torch_fault(value: Any) -> str:
    import torch

    fault = gather_fault(value)
    if fault:
        return fault
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {_type_name(value)}, a tensor of its own kind: pass the plain tensors that it consists of"
    if torch._is_zerotensor(value):
        return "a ZeroTensor, which has no memory: pass value.clone()"
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"a {kind} tensor: pass value.to_dense() or its parts"
    if value.is_quantized:
        return f"a quantized tensor ({value.dtype}): pass value.int_repr(), scales and zero points"
    try:
        there = value.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return "a tensor inside of a torch.func transform, which has no memory: commit outside of it"
    if there == 0 < value.numel():
        return "a tensor whose memory was freed (FSDP does so after use): gather it first"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        return f"dtype {dtype}, which safetensors does not have: convert it, or view it as another"
    if TORCH_DTYPES[dtype] == "F4":
        if value.dim() == 0:
            return "a 0-dim packed fp4 tensor: view it as uint8"
        if value.shape[-1] > 1 and value.stride(-1) != 1:
            return "packed fp4 with its last dimension strided: unpack, transpose and pack it again"
    return ""


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def info(name: str, value: Any) -> TensorInfo:
    """What a tensor that tensor_fault() finds nothing in is, under a name."""
    return TensorInfo("", name, *_kind(value))


def _kind(value: Any) -> tuple[str, tuple[int, ...], int]:
    shape = tuple(int(extent) for extent in value.shape)
    if is_torch(value):
        dtype = TORCH_DTYPES[str(value.dtype).removeprefix("torch.")]
        if dtype == "F4":
            shape = (*shape[:-1], shape[-1] * 2)
    else:
        dtype = NUMPY_DTYPES[value.dtype.name]
    return dtype, shape, dtypes.nbytes(dtype, shape)


def torch_bytes(tensor: Any) -> Any:
    """The bytes of a contiguous tensor as a flat uint8 tensor over the same memory."""
    import torch

    # Not reshape(-1): a single element may keep a stride of its own, which view() refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _numpy_bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def _laid_out(value: Any) -> memoryview:
    """The logical elements of a tensor in row-major order, little-endian, as bytes in main memory."""
    if is_torch(value):
        import torch

        plain = value.detach().resolve_conj().resolve_neg()
        # As integers, so that no copy kernel can be missing for a rare dtype or touch a NaN.
        lanes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if not plain.is_contiguous():
            plain = plain.view(lanes[plain.element_size()]).contiguous()
        return memoryview(torch_bytes(plain.cpu()).numpy())
    import numpy

    # Not ascontiguousarray: it makes a 0-dim array 1-dim, harmless here, but copies less plainly.
    return _numpy_bytes(numpy.array(value, dtype=value.dtype.newbyteorder("<"), order="C"))


def room(nbytes: int) -> bytearray | memoryview:
    """Writable memory for a tensor, with anything in it. Large ones lie in large pages, where there are some."""
    if nbytes < _LARGE:
        return bytearray(nbytes)
    import numpy

    return numpy.empty(nbytes, numpy.uint8).data


def put(data: memoryview, target: bytearray | memoryview, start: int) -> None:
    """Copy bytes to their place in room(); other threads go on meanwhile, where there are many."""
    if len(data) < _LARGE:
        target[start : start + len(data)] = data
        return
    import numpy

    numpy.frombuffer(target, numpy.uint8)[start : start + len(data)] = numpy.frombuffer(data, numpy.uint8)


def copied(data: memoryview) -> bytearray | memoryview:
    """A tensor's bytes, in memory of their own."""
    if len(data) < _LARGE:
        return bytearray(data)
    target = room(len(data))
    put(data, target, 0)
    return target


def carved(framework: str, infos: Sequence[TensorInfo], starts: Sequence[int], data: memoryview) -> list[Any]:
    """Tensors of one dtype whose bytes begin at `starts` in `data`, as maker() makes them, each in memory of its own:
    who keeps one does not keep the others, and who saves it does not save them.

    Small ones of one shape are made together: Python takes longer to make a tensor than to copy what is in it.
    """
    import numpy
    from numpy.lib.stride_tricks import sliding_window_view

    make, copies = maker(framework), _torch_copies if framework == "torch" else _numpy_copies
    made: list[Any] = [None] * len(infos)
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(map(itemgetter(3), infos)):
        alike.setdefault(shape, []).append(i)
    with collector_paused():
        for shape, group in alike.items():
            _, _, dtype, _, nbytes = infos[group[0]]
            # Stacked, they have an extent more.
            small = 0 < nbytes < _SMALL and len(shape) < dtypes.RANK
            if small and len(group) >= _ALIKE and dtype in _COPIED:
                rows = sliding_window_view(numpy.frombuffer(data, numpy.uint8), nbytes)[[starts[i] for i in group]]
                tensors = copies(dtype, shape, rows)
            else:
                tensors = [make(dtype, shape, copied(data[starts[i] : starts[i] + nbytes])) for i in group]
            for i, tensor in zip(group, tensors, strict=True):
                made[i] = tensor
    return made


def _torch_copies(dtype: str, shape: tuple[int, ...], rows: Any) -> "Sequence[torch.Tensor]":
    """A torch tensor of each row of bytes [tensors, bytes]."""
    import torch

    kind, shape = torch_kind(dtype, shape)
    # torch declares that it returns nothing, as with `out`.
    unbind_copy: Any = torch.unbind_copy
    made: Sequence[torch.Tensor] = unbind_copy(torch.from_numpy(rows).view(kind).view(len(rows), *shape))
    return made


def _numpy_copies(dtype: str, shape: tuple[int, ...], rows: Any) -> "list[numpy.ndarray[Any, Any]]":
    """A numpy array of each row of bytes [tensors, bytes]."""
    import numpy

    # One extent at least: what a row of a flat array gives is a number, no array.
    whole = rows.view(_numpy_kind(dtype)).reshape(len(rows), *(shape or (1,)))
    made = map(numpy.ndarray.copy, whole)
    return list(made) if shape else [one.reshape(()) for one in made]


def maker(framework: str) -> Callable[[str, tuple[int, ...], bytearray | memoryview], Any]:
    """to_torch for "torch", to_numpy for "numpy". Raises Refused for anything else."""
    if framework not in ("torch", "numpy"):
        raise Refused(f'framework={framework!r:.100}: give "torch" or "numpy"')
    # Here, not by the threads that will make tensors.
    importlib.import_module(framework)
    return to_torch if framework == "torch" else to_numpy


def to_torch(dtype: str, shape: tuple[int, ...], data: bytearray | memoryview) -> "torch.Tensor":
    """A torch tensor over `data`: canonical bytes, writable, kept alive by the tensor; nothing is copied.

    F4 comes as float4_e2m1fn_x2 with half the last extent. Raises BadTensor for what torch lacks (F6).
    """
    import torch

    kind, shape = torch_kind(dtype, shape)
    if len(data) == 0:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(data, dtype=kind)
    return flat if len(shape) == 1 else flat.reshape(shape)


def torch_kind(dtype: str, shape: tuple[int, ...]) -> "tuple[torch.dtype, tuple[int, ...]]":
    """The dtype and shape of the torch tensor for a tensor: those of F4 have half the last extent.

    Raises BadTensor for what torch lacks (F6).
    """
    import torch

    name = _TORCH_NAMES.get(dtype)
    kind = getattr(torch, name, None) if name else None
    if kind is None or (dtype == "F4" and (not shape or shape[-1] % 2)):
        dtypes.bits(dtype)
        raise BadTensor(
            f"torch {torch.__version__} has no tensor for {dtype} of shape {list(shape)}: check out files"
        )
    return kind, (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def to_numpy(dtype: str, shape: tuple[int, ...], data: bytearray | memoryview) -> "numpy.ndarray[Any, Any]":
    """A numpy array over `data`: canonical bytes, kept alive by the array; nothing is copied.

    Types that numpy lacks come as ml_dtypes types. Raises BadTensor without ml_dtypes, and for F4 and F6.
    """
    import numpy

    return numpy.frombuffer(data, dtype=_numpy_kind(dtype)).reshape(shape)


def _numpy_kind(dtype: str) -> "numpy.dtype[Any]":
    """The dtype of the numpy array for a tensor's. Raises BadTensor where there is none."""
    import numpy

    name = _NUMPY_NAMES.get(dtype)
    if name is None:
        dtypes.bits(dtype)
        raise BadTensor(f"numpy has no array for packed {dtype}: check it out as a file, or load it with torch")
    if dtype == "BF16" or dtype.startswith("F8_"):
        try:
            import ml_dtypes
        except ImportError:
            raise BadTensor(f"numpy needs ml_dtypes for {dtype}: pip install ml-dtypes, or use torch") from None
        kind: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, name))
    else:
        kind = numpy.dtype(name).newbyteorder("<")
    return kind
