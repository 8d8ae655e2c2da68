"""Filters, and the check at their border: a token that passes with honest rounding errors is no miss; others are."""

import math

import pytest
import torch
from torch import Tensor

from protocol.rollout import sampling
from protocol.rollout.filters import Filters, allowed_tokens, certain_border, possible_tokens
from tests.support.builders.seeds import seeds

FILTERS = [Filters(top_k=4), Filters(top_p=0.9), Filters(min_p=0.1), Filters(top_k=6, top_p=0.8, min_p=0.05)]


def jitter(logits: Tensor, spread: float, seed: int) -> Tensor:
    """Return the logits of another honest computation: the difference of two logits changes by at most `spread`."""
    generator = torch.Generator().manual_seed(seed)
    return logits + (torch.rand(logits.shape, generator=generator) - 0.5) * spread


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.05, 0.5])
def test_honest_rounding_at_a_filters_border_is_no_miss(filters: Filters, spread: float) -> None:
    count, vocabulary = 3000, 40
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(3)) * 2.0
    logits[::3] = logits[::3].round()  # ties, and nuclei that end where many tokens are equally likely
    words, places = sampling.seed_words(seeds(1)), torch.arange(count)
    tokens = sampling.choose(jitter(logits, spread, 1), words, places, 1.0, filters)
    margins = sampling.batch_margins(jitter(logits, spread, 2), tokens, seeds(1), [count], 1.0, filters, 2 * spread)
    assert margins.max() <= 2 * spread


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("slack", "limit"), [(0.0, 0.0), (0.0, 2e-4), (0.1, 7.2)])
def test_with_a_filter_a_wrong_token_is_a_miss_if_the_policy_is_certain(
    filters: Filters, slack: float, limit: float
) -> None:
    count, vocabulary = 1000, 200
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(count, vocabulary, generator=generator)
    logits[:, 7] += 20.0
    tokens = torch.randint(8, vocabulary, (count,), generator=generator)
    margins = sampling.batch_margins(logits, tokens, seeds(1), [count], 1.0, filters, slack, limit)
    assert margins.min() > max(slack, 1e-3)
    if filters.top_k != 4:  # whose border is among tokens nearly alike: a miss, not yet a proof
        assert margins.min() > limit


@pytest.mark.parametrize("filters", FILTERS)
def test_a_margin_that_is_certain_only_within_the_slack_is_a_miss_and_no_rejection(filters: Filters) -> None:
    """Rounding beyond the slack, as in few tokens with bfloat16, is no ground to reject if the border was uncertain."""
    count = 4000
    logits = torch.randn(count, 40, generator=torch.Generator().manual_seed(5)) * 2.0
    words, places = sampling.seed_words(seeds(1)), torch.arange(count)
    tokens = sampling.choose(jitter(logits, 0.5, 1), words, places, 1.0, filters)
    margins = sampling.batch_margins(jitter(logits, 0.5, 2), tokens, seeds(1), [count], 1.0, filters, 0.01, 2.0)
    assert margins.max() < 2.0
    assert 0 < (margins > 0.01).sum() < 0.2 * count


def test_greedy_sampling_is_detected_with_a_filter() -> None:
    count = 2000
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(6))
    for filters in (Filters(top_k=2), Filters(top_p=0.9)):
        margins = sampling.batch_margins(logits, logits.argmax(dim=-1), seeds(1), [count], 1.0, filters, 0.001, 0.004)
        assert (margins > 0.001).float().mean() > 0.2


@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
@pytest.mark.parametrize("sharpness", [0.0, 0.5, 4.0])
def test_a_nucleus_equals_that_of_a_full_sort(top_p: float, sharpness: float) -> None:
    """The nucleus may have any number of the 3,000 tokens."""
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(7)) * sharpness
    logits[0, :2] = 40.0
    probabilities = logits.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.values.cumsum(dim=-1) - probabilities.values
    mask = allowed_tokens(logits, Filters(top_p=top_p))
    logits_in_order = logits.gather(-1, probabilities.indices)
    for rounding in (-1e-7, 1e-7):
        last = logits_in_order.masked_fill(before >= top_p + rounding, math.inf).amin(dim=-1, keepdim=True)
        inside = logits >= last.minimum(logits.amax(dim=-1, keepdim=True))
        assert (mask | ~inside if rounding < 0 else inside | ~mask).all()
    for slack in (0.001, 0.1, 7.0):
        filters = Filters(top_p=top_p)
        assert (mask | ~(logits > certain_border(logits, filters, slack))).all()
        border = mask.sum(dim=-1, keepdim=True)
        ranks = [torch.full((50, 1), rank) for rank in range(0, 3000, 60)]
        ranks += [(border + offset).clamp(0, 2999) for offset in range(-10, 10)]
        for rank in ranks:
            tokens = probabilities.indices.gather(-1, rank)
            possible = possible_tokens(logits, tokens[:, 0], filters, slack)
            assert (possible | ~mask.gather(-1, tokens)[:, 0]).all()


def test_a_nucleus_larger_than_what_is_sorted_first_is_certain_too() -> None:
    """All but the last tokens of a flat nucleus are certain, however many there are."""
    logits = torch.linspace(0.0, -3.0, 5000).expand(3, -1).clone()
    logits[1, 0] = 30.0
    filters = Filters(top_p=0.9)
    allowed = allowed_tokens(logits, filters).sum(dim=-1)
    certain = (logits > certain_border(logits, filters, 0.001)).sum(dim=-1)
    assert allowed.tolist()[0] > 3000
    assert (allowed - certain <= 10).all()
    assert (certain <= allowed).all()
