"""What the compiled passes are made with: how they are compiled, and what LLVM has and numba lacks.

Numba compiles anew when the file of a function changes, not when that of a function that it calls does. After an
edit here, remove __pycache__, or it is tested with the code of before.
"""

# mypy: disable-error-code="no-untyped-call"

import logging
import warnings
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils, config, event
from numba.extending import intrinsic

_log = logging.getLogger("weightvc_kernels")


class _Compiling(event.Listener):
    """Says once, before it happens, that code is compiled: to whoever waits, it looks as if nothing did."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, started: Any) -> None:
        if not self._said and started.data["dispatcher"].py_func.__module__.startswith("weightvc_kernels."):
            self._said = True
            _log.info(
                "compiling code for this machine, once: some seconds, more where it is busy; "
                "`python -m weightvc_kernels` does that ahead"
            )

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Compiling())


def _has_avx512() -> bool:
    """Whether numba compiles for a processor with AVX-512: this one, unless its own settings name another."""
    name, features = getattr(config, "CPU_NAME", None), getattr(config, "CPU_FEATURES", None)
    if features is not None:
        return "+avx512bw" in features
    return name is None and bool(get_host_cpu_features().get("avx512bw", False))


# Numba keys its cache by the features of the processor, so code compiled with this never meets another.
WIDE = _has_avx512()


def _jit(function: Any, **options: Any) -> Any:
    options = {"nogil": True, **options, "boundscheck": False, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        # Neither beside this file nor under the home directory can it write.
        warnings.warn(
            "compiled code cannot be kept: every process will compile for some seconds. "
            "Set NUMBA_CACHE_DIR to a directory that can be written to",
            RuntimeWarning,
            stacklevel=1,
        )
        return njit(**options)(function)


def compiled(function: Any) -> Any:
    """An entry, compiled at its first call for each type of lane, and cached."""
    return _jit(function)


def compiled_alone(function: Any) -> Any:
    """An entry that no other thread of Python runs beside."""
    return _jit(function, nogil=False)


def inlined(function: Any) -> Any:
    """A part of entries."""
    return _jit(function, forceinline=True)


def generated(function: Any) -> Any:
    """Instructions made by hand: what LLVM has and numba lacks."""
    return intrinsic(function)


@generated
def pointer(context: Any, array: Any) -> Any:
    """A contiguous array's first element, to be indexed like the array, in one dimension.

    Numba counts references to arrays around calls that branch, with atomic instructions, in the innermost loops,
    where threads that share a model wait for each other. It counts none to pointers.
    """

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ctx.make_array(signature.args[0])(ctx, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@generated
def at_address(context: Any, address: Any, like: Any) -> Any:
    """The pointer to what lies at `address`, of the type of the pointer `like`: the blocks of a batch are given
    so."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], arguments[1].type)

    return like(types.uint64, like), generate


@generated
def offset(context: Any, data: Any, index: Any) -> Any:
    """The pointer that is `index` elements on."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return data(data, types.int64), generate


@generated
def prefetch(context: Any, data: Any, index: Any) -> Any:
    """Ask for the cache line of data[index]; no fault wherever that is."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [place, word(0), word(3), word(1)])
        return ctx.get_dummy_value()

    return types.void(data, types.uint64), generate


@generated
def changes_of(context: Any, x: Any, y: Any, at: Any) -> Any:
    """A bit for each of the lanes in 64 bytes from lane `at`: set if x and y differ there. Lowest bit first."""
    width = x.dtype.bitwidth
    count = 512 // width

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(width), count)
        sides = []
        for data in arguments[:2]:
            place = builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())
            sides.append(builder.load(place, align=width // 8))
        differ = builder.icmp_unsigned("!=", *sides)
        bits = builder.bitcast(differ, ir.IntType(count))
        return builder.zext(bits, ir.IntType(64)) if count < 64 else bits

    return types.uint64(x, y, types.uint64), generate


@generated
def lowest_bit(context: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set; bits must not be 0."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), generate


@generated
def bit_length(context: Any, bits: Any) -> Any:
    """The place of the highest bit that is set, from 1 on; 0 if there is none."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.IntType(1)(0))
        return builder.sub(ir.IntType(64)(64), zeros)

    return types.uint64(types.uint64), generate


@generated
def load_word(context: Any, data: Any, at: Any) -> Any:
    """Eight bytes from data[at] on, wherever that lies; data points to bytes."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.uint64(data, types.uint64), generate


@generated
def store_word(context: Any, data: Any, at: Any, word: Any) -> Any:
    """Write eight bytes from data[at] on, wherever that lies; data points to bytes."""

    def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], place, align=1)
        return ctx.get_dummy_value()

    return types.void(data, types.uint64, types.uint64), generate


def _wide(pieces: int) -> Any:
    """The sum of the hazards of 32 × `pieces` lanes of two bytes, by AVX-512: a table of 32 classes in registers.

    plane uint16 [64] has the low halves of the hazards of 32 classes from `window` on, then the high halves;
    classes outside have the hazards of the first and the last.
    """
    half, word, long = ir.IntType(16), ir.IntType(32), ir.IntType(64)
    lanes, sums = ir.VectorType(half, 32), ir.VectorType(word, 16)

    def total(context: Any, x: Any, at: Any, plane: Any, window: Any, shift: Any, mask: Any) -> Any:
        def generate(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def call(name: str, kind: Any, *values: Any) -> Any:
                signature = ir.FunctionType(kind, [value.type for value in values])
                return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)

            def all_lanes(value: Any) -> Any:
                start = ir.Constant(lanes, ir.Undefined)
                one = builder.insert_element(start, builder.trunc(value, half), word(0))
                return builder.shuffle_vector(one, start, ir.Constant(ir.VectorType(word, 32), [0] * 32))

            def load(data: Any, place: Any) -> Any:
                return builder.load(builder.bitcast(builder.gep(data, [place]), lanes.as_pointer()), align=2)

            def both(pair: Any) -> Any:
                pair = builder.bitcast(pair, sums)
                low = builder.and_(pair, ir.Constant(sums, [0xFFFF] * 16))
                return builder.add(low, builder.lshr(pair, ir.Constant(sums, [16] * 16)))

            low, high = load(arguments[2], long(0)), load(arguments[2], long(32))
            first, by, within = (all_lanes(value) for value in arguments[3:6])
            parts = [ir.Constant(sums, [0] * 16)] * 2
            for k in range(pieces):
                values = load(arguments[0], builder.add(arguments[1], long(32 * k)))
                classes = builder.and_(builder.lshr(values, by), within)
                classes = call("llvm.usub.sat.v32i16", lanes, classes, first)
                classes = call("llvm.umin.v32i16", lanes, classes, ir.Constant(lanes, [31] * 32))
                for half_of, table in enumerate((low, high)):
                    found = call("llvm.x86.avx512.permvar.hi.512", lanes, table, classes)
                    parts[half_of] = builder.add(parts[half_of], both(found))
            upper = builder.shl(parts[1], ir.Constant(sums, [16] * 16))
            all_of = call("llvm.vector.reduce.add.v16i32", word, builder.add(parts[0], upper))
            return builder.zext(all_of, long)

        def nothing(ctx: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return long(0)

        usable = WIDE and x.dtype.bitwidth == 16
        kind = types.int64(x, types.uint64, plane, types.int64, types.uint64, types.uint64)
        return kind, generate if usable else nothing

    return generated(total)


wide_32, wide_128 = _wide(1), _wide(4)
