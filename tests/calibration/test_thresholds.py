"""Thresholds from known distributions."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from grailnode.calibration.pairs import GroupMeasurement
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
from tests.calibration.synthetic import COPY, groups
from tests.support.builders.proofs import FLOAT32

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
