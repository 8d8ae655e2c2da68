"""Thresholds, rates and extrapolated tails from known distributions, and which copies the thresholds refuse."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator

from grailnode import UserError
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.procedure import REQUIRED_BITS, check_power, power
from grailnode.calibration.tail import rate_bounds, tail_rates
from grailnode.calibration.thresholds import Honest, ThresholdDemands, choose_thresholds, likelihood_scores, table
from protocol.judging.evidence import NO_EVIDENCE, REPRODUCED, UNREPRODUCED, advance, exceeded, is_improbable
from protocol.limits import MAX_STEPS
from protocol.proof import DECADE, RATE_UNIT, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from tests.support.builders.proofs import FLOAT32

ROLLOUTS = 4


def groups(
    count: int,
    *,
    miss: float = 0.0,
    distance: int = 9,
    tip: float = 0.0,
    margin: float = 0.5,
    shift: float = 1e-6,
    length: int = 20,
    seed: int = 0,
) -> list[GroupMeasurement]:
    """Return groups whose positions are off by `distance` with probability `miss`, and whose tokens by `margin` with
    probability `tip`; their last tokens are stop tokens.
    """
    generator = np.random.default_rng(seed)
    measurements = []
    for _ in range(count):
        lengths = tuple(int(n) for n in generator.integers(length // 2, length + 1, ROLLOUTS))
        n = sum(lengths)
        distances = np.where(generator.random(n) < miss, distance, 0).astype(np.uint8)
        margins = np.where(generator.random(n) < tip, margin, 0.0).astype(np.float32)
        noise = (shift * generator.standard_normal(n)).astype(np.float32)
        measurements.append(
            GroupMeasurement(
                lengths,
                distances=distances,
                sketch_errors=(distances + np.abs(noise)).astype(np.float32),
                repeats=np.zeros(n, dtype=bool),
                margins=margins,
                shifts=np.abs(noise),
                stops=np.isin(np.arange(n), np.cumsum(lengths) - 1),
                differences=noise,
                rivals=np.ones(n, dtype=np.float32),
            )
        )
    return measurements


COPY = groups(40, miss=0.9, tip=0.5, seed=99)
"""A copy that any reasonable thresholds refuse."""


# Thresholds from known distributions


DEMANDS = ThresholdDemands(headroom=1.0)


def thresholds(
    honest: Honest, copies: Sequence[Sequence[GroupMeasurement]] = (COPY,), demands: ThresholdDemands = DEMANDS
) -> Thresholds:
    return choose_thresholds(honest, copies, FLOAT32, demands)


@pytest.mark.parametrize("rate", [1e-3, 0.02, 0.3])
def test_bounds_cover_the_known_rate(rate: float) -> None:
    spec = thresholds({"pair": groups(200, miss=rate, tip=rate / 10)})
    assert rate < spec.sketch.rates[0] / RATE_UNIT < rate * 1.3 + 3e-3
    assert rate / 10 < spec.margin.rates[0] / RATE_UNIT < rate / 10 * 1.8 + 2e-3
    assert rate / 10 < spec.stop.rates[0] / RATE_UNIT < rate / 10 * 2.5 + 2e-2


def test_bounds_cover_in_as_many_tries_as_the_confidence_says() -> None:
    demands = replace(DEMANDS, confidence=0.9)
    rates = [thresholds({"pair": groups(20, miss=0.02, seed=s)}, demands=demands).sketch.rates[0] for s in range(40)]
    assert sum(rate > 0.02 * RATE_UNIT for rate in rates) >= 34


def test_the_worst_pair_determines_the_bound() -> None:
    quiet = {f"quiet-{i}": groups(100, seed=i) for i in range(9)}
    noisy = groups(100, miss=0.05, seed=50)
    both, alone = thresholds(quiet | {"noisy": noisy}).sketch, thresholds({"noisy": noisy}).sketch
    assert (both.beyond[0], both.rates[0]) == (alone.beyond[0], alone.rates[0])
    assert both.rates[0] > 0.05 * RATE_UNIT


def rounded(count: int, seed: int, errors: float) -> list[GroupMeasurement]:
    """Return groups whose scores are off by normal errors of this size, and what margins these cause."""
    generator = np.random.default_rng(seed)
    result = []
    for group in groups(count, length=60, seed=seed):
        shifts = errors * generator.standard_normal(len(group.margins))
        gaps = generator.exponential(1.0, len(shifts))
        margins = np.where(gaps < shifts, shifts - gaps, 0.0).astype(np.float32)
        result.append(replace(group, shifts=np.abs(shifts).astype(np.float32), margins=margins))
    return result


def test_larger_errors_than_were_measured_are_honest_as_far_as_the_headroom() -> None:
    """Errors three times as large cause margins three times as often, but far ones much more often."""
    honest = {"pair": rounded(300, 0, 0.01)}
    narrow, wide = (thresholds(honest, demands=replace(DEMANDS, headroom=h)) for h in (1.0, 4.0))
    counts = {
        errors: [[g.counts(row) for g in rounded(300, 1, errors)] for row in (narrow, wide)] for errors in (0.03, 0.2)
    }
    assert [is_improbable(NO_EVIDENCE, part, row) for part, row in zip(counts[0.03], (narrow, wide), strict=True)] == [
        True,
        False,
    ]
    assert is_improbable(NO_EVIDENCE, counts[0.2][1], wide)


def test_steps_are_where_cheats_have_most_evidence() -> None:
    spec = thresholds({"pair": rounded(300, 0, 0.01)}, demands=replace(DEMANDS, headroom=4.0)).margin
    assert len(spec.beyond) == MAX_STEPS
    assert sum(0.01 < beyond * NOISE_UNIT < 0.5 for beyond in spec.beyond) >= MAX_STEPS // 2


def test_clustered_misses_raise_the_rates() -> None:
    """One group in ten misses everywhere: independent misses of the same rate would never give such a group."""
    clustered = [*groups(90), *groups(10, miss=0.9, seed=1)]
    independent = groups(100, miss=0.09, seed=2)
    rates = [thresholds({"pair": part}).sketch.rates[0] for part in (clustered, independent)]
    assert rates[0] > 2 * rates[1]


@pytest.mark.parametrize("missed", [0, 8, 60])
def test_replies_that_are_not_exact_have_a_bound_on_the_groups_that_differ(missed: int) -> None:
    """Sound however the rollouts of a group depend on each other: the rate of groups is at most the sum of theirs."""
    whole, size = groups(50), ROLLOUTS
    flags = (np.arange(50 * size) >= missed).reshape(50, size).tolist()
    spec = thresholds(
        {"pair": [replace(group, reproduced=tuple(own)) for group, own in zip(whole, flags, strict=True)]}
    )
    assert spec.replay is not None
    rate = spec.replay.rates[0] / RATE_UNIT
    assert min(0.999, missed / 50) < rate <= missed / 50 * 2.5 + size * 5 / (50 * size)
    assert is_improbable(NO_EVIDENCE, [UNREPRODUCED] * 60, spec) == (missed < 60)
    honest = [UNREPRODUCED if value < rate else REPRODUCED for value in np.random.default_rng(1).random(5000)]
    assert not is_improbable(NO_EVIDENCE, honest, spec)
    assert thresholds({"pair": whole}).replay is None


@pytest.mark.parametrize("miss", [0.0, 0.01, 0.2])
def test_more_groups_of_the_same_distribution_are_accepted(miss: float) -> None:
    spec = thresholds({"pair": groups(200, miss=miss, tip=miss / 10)})
    evidence = NO_EVIDENCE
    for group in groups(2000, miss=miss, tip=miss / 10, seed=1):
        evidence = advance(evidence, group.counts(spec), spec)
        assert exceeded(evidence, spec) is None


def test_pairs_that_agree_in_nothing_have_no_thresholds() -> None:
    apart = [replace(group, margins=np.full_like(group.margins, np.nan)) for group in groups(20)]
    with pytest.raises(UserError, match="in most of its trials"):
        thresholds({"pair": apart})


def test_the_threshold_divides_the_level_among_all_alternatives() -> None:
    spec = thresholds({"pair": groups(40)}, demands=replace(DEMANDS, level=1e-6))
    alternatives = 4 + sum(len(item.alternatives) for item in (spec.sketch, spec.margin, spec.stop))
    assert spec.threshold == math.ceil(DECADE * math.log10(alternatives / 1e-6))


def test_scores_are_likelihood_ratios_that_never_fall() -> None:
    """Half of a cheat's trials reach the first step, where honest work has one in a hundred, and as many the last."""
    assert likelihood_scores([0.01, 0.0001], np.array([0.5, 0.25])) == pytest.approx(
        [math.log10(0.25 / 0.0099 / (0.5 / 0.99)), math.log10(0.25 / 0.0001 / (0.5 / 0.99))]
    )
    falling = likelihood_scores([0.5, 0.1, 0.05], np.array([0.6, 0.01, 0.009]))
    assert falling == sorted(falling)


def test_the_growth_of_an_alternative_follows_from_the_rates() -> None:
    built = table((0, 5), [0.1, 0.01], [[1.0, 2.0]])
    expectation = 1 + 0.1 * 9 + 0.01 * 90
    growth = built.alternatives[0].growth
    assert math.log10(expectation) * DECADE <= growth <= math.log10(expectation) * DECADE + 3


def heavy_tailed(count: int, seed: int) -> list[GroupMeasurement]:
    """Return groups whose shifts fall as a power, and whose margins are what these cause where scores nearly tie."""
    generator = np.random.default_rng(seed)
    result = []
    for group in groups(count, seed=seed):
        shifts = 0.005 * (1.0 + generator.pareto(4.0, len(group.margins)))
        gaps = generator.exponential(1.0, len(shifts))
        margins = np.where(gaps < shifts, shifts - gaps, 0.0)
        result.append(replace(group, shifts=shifts.astype(np.float32), margins=margins.astype(np.float32)))
    return result


def test_far_margins_have_rates_that_no_count_could_show() -> None:
    spec = thresholds({"pair": heavy_tailed(500, 0)}).margin
    seen = max(float(group.margins.max()) for group in heavy_tailed(500, 0))
    steps = zip(spec.beyond, spec.rates, strict=True)
    rate = next(rate for beyond, rate in steps if beyond >= 4 * seen / NOISE_UNIT) / RATE_UNIT
    assert 0 < rate < 1 / (500 * 60) / 10


def test_few_far_margins_refuse_a_window_and_one_does_not() -> None:
    spec = thresholds({"pair": heavy_tailed(500, 0)})
    window = heavy_tailed(16, 1)

    def refused(edits: int) -> bool:
        edited = [replace(group, margins=group.margins.copy()) for group in window]
        for group in edited[:edits]:
            group.margins[3] = 8.0
        return is_improbable(NO_EVIDENCE, [group.counts(spec) for group in edited], spec)

    assert [refused(edits) for edits in (0, 4)] == [False, True]


def test_noise_of_rounding_has_a_last_step_near_what_was_measured() -> None:
    spec = thresholds({"pair": groups(200, shift=1e-5)}).margin
    assert spec.rates[-1] <= 2e-15 * RATE_UNIT
    assert 1e-5 < spec.beyond[-1] * NOISE_UNIT < 1e-2


def test_a_forged_sketch_refuses_its_group_where_honest_sketches_differ_by_rounding() -> None:
    spec = thresholds({"pair": [replace(g, sketch_errors=g.shifts) for g in groups(200, shift=1e-3)]})
    (group,) = groups(1)
    distances = group.distances.copy()
    distances[5] = 90
    assert is_improbable(NO_EVIDENCE, [replace(group, distances=distances).counts(spec)], spec)


# Which copies are refused


def test_a_window_refuses_a_copy_that_no_group_refuses() -> None:
    spec = thresholds({"pair": groups(400, miss=0.01)}, [groups(40, miss=0.12, seed=3)])
    copy = groups(100, miss=0.12, seed=4)
    row = power(4, "pair", copy, spec, 32)
    assert row.groups < 0.1
    assert row.windows > 0.99
    sizes = (1, 8, 64)
    refused = [is_improbable(NO_EVIDENCE, [copy[0].counts(spec)] * size, spec) for size in sizes]
    assert refused == [power(4, "pair", copy[:1], spec, size).windows for size in sizes]
    assert len(set(refused)) == 2


def test_only_copies_of_the_required_bits_have_to_be_refused() -> None:
    honest = {"pair": groups(100)}
    spec = thresholds(honest)
    check_power([power(8, "pair", groups(50), spec, 4), power(REQUIRED_BITS, "pair", COPY, spec, 4)], 4)


# Extrapolation of known tails


LEVEL, DROP, MOST = 1e-9, 2.7, 100.0
TRIES = 20
FAR = np.array([0.5, 1.0, 2.0, 5.0, 10.0, 30.0])

Rate = Callable[[float], float]
"""Returns the probability of a margin beyond a value."""


def draws(draw: Callable[[Generator], np.ndarray], beyond: np.ndarray) -> list[np.ndarray]:
    """Return the bounds beyond some values of several draws."""
    return [tail_rates(draw(np.random.default_rng(seed)), beyond, DROP, MOST) for seed in range(TRIES)]


def limits(draw: Callable[[Generator], np.ndarray]) -> list[float]:
    """Return the smallest margins, of a fine grid, beyond which the bound is at most the level."""
    grid = np.geomspace(1e-3, MOST, 4000)
    return [float(grid[np.argmax(np.append(rates[:-1], 0.0) <= LEVEL)]) for rates in draws(draw, grid)]


def exponential(x: float) -> float:
    """The integral of exp(-10 s) from x to x + 1."""
    return 0.1 * (math.exp(-10.0 * x) - math.exp(-10.0 * (x + 1.0)))


def half_normal(x: float) -> float:
    """The integral of erfc(z / sqrt 2), z = 100 s, from x on; what lies beyond x + 1 is far below every level."""
    z = 100.0 * x
    return 0.01 * (math.sqrt(2.0 / math.pi) * math.exp(-z * z / 2.0) - z * math.erfc(z / math.sqrt(2.0)))


def power_law(exponent: float) -> Rate:
    """The integral of (s / 0.01) ** -a from x to x + 1."""

    def rate(x: float) -> float:
        falling = x ** (1.0 - exponent) - (x + 1.0) ** (1.0 - exponent)
        return float(0.01**exponent / (exponent - 1.0) * falling)

    return rate


def reached(rate: Rate) -> float:
    """The smallest margin whose rate is at most the level."""
    low, high = 1e-3, MOST
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rate(middle) > LEVEL else (low, middle)
    return high


def test_the_limit_covers_a_tail_closely() -> None:
    results = limits(lambda generator: generator.exponential(0.1, 100_000))
    assert sum(x >= reached(exponential) for x in results) >= TRIES - 2
    assert max(results) < 2.0 * reached(exponential)
    results = limits(lambda generator: np.abs(generator.normal(0.0, 0.01, 100_000)))
    assert sum(x >= reached(half_normal) for x in results) >= TRIES - 2
    assert max(results) < 2.0 * reached(half_normal)


@pytest.mark.parametrize("exponent", [2.5, 3.0, 4.0])
def test_rates_cover_a_power_law_at_every_far_margin(exponent: float) -> None:
    true_rates = np.array([power_law(exponent)(x) for x in FAR])
    bounds = np.array(draws(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 100_000)), FAR))
    assert (bounds >= true_rates).all(axis=1).sum() >= TRIES - 2
    assert (bounds <= 40.0 * true_rates).all()  # a bound that is far above the truth lets edited tokens pass
    assert (np.diff(bounds, axis=1) <= 0.0).all()


def test_rates_are_not_claimed_where_the_tail_has_not_begun() -> None:
    (rates, *_) = draws(lambda generator: generator.exponential(0.1, 10_000), np.array([0.0, 0.1]))
    assert rates.tolist() == [1.0, 1.0]


def test_rare_outliers_are_not_ignored() -> None:
    """One of a thousand values follows a power law; the limit then lies beyond 10 times the largest of the others."""

    def draw(generator: Generator) -> np.ndarray:
        values = generator.exponential(0.1, 100_000)
        outliers = generator.random(len(values)) < 1e-3
        values[outliers] = 0.5 * (1.0 + generator.pareto(3.0, outliers.sum()))
        return values

    assert sum(x > 12.0 for x in limits(draw)) >= TRIES - 4


def test_fewer_values_give_a_larger_limit() -> None:
    few = limits(lambda generator: generator.exponential(0.1, 300))
    many = limits(lambda generator: generator.exponential(0.1, 30_000))
    assert sorted(few)[TRIES // 2] > 1.2 * sorted(many)[TRIES // 2]


def test_equal_values_are_not_extrapolated() -> None:
    assert tail_rates(np.full(1000, 0.25), np.array([0.25, 1.0]), DROP, MOST).tolist() == [0.0, 0.0]


# Confidence bounds on rates, compared with exact sums of binomial terms


@given(st.integers(1, 60), st.floats(0.8, 0.9999), st.data())
def test_so_few_events_are_no_likelier_at_the_bound_than_the_confidence_leaves(
    trials: int, confidence: float, data: st.DataObject
) -> None:
    events = data.draw(st.integers(0, trials))
    bound = float(rate_bounds(np.array([events]), trials, confidence)[0])
    assert events / trials <= bound <= 1
    probability = sum(comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(events + 1))
    assert bound == 1 or probability <= (1 - confidence) * (1 + 1e-9)


def test_the_bounds_of_rare_events_are_close() -> None:
    rule_of_three, hundred = rate_bounds(np.array([0, 100]), 1_000_000, 0.95)
    assert rule_of_three == pytest.approx(3e-6, rel=0.01)
    assert hundred == pytest.approx(118e-6, rel=0.01)


@pytest.mark.parametrize(("trials", "confidence"), [(0, 0.9), (3, 0.0), (3, 1.0)])
def test_invalid_arguments_are_refused(trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="a bound needs"):
        rate_bounds(np.array([0]), trials, confidence)
