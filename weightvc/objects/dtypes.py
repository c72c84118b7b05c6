"""Element types: the names of the safetensors format, their widths, and the lane that patches work in.

Names and widths follow the safetensors format description (`Dtype` in its reference implementation).
A lane is the unsigned integer that a patch compares: the element, or the byte where an element is
narrower than one (packed fp4 and fp6) or where the dtype is unknown.
"""

from functools import lru_cache
from typing import Final

from weightvc.errors import BadTensor

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by dtype name."""


RANK: Final = 64
"""Extents of a shape at most: as many as numpy takes."""
_END: Final = 1 << 63


def bits(dtype: str) -> int:
    """Bits of one element of `dtype`. Raises BadTensor for a name that is not known."""
    try:
        return BITS[dtype]
    except KeyError:
        raise BadTensor(
            f"dtype {dtype!r} is not one that this weightvc knows: upgrade weightvc, or store it as U8"
        ) from None


def lane(dtype: str) -> int:
    """Bytes of the lane that a patch compares: 1, 2, 4 or 8."""
    width = bits(dtype)
    return width // 8 if width >= 8 else 1


def count(shape: tuple[int, ...] | list[int]) -> int:
    """Elements of `shape`; 1 for a 0-dim tensor."""
    total = 1
    for extent in shape:
        total *= extent
    return total


def _shown(extent: int) -> str:
    return str(extent) if abs(extent) < 1 << 64 else f"{extent.bit_length()} bits"


@lru_cache(1 << 12)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    if len(shape) > RANK:
        raise BadTensor(f"a tensor has {len(shape)} extents, {RANK} at most: reshape it")
    # Extents of 0 are passed over: no array library makes room for [0, 2^62] either.
    room = bits(dtype)
    for extent in shape:
        if not 0 <= extent < _END:
            raise BadTensor(f"a tensor has an extent of {_shown(extent)}: extents are from 0, and below 2^63")
        room *= extent or 1
    if room // 8 >= _END:
        raise BadTensor(f"{dtype} tensor of shape {list(shape)} has 2^63 bytes or more: split it")
    total = bits(dtype) * count(shape)
    if total % 8:
        raise BadTensor(f"{dtype} tensor of shape {list(shape)} does not fill whole bytes")
    return total // 8


def nbytes(dtype: str, shape: tuple[int, ...] | list[int]) -> int:
    """Canonical bytes of a tensor. Raises BadTensor if packed elements do not fill whole bytes, or if the shape has
    more than RANK extents, a negative one, or 2^63 bytes or more."""
    # Few distinct shapes stand behind hundreds of thousands of tensors.
    return _nbytes(dtype, tuple(shape))
