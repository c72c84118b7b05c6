"""A source whose floating tensors are read in another dtype, rounded as torch rounds."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weightvc.errors import BadFile, Refused
from weightvc.objects import dtypes
from weightvc.sources.base import Layout, LayoutFile, Source, TensorInfo
from weightvc.sources.header import build_header, parse, shown, strict_json

NAMES = {
    "bfloat16": "BF16",
    "bf16": "BF16",
    "float16": "F16",
    "fp16": "F16",
    "float32": "F32",
    "fp32": "F32",
}
"""What a user may write for a dtype, and the format's name."""

_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Below the size at which torch splits work among threads, and whole vectors: torch's scalar and vector code
# differ in a NaN's payload, so the last block is padded and every element always takes the vector path.
_BLOCK = 16384


def target(dtype: Any) -> str:
    """The format's name for a user's `dtype`, one of NAMES or a torch.dtype.

    Raises Refused listing the names that there are.
    """
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
    try:
        return NAMES[name]
    except (KeyError, TypeError):
        raise Refused(f"cannot cast to {dtype!r}: give one of {', '.join(NAMES)}") from None


def cast(source: Source, dtype: Any) -> Source:
    """`source` with tensors of F64, F32, F16 and BF16 read as `dtype`; others pass unchanged.

    A layout of files is rebuilt in the new dtype: headers, total_size in an index, and the dtype in a config.json
    beside the weights, which says in what they are loaded. Other side files keep their bytes. Raises Refused for a
    dtype that is not in NAMES.
    """
    new = target(dtype)
    if all(tensor.dtype == new or tensor.dtype not in _TORCH for tensor in source.tensors):
        return source
    return CastSource(source, new)


class CastSource:
    """A source read in another dtype. Made by cast()."""

    def __init__(self, source: Source, dtype: str) -> None:
        """`dtype` is the format's name of the target."""
        self._source = source
        self.tensors: Sequence[TensorInfo] = [_cast_info(tensor, dtype) for tensor in source.tensors]
        self.layout = _cast_layout(source, self.tensors)

    @property
    def remote(self) -> bool:
        """Whether each read is a request over the network."""
        return bool(getattr(self._source, "remote", False))

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop) of `tensors[index]` in its new dtype, however the tensor is cut into ranges."""
        old, new = self._source.tensors[index], self.tensors[index]
        if old.dtype == new.dtype:
            return self._source.read(index, start, stop)
        if not 0 <= start <= stop <= new.nbytes:
            raise IndexError(f"bytes {start} to {stop} of tensor {shown(new.name)}")
        if start == stop:
            return b""
        from_width, to_width = dtypes.lane(old.dtype), dtypes.lane(new.dtype)
        first = start // to_width // _BLOCK * _BLOCK
        last = min(-(-stop // (to_width * _BLOCK)) * _BLOCK, new.nbytes // to_width)
        data = self._source.read(index, first * from_width, last * from_width)
        rounded = _rounded(data, old.dtype, new.dtype)
        return rounded[start - first * to_width : stop - first * to_width]

    def check(self) -> None:
        """Raise BadFile if what was read has changed since the source was opened."""
        self._source.check()

    def close(self) -> None:
        """Close the source beneath; idempotent."""
        self._source.close()


def rounded(value: Any, dtype: str) -> Any:
    """A torch tensor, rounded if it is a float of another dtype than `dtype` (the format's name): on its device, as
    torch does it there. Of what is not finite the payload may be another one than in main memory."""
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in _TORCH.values() or dtype not in _TORCH or kind == _TORCH[dtype]:
        return value
    import torch

    return value.to(getattr(torch, _TORCH[dtype]))


def round_into(value: Any, out: Any, dtype: str) -> int:
    """Round a torch tensor of floats into `out`, a flat uint8 tensor, to the bits that CastSource reads: whole blocks
    of it, where it lies in main memory as it is kept. Returns how many bytes are done; the others are to be read."""
    import torch

    kind = getattr(torch, _TORCH[dtype])
    if not value.is_cpu or not value.is_contiguous() or value.is_neg() or out.storage_offset() % kind.itemsize:
        return 0
    count = value.numel() // _BLOCK * _BLOCK
    old = value.detach().as_strided((count,), (1,))
    for new, block in zip(out[: count * kind.itemsize].view(kind).split(_BLOCK), old.split(_BLOCK)):
        new.copy_(block)
    done: int = count * kind.itemsize
    return done


def _rounded(data: memoryview | bytes, old: str, new: str) -> memoryview:
    """Whole blocks of elements (the last may be shorter) in the new dtype."""
    import torch

    from_width, to_width = dtypes.lane(old), dtypes.lane(new)
    count = len(data) // from_width
    padded = bytearray(-(-count // _BLOCK) * _BLOCK * from_width)
    padded[: len(data)] = data
    elements = torch.frombuffer(padded, dtype=getattr(torch, _TORCH[old]))
    result = torch.empty(len(elements), dtype=getattr(torch, _TORCH[new]))
    for begin in range(0, len(elements), _BLOCK):
        result[begin : begin + _BLOCK] = elements[begin : begin + _BLOCK]
    raw: Any = result.view(torch.uint8).numpy()
    return memoryview(raw)[: count * to_width]


def _cast_info(tensor: TensorInfo, dtype: str) -> TensorInfo:
    if tensor.dtype not in _TORCH:
        return tensor
    return tensor._replace(dtype=dtype, nbytes=dtypes.nbytes(dtype, tensor.shape))


def _cast_layout(source: Source, tensors: Sequence[TensorInfo]) -> Layout | None:
    if source.layout is None:
        return None
    by_name = {(tensor.component, tensor.name): tensor for tensor in tensors}
    # By folder: bytes that its tensors had, and have now; and what dtype some of them were cast to.
    grown: dict[str, int] = {}
    became: dict[str, str] = {}
    for old, new in zip(source.tensors, tensors):
        grown[old.component] = grown.get(old.component, 0) + new.nbytes - old.nbytes
        if new.dtype != old.dtype:
            became[old.component] = _TORCH[new.dtype]
    return Layout(
        tuple(
            _cast_weights(file, by_name) if file.weights else _cast_side(file, grown, became)
            for file in source.layout.files
        )
    )


def _cast_weights(file: LayoutFile, by_name: Mapping[tuple[str, str], TensorInfo]) -> LayoutFile:
    entries, metadata = parse(file.content[8:], repr(file.path))
    component = file.path.rpartition("/")[0]
    tensors = [by_name[component, name] for name in entries]
    prefix = build_header(tensors, metadata)
    size = len(prefix) + sum(tensor.nbytes for tensor in tensors)
    return LayoutFile(file.path, size, prefix, weights=True)


def _cast_side(file: LayoutFile, grown: dict[str, int], became: dict[str, str]) -> LayoutFile:
    folder, _, name = file.path.rpartition("/")
    if name == "config.json" and folder in became:
        content = _cast_config(file.content, became[folder])
        return LayoutFile(file.path, len(content), content)
    if not file.path.endswith(".safetensors.index.json"):
        return file
    index: Any = strict_json(file.content, repr(file.path))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if type(metadata) is dict else None
    if type(total) is not int:
        return file
    total += grown.get(folder, 0)
    # In the text, so that the file keeps its spacing and order.
    content, changes = re.subn(rb'("total_size"\s*:\s*)\d+', rb"\g<1>%d" % total, file.content)
    if changes != 1:
        return file
    return LayoutFile(file.path, len(content), content)


def _cast_config(content: bytes, dtype: str) -> bytes:
    """A config.json that names `dtype` where it named another float, with its spacing and order."""
    try:
        config = strict_json(content, "config.json")
    except BadFile:
        return content  # a file like any other
    for key in ("dtype", "torch_dtype"):
        if type(config) is not dict or config.get(key) not in _TORCH.values():
            continue
        wanted = {**config, key: dtype}
        for match in re.finditer(rb'"%s"\s*:\s*"(\w+)"' % key.encode(), content):
            changed = content[: match.start(1)] + dtype.encode() + content[match.end(1) :]
            # A part of the model may have a dtype of its own: the one meant is the one that makes `wanted`.
            if strict_json(changed, "config.json") == wanted:
                content, config = changed, wanted
                break
    return content
