"""The filters top-k, top-p and min-p, and bounds on their effect in a computation with other rounding errors
(docs/spec/sampling.md).

Two honest nodes compute slightly different logits, so they may disagree about a token at a filter's border. The check
uses `certain_border` and `possible_tokens`, which hold for every honest computation.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_NUCLEUS_SIZES: Final = (128, 1024)
"""How many of the most likely tokens top-p sorts before it sorts all of them. Most nuclei are no larger, and sorting a
large vocabulary takes longer than a whole prefill.
"""


@dataclass(frozen=True)
class Filters:
    """The filters of a run. A token may be sampled if it passes all three; by default, every token does."""

    top_k: int = 0  # only the k most likely tokens pass; 0 for all
    # only the smallest set of most likely tokens with at least this total probability passes, in (0, 1]
    top_p: float = 1.0
    min_p: float = 0.0  # only tokens with at least this fraction of the largest probability pass, in [0, 1]

    @property
    def active(self) -> bool:
        """Whether the filters can exclude a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


EVERY_TOKEN: Final = Filters()


def allowed_tokens(scaled: Tensor, filters: Filters) -> Tensor:
    """Return which tokens pass the filters, a threshold on each row of logits / temperature: bool [..., V]."""
    threshold = torch.full_like(scaled[..., :1], -math.inf)
    if 0 < filters.top_k < scaled.shape[-1]:
        threshold = scaled.topk(filters.top_k, dim=-1).values[..., -1:]
    if filters.min_p > 0.0:
        threshold = torch.maximum(threshold, scaled.max(dim=-1, keepdim=True).values + math.log(filters.min_p))
    if filters.top_p < 1.0:
        for count in (*_NUCLEUS_SIZES, scaled.shape[-1]):
            ordered, before = _most_likely(scaled, min(count, scaled.shape[-1]))
            nucleus = before[..., :-1] < filters.top_p  # a token belongs to it if those before have not reached top_p
            nucleus[..., 0] = True
            if not nucleus[..., -1].any():
                break
        threshold = torch.maximum(threshold, ordered.masked_fill(~nucleus, math.inf).min(dim=-1, keepdim=True).values)
    return scaled >= threshold


def _most_likely(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the logits of the K = `count` most likely tokens, descending: float32 [..., K]; and their probability.

    float64 [..., K + 1]: the total probability of the first 0, 1, ..., K tokens.
    """
    ordered = scaled.topk(count, dim=-1).values
    shares = (ordered - _log_sum(scaled)).exp()
    return ordered, torch.cat([torch.zeros_like(shares[..., :1]), shares.cumsum(dim=-1)], dim=-1)


def _log_sum(scaled: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials to 1e-8, or -inf if all values are -inf: float64 [..., 1]."""
    largest = scaled.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scaled.dtype).min)
    total = (scaled - largest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log()
    return total + largest


def certain_border(scaled: Tensor, filters: Filters, slack: float) -> Tensor:
    """Return the logit above which a token passes the filters in every honest computation, float32 [..., 1], from
    logits / temperature of one of them, float32 [..., V]. Two of them may differ by `slack` in the difference of two
    tokens' logits / temperature: the odds of any set of tokens then differ by a factor of at most e**slack.
    """
    border = torch.full_like(scaled[..., :1], -math.inf)
    if 0 < filters.top_k < scaled.shape[-1]:
        border = scaled.topk(filters.top_k + 1, dim=-1).values[..., -1:] + slack
    if filters.min_p > 0.0:
        border = torch.maximum(border, scaled.amax(dim=-1, keepdim=True) + (math.log(filters.min_p) + slack))
    if filters.top_p < 1.0:
        flat = scaled.reshape(-1, scaled.shape[-1])
        border = torch.maximum(border, _certain_nucleus_border(flat, filters.top_p, slack).view_as(border))
    return border


def _certain_nucleus_border(scaled: Tensor, top_p: float, slack: float) -> Tensor:
    """Return the logit above which a token is in the nucleus in every honest computation: float32 [N, 1]. The most
    likely tokens are sorted first, and more of them only for the rows whose nucleus may be larger.
    """
    border = torch.empty_like(scaled[:, :1])
    rows = torch.arange(len(scaled), device=scaled.device)
    for size in (*_NUCLEUS_SIZES, scaled.shape[-1]):
        count = min(size, scaled.shape[-1])
        ordered, before = _most_likely(scaled[rows], count)
        # For each token, how many tokens may be at least as likely, including the token itself.
        as_likely = torch.searchsorted(-ordered, -ordered + slack, right=True)
        most_before = before.gather(-1, as_likely) - before.diff(dim=-1)
        certain = most_before.clamp(0.0, 1.0).logit() + slack < _log_odds(top_p)
        counted = as_likely < count if count < scaled.shape[-1] else torch.ones_like(certain)
        border[rows] = ordered.masked_fill(certain & counted, -math.inf).amax(dim=-1, keepdim=True)
        rows = rows[~(counted & ~certain).any(dim=-1)]  # where no token that is not certain was found
        if count == scaled.shape[-1] or not len(rows):
            break
    return border


def possible_tokens(scaled: Tensor, tokens: Tensor, filters: Filters, slack: float) -> Tensor:
    """Return whether each row's token, int64 [...], passes in any honest computation (`certain_border`): bool [...]."""
    own = scaled.gather(-1, tokens[..., None])
    possible = torch.ones_like(own, dtype=torch.bool)
    if 0 < filters.top_k < scaled.shape[-1]:
        possible &= own >= scaled.topk(filters.top_k, dim=-1).values[..., -1:] - slack
    if filters.min_p > 0.0:
        possible &= own >= scaled.amax(dim=-1, keepdim=True) + (math.log(filters.min_p) - slack)
    if filters.top_p < 1.0:
        ahead = scaled.masked_fill(~(scaled > own + slack), -math.inf)
        least_before = (_log_sum(ahead) - _log_sum(scaled)).exp()
        possible &= least_before.clamp(0.0, 1.0).logit() - slack < _log_odds(filters.top_p)
    return possible.squeeze(-1)


def _log_odds(probability: float) -> float:
    """Return the logarithm of p / (1 - p)."""
    return math.log(probability) - math.log1p(-probability)
