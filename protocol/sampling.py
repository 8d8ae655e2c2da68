"""Seed-bound sampling (docs/spec/sampling.md): the noise, the choice, and the check.

Token t of a rollout is argmax over the vocabulary of logits / temperature + Gumbel noise. Drawing that way samples the
policy's softmax exactly (the Gumbel-max trick), and because the noise is a function of (seed, t, token id) alone, anybody
with the policy's logits can tell whether the chosen token is the one that had to be chosen.

The noise is made from integer operations on 32-bit words (held in int64, so that they run the same on every device) and one
exact integer-to-float64 conversion; it is a multiple of 2**-19 below 2**24 units, hence exact in float32. No logarithm is
taken at run time: a table made once covers the 32 octaves on either side of one half with 256 segments each, read with
integer linear interpolation (error below 4e-6 on a scale where 1.0 changes a probability by a factor e).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SEED_BYTES: Final = 16
NOISE_UNIT: Final = 2.0**-19

_WORD: Final = 0xFFFF_FFFF
_SEGMENT_BITS: Final = 8
_SEGMENTS: Final = 1 << _SEGMENT_BITS
_OCTAVES: Final = 32
_FRACTION_BITS: Final = 52 - _SEGMENT_BITS
_FRACTION_KEPT: Final = 20  # bits of the fraction that take part in the interpolation
_BIAS: Final = 1023


@dataclass(frozen=True)
class SamplingParams:
    """How a policy is sampled.

    Attributes:
        temperature: divides the logits; positive.
        max_tokens: a completion ends after this many tokens at the latest.
        eos: the token id that ends a completion (and is its last token).
    """

    temperature: float
    max_tokens: int
    eos: int


def _mix(x: Tensor) -> Tensor:
    """A bijective mixer of 32-bit words with three multiplications (constants of the 'triple32' family)."""
    x = x ^ (x >> 17)
    x = (x * 0xED5AD4BB) & _WORD
    x = x ^ (x >> 11)
    x = (x * 0xAC4C1B51) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x31848BAB) & _WORD
    return x ^ (x >> 14)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Gumbel quantiles in units of 2**-19: int64 [2, 32 * 256 + 1], row 0 for u < 1/2, row 1 for u >= 1/2."""
    rows: list[list[int]] = [[], []]
    for index in range(_OCTAVES * _SEGMENTS + 1):
        octave, segment = divmod(index, _SEGMENTS)
        u = min(math.ldexp(1.0 + segment / _SEGMENTS, octave - 33), 0.5)
        rows[0].append(round(-math.log(-math.log(u)) / NOISE_UNIT))
        rows[1].append(round(-math.log(-math.log1p(-u)) / NOISE_UNIT))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def hash_words(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The 32-bit hash behind the noise.

    Args:
        seeds: int64 [..., 4], each a 32-bit word of the rollout's seed.
        positions: int64 [...], index of the token in its completion.
        tokens: int64 [V], token ids.

    Returns:
        int64 [..., V] in [0, 2**32).
    """
    key = _mix(seeds[..., 0] ^ (positions & _WORD))
    key = _mix(key ^ seeds[..., 1])
    other = _mix((key + 0x9E3779B9 + seeds[..., 2]) & _WORD)
    other = _mix(other ^ seeds[..., 3])
    return _mix(_mix((tokens & _WORD) ^ key[..., None]) ^ other[..., None])


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of uniform 32-bit words: float32 of the same shape, a multiple of 2**-19.

    A word h stands for u = (2h + 1) / 2**33, which is symmetric about one half.
    """
    high = words >> 31
    odd = torch.where(high == 1, _WORD - words, words) * 2 + 1  # in [1, 2**32): u or 1 - u in units of 2**-33
    bits = odd.to(torch.float64).view(torch.int64)  # exact: the float's fields are the octave and the place in it
    index = (bits >> _FRACTION_BITS) - (_BIAS << _SEGMENT_BITS)
    fraction = (bits >> (_FRACTION_BITS - _FRACTION_KEPT)) & ((1 << _FRACTION_KEPT) - 1)
    table = _table(words.device)
    left, right = table[high, index], table[high, index + 1]
    units = left + (((right - left) * fraction) >> _FRACTION_KEPT)
    return units.to(torch.float32) * NOISE_UNIT


def seed_words(seeds: list[bytes], device: torch.device | None = None) -> Tensor:
    """Seeds of 16 bytes as four little-endian 32-bit words each: int64 [B, 4]."""
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed has {SEED_BYTES} bytes")
    flat = (
        torch.frombuffer(bytearray(b"".join(seeds)), dtype=torch.int32) if seeds else torch.empty(0, dtype=torch.int32)
    )
    return (flat.to(torch.int64) & _WORD).reshape(len(seeds), 4).to(device)


def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise for every token of the vocabulary.

    Args:
        seeds: int64 [..., 4] from `seed_words`.
        positions: int64 [...], index of the token in its completion.
        vocabulary: V.

    Returns:
        float32 [..., V].
    """
    return gumbel(hash_words(seeds, positions, torch.arange(vocabulary, device=seeds.device)))


def choose(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
    """The token that had to be chosen: argmax of logits / temperature + noise.

    Args:
        logits: float32 [..., V].
        seeds: int64 [..., 4]; positions: int64 [...].

    Returns:
        int64 [...], token ids.
    """
    return (logits / temperature + noise(seeds, positions, logits.shape[-1])).argmax(dim=-1)


def margins(logits: Tensor, tokens: Tensor, seed: bytes, temperature: float) -> Tensor:
    """How far each token of a completion fell short of the best one: 0 where it is the one that had to be chosen.

    Args:
        logits: float32 [T, V], row t being the logits from which token t was drawn.
        tokens: int64 [T], the completion.
        seed: the rollout's 16 bytes.

    Returns:
        float32 [T], non-negative, in units of logits / temperature.
    """
    return batch_margins(logits, tokens, [seed], [len(tokens)], temperature)


def batch_margins(
    logits: Tensor, tokens: Tensor, seeds: Sequence[bytes], lengths: Sequence[int], temperature: float
) -> Tensor:
    """`margins` of several completions, one behind another.

    Args:
        logits: float32 [N, V]; tokens: int64 [N], N tokens in all.
        seeds: 16 bytes for each completion; lengths: its tokens, N in sum.

    Returns:
        float32 [N].
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=logits.device)
    words = seed_words(list(seeds), logits.device).repeat_interleave(counts, dim=0)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = torch.arange(len(tokens), device=logits.device) - begins
    scores = logits / temperature + noise(words, positions, logits.shape[-1])
    return scores.max(dim=-1).values - scores.gather(-1, tokens[:, None]).squeeze(-1)


def log_probabilities(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token under the sampled distribution: float32 [T] from logits [T, V], tokens [T]."""
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
