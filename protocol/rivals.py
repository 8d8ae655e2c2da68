"""The best score of a position, compiled for a CPU: the integers and float32 sums of protocol/sampling.py, bit for bit.

Every token of the vocabulary is hashed, which vector registers do for sixteen of them at a time; the noise table is read only for
tokens that the first eight bits of their hash allow to win, about one in a hundred.
"""

from typing import Any, Final

import numba
import numpy as np

from protocol.patch.jit import kernel

U: Any = numba.uint32
W: Any = numba.uint64
F: Any = numba.float32

COARSE_BITS: Final = 8
"""Leading bits of a word that bound its noise."""


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
def _noise(word: Any, table: Any) -> Any:
    """`sampling.gumbel` of one word."""
    high = word >> U(31)
    odd = W(U(0xFFFFFFFF) - word if high else word) * W(2) + W(1)
    octave = W(31)
    while not (odd >> octave) & W(1):
        octave -= W(1)
    behind = (odd << (W(52) - octave)) & W(0xFFFFFFFFFFFFF)
    segment = octave * W(256) + (behind >> W(44))
    fraction = numba.int64((behind >> W(24)) & W(0xFFFFF))
    left, right = table[high, segment], table[high, segment + W(1)]
    units = left + (((right - left) * fraction) >> 20)
    return F(units) * F(2.0**-19)


@kernel(
    "float32[:, ::1]",
    "float32[::1]",
    "uint32[:, ::1]",
    "int64[:, ::1]",
    "float32[::1]",
    "uint32[::1]",
    "float32[::1]",
    "int64[::1]",
)
def best_scores(scaled: Any, own: Any, keys: Any, table: Any, bounds: Any, words: Any, best: Any, ahead: Any) -> None:
    """The best score of each row, and by how many tokens the one that has it is less likely than the most likely one.

    Args:
        scaled: float32 [N, V], logits / temperature.
        own: float32 [N], scores of the chosen tokens; nothing below is looked for.
        keys: uint32 [N, 2], `key` and `other` of docs/spec/sampling.md.
        table: int64 [2, 8193], the noise table; bounds: float32 [256], the largest noise by a word's first bits.
        words: uint32 [V], scratch.
        best: float32 [N], result: at least `own`.
        ahead: int64 [N], result: tokens with larger logits than the winner; 0 where nothing beats `own`.
    """
    for row in range(scaled.shape[0]):
        key, other = keys[row, 0], keys[row, 1]
        for token in range(scaled.shape[1]):
            words[token] = _mixed(U(_mixed(U(token) ^ key) ^ other))
        top, winner = own[row], -1
        for token in range(scaled.shape[1]):
            word = words[token]
            if scaled[row, token] + bounds[word >> U(24)] > top:
                score = scaled[row, token] + _noise(word, table)
                if score > top:
                    top, winner = score, token
        best[row] = top
        count = 0
        if winner >= 0:
            for token in range(scaled.shape[1]):
                count += scaled[row, token] > scaled[row, winner]
        ahead[row] = count


def coarse_bounds(noise_of: Any) -> np.ndarray:
    """The largest noise of a word by its first bits: float32 [256] from a function of words int64 [256]."""
    shift = 32 - COARSE_BITS
    largest = ((np.arange(1 << COARSE_BITS, dtype=np.int64) + 1) << shift) - 1
    bounds: np.ndarray = np.asarray(noise_of(largest), dtype=np.float32)
    return bounds
