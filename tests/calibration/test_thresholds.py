"""Thresholds and extrapolated tails from known distributions, and which copies the thresholds refuse."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import Generator

from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.separation import REQUIRED_BITS, TooWideError, check, power
from grailnode.calibration.tail import MarginTail
from grailnode.calibration.thresholds import (
    CalibrationError,
    Honest,
    MeasuredMargins,
    ThresholdDemands,
    choose_thresholds,
    is_refused,
    points_of,
    relative_entropy,
    surprisals,
)
from protocol.judging.evidence import Counts, surprisal_threshold, window_surprisal
from protocol.proof import Thresholds
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
    probability `tip`.
    """
    generator = np.random.default_rng(seed)
    measurements = []
    for _ in range(count):
        lengths = tuple(int(n) for n in generator.integers(length // 2, length + 1, ROLLOUTS))
        n = sum(lengths)
        measurements.append(
            GroupMeasurement(
                lengths,
                np.where(generator.random(n) < miss, distance, 0).astype(np.int16),
                np.zeros(n, dtype=bool),
                np.where(generator.random(n) < tip, margin, 0.0).astype(np.float32),
                (shift * np.abs(generator.standard_normal(n))).astype(np.float32),
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


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.02, 0.3])
def test_bounds_cover_the_known_rate(rate: float) -> None:
    spec = thresholds({"pair": groups(200, miss=rate, tip=rate / 10)})
    assert spec.sketch_tolerance < 9  # below the distance of the misses: they are counted
    assert rate < spec.sketch_rate < rate * 1.25 + 1e-3
    assert spec.margin < 0.5
    assert rate / 10 < spec.margin_rate < rate / 10 * 1.5 + 1e-3


def test_bounds_cover_in_as_many_tries_as_the_confidence_says() -> None:
    demands = replace(DEMANDS, confidence=0.9)
    covered = [
        thresholds({"pair": groups(20, miss=0.02, seed=s)}, demands=demands).sketch_rate > 0.02 for s in range(60)
    ]
    assert sum(covered) >= 48  # 54 are expected; fewer than 48 have a probability of 1%


def test_the_worst_pair_determines_the_bound() -> None:
    quiet = {f"quiet-{i}": groups(100, seed=i) for i in range(9)}
    noisy = groups(100, miss=0.05, seed=50)
    assert thresholds(quiet | {"noisy": noisy}).sketch_rate == thresholds({"noisy": noisy}).sketch_rate > 0.05


def test_a_tolerance_is_chosen_where_the_copy_differs_most() -> None:
    honest = groups(100, miss=0.5, distance=3)  # half of the honest positions are off by 3, copies by 9
    assert thresholds({"pair": honest}).sketch_tolerance == 3
    assert thresholds({"pair": groups(100)}).sketch_tolerance == 0


def test_headroom_raises_the_bounds() -> None:
    honest = {"pair": groups(100, miss=0.01)}
    narrow, wide = (thresholds(honest, demands=replace(DEMANDS, headroom=h)) for h in (1.0, 4.0))
    assert narrow.sketch_tolerance == wide.sketch_tolerance
    assert 2 * narrow.sketch_rate < wide.sketch_rate < 4 * narrow.sketch_rate  # the bound of four times the misses
    largest = max(float(group.shifts.max()) for group in honest["pair"])
    assert wide.margin_limit >= 4 * largest > narrow.margin_limit / 2


def test_clustered_misses_raise_the_rate() -> None:
    """One rollout in twenty misses in most of its positions, which independent misses at the mean rate never do."""
    generator = np.random.default_rng(0)

    def clustered(group: GroupMeasurement) -> GroupMeasurement:
        bad = np.repeat(generator.random(len(group.lengths)) < 0.05, group.lengths)
        return replace(group, distances=np.where(bad & (generator.random(len(bad)) < 0.7), 9, 0).astype(np.int16))

    honest = {"pair": [clustered(group) for group in groups(200)]}
    spec = thresholds(honest, copies=(groups(40, miss=1.0, distance=60),))
    assert spec.sketch_tolerance < 9 or spec.sketch_rate < 0.03
    assert max(surprisals(spec, honest, DEMANDS.window)) < surprisal_threshold(spec)


@pytest.mark.parametrize("miss", [0.0, 0.01, 0.2])
def test_more_groups_of_the_same_distribution_are_accepted(miss: float) -> None:
    spec = thresholds({"pair": groups(200, miss=miss, distance=2, tip=1e-3, margin=1e-6)})
    later = groups(400, miss=miss, distance=2, tip=1e-3, margin=1e-6, seed=1)
    assert not any(is_refused(g.weigh(spec), spec) for g in later)


def test_the_limit_lies_beyond_honest_shifts() -> None:
    limit = MeasuredMargins.of(groups(200, shift=1e-3), DEMANDS).limit
    assert 4e-3 < limit < 0.1  # the largest of some 12,000 normal shifts is about 4 standard deviations
    assert MeasuredMargins.of(groups(200, shift=0.0), DEMANDS).limit > 0  # a unit in the last place
    assert MeasuredMargins.of(groups(200, tip=0.01, margin=0.75), DEMANDS).limit >= 0.75
    heavy = [replace(g, shifts=(1e-6 / np.random.default_rng(0).random(len(g.shifts)) ** 2)) for g in groups(50)]
    assert MeasuredMargins.of(heavy, DEMANDS).limit == 100.0  # a tail without a mean: no limit can be estimated


def test_nan_is_a_miss() -> None:
    nan_groups = [replace(g, margins=np.full_like(g.margins, np.nan), shifts=g.margins * np.nan) for g in groups(20)]
    spec = thresholds({"pair": nan_groups})
    assert spec.margin_rate > 0.99
    assert spec.margin_limit == 100.0


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(CalibrationError, match="ask for more --rollouts"):
        thresholds({"pair": groups(7)})


def test_relative_entropy() -> None:
    assert relative_entropy(0.5, 0.25) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    assert relative_entropy(1.0, 0.25) == pytest.approx(math.log(4))
    assert relative_entropy(0.2, 0.25) == 0.0


def test_points_are_the_doublings_of_a_copys_share_and_never_fall() -> None:
    rates = np.array([0.08, 0.01, 0.001, 0.0005])
    shares = np.array([0.32, 0.24, 0.08, 0.079])
    # Between the thresholds, the ratios are 0.68/0.92, 0.08/0.07, then 0.16/0.009 and 0.001/0.0005, which are pooled
    # because the second one is smaller, and 0.079/0.0005 beyond the last one.
    doublings = [math.log2(ratio / (0.68 / 0.92)) for ratio in (0.08 / 0.07, 0.161 / 0.0095, 0.079 / 0.0005)]
    first, pooled, last = (round(4 * number) for number in doublings)
    assert points_of(rates, shares) == [first, pooled, pooled, last]
    assert points_of(rates, rates) == [0, 0, 0, 0]


def test_steps_have_bounds_of_the_worst_pair() -> None:
    quiet = groups(200, tip=1e-3, margin=0.01)
    honest = {"quiet": quiet, "noisy": groups(200, tip=0.01, margin=0.1, seed=2)}
    spec = thresholds(honest, copies=(groups(60, tip=0.2, margin=0.5, miss=0.9, seed=3),))
    for pair in honest.values():
        margins = np.concatenate([group.margins for group in pair])
        assert all((margins > step.beyond).mean() <= step.rate for step in spec.margin_steps)


def test_more_honest_groups_are_accepted_by_their_points() -> None:
    """Rollouts whose margins come in clusters, as those of one prompt may."""
    generator = np.random.default_rng(1)

    def clustered(group: GroupMeasurement) -> GroupMeasurement:
        bad = np.repeat(generator.random(len(group.lengths)) < 0.05, group.lengths)
        margins = np.where(bad & (generator.random(len(bad)) < 0.3), 0.2, 0.0).astype(np.float32)
        return replace(group, margins=margins)

    honest = {"pair": [clustered(group) for group in groups(300)]}
    spec = thresholds(honest, copies=(groups(60, tip=0.5, margin=1.0, miss=0.9, seed=3),))
    later = [clustered(group).weigh(spec) for group in groups(400, seed=9)]
    assert not any(is_refused(evidence, spec) for evidence in later)
    windows = [[evidence.counts for evidence in later[begin : begin + 16]] for begin in range(0, 400, 16)]
    assert max(window_surprisal(window, spec) for window in windows) < surprisal_threshold(spec)


def heavy_tailed(count: int, seed: int) -> list[GroupMeasurement]:
    """Groups whose shifts fall as a power of 2.5 from 0.01 on in one of 33 tokens."""
    generator = np.random.default_rng(seed)

    def heavy(group: GroupMeasurement) -> GroupMeasurement:
        far = 0.01 * (1.0 + generator.pareto(2.5, len(group.shifts)))
        shifts = np.where(generator.random(len(far)) < 0.03, far, group.shifts)
        return replace(group, shifts=shifts.astype(np.float32))

    return [heavy(group) for group in groups(count, seed=seed)]


def test_far_margins_have_a_rate_that_no_count_could_show() -> None:
    honest = {"pair": heavy_tailed(1500, 0), "other": heavy_tailed(1500, 1)}
    spec = thresholds(honest, demands=replace(DEMANDS, headroom=4.0))
    largest = max(float(group.shifts.max()) for pair in honest.values() for group in pair)
    assert 4.0 * largest <= spec.far_margin < spec.margin_limit
    assert spec.far_rate < 1e-6  # 90,000 tokens without an event show 5e-5 at best
    true_rate = 0.03 * 0.01**2.5 * (spec.far_margin**-1.5 - (spec.far_margin + 1.0) ** -1.5) / 1.5
    assert 4.0 * true_rate <= spec.far_rate <= 40.0 * true_rate


def test_few_far_margins_refuse_a_window_and_one_does_not() -> None:
    """Honest work has one far margin in a great many tokens, and never four in 6,000."""
    spec = thresholds({"pair": heavy_tailed(1500, 0)}, demands=replace(DEMANDS, headroom=4.0))

    def surprisal(far: int) -> float:
        return window_surprisal([Counts(6000, 6000, 0, far, 0, 0, far)], spec)

    assert surprisal(1) < surprisal_threshold(spec) < surprisal(4)


def test_noise_of_rounding_has_a_limit_near_what_was_measured_and_no_far_margins_below_it() -> None:
    spec = thresholds({"pair": groups(400, shift=1e-3)}, demands=replace(DEMANDS, headroom=4.0))
    assert spec.far_margin == spec.margin_limit < 0.05
    assert spec.far_rate < 1e-9


# Which copies thresholds refuse, and which thresholds are refused


DEFAULT_DEMANDS = ThresholdDemands()


def test_a_copy_that_differs_clearly_is_always_refused() -> None:
    honest = {"pair": groups(100, miss=0.01)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEFAULT_DEMANDS)
    result = power(REQUIRED_BITS, "pair", COPY, spec, 16)
    assert (result.rollouts, result.groups, result.windows) == (1.0, 1.0, 1.0)
    assert result.tokens == sum(sum(group.lengths) for group in COPY)
    check([result], honest, spec, 16)


def test_honest_work_is_never_refused() -> None:
    spec = choose_thresholds({"pair": groups(100, miss=0.01)}, [COPY], FLOAT32, DEFAULT_DEMANDS)
    result = power(16, "pair", groups(100, miss=0.01, seed=7), spec, 16)
    assert (result.rollouts, result.groups, result.windows) == (0.0, 0.0, 0.0)


def test_a_window_refuses_a_copy_that_no_group_refuses() -> None:
    spec = choose_thresholds({"pair": groups(400, miss=1e-3)}, [COPY], FLOAT32, DEFAULT_DEMANDS)
    faint = groups(100, miss=0.05, seed=8)
    result = power(8, "pair", faint, spec, 64)
    assert result.groups < 0.1
    assert result.windows > 0.9


def test_a_distribution_that_hides_the_copy_is_refused_in_one_line() -> None:
    honest = {"quiet": groups(60), "noisy": groups(60, miss=0.8, distance=20, tip=0.01, seed=3)}
    copy = groups(60, miss=0.82, distance=20, tip=0.01, seed=4)
    spec = choose_thresholds(honest, [copy], FLOAT32, DEFAULT_DEMANDS)
    weak = power(REQUIRED_BITS, "quiet", copy, spec, 16)
    with pytest.raises(TooWideError) as error_info:
        check([weak, power(REQUIRED_BITS, "noisy", COPY, spec, 16)], honest, spec, 16)
    line = str(error_info.value)
    assert "\n" not in line
    for part in ("too wide", "4-bit copy's windows of 16 groups (pair quiet)", "noisy in sketches", "noisy in margins"):
        assert part in line


def test_only_copies_of_the_required_bits_have_to_be_refused() -> None:
    honest = {"pair": groups(100)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEFAULT_DEMANDS)
    check([power(8, "pair", groups(50), spec, 4), power(REQUIRED_BITS, "pair", COPY, spec, 4)], honest, spec, 4)


# Extrapolation of known tails


LEVEL, DROP, MOST = 1e-9, 2.7, 100.0
TRIES = 20
FAR = np.array([0.5, 1.0, 2.0, 5.0, 10.0, 30.0])

Rate = Callable[[float], float]
"""Returns the probability of a margin beyond a value."""


def draws(draw: Callable[[Generator], np.ndarray]) -> list[MarginTail]:
    return [MarginTail(draw(np.random.default_rng(seed)), DROP, MOST) for seed in range(TRIES)]


def limits(draw: Callable[[Generator], np.ndarray]) -> list[float]:
    return [tail.reach(LEVEL) for tail in draws(draw)]


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


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_the_limit_covers_a_power_law(exponent: float) -> None:
    results = limits(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 11_000)))
    assert sum(x >= reached(power_law(exponent)) for x in results) >= TRIES - 2


@pytest.mark.parametrize("exponent", [2.5, 3.0, 4.0])
def test_rates_cover_a_power_law_at_every_far_margin(exponent: float) -> None:
    tails = draws(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 100_000)))
    true_rates = np.array([power_law(exponent)(x) for x in FAR])
    bounds = np.array([tail.rates(FAR) for tail in tails])
    assert (bounds >= true_rates).all(axis=1).sum() >= TRIES - 2
    assert (bounds <= 40.0 * true_rates).all()  # a bound that is far above the truth lets edited tokens pass
    assert (np.diff(bounds, axis=1) <= 0.0).all()


def test_rates_cover_the_margins_of_gumbel_noise() -> None:
    """Two sides draw from the same noise; the scores of one are shifted by heavy-tailed amounts."""
    generator = np.random.default_rng(0)
    tokens, vocabulary = 400_000, 6
    scores = generator.normal(0.0, 2.0, (tokens, vocabulary)) + generator.gumbel(size=(tokens, vocabulary))
    shifts = 0.02 * (1.0 + generator.pareto(3.0, tokens))
    shifted = scores.copy()
    shifted[np.arange(tokens), generator.integers(0, vocabulary, tokens)] += shifts
    margins = scores.max(axis=1) - np.take_along_axis(scores, shifted.argmax(axis=1)[:, None], axis=1)[:, 0]
    seen = [float((margins > x).mean()) for x in (0.1, 0.2, 0.4, 0.8)]
    assert seen[-1] > 0.0
    bounds = MarginTail(shifts[:20_000], DROP, MOST).rates(np.array([0.1, 0.2, 0.4, 0.8]))
    assert all(bound >= rate for bound, rate in zip(bounds, seen, strict=True))


def test_rates_are_not_claimed_where_the_tail_has_not_begun() -> None:
    (tail, *_) = draws(lambda generator: generator.exponential(0.1, 10_000))
    assert tail.rates(np.array([0.0, 0.1])).tolist() == [1.0, 1.0]


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
    tail = MarginTail(np.full(1000, 0.25), DROP, MOST)
    assert tail.reach(LEVEL) == 0.25
    assert tail.rates(np.array([0.25, 1.0])).tolist() == [0.0, 0.0]
