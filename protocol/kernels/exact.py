"""Arithmetic on float32 that gives the same bits on every processor, in every batch and with any number of threads.

IEEE 754 defines the result of an addition, a product, a quotient, a square root and a fused multiply-add. What differs
between processors and libraries is the order of a sum, and the approximation of exp, log, sin and cos. Here the order
is fixed (docs/spec/numerics.md): a sum of products has 64 partial sums, the n-th product is added to partial sum n mod
64 by a fused multiply-add, and the partial sums are added pairwise. Functions are series in float64.
"""

import math
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from protocol.kernels.jit import inlined, kernel
from protocol.kernels.logit_simd import FLOATS, fused
from protocol.kernels.simd import VECTOR_SIZE, broadcast, cgutils, intrinsic, load_vector, types, vector_pointer

LANES: Final = VECTOR_SIZE
_word: Final = ir.IntType(64)

_LN2_HIGH: Final = 6.93147180369123816490e-01  # its product with an integer below 2**21 is exact
_LN2_LOW: Final = 1.90821492927058770002e-10
_EXP_TERMS: Final = 14
_LOG_TERMS: Final = 13
_LEAST: Final = -700.0
_ROWS: Final = 2  # that are computed together: more would not fit the registers of a processor without AVX-512

F = numba.float32


def _sum(builder: Any, vector: Any) -> Any:
    """Add the elements of a vector pairwise: the lower half and the upper half, until one is left."""
    half = LANES // 2
    while half:
        lower, upper = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), half), list(places)))
            for places in (range(half), range(half, 2 * half))
        )
        vector, half = builder.fadd(lower, upper), half // 2
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _dots(
    context: Any, builder: Any, signature: Any, args: Any, left_offsets: list[Any], right_offset: Any, blocks: Any
) -> list[Any]:
    """Return the sums of products of several parts of the first argument with one part of the second."""
    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    sums = [cgutils.alloca_once_value(builder, zeros) for _ in left_offsets]
    with cgutils.for_range(builder, blocks) as loop:
        step = builder.mul(loop.index, ir.Constant(_word, LANES))
        other = load_vector(context, builder, signature.args[1], args[1], builder.add(right_offset, step))
        for partial_sums, offset in zip(sums, left_offsets, strict=True):
            one = load_vector(context, builder, signature.args[0], args[0], builder.add(offset, step))
            builder.store(fused(builder, one, other, builder.load(partial_sums)), partial_sums)
    return [_sum(builder, builder.load(partial_sums)) for partial_sums in sums]


@intrinsic
def _dot(_typing: Any, left: Any, right: Any, left_offset: Any, right_offset: Any, blocks: Any) -> Any:
    """Return the sum of the products of `blocks` * 64 elements of two arrays, from the offsets on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _dots(context, builder, signature, args, [args[2]], args[3], args[4])[0]

    return types.float32(left, right, types.int64, types.int64, types.int64), generate


@intrinsic
def _set_dots(
    _typing: Any,
    left: Any,
    right: Any,
    left_offset: Any,
    right_offset: Any,
    blocks: Any,
    result: Any,
    place: Any,
    stride: Any,
) -> Any:
    """Set result[place + i * stride] to `_dot` of row i of the left array, for _ROWS rows of `blocks` * 64 elements:
    the elements of the right array are loaded once.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = builder.mul(args[4], ir.Constant(_word, LANES))
        rows = [builder.mul(width, ir.Constant(_word, row)) for row in range(_ROWS)]
        offsets = [builder.add(args[2], row) for row in rows]
        data = context.make_array(signature.args[5])(context, builder, args[5]).data
        for row, total in enumerate(_dots(context, builder, signature, args, offsets, args[3], args[4])):
            index = builder.add(args[6], builder.mul(args[7], ir.Constant(_word, row)))
            builder.store(total, builder.gep(data, [index]))
        return context.get_dummy_value()

    kinds = (types.int64,) * 3
    return types.none(left, right, *kinds, result, types.int64, types.int64), generate


@intrinsic
def _add_scaled(_typing: Any, factor: Any, vector: Any, offset: Any, sums: Any, place: Any) -> Any:
    """Set sums[place + i] = factor * vector[offset + i] + sums[place + i], rounded once, for 64 elements."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        new = load_vector(context, builder, signature.args[1], args[1], args[2])
        before = load_vector(context, builder, signature.args[3], args[3], args[4])
        pointer = vector_pointer(context, builder, signature.args[3], args[3], args[4])
        builder.store(fused(builder, broadcast(builder, args[0], FLOATS.element), new, before), pointer, align=4)
        return context.get_dummy_value()

    return types.none(types.float32, vector, types.int64, sums, types.int64), generate


@inlined
def exact_exp(x: Any) -> Any:
    """Return exp(x) in float64 for x <= 0, to 1e-15; 0 below -700. NaN for NaN."""
    power = math.floor(max(x, _LEAST) * (1.0 / math.log(2.0)) + 0.5)
    rest = (max(x, _LEAST) - power * _LN2_HIGH) - power * _LN2_LOW
    series = 1.0
    for term in range(_EXP_TERMS, 0, -1):
        series = 1.0 + series * rest / term
    result = math.ldexp(series, int(power))
    if x != x:  # noqa: PLR0124 - NaN
        return x
    return 0.0 if x < _LEAST else result


@inlined
def exact_log(x: Any) -> Any:
    """Return the natural logarithm of a positive, finite float64, to 1e-15."""
    mantissa, power = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, power = 2.0 * mantissa, power - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for term in range(_LOG_TERMS, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return power * _LN2_HIGH + (power * _LN2_LOW + 2.0 * ratio * series)


@kernel
def _products(left: Any, right: Any, result: Any) -> None:
    (rows, width), columns = left.shape, len(right)
    blocks, whole = width // LANES, rows // _ROWS * _ROWS
    for column in range(columns):
        for row in range(0, whole, _ROWS):
            _set_dots(left, right, row * width, column * width, blocks, result, row * columns + column, columns)
        for row in range(whole, rows):
            result[row, column] = _dot(left, right, row * width, column * width, blocks)


@kernel
def _squares(values: Any, result: Any) -> None:
    rows, width = values.shape
    for row in range(rows):
        result[row] = _dot(values, values, row * width, row * width, width // LANES)


@kernel
def _silu(values: Any, result: Any) -> None:
    for index in range(values.size):
        x = np.float64(values[index])
        small = exact_exp(-abs(x))  # of a number that is not positive
        result[index] = F(x / (1.0 + small) if x >= 0.0 else x * small / (1.0 + small))


@kernel
def _logs(values: Any, result: Any) -> None:
    for index in range(values.size):
        x = np.float64(values[index])
        result[index] = F(exact_log(x) if 0.0 < x < np.inf else np.log(x))


@kernel
def _attend(queries: Any, keys: Any, values: Any, visible: Any, scale: Any, scores: Any, result: Any) -> None:
    (batch, heads, new, width), total, mixed = queries.shape, keys.shape[2], result.reshape(result.size)
    shared, blocks = heads // keys.shape[1], width // LANES
    for sequence in range(batch):
        for head in range(heads):
            base = (sequence * keys.shape[1] + head // shared) * total * width
            for position in range(new):
                own = ((sequence * heads + head) * new + position) * width
                largest = F(-np.inf)
                for key in range(total):
                    if visible[sequence, position, key]:
                        scores[key] = _dot(queries, keys, own, base + key * width, blocks) * scale
                        largest = max(largest, scores[key])
                weight_sum = 0.0
                for key in range(total):
                    if visible[sequence, position, key]:
                        weight = F(exact_exp(np.float64(scores[key]) - np.float64(largest)))
                        weight_sum += np.float64(weight)
                        for block in range(blocks):
                            place = block * LANES
                            _add_scaled(weight, values, base + key * width + place, mixed, own + place)
                for place in range(own, own + width):
                    mixed[place] = F(mixed[place] / F(weight_sum))


def padded_width(width: int) -> int:
    """Return the smallest multiple of LANES that is at least a width."""
    return -(-width // LANES) * LANES


def padded(rows: Tensor) -> np.ndarray:
    """Return float32 [N, K'] from [..., K], contiguous, with zeros behind each row up to a multiple of LANES."""
    flat = rows.reshape(-1, rows.shape[-1])
    missing = padded_width(rows.shape[-1]) - rows.shape[-1]
    array: np.ndarray = (functional.pad(flat, (0, missing)) if missing else flat.contiguous()).numpy()
    return array


def products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compute left @ right.T: float32 [N, J] from contiguous [N, K] and [J, K], where K is a multiple of LANES."""
    result = np.empty((len(left), len(right)), dtype=np.float32)
    _products(left, right, result)
    return result


def square_sums(values: np.ndarray) -> np.ndarray:
    """Compute the sum of the squares of each row: float32 [N] from contiguous [N, K], K a multiple of LANES."""
    result = np.empty(len(values), dtype=np.float32)
    _squares(values, result)
    return result


def silu(values: np.ndarray) -> np.ndarray:
    """Compute x / (1 + exp(-x)) of every element: float32, of a contiguous array."""
    result = np.empty_like(values)
    _silu(values.reshape(-1), result.reshape(-1))
    return result


def logs(values: np.ndarray) -> np.ndarray:
    """Compute the natural logarithm of every element: float32, of a contiguous array."""
    result = np.empty_like(values)
    _logs(values.reshape(-1), result.reshape(-1))
    return result


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray, scale: float) -> np.ndarray:
    """Compute attention: float32 [B, H, S, E]; keys that are not visible (bool [B, S, K]) change nothing. Queries are
    float32 [B, H, S, E], keys and values [B, C, K, E], all contiguous; C divides H, and LANES divides E.
    """
    result, scores = np.zeros_like(queries), np.empty(keys.shape[2], dtype=np.float32)
    _attend(queries, keys, values, visible, np.float32(scale), scores, result)
    return result
