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
    ThresholdDemands,
    choose_thresholds,
    largest_evidence,
    likelihood_scores,
    stop_margins,
    table,
)
from protocol.judging.evidence import NO_EVIDENCE, advance, exceeded, is_improbable
from protocol.proof import DECADE, RATE_UNIT, Table, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from tests.support.builders.proofs import FLOAT32

ROLLOUTS = 4


def groups(
    count: int,
    *,
    miss: float = 0.0,
    distance: int = 9,
    shift: float = 1e-6,
    stops: float = 0.1,
    right: float = 0.5,
    luck: float = 0.0,
    length: int = 20,
    seed: int = 0,
) -> list[GroupMeasurement]:
    """Return groups whose positions are off by `distance` with probability `miss`, and whose scores by normal shifts.

    A token has a margin if its shift exceeds the gap to the next score, which has the density 1 at 0. It is one of a
    stop with probability `stops`. A rollout has the reward 1 with probability `right`, and one with a margin with
    probability `luck` if that is larger.
    """
    generator = np.random.default_rng(seed)
    measurements = []
    for _ in range(count):
        lengths = tuple(int(n) for n in generator.integers(length // 2, length + 1, ROLLOUTS))
        n = sum(lengths)
        shifts = shift * np.abs(generator.standard_normal(n))
        margins = (shifts - generator.exponential(size=n)).clip(min=0.0).astype(np.float32)
        missed = np.maximum.reduceat(margins, np.cumsum([0, *lengths[:-1]])) > 0
        is_right = generator.random(ROLLOUTS) < np.where(missed, max(luck, right), right)
        measurements.append(
            GroupMeasurement(
                lengths,
                distances=np.where(generator.random(n) < miss, distance, 0).astype(np.uint8),
                repeats=np.zeros(n, dtype=bool),
                margins=margins,
                shifts=shifts.astype(np.float32),
                stops=generator.random(n) < stops,
                differences=np.zeros(n, dtype=np.float32),
                rivals=np.ones(n, dtype=np.float32),
                rewards=tuple((is_right * 1_000_000).tolist()),
            )
        )
    return measurements


COPY = groups(40, miss=0.9, shift=0.5, seed=99)
"""A copy that any reasonable thresholds refuse."""


# Thresholds from known distributions


DEMANDS = ThresholdDemands(headroom=1.0)


def thresholds(
    honest: Honest, copies: Sequence[Sequence[GroupMeasurement]] = (COPY,), demands: ThresholdDemands = DEMANDS
) -> Thresholds:
    return choose_thresholds(honest, copies, FLOAT32, demands)


def rate_beyond(table: Table, value: float) -> float:
    """Return the largest rate of a step that lies below a value: of what exceeds it by any amount."""
    return max(rate for beyond, rate in zip(table.beyond, table.rates, strict=True) if beyond < value) / RATE_UNIT


def is_refused(group: GroupMeasurement, spec: Thresholds) -> bool:
    return exceeded(advance(NO_EVIDENCE, group.counts(spec), spec), spec) is not None


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.02, 0.3])
def test_bounds_cover_the_known_rate(rate: float) -> None:
    spec = thresholds({"pair": groups(200, miss=rate, shift=rate / 10)})
    assert rate < rate_beyond(spec.sketch, 9) < rate * 1.4 + 2e-3
    largest = {name: spec.table(name).rates[0] / RATE_UNIT for name in ("margin", "stop")}
    honest = groups(2000, shift=rate / 10, seed=1)
    margins = np.concatenate([group.margins for group in honest]) * (1 / NOISE_UNIT)
    for beyond, bound in zip(spec.margin.beyond, spec.margin.rates, strict=True):
        assert (margins > beyond).mean() <= bound / RATE_UNIT
    assert largest["margin"] < rate / 10 * 1.6 + 2e-3
    stops = np.concatenate([stop_margins(group) for group in honest]) > 0
    assert stops.mean() < largest["stop"] < stops.mean() * 3 + 2e-2


def test_bounds_cover_in_as_many_tries_as_the_confidence_says() -> None:
    demands = replace(DEMANDS, confidence=0.9)
    rows = [thresholds({"pair": groups(20, miss=0.02, seed=s)}, demands=demands) for s in range(40)]
    assert sum(rate_beyond(row.sketch, 9) > 0.02 for row in rows) >= 32  # 36 are expected


def test_the_worst_pair_determines_the_bound() -> None:
    quiet = {f"quiet-{i}": groups(100, seed=i) for i in range(9)}
    noisy = groups(100, miss=0.05, seed=50)
    one, both = thresholds({"noisy": noisy}), thresholds(quiet | {"noisy": noisy})
    assert rate_beyond(both.sketch, 9) == rate_beyond(one.sketch, 9) > 0.05


def test_headroom_raises_the_bounds() -> None:
    honest = {"pair": groups(100, miss=0.01, shift=0.02)}
    narrow, wide = (thresholds(honest, demands=replace(DEMANDS, headroom=h)) for h in (1.0, 4.0))
    assert 2 * rate_beyond(narrow.sketch, 9) < rate_beyond(wide.sketch, 9) < 4 * rate_beyond(narrow.sketch, 9)
    assert 2 * narrow.margin.rates[0] < wide.margin.rates[0] < 4 * narrow.margin.rates[0]


def test_clustered_misses_raise_the_rates() -> None:
    """One rollout in twenty misses in most of its positions, which independent misses at the mean rate never do."""
    generator = np.random.default_rng(0)

    def clustered(group: GroupMeasurement) -> GroupMeasurement:
        bad = np.repeat(generator.random(len(group.lengths)) < 0.05, group.lengths)
        return replace(group, distances=np.where(bad & (generator.random(len(bad)) < 0.7), 9, 0).astype(np.uint8))

    honest = [clustered(group) for group in groups(200)]
    copy = groups(40, miss=1.0, distance=60)
    spec = thresholds({"pair": honest}, copies=(copy,))
    assert not is_improbable(NO_EVIDENCE, [group.counts(spec) for group in honest], spec)
    assert not is_improbable(NO_EVIDENCE, [clustered(group).counts(spec) for group in groups(400, seed=9)], spec)
    assert all(is_refused(group, spec) for group in copy)


@pytest.mark.parametrize("miss", [0.0, 0.01, 0.2])
def test_more_groups_of_the_same_distribution_are_accepted(miss: float) -> None:
    spec = thresholds({"pair": groups(200, miss=miss, distance=2, shift=1e-3)})
    later = [group.counts(spec) for group in groups(400, miss=miss, distance=2, shift=1e-3, seed=1)]
    assert not is_improbable(NO_EVIDENCE, later, spec)


def test_honest_misses_that_are_likelier_with_higher_rewards_raise_the_odds() -> None:
    plain, skewed = (thresholds({"pair": groups(1000, shift=0.02, right=0.2, luck=luck)}) for luck in (0.0, 1.0))
    assert plain.luck.rates[0] < skewed.luck.rates[0]
    for luck, refused in ((1.0, True), (0.0, False)):
        later = [group.counts(plain) for group in groups(1000, shift=0.02, right=0.2, luck=luck, seed=1)]
        assert is_improbable(NO_EVIDENCE, later, plain) == refused


def test_the_last_step_lies_beyond_honest_shifts() -> None:
    def last(measured: list[GroupMeasurement]) -> float:
        return thresholds({"pair": measured}).margin.beyond[-1] * NOISE_UNIT

    assert 4e-3 < last(groups(200, shift=1e-3)) < 0.2  # the largest of 12,000 normal shifts is 4 standard deviations
    heavy = [replace(g, shifts=(1e-6 / np.random.default_rng(0).random(len(g.shifts)) ** 2)) for g in groups(50)]
    assert last(heavy) == pytest.approx(100.0)  # a tail without a mean: no limit can be estimated


def test_pairs_that_agree_in_nothing_have_no_thresholds() -> None:
    """A margin that is no number is a miss."""
    nan_groups = [replace(g, margins=np.full_like(g.margins, np.nan), shifts=g.margins * np.nan) for g in groups(20)]
    with pytest.raises(CalibrationError, match="in most of its"):
        thresholds({"pair": nan_groups})


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(CalibrationError, match="ask for more --rollouts"):
        thresholds({"pair": groups(7)})


def test_scores_are_the_logarithms_of_likelihood_ratios_and_never_fall() -> None:
    rates, shares = np.array([0.08, 0.01, 0.001, 0.0005]), np.array([0.32, 0.24, 0.08, 0.079])
    # Between the steps, the ratios are 0.68/0.92, 0.08/0.07, then 0.16/0.009 and 0.001/0.0005, which are pooled because
    # the second one is smaller, and 0.079/0.0005 beyond the last one.
    ratios = [ratio / (0.68 / 0.92) for ratio in (0.08 / 0.07, 0.161 / 0.0095, 0.161 / 0.0095, 0.079 / 0.0005)]
    assert likelihood_scores(rates.tolist(), shares) == pytest.approx(np.log10(ratios))
    assert likelihood_scores(rates.tolist(), rates) == pytest.approx([0.0] * 4, abs=1e-9)


def test_the_growth_is_the_least_that_no_honest_distribution_exceeds() -> None:
    (alternative,) = table([1, 5], [0.1, 0.01], [[0.5, 2.0]]).alternatives
    mean = 0.9 + 0.09 * 10**0.5 + 0.01 * 100.0
    assert alternative.scores == (500_000, 2_000_000)
    assert 0 <= alternative.growth - np.log10(mean) * DECADE <= 2


def test_the_largest_evidence_is_that_of_the_judge() -> None:
    chosen = table([0, 3], [0.1, 0.01], [[0.5, 0.5], [0.0, 2.0]])
    values, trials = np.array([0, 1, 5, 5, 0, 0, 1, 0]), np.array([2, 2, 3, 1])
    expected, running = 0, [0, 0]
    for part in np.split(values, np.cumsum(trials)[:-1]):
        steps = [int(((part > 0) & (part <= 3)).sum()), int((part > 3).sum())]
        for place, item in enumerate(chosen.alternatives):
            added = sum(n * score for n, score in zip(steps, item.scores, strict=True)) - len(part) * item.growth
            running[place] = max(0, running[place]) + added
        expected = max(expected, *running)
    assert largest_evidence(chosen, values, trials) == expected


def heavy_tailed(count: int, seed: int) -> list[GroupMeasurement]:
    """Groups whose shifts fall as a power of 2.5 from 0.01 on in one of 33 tokens."""
    generator = np.random.default_rng(seed)

    def heavy(group: GroupMeasurement) -> GroupMeasurement:
        far = 0.01 * (1.0 + generator.pareto(2.5, len(group.shifts)))
        shifts = np.where(generator.random(len(far)) < 0.03, far, group.shifts)
        return replace(group, shifts=shifts.astype(np.float32))

    return [heavy(group) for group in groups(count, seed=seed)]


def test_large_margins_have_a_rate_that_no_count_could_show() -> None:
    honest = {"pair": heavy_tailed(1500, 0), "other": heavy_tailed(1500, 1)}
    spec = thresholds(honest, demands=replace(DEMANDS, headroom=4.0))
    largest = max(float(group.shifts.max()) for pair in honest.values() for group in pair)
    steps = [step * NOISE_UNIT for step in spec.margin.beyond]
    (far, rate), *_ = [
        (step, rate / RATE_UNIT) for step, rate in zip(steps, spec.margin.rates, strict=True) if step > 4.0 * largest
    ]
    assert rate < 1e-5  # 90,000 tokens without an event show 5e-5 at best
    true_rate = 0.03 * 0.01**2.5 * (far**-1.5 - (far + 1.0) ** -1.5) / 1.5
    assert 4.0 * true_rate <= rate <= 40.0 * true_rate


def test_few_large_margins_refuse_a_window_and_one_does_not() -> None:
    """Honest work has one of them in a great many tokens, and never six in 9,000."""
    spec = thresholds({"pair": heavy_tailed(1500, 0)}, demands=replace(DEMANDS, headroom=4.0))
    plain = groups(1, length=3000)[0]

    def refused(far: int) -> bool:
        margins = np.zeros_like(plain.margins)
        margins[:far] = 8.0
        return is_refused(replace(plain, margins=margins, rewards=()), spec)

    assert not refused(1)
    assert refused(6)


# Which copies thresholds refuse, and which thresholds are refused


DEFAULT_DEMANDS = ThresholdDemands()


def test_a_copy_that_differs_clearly_is_always_refused() -> None:
    honest = {"pair": groups(100, miss=0.01)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEFAULT_DEMANDS)
    result = power(REQUIRED_BITS, "pair", COPY, spec, 16)
    assert (result.groups, result.windows) == (1.0, 1.0)
    assert result.tokens == sum(sum(group.lengths) for group in COPY)
    check([result], honest, 16)


def test_honest_work_is_never_refused() -> None:
    spec = choose_thresholds({"pair": groups(100, miss=0.01)}, [COPY], FLOAT32, DEFAULT_DEMANDS)
    result = power(16, "pair", groups(100, miss=0.01, seed=7), spec, 16)
    assert (result.groups, result.windows) == (0.0, 0.0)


def test_a_window_refuses_a_copy_that_no_group_refuses() -> None:
    spec = choose_thresholds({"pair": groups(400, miss=1e-3)}, [COPY], FLOAT32, DEFAULT_DEMANDS)
    faint = groups(100, miss=0.05, seed=8)
    result = power(8, "pair", faint, spec, 64)
    assert result.groups < 0.1
    assert result.windows > 0.9


def test_a_distribution_that_hides_the_copy_is_refused_in_one_line() -> None:
    honest = {"quiet": groups(60), "noisy": groups(60, miss=0.8, distance=20, shift=0.0125, seed=3)}
    copy = groups(60, miss=0.82, distance=20, shift=0.0125, seed=4)
    spec = choose_thresholds(honest, [copy], FLOAT32, DEFAULT_DEMANDS)
    weak = power(REQUIRED_BITS, "quiet", copy, spec, 16)
    with pytest.raises(TooWideError) as error_info:
        check([weak, power(REQUIRED_BITS, "noisy", COPY, spec, 16)], honest, 16)
    line = str(error_info.value)
    assert "\n" not in line
    for part in ("too wide", "4-bit copy's windows of 16 groups (pair quiet)", "noisy in sketches", "noisy in margins"):
        assert part in line


def test_only_copies_of_the_required_bits_have_to_be_refused() -> None:
    honest = {"pair": groups(100)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEFAULT_DEMANDS)
    check([power(8, "pair", groups(50), spec, 4), power(REQUIRED_BITS, "pair", COPY, spec, 4)], honest, 4)


# Extrapolation of known tails


DROP, MOST = 2.7, 100.0
TRIES = 20
FAR = np.array([0.5, 1.0, 2.0, 5.0, 10.0, 30.0])

Rate = Callable[[float], float]
"""Returns the probability of a margin beyond a value."""


def draws(draw: Callable[[Generator], np.ndarray]) -> list[MarginTail]:
    return [MarginTail(draw(np.random.default_rng(seed)), DROP, MOST) for seed in range(TRIES)]


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


@pytest.mark.parametrize(
    ("draw", "rate", "margins"),
    [
        (lambda generator: generator.exponential(0.1, 100_000), exponential, (1.0, 1.5, 2.0)),
        (lambda generator: np.abs(generator.normal(0.0, 0.01, 100_000)), half_normal, (0.04, 0.05, 0.06)),
    ],
)
def test_rates_cover_a_light_tail_closely(
    draw: Callable[[Generator], np.ndarray], rate: Rate, margins: Sequence[float]
) -> None:
    bounds = np.array([tail.rates(np.array(margins)) for tail in draws(draw)])
    assert (bounds >= [rate(margin) for margin in margins]).all(axis=1).sum() >= TRIES - 2
    assert (bounds <= [rate(margin / 2.0) for margin in margins]).all()


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
    """One of a thousand values follows a power law; the others are below 1.5."""

    def draw(generator: Generator) -> np.ndarray:
        values = generator.exponential(0.1, 100_000)
        outliers = generator.random(len(values)) < 1e-3
        values[outliers] = 0.5 * (1.0 + generator.pareto(3.0, outliers.sum()))
        return values

    assert sum(float(tail.rates(np.array([12.0]))[0]) > 1e-9 for tail in draws(draw)) >= TRIES - 4


def test_fewer_values_give_larger_rates() -> None:
    def rates(count: int) -> list[float]:
        tails = draws(lambda generator: generator.exponential(0.1, count))
        return sorted(float(tail.rates(np.array([2.0]))[0]) for tail in tails)

    few, many = rates(300), rates(30_000)
    assert few[TRIES // 2] > 10.0 * many[TRIES // 2]


def test_equal_values_are_not_extrapolated() -> None:
    tail = MarginTail(np.full(1000, 0.25), DROP, MOST)
    assert tail.rates(np.array([0.25, 1.0])).tolist() == [0.0, 0.0]
