"""The best token of a position, and the sum for its log-probability, compiled for a CPU.

Scores are computed with the integers and float32 sums of protocol/rollout/sampling.py and have the same bits. Every
token of the vocabulary is hashed, 64 tokens at a time (protocol/kernels/logit_simd.py). The noise table is read only
for tokens whose hash may give them the best score, which are very few.
"""

from typing import Any

import numba
import numpy as np

from protocol.kernels.exact import exact_exp
from protocol.kernels.jit import inlined, loaded_kernel
from protocol.kernels.logit_simd import add_exponentials, contenders, take_maxima
from protocol.kernels.simd import VECTOR_SIZE, highest_bit, lowest_bit

U: Any = numba.uint32
W: Any = numba.uint64
F: Any = numba.float32


@inlined
def _mix(x: Any) -> Any:
    """Compute `sampling._mix` in 32-bit arithmetic."""
    x = U(x ^ (x >> U(17)))
    x = U(x * U(0xED5AD4BB))
    x = U(x ^ (x >> U(11)))
    x = U(x * U(0xAC4C1B51))
    x = U(x ^ (x >> U(15)))
    x = U(x * U(0x31848BAB))
    return U(x ^ (x >> U(14)))


@inlined
def _noise(token: Any, key: Any, other: Any, table: Any) -> Any:
    """Compute `sampling.gumbel` of the token's word."""
    word = _mix(U(_mix(U(token) ^ key) ^ other))
    high = word >> U(31)
    odd = W(U(0xFFFFFFFF) - word if high else word) * W(2) + W(1)
    octave = highest_bit(odd)
    mantissa = (odd << (W(52) - octave)) & W(0xFFFFFFFFFFFFF)
    segment = octave * W(256) + (mantissa >> W(44))
    fraction = numba.int64((mantissa >> W(24)) & W(0xFFFFF))
    low_units, high_units = table[high, segment], table[high, segment + W(1)]
    units = low_units + (((high_units - low_units) * fraction) >> 20)
    return F(units) * F(2.0**-19)


_FLOATS, _INTEGERS = "float32[::1]", "int64[::1]"


@loaded_kernel("float32[:, ::1]", "uint32[:, ::1]", _INTEGERS, "int64[:, ::1]", _FLOATS, _FLOATS, _INTEGERS)
def best_tokens(scaled: Any, words: Any, positions: Any, table: Any, least: Any, best: Any, tokens: Any) -> None:
    """Find the best score of each row above a bound, and its token; of equal scores, the one with the smallest id.

    Args:
        scaled: float32 [N, V], logits / temperature, -inf for tokens that are not considered.
        words: uint32 [N, 4], of the seed of each row.
        positions: int64 [N], index of each row's token in its completion.
        table: int64 [2, 8193], the noise table.
        least: float32 [N], the bounds.
        best: float32 [N], result: the best score, or the bound if none is above it.
        tokens: int64 [N], result; -1 if no score is above the bound.
    """
    width = W(scaled.shape[1])
    whole = width // W(VECTOR_SIZE) * W(VECTOR_SIZE)
    flat = scaled.reshape(scaled.size)
    for row in range(scaled.shape[0]):
        key = _mix(U(_mix(U(words[row, 0] ^ U(positions[row]))) ^ words[row, 1]))
        other = _mix(U(_mix(U(U(key + U(0x9E3779B9)) + words[row, 2])) ^ words[row, 3]))
        base, top, winner, token = W(row) * width, least[row], width, W(0)
        while token < width:
            if token < whole:
                mask = contenders(flat, base + token, U(token), key, other, top)
                end = token + W(VECTOR_SIZE)
            else:
                mask = (W(1) << (width - token)) - W(1)
                end = width
            while mask:
                contender = token + lowest_bit(mask)
                mask &= mask - W(1)
                score = flat[base + contender] + _noise(contender, key, other, table)
                if score > top:
                    top, winner = score, contender
            token = end
        best[row], tokens[row] = top, numba.int64(winner) if winner < width else -1


@loaded_kernel("float32[:, ::1]", _FLOATS, _FLOATS, _FLOATS)
def exponential_sums(scaled: Any, scratch: Any, largest: Any, sums: Any) -> None:
    """Compute the largest value of each row of float32 [N, V], and the sum of exp(value - largest): float32 [N] each. A
    row with a NaN has a NaN as its sum. `scratch` is float32 [64].
    """
    width = scaled.shape[1]
    whole = width // VECTOR_SIZE * VECTOR_SIZE
    flat = scaled.reshape(scaled.size)
    for row in range(scaled.shape[0]):
        begin, end = row * width, (row + 1) * width
        scratch[:] = F(-np.inf)
        for at in range(begin, begin + whole, VECTOR_SIZE):
            take_maxima(flat, W(at), scratch)
        row_max = F(-np.inf)
        for index in range(VECTOR_SIZE):
            row_max = max(row_max, scratch[index])
        for at in range(begin + whole, end):
            row_max = max(row_max, flat[at])
        scratch[:] = F(0.0)
        for at in range(begin, begin + whole, VECTOR_SIZE):
            add_exponentials(flat, W(at), row_max, scratch)
        total = 0.0
        for index in range(VECTOR_SIZE):
            total += scratch[index]
        for at in range(begin + whole, end):
            total += exact_exp(np.float64(flat[at] - row_max))
        largest[row], sums[row] = row_max, F(total)
