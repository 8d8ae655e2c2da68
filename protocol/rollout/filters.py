"""Which tokens may be drawn at all: top-k, top-p, min-p; and what a check knows of it, within rounding
(docs/spec/sampling.md).
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_FEW: Final = (128, 1024)
"""Most nuclei have no more tokens; sorting a large vocabulary takes longer than all of a prefill."""


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn at all; the defaults allow every one. A token has to pass all three.

    Attributes:
        top_k: only the k most likely; 0 for all.
        top_p: only the most likely tokens whose probabilities together first reach this much, in (0, 1].
        min_p: only tokens at least this share as likely as the most likely one, in [0, 1].
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        """Whether any token may be forbidden."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


EVERY_TOKEN: Final = Filters()


def allowed(scaled: Tensor, filters: Filters) -> Tensor:
    """Which tokens the filters let through, by a threshold on the logits of each row.

    Args:
        scaled: float32 [..., V], logits / temperature.

    Returns:
        bool [..., V].
    """
    threshold = torch.full_like(scaled[..., :1], -math.inf)
    if 0 < filters.top_k < scaled.shape[-1]:
        threshold = scaled.topk(filters.top_k, dim=-1).values[..., -1:]
    if filters.min_p > 0.0:
        threshold = torch.maximum(threshold, scaled.max(dim=-1, keepdim=True).values + math.log(filters.min_p))
    if filters.top_p < 1.0:
        for count in (*_FEW, scaled.shape[-1]):
            ordered, before = _likeliest(scaled, min(count, scaled.shape[-1]))
            kept = before[..., :-1] < filters.top_p  # a token is kept if those before have not reached it
            kept[..., 0] = True
            if not kept[..., -1].any():
                break
        threshold = torch.maximum(threshold, ordered.masked_fill(~kept, math.inf).min(dim=-1, keepdim=True).values)
    return scaled >= threshold


def _likeliest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many of the most likely tokens in order, and the probability before each and behind the last.

    Returns:
        float32 [..., K] and float64 [..., K + 1].
    """
    ordered = scaled.topk(count, dim=-1).values
    shares = (ordered - _log_sum(scaled)).exp()
    return ordered, torch.cat([torch.zeros_like(shares[..., :1]), shares.cumsum(dim=-1)], dim=-1)


def _log_sum(scaled: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, -inf where there are none: float64 [..., 1], to 1e-8."""
    largest = scaled.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scaled.dtype).min)
    total = (scaled - largest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log()
    return total + largest


def surely_allowed(scaled: Tensor, filters: Filters, slack: float, among: int) -> Tensor:
    """The border above which every honest computation lets a token through, among so many of the most likely ones.

    Args:
        scaled: float32 [..., V], logits / temperature, of one of them.
        slack: how far two of them may differ in what lies between two tokens' logits / temperature. The odds of any set
            of tokens then differ by a factor of at most e**slack.

    Returns:
        float32 [..., 1].
    """
    border = torch.full_like(scaled[..., :1], -math.inf)
    if 0 < filters.top_k < scaled.shape[-1]:
        border = scaled.topk(filters.top_k + 1, dim=-1).values[..., -1:] + slack
    if filters.min_p > 0.0:
        border = torch.maximum(border, scaled.amax(dim=-1, keepdim=True) + (math.log(filters.min_p) + slack))
    if filters.top_p < 1.0:
        count = min(among, scaled.shape[-1])
        ordered, before = _likeliest(scaled, count)
        # How many may be as likely as each token, itself among them.
        around = torch.searchsorted(-ordered, -ordered + slack, right=True)
        most = before.gather(-1, around) - before.diff(dim=-1)
        sure = most.clamp(0.0, 1.0).logit() + slack < _odds(filters.top_p)
        if count < scaled.shape[-1]:
            sure &= around < count
        border = torch.maximum(border, ordered.masked_fill(sure, -math.inf).amax(dim=-1, keepdim=True))
    return border


def possibly_allowed(scaled: Tensor, tokens: Tensor, filters: Filters, slack: float) -> Tensor:
    """Whether any honest computation lets a token through.

    Args:
        scaled: float32 [..., V], logits / temperature, of one of them; tokens: int64 [...], one of each row.
        slack: see `surely_allowed`.

    Returns:
        bool [...].
    """
    own = scaled.gather(-1, tokens[..., None])
    possible = torch.ones_like(own, dtype=torch.bool)
    if 0 < filters.top_k < scaled.shape[-1]:
        possible &= own >= scaled.topk(filters.top_k, dim=-1).values[..., -1:] - slack
    if filters.min_p > 0.0:
        possible &= own >= scaled.amax(dim=-1, keepdim=True) + (math.log(filters.min_p) - slack)
    if filters.top_p < 1.0:
        ahead = scaled.masked_fill(~(scaled > own + slack), -math.inf)
        least = (_log_sum(ahead) - _log_sum(scaled)).exp()
        possible &= least.clamp(0.0, 1.0).logit() - slack < _odds(filters.top_p)
    return possible.squeeze(-1)


def _odds(share: float) -> float:
    """The logarithm of share / (1 - share)."""
    return math.log(share) - math.log1p(-share)
