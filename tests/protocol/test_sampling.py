"""Seed-bound sampling: it gives the same bits everywhere, samples the policy's distribution, and can be checked."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.rollout import sampling
from protocol.rollout.filters import Filters, allowed_tokens, certain_border, possible_tokens
from tests.protocol import slow_sampling
from tests.support.builders.samples import seeds

SEED = bytes(range(16))
EDGES = [0, 1, 2, 127, 128, (1 << 31) - 2, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 2, (1 << 32) - 1]


def margins(logits: torch.Tensor, tokens: torch.Tensor, seed: bytes, temperature: float) -> torch.Tensor:
    return sampling.batch_margins(logits, tokens, *sampling.token_places([seed], [len(tokens)]), temperature)


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 17) - 1),
    st.lists(st.integers(0, (1 << 31) - 1), min_size=1),
)
def test_the_slow_implementation_gives_the_same_bits(seed: bytes, position: int, tokens: list[int]) -> None:
    words = sampling.hash_words(sampling.seed_words([seed])[0], torch.tensor(position), torch.tensor(tokens))
    assert words.tolist() == [slow_sampling.word(seed, position, token) for token in tokens]
    units = (sampling.gumbel(words).double() / sampling.NOISE_UNIT).tolist()
    assert units == [slow_sampling.units(word) for word in words.tolist()]


def test_the_slow_implementation_gives_the_same_noise_at_the_edges() -> None:
    near_powers = [(1 << bit) + step for bit in range(1, 32) for step in (-2, -1, 0, 1)]
    words = sorted({*EDGES, *near_powers, *((1 << 32) - 1 - word for word in near_powers)})
    units = (sampling.gumbel(torch.tensor(words)).double() / sampling.NOISE_UNIT).tolist()
    assert units == [slow_sampling.units(word) for word in words]


def test_noise_rises_with_the_word() -> None:
    words = torch.tensor(sorted({*random.Random(0).sample(range(1 << 32), 100_000), *EDGES}))
    assert (sampling.gumbel(words).diff() >= 0).all()


def test_noise_is_near_the_exact_quantile_everywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.arange(50_000)
    words = torch.cat([torch.randint(0, 1 << 32, (500_000,), generator=generator), ends, (1 << 32) - 1 - ends])
    low = words < 1 << 31
    tail = (2 * torch.where(low, words, (1 << 32) - 1 - words) + 1).double() / 2**33  # u or 1 - u, exact
    exact = torch.where(low, -torch.log(-torch.log(tail)), -torch.log(-torch.log1p(-tail)))
    assert (sampling.gumbel(words).double() - exact).abs().max() < 4e-6


def test_the_table_does_not_depend_on_the_last_bits_of_a_logarithm() -> None:
    """No entry lies near the middle between two integers, so libraries whose logarithms differ slightly round alike."""
    for index in range(32 * 256 + 1):
        u = min(math.ldexp(1 + index % 256 / 256, index // 256 - 33), 0.5)
        for value in (-math.log(-math.log(u)) * 2**19, -math.log(-math.log1p(-u)) * 2**19):
            assert abs(value % 1 - 0.5) > 1e-5


def test_words_are_uniform() -> None:
    """Chi-square over 256 cells of the high and of the low byte: 255 degrees of freedom, 0.9999 quantile 346."""
    words = sampling.hash_words(sampling.seed_words([SEED])[0], torch.arange(64), torch.arange(4096)).reshape(-1)
    for byte in (words >> 24, words & 0xFF):
        counts = torch.bincount(byte, minlength=256).double()
        expected_counts = len(words) / 256
        assert ((counts - expected_counts) ** 2 / expected_counts).sum() < 346


@pytest.mark.parametrize("vocabulary", [2, 300, 1024, 3000])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 20.0])
def test_the_check_considers_every_token(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, vocabulary, generator=generator) * sharpness
    tokens = torch.randint(0, vocabulary, (40,), generator=generator)
    tokens[::3] = logits[::3].argmax(dim=-1)
    result = sampling.batch_margins(logits, tokens, *sampling.token_places(seeds(3), [13, 0, 27]), 0.8)
    positions = torch.tensor([*range(13), *range(27)])
    words = sampling.seed_words([seeds(3)[0]] * 13 + [seeds(3)[2]] * 27)
    scores = logits / 0.8 + sampling.noise(words, positions, vocabulary)
    full = scores.max(dim=-1).values - scores.gather(-1, tokens[:, None]).squeeze(-1)
    assert torch.equal(result, full)


@pytest.mark.parametrize("first", [0, 5])
def test_a_stop_is_taken_or_drawn(first: int) -> None:
    """Compared with the choice among all tokens; 5 tokens of the first completion came before."""
    lengths, stops, temperature = [400, 0, 200], (3, 7), 0.7
    count = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, 12, generator=generator)
    positions = torch.cat([torch.arange(first, first + lengths[0]), torch.arange(lengths[2])])
    words = sampling.seed_words(seeds(3)).repeat_interleave(torch.tensor(lengths), dim=0)
    chosen = sampling.choose(logits, words, positions, temperature)
    tokens = torch.where(
        torch.rand(count, generator=generator) < 0.5, torch.randint(12, (count,), generator=generator), chosen
    )
    parts = *sampling.token_places(seeds(3), lengths, first=first), temperature
    margins = sampling.batch_margins(logits, tokens, *parts)
    drawn = sampling.drawn_stops(logits, tokens, margins, *parts, stops)
    ids = torch.tensor(stops)
    assert torch.equal(drawn, torch.isin(tokens, ids) | torch.isin(chosen, ids))


def test_largest_noise_bounds_the_noise() -> None:
    assert sampling.gumbel(torch.tensor([(1 << 32) - 1])).item() <= sampling.LARGEST_NOISE


def test_equal_scores_give_the_smallest_id() -> None:
    logits = torch.full((1, 5), -math.inf)
    logits[0, 2] = logits[0, 3] = 0.0
    noise = sampling.noise(sampling.seed_words([SEED]), torch.tensor([0]), 5)
    logits = logits - noise
    assert sampling.choose(logits, sampling.seed_words([SEED]), torch.tensor([0]), 1.0).tolist() == [2]


def test_no_tokens() -> None:
    assert margins(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), SEED, 1.0).shape == (0,)
    assert sampling.seed_words([]).shape == (0, 4)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_seed_has_sixteen_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        sampling.seed_words([bytes(size)])


@pytest.mark.parametrize(
    ("tokens", "complete", "text"),
    [
        ((), False, ()),
        ((4,), False, (4,)),
        ((2,), True, ()),
        ((4, 7), True, (4,)),
        ((4, 5, 6), True, (4, 5, 6)),
        ((4, 5, 7), True, (4, 5)),
        ((4, 7, 5), False, (4, 7, 5)),
        ((7, 2), False, (7,)),
        ((4, 5, 6, 7), False, (4, 5, 6)),
    ],
)
def test_a_completion_ends_at_its_first_stop_token_or_at_the_maximum_length(
    tokens: tuple[int, ...], complete: bool, text: tuple[int, ...]
) -> None:
    params = sampling.SamplingParams(temperature=1.0, max_tokens=3, stops=(2, 7))
    assert params.is_complete(tokens) == complete
    assert params.without_stop(tokens) == text


# Filters, and the check at their border: a token that passes with honest rounding errors is no miss; others are


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
    words, places = sampling.token_places(seeds(1), [count])
    tokens = sampling.choose(jitter(logits, spread, 1), words, places, 1.0, filters)
    margins = sampling.batch_margins(jitter(logits, spread, 2), tokens, words, places, 1.0, filters, 2 * spread)
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
    margins = sampling.batch_margins(
        logits, tokens, *sampling.token_places(seeds(1), [count]), 1.0, filters, slack, limit
    )
    assert margins.min() > max(slack, 1e-3)
    if filters.top_k != 4:  # whose border is among tokens nearly alike: a miss, not yet a proof
        assert margins.min() > limit


@pytest.mark.parametrize("filters", FILTERS)
def test_a_margin_that_is_certain_only_within_the_slack_is_a_miss_and_no_rejection(filters: Filters) -> None:
    """Rounding beyond the slack, as in few tokens with bfloat16, is no ground to reject if the border was uncertain."""
    count = 4000
    logits = torch.randn(count, 40, generator=torch.Generator().manual_seed(5)) * 2.0
    words, places = sampling.token_places(seeds(1), [count])
    tokens = sampling.choose(jitter(logits, 0.5, 1), words, places, 1.0, filters)
    margins = sampling.batch_margins(jitter(logits, 0.5, 2), tokens, words, places, 1.0, filters, 0.01, 2.0)
    assert margins.max() < 2.0
    assert 0 < (margins > 0.01).sum() < 0.2 * count


def test_greedy_sampling_is_detected_with_a_filter() -> None:
    count = 2000
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(6))
    places = sampling.token_places(seeds(1), [count])
    for filters in (Filters(top_k=2), Filters(top_p=0.9)):
        margins = sampling.batch_margins(logits, logits.argmax(dim=-1), *places, 1.0, filters, 0.001, 0.004)
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
