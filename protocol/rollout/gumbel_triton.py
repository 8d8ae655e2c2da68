"""The best token of each row on a GPU, in one pass over the logits, compiled by Triton.

It has the bits of protocol/rollout/sampling.py: the words are hashed in 32-bit integers, their octave is read from an
exact conversion to float64, and the sum is rounded once, because the noise is a multiple of a power of two. Import this
module only where Triton is installed. Triton reads the annotations, too, and refuses names that it does not know.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

_jit = cast(Callable[[Callable[..., Any]], Any], triton.jit)

_BLOCK: Final = 2048
_TABLE_ROW: Final = tl.constexpr(32 * 256 + 1)


@_jit
def _mix(x: "Any") -> "Any":
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ (x >> 11)
    x = x * 0xAC4C1B51
    x = x ^ (x >> 15)
    x = x * 0x31848BAB
    return x ^ (x >> 14)


@_jit
def _gumbel_units(word: "Any", table: "Any", mask: "Any") -> "Any":
    """Compute the noise of words in units of 2**-19: int64."""
    high = (word >> 31).to(tl.int64)
    folded = tl.where(high == 1, 0xFFFFFFFF - word, word)
    bits = (folded.to(tl.int64) * 2 + 1).to(tl.float64).to(tl.int64, bitcast=True)
    place = high * _TABLE_ROW + (bits >> 44) - (1023 << 8)
    fraction = (bits >> 24) & 0xFFFFF
    low = tl.load(table + place, mask=mask, other=0)
    step = tl.load(table + place + 1, mask=mask, other=0) - low
    return low + ((step * fraction) >> 20)


@_jit
def _block_best(
    scaled: "Any",
    keys: "Any",
    others: "Any",
    table: "Any",
    scores: "Any",
    tokens: "Any",
    vocabulary: "Any",
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocabulary
    logits = tl.load(scaled + row.to(tl.int64) * vocabulary + token, mask=mask, other=float("-inf"))
    key, other = tl.load(keys + row).to(tl.uint32), tl.load(others + row).to(tl.uint32)
    word = _mix(_mix(token.to(tl.uint32) ^ key) ^ other)
    units = _gumbel_units(word, table, mask)
    score = tl.where(mask, logits + units.to(tl.float32) * 1.9073486328125e-06, float("-inf"))
    best, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + block
    tl.store(scores + out, best)
    tl.store(tokens + out, block * BLOCK + place)


def best_tokens(scaled: Tensor, keys: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
    """Return the token with the best score of each row, of equal scores that with the smallest id: int64 [B].

    Logits / temperature are float32 [B, V], contiguous, -inf for tokens that may not be sampled; the keys int64 [B]
    each, from `sampling.noise_keys`; the noise table int64 [2, 8193].
    """
    rows, vocabulary = scaled.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=scaled.device)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=scaled.device)
    _block_best[(rows, blocks)](scaled, keys[0], keys[1], table, scores, tokens, vocabulary, BLOCK=_BLOCK)
    best = scores == scores.amax(dim=-1, keepdim=True)
    return tokens.masked_fill(~best, vocabulary).amin(dim=-1).clamp(max=vocabulary - 1)
