"""Seed-bound sampling (docs/spec/sampling.md): the noise, the choice, and the check.

Token t of a rollout is argmax over the vocabulary of logits / temperature + Gumbel noise. Drawing that way samples the
policy's softmax exactly (the Gumbel-max trick), and because the noise is a function of (seed, t, token id) alone,
anybody with the policy's logits can tell whether the chosen token is the one that had to be chosen.

The noise is made from integer operations on 32-bit words (held in int64, so that they run the same on every device) and
one exact integer-to-float64 conversion; it is a multiple of 2**-19 below 2**24 units, hence exact in float32. No
logarithm is
taken at run time: a table made once covers the 32 octaves on either side of one half with 256 segments each, read with
integer linear interpolation (error below 4e-6 on a scale where 1.0 changes a probability by a factor e).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.rollout.filters import EVERY_TOKEN, Filters, allowed, possibly_allowed, surely_allowed

SEED_BYTES: Final = 16
NOISE_UNIT: Final = 2.0**-19
RIVALS: Final = 1024
"""The most likely tokens of a position that the check draws noise for."""
LARGEST_NOISE: Final = 22.875
"""No noise is larger: the Gumbel quantile of 1 - 2**-33, rounded up."""

_BORDER: Final = 1e-3
"""Nobody knows the border of a filter better than this, in units of logits / temperature: rounding makes neighbours
swap.
"""

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
    filters: Filters = EVERY_TOKEN


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
    return _hash_pairs(seeds[..., None, :], positions[..., None], tokens)


def _hash_pairs(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`hash_words` of tokens each with a seed and a position of its own: int64 of the broadcast shape."""
    key, other = _keys(seeds, positions)
    return _mix(_mix((tokens & _WORD) ^ key) ^ other)


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What the hash of every token at a position has in common: int64 of the broadcast shape, twice."""
    key = _mix(seeds[..., 0] ^ (positions & _WORD))
    key = _mix(key ^ seeds[..., 1])
    other = _mix((key + 0x9E3779B9 + seeds[..., 2]) & _WORD)
    return key, _mix(other ^ seeds[..., 3])


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


def choose(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, filters: Filters = EVERY_TOKEN
) -> Tensor:
    """The token that had to be chosen: argmax of logits / temperature + noise over the allowed tokens.

    Args:
        logits: float32 [..., V].
        seeds: int64 [..., 4]; positions: int64 [...].

    Returns:
        int64 [...], token ids.
    """
    scaled = logits / temperature
    scores = scaled + noise(seeds, positions, logits.shape[-1])
    if filters.active:
        scores = scores.masked_fill(~allowed(scaled, filters), -math.inf)
    return scores.argmax(dim=-1)


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
    logits: Tensor,
    tokens: Tensor,
    seeds: Sequence[bytes],
    lengths: Sequence[int],
    temperature: float,
    filters: Filters = EVERY_TOKEN,
    slack: float = 0.0,
    limit: float = 0.0,
    *,
    first: int = 0,
) -> Tensor:
    """`margins` of several completions, one behind another.

    Only the RIVALS most likely tokens count. A winner from the tail behind them is overlooked, which is as rare as that
    tail is improbable and never speaks against honest work.

    With filters, a rival counts that every honest computation lets through, and a token that none does has an infinite
    margin. What is certain only within `slack`, and not within `limit`, is a miss at most: the margin is below `limit`.

    Args:
        logits: float32 [N, V]; tokens: int64 [N], N tokens in all.
        seeds: 16 bytes for each completion; lengths: its tokens, N in sum.
        slack: by how much the difference of two scores may differ between honest computations, but for a known share of
            the tokens; limit: but for none. In units of logits / temperature. Without filters they change nothing.
        first: tokens of the first completion that stand before these.

    Returns:
        float32 [N].
    """
    scaled = logits if temperature == 1.0 else logits / temperature
    chosen = scaled.gather(-1, tokens[:, None]).squeeze(-1)
    words = seed_words(list(seeds), logits.device)
    score = _scores_on_cpu if scaled.device.type == "cpu" else _scores

    def shortfall(rivals: Tensor) -> Tensor:
        own, best = score(rivals, tokens, chosen, words, lengths, first)
        return best - own

    def certain(within: float) -> Tensor:
        within = max(within, _BORDER)
        short = shortfall(scaled.masked_fill(~(scaled > surely_allowed(scaled, filters, within, RIVALS)), -math.inf))
        return short.masked_fill(~possibly_allowed(scaled, tokens, filters, within), math.inf)

    if not filters.active:
        return shortfall(scaled)
    if limit <= max(slack, _BORDER):
        return certain(slack)
    below = np.nextafter(np.float32(limit), np.float32(0.0))
    return torch.maximum(certain(limit), certain(slack).clamp(max=float(below)))


def _scores(
    rivals: Tensor, tokens: Tensor, chosen: Tensor, words: Tensor, lengths: Sequence[int], first: int = 0
) -> tuple[Tensor, Tensor]:
    """The score of each chosen token, and the best one among it and the RIVALS most likely tokens: float32 [N] each."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=rivals.device)
    words = words.repeat_interleave(counts, dim=0)
    positions = _positions(counts, first)
    own = chosen + gumbel(_hash_pairs(words, positions, tokens))
    return own, _best(rivals, own, words, positions)


def _positions(counts: Tensor, first: int) -> Tensor:
    """Of each token in its completion, the first of which has so many before these: int64 [N] of int64 [C]."""
    begins = counts.cumsum(0) - counts
    begins[:1] -= first
    positions = torch.arange(int(counts.sum()), device=counts.device)
    return positions - begins.repeat_interleave(counts)


def _best(rivals: Tensor, own: Tensor, words: Tensor, positions: Tensor) -> Tensor:
    """The best score of each row among `own` and the RIVALS most likely tokens: float32 [N]."""
    values, ids = rivals.topk(RIVALS) if rivals.shape[-1] > RIVALS else (rivals, None)
    rows, columns = (values >= (own - LARGEST_NOISE)[:, None]).nonzero(as_tuple=True)
    candidates = columns if ids is None else ids[rows, columns]
    scores = values[rows, columns] + gumbel(_hash_pairs(words[rows], positions[rows], candidates))
    return own.scatter_reduce(0, rows, scores, "amax")


def _scores_on_cpu(
    rivals: Tensor, tokens: Tensor, chosen: Tensor, words: Tensor, lengths: Sequence[int], first: int = 0
) -> tuple[Tensor, Tensor]:
    """The same, compiled. Where the winner is none of the RIVALS most likely tokens, `_scores` looks again."""
    from protocol.rollout.gumbel_max import best_scores  # noqa: PLC0415 - numba takes half a second of those who never check

    rivals, counts = rivals.contiguous(), torch.tensor(lengths, dtype=torch.int64)
    own, best, ahead = torch.empty_like(chosen), torch.empty_like(chosen), torch.empty_like(tokens)
    best_scores(
        rivals.numpy(),
        tokens.numpy(),
        chosen.numpy(),
        words.numpy().astype(np.uint32),
        counts.numpy(),
        first,
        _table(rivals.device).numpy(),
        own.numpy(),
        best.numpy(),
        ahead.numpy(),
    )
    tail = (ahead >= RIVALS).nonzero().squeeze(1)
    if len(tail):
        completions = torch.arange(len(counts)).repeat_interleave(counts)[tail]
        best[tail] = _best(rivals[tail], own[tail], words[completions], _positions(counts, first)[tail])
    return own, best


def log_probabilities(logits: Tensor, tokens: Tensor, temperature: float, filters: Filters = EVERY_TOKEN) -> Tensor:
    """Log-probability of each token under the sampled distribution: float32 [T] from logits [T, V], tokens [T].

    With filters the distribution is that of the allowed tokens; the token itself counts as allowed.
    """
    scaled = logits if temperature == 1.0 else logits / temperature
    if filters.active:
        mask = allowed(scaled, filters).scatter(-1, tokens[:, None], True)
        scaled = scaled.masked_fill(~mask, -math.inf)
    if scaled.device.type == "cpu" and scaled.dtype == torch.float32 and not scaled.requires_grad:
        return _log_probabilities_on_cpu(scaled, tokens)
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


def _log_probabilities_on_cpu(scaled: Tensor, tokens: Tensor) -> Tensor:
    """The same, compiled."""
    from protocol.rollout.gumbel_max import exponential_sums  # noqa: PLC0415 - see above

    largest, sums, lanes = torch.empty(len(scaled)), torch.empty(len(scaled)), torch.empty(64)
    exponential_sums(scaled.contiguous().numpy(), lanes.numpy(), largest.numpy(), sums.numpy())
    return scaled.gather(-1, tokens[:, None]).squeeze(-1) - largest - sums.log()
