"""The differ: codecs for blocks of weights, on arrays only. No I/O, no torch.

    encode_whole, decode_whole              a block by itself (RAW, PLANES)
    encode_patch, decode_patch,             a block against an old one (SPARSE, DENSE, or whole)
    decode_patch_into, positions_values      (these read RICE too)
    diff_lanes, ulp_steps                   what changed, and by how much

The module `payloads` decodes many blocks at once, makes several payloads into one, or turns them around.

The module `context` holds the context codec: smaller patches, coded with tables that a whole patch shares. It is
compiled by numba, which is imported at its first call. So does `rice` hold the RICE codec: patches that are applied
several times as fast, and whose positions decode without the old block; and `hashes` blake3 of many short pieces, for
who has numba loaded already. All the rest needs nothing compiled.

All are pure, release the GIL in their heavy parts, and may be called from any number of threads. They run on
numpy and zstd: both load in a tenth of a second. The layout of the payloads is in `codec` and `streams`, that of
the context codec and of RICE in docs/patch.md.
"""

from weightvc_kernels import context, payloads, rice
from weightvc_kernels.codec import (
    BLOCK_LIMIT,
    DENSE,
    PLANES,
    RAW,
    RICE,
    SPARSE,
    decode_patch,
    decode_patch_into,
    decode_whole,
    decode_whole_into,
    encode_patch,
    encode_whole,
    positions_values,
)
from weightvc_kernels.errors import CodecError
from weightvc_kernels.lanes import diff_lanes, ulp_steps

__all__ = [
    "BLOCK_LIMIT",
    "DENSE",
    "PLANES",
    "RAW",
    "RICE",
    "SPARSE",
    "CodecError",
    "context",
    "decode_patch",
    "decode_patch_into",
    "decode_whole",
    "decode_whole_into",
    "diff_lanes",
    "encode_patch",
    "encode_whole",
    "payloads",
    "positions_values",
    "rice",
    "ulp_steps",
]
