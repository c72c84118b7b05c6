"""A tensor's identity but for its bytes."""

from typing import NamedTuple


class TensorInfo(NamedTuple):
    """Component ("" is the default), name, dtype (as safetensors calls it), shape, and canonical bytes.

    A tuple, since a tree may have hundreds of thousands.
    """

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
