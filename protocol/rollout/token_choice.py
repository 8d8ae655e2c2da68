"""The choice of tokens while sampling, with their log-probabilities (docs/spec/sampling.md).

It computes what `choose` and `log_probabilities` of protocol/rollout/sampling.py compute, with compiled
code: on a CPU by protocol/rollout/gumbel_max.py, which reads the noise table only for the few tokens that may have the
best score, and on a GPU by protocol/rollout/gumbel_triton.py.
"""

import math

import torch
from torch import Tensor

from protocol.rollout.filters import EVERY_TOKEN, Filters, allowed_tokens, certain_border
from protocol.rollout.sampling import (
    BORDER,
    LEAST_NOISE,
    best_tokens_on_gpu,
    choose,
    exponential_sums,
    gumbel,
    hash_pairs,
    log_probabilities,
    search_on_cpu,
    triton_fault,
)


def choose_with_log_probabilities(
    logits: Tensor, seeds: Tensor | None, positions: Tensor, temperature: float, filters: Filters = EVERY_TOKEN
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row, int64 [B], and compute its log-probability under the distribution that is
    sampled from, float32 [B]. The tokens have the same bits on every device; the log-probabilities agree to rounding
    errors.

    Logits are float32 [B, V]; seeds int64 [B, 4] from `seed_words`, None for the most likely tokens; positions int64
    [B], the index of the token in its completion.
    """
    compiled = logits.dtype == torch.float32 and (
        logits.device.type == "cpu" or (logits.is_cuda and not triton_fault(logits.device))
    )
    if seeds is None or not compiled:
        tokens = choose(logits, seeds, positions, temperature, filters) if seeds is not None else logits.argmax(-1)
        return tokens, log_probabilities(logits, tokens, temperature, filters)
    scaled = logits if temperature == 1.0 else logits / temperature
    if filters.active:
        scaled = scaled.masked_fill(~allowed_tokens(scaled, filters), -math.inf)
    scaled = scaled.contiguous()
    if logits.is_cuda:
        tokens = best_tokens_on_gpu(scaled, seeds, positions)
        return tokens, log_probabilities(logits, tokens, temperature, filters)
    largest, log_sums = exponential_sums(scaled)
    _, tokens = search_on_cpu(scaled, seeds, positions, largest + LEAST_NOISE)
    for row in (tokens < 0).nonzero().flatten().tolist():  # a policy that computes no finite number
        tokens[row] = choose(logits[row], seeds[row], positions[row], temperature, filters)
    return tokens, scaled.gather(-1, tokens[:, None]).squeeze(-1) - largest - log_sums


def best_rivals(
    logits: Tensor,
    tokens: Tensor,
    words: Tensor,
    positions: Tensor,
    temperature: float,
    filters: Filters = EVERY_TOKEN,
    slack: float = 0.0,
) -> Tensor:
    """Return the token with the best score at each position but the own one, without filters, and by how much its score
    falls short, at most 0 where the own one may not pass the filters: float32 [N, 2]; the arguments are those of
    `sampling.batch_margins`.
    """
    others = logits.scatter(-1, tokens[:, None], -math.inf)
    rivals, _ = choose_with_log_probabilities(others, words, positions, temperature)
    both = torch.stack([tokens, rivals], dim=1)
    own = logits.gather(-1, both) / temperature
    scores = own + gumbel(hash_pairs(words[:, None], positions[:, None], both))
    shortfalls = scores[:, :1] - scores[:, 1:]
    if filters.active:
        passes = own[:, :1] > certain_border(logits / temperature, filters, max(slack, BORDER))
        shortfalls = torch.where(passes, shortfalls, shortfalls.clamp(max=0.0))
    return torch.cat([rivals[:, None].to(torch.float32), shortfalls], dim=1)
