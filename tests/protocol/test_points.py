"""Points: their sums are bounded for every honest distribution, and tell how far misses lie."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.judging.points import LOG_WEIGHTS, count_points, log_factors, log_tail, mean_bound

from protocol.judging.evidence import (
    MAX_SURPRISAL,
    CountedWindow,
    Counts,
    compute_evidence,
    history_surprisal,
    points_surprisal,
    surprisal_threshold,
    window_surprisal,
)
from protocol.limits import MAX_POINTS, MAX_STEPS
from protocol.proof import Step, Thresholds
from tests.support.builders.samples import thresholds

STEPS = tuple(
    Step(beyond=beyond, rate=rate, points=points)
    for beyond, rate, points in ((0.01, 0.02, 4), (0.05, 4e-3, 11), (0.2, 5e-4, 23))
)
PROOF: Thresholds = thresholds(
    margin_steps=STEPS, margin=0.01, margin_rate=0.02, far_margin=100.0, far_rate=0.999, margin_limit=100.0
)
TOKENS = 400


@st.composite
def honest_distributions(draw: st.DrawFn) -> tuple[tuple[Step, ...], list[float]]:
    """Return steps, and the probabilities of 0, 1, ... reached steps, within the rates of the steps."""
    number = draw(st.integers(1, 6))
    rates = sorted(draw(st.lists(st.floats(1e-9, 0.9), min_size=number, max_size=number)), reverse=True)
    points = sorted(draw(st.sets(st.integers(1, MAX_POINTS), min_size=number, max_size=number)))
    steps = tuple(Step(beyond=i, rate=rates[i], points=points[i]) for i in range(number))
    tails: list[float] = []
    for rate in rates:
        tails.append(draw(st.floats(0.0, 1.0)) * min(rate, *tails[-1:], 1.0))
    return steps, [one - other for one, other in zip([1.0, *tails], [*tails, 0.0], strict=True)]


@given(honest_distributions())
def test_the_growth_bounds_every_distribution_within_the_rates(case: tuple[tuple[Step, ...], list[float]]) -> None:
    steps, probabilities = case
    points = np.array([0, *(step.points for step in steps)])
    log_means = np.logaddexp.reduce(np.log(np.maximum(probabilities, 1e-300)) + LOG_WEIGHTS[:, None] * points, axis=1)
    assert (log_means <= -log_factors(0, 1, steps) + 1e-9).all()


@pytest.mark.parametrize("tokens", [1, 24, TOKENS])
def test_the_tail_is_the_exact_probability_at_the_full_rates(tokens: int) -> None:
    """The exact distribution of the sum, by convolution of positive numbers. Up to the mean the result is 1."""
    single = np.zeros(STEPS[-1].points + 1)
    rates = [step.rate for step in STEPS]
    single[0], single[[step.points for step in STEPS]] = 1.0 - rates[0], -np.diff([*rates, 0.0])
    total = np.ones(1)
    for _ in range(tokens):
        total = np.convolve(total, single)[:2000]
    exact = np.cumsum(total[::-1])[::-1]
    above = range(math.ceil(tokens * mean_bound(STEPS)) + 1, min(len(exact), 900))
    tails = np.exp([log_tail(points, tokens, STEPS) for points in above])
    np.testing.assert_allclose(tails, exact[above.start : above.stop], rtol=1e-7)
    assert log_tail(STEPS[-1].points * tokens + 1, tokens, STEPS) == -math.inf


@given(honest_distributions(), st.integers(1, 300), st.data())
def test_the_tail_is_below_chernoffs_bound(
    case: tuple[tuple[Step, ...], list[float]], trials: int, data: st.DataObject
) -> None:
    steps = case[0]
    points = data.draw(st.integers(0, trials * steps[-1].points))
    assert log_tail(points, trials, steps) <= min(0.0, -float(log_factors(points, trials, steps).max())) + 1e-9


def test_more_points_are_never_more_probable() -> None:
    tails = [log_tail(points, TOKENS, STEPS) for points in range(0, 4000, 7)]
    assert all(one >= other for one, other in itertools.pairwise(tails))
    assert log_tail(10**9, 10**9, STEPS) <= log_tail(10**6, 10**9, STEPS)  # a sum of too many values


def test_points_grow_with_the_statistic() -> None:
    values = np.array([0.0, 0.01, 0.0101, 0.05, 0.06, 0.2, 3.0, np.inf, np.nan])
    assert count_points(values, STEPS).tolist() == [0, 0, 4, 4, 11, 11, 23, 23, 23]
    assert count_points(np.array([0, 1, 2, 3], dtype=np.int16), STEPS).tolist() == [0, 23, 23, 23]


def tokens_of(shares: Sequence[float], seed: int, count: int) -> np.ndarray:
    """Return margins of which these shares lie beyond each step: float64 [count]."""
    uniform = np.random.default_rng(seed).random(count)
    return np.where(
        uniform < shares[2], 0.5, np.where(uniform < shares[1], 0.1, np.where(uniform < shares[0], 0.02, 0))
    )


def counts_of(margins: np.ndarray) -> Counts:
    """Return the counts of a group with these margins and right sketches."""
    return compute_evidence(np.zeros(len(margins), dtype=np.int16), margins, [len(margins)], PROOF).counts


HONEST = tuple(step.rate for step in STEPS)
FURTHER = (0.02, 0.016, 0.008)
"""As many margins as honest work may have, but larger ones."""


def test_margins_that_lie_further_are_refused_though_they_are_no_more() -> None:
    counts = [counts_of(tokens_of(FURTHER, seed, TOKENS)) for seed in range(8)]
    without_points = [Counts(item.tokens, item.positions, 0, item.margin_misses) for item in counts]
    assert window_surprisal(without_points, PROOF) < 4.0
    assert window_surprisal(counts, PROOF) > surprisal_threshold(PROOF)
    history = [CountedWindow(counts_of(tokens_of(FURTHER, seed, 50)), PROOF) for seed in range(64)]
    assert history_surprisal(history) > surprisal_threshold(PROOF)


def test_honest_points_at_the_full_rates_are_refused_at_most_as_often_as_the_level_says() -> None:
    level, miners = 0.01, 1500
    refused = sum(
        points_surprisal(counts_of(tokens_of(HONEST, seed, TOKENS)).margin_points, TOKENS, STEPS) > -math.log10(level)
        for seed in range(miners)
    )
    assert refused <= miners * level


def test_the_false_rejection_rate_of_a_history_of_points_is_bounded() -> None:
    level, n, miners = 0.005, 20, 100
    refused = 0
    for seed in range(miners):
        margins = tokens_of(HONEST, seed, n * 24).reshape(n, 24)
        history = [CountedWindow(counts_of(window), PROOF) for window in margins]
        refused += any(history_surprisal(history[:end]) > -math.log10(level) for end in range(1, n + 1))
    assert refused <= 2 * miners * n * level  # of misses, and of points


def test_the_surprisal_of_a_history_of_points_follows_its_formula() -> None:
    history = [Counts(40, 30, margin_points=23), Counts(), Counts(24, 9, margin_points=15)]
    w = 2.0 ** (np.arange(1, 33) / 16)
    M = 1 + 0.02 * (w**4 - 1) + 4e-3 * (w**11 - w**4) + 5e-4 * (w**23 - w**11)
    R = np.zeros(32)
    for t, x in ((40, 23), (24, 15)):
        R = (1.0 + R) * np.exp(x * np.log(w) - t * np.log(M))
    assert history_surprisal([CountedWindow(counts, PROOF) for counts in history]) == pytest.approx(np.log10(R.mean()))


def test_the_largest_counts_have_a_surprisal() -> None:
    most = Counts(10**9, 10**9, 0, 0, MAX_POINTS * 10**9, MAX_POINTS * 10**9)
    assert history_surprisal([CountedWindow(most, PROOF)]) == window_surprisal([most], PROOF) == MAX_SURPRISAL
    steps = tuple(Step(beyond=i, rate=1 - 1e-6, points=MAX_POINTS - MAX_STEPS + i + 1) for i in range(MAX_STEPS))
    assert points_surprisal(MAX_POINTS * 1000, 1000, steps) < 1.0


@pytest.mark.parametrize(
    "changes", [{"beyond": 0.2}, {"rate": 0.03}, {"points": 4}, {"points": 0}, {"points": 101}, {"beyond": -1.0}]
)
def test_steps_that_do_not_ascend_are_invalid(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        second = Step(**(STEPS[1].model_dump() | changes))
        thresholds(margin_steps=(STEPS[0], second, STEPS[2]))
