"""The compiled choice of tokens gives the bits of the reference, whatever the logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.rollout import sampling
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.token_choice import choose_with_log_probabilities, greedy_with_log_probabilities

FILTERS = [EVERY_TOKEN, Filters(top_k=5), Filters(top_p=0.7), Filters(min_p=0.05), Filters(50, 0.9, 0.01)]


def rows(count: int, vocabulary: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random logits, seed words and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * scale
    words = torch.randint(0, 1 << 32, (count, 4), generator=generator)
    return logits, words, torch.randint(0, 1 << 17, (count,), generator=generator)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 1000, 32_000])
def test_the_tokens_are_those_of_the_reference(vocabulary: int, temperature: float, filters: Filters) -> None:
    logits, words, positions = rows(64 if vocabulary < 10_000 else 8, vocabulary, vocabulary)
    tokens, log_probabilities = choose_with_log_probabilities(logits, words, positions, temperature, filters)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, temperature, filters))
    expected = sampling.log_probabilities(logits, tokens, temperature, filters)
    torch.testing.assert_close(log_probabilities, expected, rtol=0, atol=2e-5)


@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(0.0, 1e30), st.sampled_from(FILTERS))
def test_any_logits_and_seeds_give_the_tokens_of_the_reference(
    seed: int, vocabulary: int, scale: float, filters: Filters
) -> None:
    logits, words, positions = rows(4, vocabulary, seed, scale)
    tokens, _ = choose_with_log_probabilities(logits, words, positions, 1.0, filters)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, 1.0, filters))


def test_equal_logits_leave_the_choice_to_the_noise() -> None:
    _, words, positions = rows(32, 5000, 1)
    logits = torch.zeros(32, 5000)
    tokens, _ = choose_with_log_probabilities(logits, words, positions, 1.0)
    assert torch.equal(tokens, sampling.noise(words, positions, 5000).argmax(dim=-1))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_give_the_token_of_the_reference(value: float) -> None:
    logits, words, positions = rows(3, 200, 2)
    logits[1] = value
    tokens, _ = choose_with_log_probabilities(logits, words, positions, 1.0)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, 1.0))


def test_greedy_takes_the_largest_logit() -> None:
    logits, _, _ = rows(8, 500, 3)
    tokens, log_probabilities = greedy_with_log_probabilities(logits)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    torch.testing.assert_close(log_probabilities, logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-5)
