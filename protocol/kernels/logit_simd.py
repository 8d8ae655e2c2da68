"""Sixty-four logits at a time, for protocol/rollout/gumbel_max.py: LLVM's vectors as in protocol/kernels/simd.py, for
any processor.

No sum is reordered, and where a product and a sum are rounded once, all processors do that: each finds the same bits.
One without such an instruction (older than Haswell) takes long for it.
"""

import math
from typing import Any, Final

from llvmlite import ir

from protocol.kernels.simd import LANES, cgutils, intrinsic, types

_index: Final = ir.IntType(32)
_long: Final = ir.IntType(64)
_float: Final = ir.FloatType()
_words: Final = ir.VectorType(_index, LANES)
_floats: Final = ir.VectorType(_float, LANES)

_MOST_NOISE: Final = (32 + 127) * math.log(2.0) + 1e-3
"""ln(2**32) with the bias of a float's exponent, and room for rounding: see `contenders`."""
_NOISE_STEP: Final = math.log(2.0) * 2.0**-23
_ROUNDER: Final = 1.5 * 2.0**23
"""Added to a small float, it leaves the nearest integer in the lowest bits."""
_LEAST_EXPONENT: Final = -87.0
_TAYLOR: Final = tuple(1.0 / math.factorial(n) for n in range(6, -1, -1))


def _word(number: int) -> Any:
    return ir.Constant(_words, [number] * LANES)


def _real(number: float) -> Any:
    """The nearest float32 in every lane."""
    rounded = ir.Constant(_float, number)
    return ir.Constant(_floats, [rounded] * LANES)


def _everywhere(builder: Any, number: Any, vector_type: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), number, ir.Constant(_index, 0))
    return builder.shuffle_vector(single, single, ir.Constant(_words, None))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])
    return builder.bitcast(data, _floats.as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    vector = builder.load(_pointer(context, builder, array_type, array, offset))
    vector.align = 4
    return vector


def _fused(builder: Any, factor: Any, other: Any, addend: Any) -> Any:
    """factor * other + addend, rounded once."""
    kind = ir.FunctionType(_floats, [_floats] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [factor, other, addend])


def _mixed(builder: Any, x: Any) -> Any:
    """`sampling._mix`."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = builder.mul(builder.xor(x, builder.lshr(x, _word(shift))), _word(factor))
    return builder.xor(x, builder.lshr(x, _word(14)))


@intrinsic
def contenders(_typing: Any, logits: Any, offset: Any, first: Any, key: Any, other: Any, top: Any) -> Any:
    """A bit for each of 64 tokens: whether it may have a score above `top`.

    A word h has the noise -ln(-ln u) <= -ln(1 - u) = ln(2**32) - ln(m + 1/2), where m = 2**32 - 1 - h; and a float's
    bits, read as an integer, are at most 2**23 times its binary logarithm, plus the bias. So a bound takes one product
    and one sum. For each of the 2**32 words it is at least 0.001 above the noise, and at most 0.17 for a quarter of
    them, those with the most noise.

    Args:
        logits: float32 [...]; offset: of the first of the 64, whose token id is `first`.
        key, other: what the hash of every token at this position has in common.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ids = builder.add(_everywhere(builder, args[2], _words), ir.Constant(_words, list(range(LANES))))
        hashed = _mixed(builder, builder.xor(ids, _everywhere(builder, args[3], _words)))
        hashed = _mixed(builder, builder.xor(hashed, _everywhere(builder, args[4], _words)))
        left = builder.bitcast(builder.uitofp(builder.xor(hashed, _word(0xFFFFFFFF)), _floats), _words)
        bound = _fused(builder, builder.sitofp(left, _floats), _real(-_NOISE_STEP), _real(_MOST_NOISE))
        scores = builder.fadd(_load(context, builder, signature.args[0], args[0], args[1]), bound)
        return builder.bitcast(builder.fcmp_ordered(">", scores, _everywhere(builder, args[5], _floats)), _long)

    return types.uint64(logits, types.uint64, types.uint32, types.uint32, types.uint32, types.float32), generate


@intrinsic
def keep_largest(_typing: Any, logits: Any, offset: Any, kept: Any) -> Any:
    """kept[i] = max(kept[i], logits[offset + i]) for 64 elements; what is no number is passed over."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _pointer(context, builder, signature.args[2], args[2], ir.Constant(_long, 0))
        before = builder.load(place)
        before.align = 4
        new = _load(context, builder, signature.args[0], args[0], args[1])
        stored = builder.store(builder.select(builder.fcmp_ordered(">", new, before), new, before), place)
        stored.align = 4
        return context.get_dummy_value()

    return types.none(logits, types.uint64, kept), generate


@intrinsic
def add_exponentials(_typing: Any, logits: Any, offset: Any, largest: Any, sums: Any) -> Any:
    """sums[i] += exp(logits[offset + i] - largest) for 64 elements, none of them larger than `largest`.

    The exponential is within 2 units in the last place, and 2**-126 where it would be less; of what is no number it is
    none.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        new = _load(context, builder, signature.args[0], args[0], args[1])
        x = builder.fsub(new, _everywhere(builder, args[2], _floats))
        x = builder.select(builder.fcmp_ordered("<", x, _real(_LEAST_EXPONENT)), _real(_LEAST_EXPONENT), x)
        rounded = _fused(builder, x, _real(1.0 / math.log(2.0)), _real(_ROUNDER))
        power = builder.fsub(rounded, _real(_ROUNDER))
        rest = _fused(builder, power, _real(-math.log(2.0)), x)
        series = _real(_TAYLOR[0])
        for coefficient in _TAYLOR[1:]:
            series = _fused(builder, series, rest, _real(coefficient))
        # The integer in the lowest bits of `rounded`, with the bias, moved to where a float has its exponent.
        scale = builder.shl(builder.add(builder.bitcast(rounded, _words), _word(127)), _word(23))
        place = _pointer(context, builder, signature.args[3], args[3], ir.Constant(_long, 0))
        before = builder.load(place)
        before.align = 4
        stored = builder.store(_fused(builder, series, builder.bitcast(scale, _floats), before), place)
        stored.align = 4
        return context.get_dummy_value()

    return types.none(logits, types.uint64, types.float32, sums), generate
