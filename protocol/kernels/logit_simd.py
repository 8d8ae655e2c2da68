"""SIMD operations on 64 logits at a time, for protocol/rollout/gumbel_max.py. They are written with LLVM's vector types
and run on any processor.

All processors compute the same bits: no sum is reordered, and a fused multiply-add is rounded once everywhere. A
processor without that instruction (older than Haswell) emulates it slowly.
"""

import math
from typing import Any, Final

from llvmlite import ir

from protocol.kernels.simd import VECTOR_SIZE, broadcast, cgutils, intrinsic, load_vector, types, vector_pointer

_index: Final = ir.IntType(32)
_long: Final = ir.IntType(64)
_float: Final = ir.FloatType()
_words: Final = ir.VectorType(_index, VECTOR_SIZE)
FLOATS: Final = ir.VectorType(_float, VECTOR_SIZE)

_MAX_NOISE: Final = (32 + 127) * math.log(2.0) + 1e-3
"""ln(2**32) plus the bias of a float's exponent and a margin for rounding errors: see `contenders`."""
_NOISE_STEP: Final = math.log(2.0) * 2.0**-23
_ROUNDER: Final = 1.5 * 2.0**23
"""The sum of this and a small float has the nearest integer in its lowest bits."""
_LEAST_EXPONENT: Final = -87.0
_TAYLOR: Final = tuple(1.0 / math.factorial(n) for n in range(6, -1, -1))


def _word(number: int) -> Any:
    return ir.Constant(_words, [number] * VECTOR_SIZE)


def _real(number: float) -> Any:
    """Return a vector with the nearest float32 in every element."""
    rounded = ir.Constant(_float, number)
    return ir.Constant(FLOATS, [rounded] * VECTOR_SIZE)


def fused(builder: Any, factor: Any, other: Any, addend: Any) -> Any:
    """Compute factor * other + addend, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR_SIZE}f32")
    return builder.call(function, [factor, other, addend])


def _mix(builder: Any, x: Any) -> Any:
    """Compute `sampling._mix`."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = builder.mul(builder.xor(x, builder.lshr(x, _word(shift))), _word(factor))
    return builder.xor(x, builder.lshr(x, _word(14)))


@intrinsic
def contenders(_typing: Any, logits: Any, offset: Any, first: Any, key: Any, other: Any, top: Any) -> Any:
    """Return a mask of 64 tokens: whether each may have a score above `top`. Their logits begin at an offset, and their
    ids with `first`; the hashes of all tokens at this position share `key` and `other`.

    The score is bounded with one product and one sum. A word h has the noise -ln(-ln u) <= -ln(1 - u) = ln(2**32) -
    ln(m + 1/2), where m = 2**32 - 1 - h; and a float's bits, read as an integer, are at most 2**23 times its binary
    logarithm, plus the bias. For each of the 2**32 words the bound is at least 0.001 above the noise, and for the
    quarter of words with the largest noise it is at most 0.17 above.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ids = builder.add(broadcast(builder, args[2], _index), ir.Constant(_words, list(range(VECTOR_SIZE))))
        word = _mix(builder, builder.xor(ids, broadcast(builder, args[3], _index)))
        word = _mix(builder, builder.xor(word, broadcast(builder, args[4], _index)))
        float_bits = builder.bitcast(builder.uitofp(builder.xor(word, _word(0xFFFFFFFF)), FLOATS), _words)
        bound = fused(builder, builder.sitofp(float_bits, FLOATS), _real(-_NOISE_STEP), _real(_MAX_NOISE))
        scores = builder.fadd(load_vector(context, builder, signature.args[0], args[0], args[1]), bound)
        return builder.bitcast(builder.fcmp_ordered(">", scores, broadcast(builder, args[5], _float)), _long)

    return types.uint64(logits, types.uint64, types.uint32, types.uint32, types.uint32, types.float32), generate


@intrinsic
def take_maxima(_typing: Any, logits: Any, offset: Any, maxima: Any) -> Any:
    """Set maxima[i] = max(maxima[i], logits[offset + i]) for 64 elements; a NaN changes nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = vector_pointer(context, builder, signature.args[2], args[2], ir.Constant(_long, 0))
        before = builder.load(place, align=4)
        new = load_vector(context, builder, signature.args[0], args[0], args[1])
        builder.store(builder.select(builder.fcmp_ordered(">", new, before), new, before), place, align=4)
        return context.get_dummy_value()

    return types.none(logits, types.uint64, maxima), generate


@intrinsic
def add_exponentials(_typing: Any, logits: Any, offset: Any, largest: Any, sums: Any) -> Any:
    """Add exp(logits[offset + i] - largest) to sums[i] for 64 elements, none of them larger than `largest`, exact to 2
    units in the last place and at least 2**-126; that of a NaN is NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        new = load_vector(context, builder, signature.args[0], args[0], args[1])
        x = builder.fsub(new, broadcast(builder, args[2], _float))
        x = builder.select(builder.fcmp_ordered("<", x, _real(_LEAST_EXPONENT)), _real(_LEAST_EXPONENT), x)
        shifted_power = fused(builder, x, _real(1.0 / math.log(2.0)), _real(_ROUNDER))
        power = builder.fsub(shifted_power, _real(_ROUNDER))
        rest = fused(builder, power, _real(-math.log(2.0)), x)
        series = _real(_TAYLOR[0])
        for coefficient in _TAYLOR[1:]:
            series = fused(builder, series, rest, _real(coefficient))
        # 2**power: the integer in the lowest bits, plus the bias, is moved to a float's exponent.
        scale = builder.shl(builder.add(builder.bitcast(shifted_power, _words), _word(127)), _word(23))
        place = vector_pointer(context, builder, signature.args[3], args[3], ir.Constant(_long, 0))
        before = builder.load(place, align=4)
        builder.store(fused(builder, series, builder.bitcast(scale, FLOATS), before), place, align=4)
        return context.get_dummy_value()

    return types.none(logits, types.uint64, types.float32, sums), generate
