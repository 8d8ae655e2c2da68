"""The best score of a position and the sum behind its log-probability, compiled for a CPU.

Scores are the integers and float32 sums of protocol/rollout/sampling.py, bit for bit. Every token of the vocabulary is
hashed, 64 at a time (protocol/kernels/logit_simd.py); the noise table is read only for those whose hash may let them
win, a handful in a vocabulary.
"""

from typing import Any

import numba
import numpy as np

from protocol.kernels.jit import kernel
from protocol.kernels.logit_simd import add_exponentials, contenders, keep_largest
from protocol.kernels.simd import LANES, highest, lowest

U: Any = numba.uint32
W: Any = numba.uint64
F: Any = numba.float32


@kernel()
def _mixed(x: Any) -> Any:
    """`sampling._mix`, in 32-bit arithmetic."""
    x = U(x ^ (x >> U(17)))
    x = U(x * U(0xED5AD4BB))
    x = U(x ^ (x >> U(11)))
    x = U(x * U(0xAC4C1B51))
    x = U(x ^ (x >> U(15)))
    x = U(x * U(0x31848BAB))
    return U(x ^ (x >> U(14)))


@kernel()
def _noise(token: Any, key: Any, other: Any, table: Any) -> Any:
    """`sampling.gumbel` of the token's word."""
    word = _mixed(U(_mixed(U(token) ^ key) ^ other))
    high = word >> U(31)
    odd = W(U(0xFFFFFFFF) - word if high else word) * W(2) + W(1)
    octave = highest(odd)
    behind = (odd << (W(52) - octave)) & W(0xFFFFFFFFFFFFF)
    segment = octave * W(256) + (behind >> W(44))
    fraction = numba.int64((behind >> W(24)) & W(0xFFFFF))
    left, right = table[high, segment], table[high, segment + W(1)]
    units = left + (((right - left) * fraction) >> 20)
    return F(units) * F(2.0**-19)


@kernel(
    "float32[:, ::1]",
    "int64[::1]",
    "float32[::1]",
    "uint32[:, ::1]",
    "int64[::1]",
    "int64",
    "int64[:, ::1]",
    "float32[::1]",
    "float32[::1]",
    "int64[::1]",
)
def best_scores(
    rivals: Any,
    tokens: Any,
    chosen: Any,
    seeds: Any,
    lengths: Any,
    first: Any,
    table: Any,
    own: Any,
    best: Any,
    ahead: Any,
) -> None:
    """The score of each chosen token, the best one, and how many tokens are more likely than the one that has it.

    Args:
        rivals: float32 [N, V], logits / temperature of the tokens that may win, of N tokens in all.
        tokens: int64 [N], the chosen ones; chosen: float32 [N], their logits / temperature.
        seeds: uint32 [C, 4], a seed for each of C completions; lengths: int64 [C], their tokens, N in sum.
        first: tokens of the first completion that stand before these.
        table: int64 [2, 8193], the noise table.
        own: float32 [N], result: scores of the chosen tokens.
        best: float32 [N], result: at least `own`.
        ahead: int64 [N], result: tokens with larger logits than the winner; 0 where nothing beats `own`.
    """
    width = W(rivals.shape[1])
    whole = width // W(LANES) * W(LANES)
    flat = rivals.reshape(rivals.size)
    row = W(0)
    for completion in range(len(lengths)):
        before = first if completion == 0 else 0
        for position in range(before, before + lengths[completion]):
            key = _mixed(U(_mixed(U(seeds[completion, 0] ^ U(position))) ^ seeds[completion, 1]))
            other = _mixed(U(_mixed(U(U(key + U(0x9E3779B9)) + seeds[completion, 2])) ^ seeds[completion, 3]))
            base = row * width
            top = chosen[row] + _noise(tokens[row], key, other, table)
            own[row] = top
            winner = W(width)
            token = W(0)
            while token < width:
                if token < whole:
                    left = contenders(flat, base + token, U(token), key, other, top)
                    behind = token + W(LANES)
                else:
                    left = (W(1) << (width - token)) - W(1)
                    behind = width
                while left:
                    rival = token + lowest(left)
                    left &= left - W(1)
                    score = flat[base + rival] + _noise(rival, key, other, table)
                    if score > top:
                        top, winner = score, rival
                token = behind
            best[row] = top
            count = 0
            if winner < width:
                for token in range(width):
                    count += flat[base + W(token)] > flat[base + winner]
            ahead[row] = count
            row += W(1)


@kernel("float32[:, ::1]", "float32[::1]", "float32[::1]", "float32[::1]")
def exponential_sums(scaled: Any, lanes: Any, largest: Any, sums: Any) -> None:
    """The largest value of each row, and the sum of exp(value - largest): float32 [N] each, of float32 [N, V].

    A row with a value that is no number has a sum that is none. `lanes` is scratch: float32 [64].
    """
    width = scaled.shape[1]
    whole = width // LANES * LANES
    flat = scaled.reshape(scaled.size)
    for row in range(scaled.shape[0]):
        begin, end = row * width, (row + 1) * width
        lanes[:] = F(-np.inf)
        for at in range(begin, begin + whole, LANES):
            keep_largest(flat, W(at), lanes)
        most = F(-np.inf)
        for lane in range(LANES):
            most = max(most, lanes[lane])
        for at in range(begin + whole, end):
            most = max(most, flat[at])
        lanes[:] = F(0.0)
        for at in range(begin, begin + whole, LANES):
            add_exponentials(flat, W(at), most, lanes)
        total = 0.0
        for lane in range(LANES):
            total += lanes[lane]
        for at in range(begin + whole, end):
            total += np.exp(np.float64(flat[at] - most))
        largest[row], sums[row] = most, F(total)
