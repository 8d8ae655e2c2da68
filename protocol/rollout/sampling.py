"""Seed-bound sampling (docs/spec/sampling.md): the noise, the choice, and the check.

Token t of a rollout is the argmax over the vocabulary of logits / temperature + Gumbel noise. This samples the policy's
softmax exactly (the Gumbel-max trick). Because the noise is a function of (seed, t, token id) alone, anybody with the
policy's logits can check that a token is the right one.

The noise is computed with integer operations on 32-bit words (stored in int64, so that every device gives the same
result) and one exact integer-to-float64 conversion. It is a multiple of 2**-19 below 2**24 units, hence exact in
float32. No logarithm is computed at run time: a table, computed once, covers the 32 octaves on either side of one half
with 256 segments each, and is read with integer linear interpolation (error below 4e-6, on a scale where 1.0 changes a
probability by a factor e).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol.rollout.filters import EVERY_TOKEN, Filters, allowed_tokens, certain_border, possible_tokens

SEED_BYTES: Final = 16
NOISE_UNIT: Final = 2.0**-19
LARGEST_NOISE: Final = 22.875
"""An upper bound on the noise: the Gumbel quantile of 1 - 2**-33, rounded up."""
LEAST_NOISE: Final = -4.0
"""Less than any noise: the Gumbel quantile of 2**-33 is -3.13."""
SCORES_AT_ONCE: Final = 1 << 22
"""Scores that the search in torch computes at a time; each takes some 60 bytes."""

BORDER: Final = 1e-3
"""The smallest uncertainty of a filter's border, in units of logits / temperature: rounding swaps tokens this close."""

_WORD: Final = 0xFFFF_FFFF
_SEGMENT_BITS: Final = 8
_SEGMENTS: Final = 1 << _SEGMENT_BITS
_OCTAVES: Final = 32
_FRACTION_BITS: Final = 52 - _SEGMENT_BITS
_INTERPOLATION_BITS: Final = 20  # leading bits of the fraction that the interpolation uses
_BIAS: Final = 1023


@dataclass(frozen=True)
class SamplingParams:
    """The parameters with which a policy is sampled; a completion ends with its first stop token."""

    temperature: float
    max_tokens: int
    stops: tuple[int, ...]
    filters: Filters = EVERY_TOKEN

    def is_complete(self, tokens: tuple[int, ...]) -> bool:
        """Return whether a completion ends as sampling does: at its only stop token or at the maximum length."""
        if not tokens or len(tokens) > self.max_tokens or any(token in self.stops for token in tokens[:-1]):
            return False
        return tokens[-1] in self.stops or len(tokens) == self.max_tokens

    def without_stop(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return a completion without the stop token at its end, if it has one: what an environment judges."""
        return tokens[:-1] if tokens and tokens[-1] in self.stops else tokens


def _mix(x: Tensor) -> Tensor:
    """Mix 32-bit words bijectively with three multiplications (constants of the 'triple32' family)."""
    x = x ^ (x >> 17)
    x = (x * 0xED5AD4BB) & _WORD
    x = x ^ (x >> 11)
    x = (x * 0xAC4C1B51) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x31848BAB) & _WORD
    return x ^ (x >> 14)


@functools.cache
def noise_table(device: torch.device) -> Tensor:
    """Compute Gumbel quantiles in units of 2**-19: int64 [2, 32 * 256 + 1], row 0 for u < 1/2, row 1 for u >= 1/2.

    None is nearer than 2e-5 units to where it would be rounded otherwise, some 10,000 times the error of a logarithm in
    float64. So all platforms compute the same table.
    """
    rows: list[list[int]] = [[], []]
    for index in range(_OCTAVES * _SEGMENTS + 1):
        octave, segment = divmod(index, _SEGMENTS)
        u = min(math.ldexp(1.0 + segment / _SEGMENTS, octave - 33), 0.5)
        rows[0].append(round(-math.log(-math.log(u)) / NOISE_UNIT))
        rows[1].append(round(-math.log(-math.log1p(-u)) / NOISE_UNIT))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def hash_words(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Hash seed, position and each token id of int64 [V] to a word, of which noise is made: int64 [..., V]."""
    return hash_pairs(seeds[..., None, :], positions[..., None], tokens)


def hash_pairs(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Hash tokens, each with a seed and a position of its own, as `hash_words`: int64 of the broadcast shape."""
    key, other = noise_keys(seeds, positions)
    return _mix(_mix((tokens & _WORD) ^ key) ^ other)


def noise_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two keys that the hashes of all tokens at a position share: int64 of the broadcast shape each."""
    key = _mix(seeds[..., 0] ^ (positions & _WORD))
    key = _mix(key ^ seeds[..., 1])
    other = _mix((key + 0x9E3779B9 + seeds[..., 2]) & _WORD)
    return key, _mix(other ^ seeds[..., 3])


def gumbel(words: Tensor) -> Tensor:
    """Convert uniform words, int64 in [0, 2**32), to standard Gumbel noise: float32 of the same shape, multiples of
    2**-19. A word h represents u = (2h + 1) / 2**33, which is symmetric about one half.
    """
    high = words >> 31
    odd = torch.where(high == 1, _WORD - words, words) * 2 + 1  # in [1, 2**32): u or 1 - u in units of 2**-33
    bits = odd.to(torch.float64).view(torch.int64)  # exact: exponent and mantissa are the octave and the place in it
    index = (bits >> _FRACTION_BITS) - (_BIAS << _SEGMENT_BITS)
    fraction = (bits >> (_FRACTION_BITS - _INTERPOLATION_BITS)) & ((1 << _INTERPOLATION_BITS) - 1)
    table = noise_table(words.device)
    low_units, high_units = table[high, index], table[high, index + 1]
    units = low_units + (((high_units - low_units) * fraction) >> _INTERPOLATION_BITS)
    return units.to(torch.float32) * NOISE_UNIT


@functools.cache
def triton_fault(device: torch.device) -> str:
    """Return in a line why Triton cannot draw tokens on a GPU, and what to do; empty if it can.

    Triton comes with torch's builds for CUDA, but it compiles with the system's C compiler, and into a directory that
    must be writable. So this launches the kernel once, on a few logits. Where that fails, torch computes the same bits.
    """
    zeros = torch.zeros(1, 4, dtype=torch.int64, device=device)
    try:
        best_tokens_on_gpu(torch.zeros(1, 4, device=device), zeros, zeros[:, 0]).tolist()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and file systems fail in many ways
        reason = (str(error) or type(error).__name__).partition("\n")[0][:200].rstrip(". ")
        return (
            f"Triton cannot compile the kernel that draws tokens ({reason}), so torch draws the same tokens, more "
            "slowly: install gcc, libc6-dev and Python's headers, and let TRITON_CACHE_DIR name a directory that this "
            "user can write, on a file system without noexec"
        )
    return ""


def seed_words(seeds: list[bytes], device: torch.device | None = None) -> Tensor:
    """Convert seeds of 16 bytes (ValueError for others) to four little-endian 32-bit words each: int64 [B, 4]."""
    if any(len(seed) != SEED_BYTES for seed in seeds):
        raise ValueError(f"a seed has {SEED_BYTES} bytes")
    flat = (
        torch.frombuffer(bytearray(b"".join(seeds)), dtype=torch.int32) if seeds else torch.empty(0, dtype=torch.int32)
    )
    return (flat.to(torch.int64) & _WORD).reshape(len(seeds), 4).to(device)


def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Compute the noise of a vocabulary, float32 [..., V], for seed words int64 [..., 4] and positions int64 [...]."""
    return gumbel(hash_words(seeds, positions, torch.arange(vocabulary, device=seeds.device)))


def choose(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, filters: Filters = EVERY_TOKEN
) -> Tensor:
    """Choose the next token, int64 [...], for logits float32 [..., V]: the argmax of logits / temperature + noise over
    the tokens that pass the filters. For seeds and positions see `noise`.
    """
    scaled = logits / temperature
    scores = scaled + noise(seeds, positions, logits.shape[-1])
    if filters.active:
        scores = scores.masked_fill(~allowed_tokens(scaled, filters), -math.inf)
    return scores.argmax(dim=-1)


def batch_margins(
    logits: Tensor,
    tokens: Tensor,
    words: Tensor,
    positions: Tensor,
    temperature: float,
    filters: Filters = EVERY_TOKEN,
    slack: float = 0.0,
    limit: float = 0.0,
    cap: float = 0.0,
) -> Tensor:
    """Compute how far the score of each token falls short of the best score; 0 for the right token.

    Every token of the vocabulary is considered, however unlikely it is. With filters, only tokens that pass them in
    every honest computation are considered, and a token that passes in none has an infinite margin. A margin that holds
    for an uncertainty of `slack` but not of `limit` is reduced to `cap`.

    Args:
        logits: float32 [N, V]; row n holds the logits from which token n was sampled.
        tokens: int64 [N].
        words: int64 [N, 4], of the seed of each token's completion; positions: int64 [N] (`token_places`).
        slack: by how much the difference of two scores may differ between honest computations, except for a bounded
            share of the tokens; in units of logits / temperature. Ignored without filters.
        limit: the same, without exception.
        cap: the largest margin that is a plain miss.

    Returns:
        float32 [N], non-negative, in units of logits / temperature.
    """
    scaled = logits if temperature == 1.0 else logits / temperature
    own = scaled.gather(-1, tokens[:, None]).squeeze(-1) + gumbel(hash_pairs(words, positions, tokens))

    def shortfall(contenders: Tensor) -> Tensor:
        if contenders.device.type == "cpu":
            return search_on_cpu(contenders.contiguous(), words, positions, own)[0] - own
        return _best(contenders, words, positions, own) - own

    def certain(within: float) -> Tensor:
        within = max(within, BORDER)
        border = certain_border(scaled, filters, within)
        short = shortfall(scaled.masked_fill(~(scaled > border), -math.inf))
        return short.masked_fill(~possible_tokens(scaled, tokens, filters, within), math.inf)

    if not filters.active:
        return shortfall(scaled)
    if limit <= max(slack, BORDER):
        return certain(slack)
    return torch.maximum(certain(limit), certain(slack).clamp(max=cap))


def drawn_stops(
    logits: Tensor,
    tokens: Tensor,
    margins: Tensor,
    words: Tensor,
    positions: Tensor,
    temperature: float,
    stops: Sequence[int],
) -> Tensor:
    """Return where a completion takes a stop token, or has another token where the policy draws a stop token: bool [N].
    The margins are of `batch_margins`, float32 [N], as are the other arguments; the stops end a completion.
    """
    ids = torch.tensor(stops, dtype=torch.int64, device=logits.device)
    is_stop = torch.isin(tokens, ids)
    rows = torch.nonzero((margins > 0) & ~is_stop).squeeze(-1)
    if not len(rows):
        return is_stop
    tokens, words, positions = tokens[rows], words[rows], positions[rows]
    own = logits[rows, tokens] / temperature + gumbel(hash_pairs(words, positions, tokens))
    of_stops = logits[rows[:, None], ids] / temperature + gumbel(hash_words(words, positions, ids))
    drawn = of_stops.amax(dim=-1) - own >= margins[rows] - BORDER
    return is_stop.index_put((rows,), drawn)


def token_places(
    seeds: Sequence[bytes], lengths: Sequence[int], device: torch.device | None = None, *, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the words of the seed, int64 [N, 4], and the position, int64 [N], of each token of completions, one behind
    another: there are a seed of 16 bytes and a length for each, and `first` tokens of the first one come before these.
    """
    counts = torch.tensor(lengths, dtype=torch.int64)
    begins = counts.cumsum(0) - counts
    begins[:1] -= first
    words = seed_words(list(seeds)).repeat_interleave(counts, dim=0)
    return words.to(device), (torch.arange(len(words)) - begins.repeat_interleave(counts)).to(device)


def best_tokens_on_gpu(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the token with the best score of each row: int64 [N]; see `gumbel_triton.best_tokens`."""
    from protocol.rollout.gumbel_triton import best_tokens  # noqa: PLC0415 - only where there is a GPU

    return best_tokens(scaled, noise_keys(seeds, positions), noise_table(scaled.device))


def _best(contenders: Tensor, words: Tensor, positions: Tensor, own: Tensor) -> Tensor:
    """Return the best score of each row, at least `own`: float32 [N]. Of logits / temperature, float32 [N, V], -inf is
    not considered, and what is no number has no score.
    """
    if contenders.is_cuda and not triton_fault(contenders.device):
        winners = best_tokens_on_gpu(contenders.contiguous(), words, positions)
        scores = contenders.gather(-1, winners[:, None]).squeeze(-1) + gumbel(hash_pairs(words, positions, winners))
        return torch.maximum(own, scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
    best = own.clone()
    rows = max(1, SCORES_AT_ONCE // contenders.shape[-1])
    for begin in range(0, len(own), rows):
        part = slice(begin, begin + rows)
        scores = contenders[part] + noise(words[part], positions[part], contenders.shape[-1])
        largest = scores.masked_fill(scores.isnan(), -math.inf).amax(dim=-1)
        best[part] = torch.maximum(best[part], largest)
    return best


def search_on_cpu(scaled: Tensor, words: Tensor, positions: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best score of each row, at least a bound, and its token, -1 if no score is above it: float32 [N] and
    int64 [N]; see `gumbel_max.best_tokens`.
    """
    from protocol.rollout.gumbel_max import best_tokens  # noqa: PLC0415 - numba costs processes that never check half a second

    best, tokens = torch.empty_like(least), torch.empty(len(least), dtype=torch.int64)
    arrays = scaled.numpy(), words.numpy().astype(np.uint32), positions.to(torch.int64).numpy()
    best_tokens(*arrays, noise_table(scaled.device).numpy(), least.numpy(), best.numpy(), tokens.numpy())
    return best, tokens


def log_probabilities(logits: Tensor, tokens: Tensor, temperature: float, filters: Filters = EVERY_TOKEN) -> Tensor:
    """Compute the log-probability of tokens int64 [T], by logits float32 [T, V], under the distribution that is sampled
    from: float32 [T]. With filters, this is over the tokens that pass them and the token itself.
    """
    scaled = logits if temperature == 1.0 else logits / temperature
    if filters.active:
        mask = allowed_tokens(scaled, filters).scatter(-1, tokens[:, None], True)
        scaled = scaled.masked_fill(~mask, -math.inf)
    if scaled.device.type == "cpu" and scaled.dtype == torch.float32 and not scaled.requires_grad:
        largest, log_sums = exponential_sums(scaled.contiguous())
        return scaled.gather(-1, tokens[:, None]).squeeze(-1) - largest - log_sums
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


def exponential_sums(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return largest value and ln(sum of exp(value - largest)) of rows: float32 [T] of contiguous float32 [T, V]."""
    from protocol.kernels import exact  # noqa: PLC0415 - see search_on_cpu
    from protocol.rollout import gumbel_max  # noqa: PLC0415

    largest, sums, scratch = torch.empty(len(scaled)), torch.empty(len(scaled)), torch.empty(64)
    gumbel_max.exponential_sums(scaled.numpy(), scratch.numpy(), largest.numpy(), sums.numpy())
    return largest, torch.from_numpy(exact.logs(sums.numpy()))
