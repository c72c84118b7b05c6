"""Copies of memory by address, compiled. Imports numba."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import int64, types
from numba.core import cgutils

from weightvc_kernels.context_vectors import compiled_alone, generated


@generated
def _copy(context: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(8).as_pointer()
        to, at = (builder.inttoptr(argument, kind) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, at, arguments[2], 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@compiled_alone
def gather(addresses, sizes, target):
    """Copy sizes[i] bytes from addresses[i], for each i, to the address `target` and on."""
    target = int64(target)
    for i in range(addresses.size):
        _copy(target, int64(addresses[i]), int64(sizes[i]))
        target += int64(sizes[i])
