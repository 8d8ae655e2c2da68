"""Chooses thresholds from measurements of honest pairs and of a copy (docs/spec/run.md, `proof`).

A tolerance is chosen where a copy's misses are the strongest evidence: where the relative entropy of the copy's share
of misses to the honest bound is largest, because this is the expected evidence of one position. It is chosen on some of
the groups, and the rate of honest misses beyond it is bounded on the others, so that the choice does not bias the
bound. Steps and their points are chosen on all groups, by rates that are bounded for all candidates together. The rate
of margins beyond all that were measured is extrapolated (grailnode/calibration/tail.py), because counting cannot show
that something happens less often than once in all positions. Every bound is that of the worst pair; a bound over all
pairs together would hide its noise.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from protocol.judging.points import POINTS_OF_DOUBLING

from grailnode import UserError
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.rates import rate_bound
from grailnode.calibration.tail import MarginTail
from protocol.judging.evidence import Evidence, window_surprisal
from protocol.limits import MAX_POINTS, MAX_STEPS
from protocol.proof import Arithmetic, Step, Thresholds
from protocol.rollout.sampling import LARGEST_NOISE

Honest = Mapping[str, Sequence[GroupMeasurement]]
"""Measurements of each honest pair, by its name."""

_PILOT: Final = 4  # one of so many groups is used to choose tolerances, the others to bound the rates
LEAST_GROUPS: Final = 8
WIDEST_SKETCH: Final = 64
WIDEST_MARGIN: Final = 100.0
"""The largest value in a manifest: no margin refuses a group by itself."""
_MARGINS: Final = (0.0, *(10.0 ** (exponent / 4) for exponent in range(-28, 5)))
_MARGIN_STEPS: Final = (0.0, *(10.0 ** (exponent / 8) for exponent in range(-40, 9)))
_EDITED: Final = 1e-3  # share of tokens that a cheat edits
_FAR_CANDIDATES: Final = 64
_LEAST_RATE: Final = 1e-15  # of far margins
_MOST_RATE: Final = 1.0 - 1e-6
_ULP: Final = float(np.spacing(np.float32(LARGEST_NOISE)))
_STEP: Final = 1.25  # factor by which a rate is raised if misses are clustered


class CalibrationError(UserError):
    """No thresholds can be chosen; the message says why, and what to do."""


@dataclass(frozen=True)
class ThresholdDemands:
    """The requirements of the creator of a run.

    Attributes:
        level: probability with which one test may refuse honest work.
        confidence: of the bounds on the rates.
        headroom: factor by which an honest pair may miss more often, and be further off, than the worst measured pair:
            for machines and later versions that were not measured.
        window: least number of a miner's groups that are audited in a window.
    """

    level: float = 1e-9
    confidence: float = 0.99
    headroom: float = 4.0
    window: int = 16


def choose_thresholds(
    honest: Honest,
    copies: Sequence[Sequence[GroupMeasurement]],
    arithmetics: tuple[Arithmetic, Arithmetic],
    demands: ThresholdDemands,
) -> Thresholds:
    """Choose the thresholds that accept honest pairs and refuse a copy after the fewest positions.

    Args:
        honest: at least LEAST_GROUPS groups of each pair.
        copies: measurements of a copy's groups, by one or more pairs.
        arithmetics: those of miners and validators, which all pairs have.
    """
    check_groups(min(map(len, honest.values())))
    pilot = [list(groups[::_PILOT]) for groups in honest.values()]
    rest = [[group for i, group in enumerate(groups) if i % _PILOT] for groups in honest.values()]
    distances, margins = _columns("fresh", pilot, rest, copies), _columns("margins", pilot, rest, copies)
    tolerance = int(distances.choose(range(WIDEST_SKETCH + 1), demands))
    measured = [MeasuredMargins.of(groups, demands) for groups in honest.values()]
    limit = max(pair.limit for pair in measured)
    far_margin, far_rate = choose_far_margin(measured, limit)
    margin = margins.choose([value for value in _MARGINS if value <= limit], demands)
    spec = Thresholds(
        miner=arithmetics[0],
        validator=arithmetics[1],
        sketch_tolerance=tolerance,
        sketch_rate=_rate(distances.rest, tolerance, demands),
        sketch_steps=distances.choose_steps([float(value) for value in range(WIDEST_SKETCH + 1)], demands),
        sketch_median=_median(honest, tolerance, demands),
        margin=margin,
        margin_rate=_rate(margins.rest, margin, demands),
        margin_steps=margins.choose_steps([value for value in _MARGIN_STEPS if value <= limit], demands),
        far_margin=far_margin,
        far_rate=far_rate,
        margin_limit=limit,
        logprob_tolerance=logprob_tolerance(honest, demands),
        level=demands.level,
        confidence=demands.confidence,
        positions=sum(len(group.fresh) for groups in honest.values() for group in groups),
    )
    return widened(spec, honest, demands.window)


def check_groups(groups: int) -> None:
    """Raise CalibrationError for a pair with fewer than LEAST_GROUPS groups."""
    if groups < LEAST_GROUPS:
        raise CalibrationError(f"a pair needs at least {LEAST_GROUPS} groups; ask for more --rollouts")


@dataclass(frozen=True)
class _Columns:
    """One statistic of all positions, an array for each pair: of pilot groups, of the other groups, and of copies."""

    pilot: list[np.ndarray]
    rest: list[np.ndarray]
    copies: list[np.ndarray]

    def choose(self, candidates: Sequence[float], demands: ThresholdDemands) -> float:
        """Return the threshold whose misses separate a copy best; if none separates it, that with the fewest misses."""
        best, choice = (-1.0, -1.0), candidates[0]
        for threshold in candidates:
            rate = _rate(self.pilot, threshold, demands)
            share = min(float(beyond(values, threshold).mean()) for values in self.copies)
            merit = (relative_entropy(share, rate), -rate)
            if merit > best:
                best, choice = merit, threshold
        return choice

    def choose_steps(self, candidates: Sequence[float], demands: ThresholdDemands) -> tuple[Step, ...]:
        """Return steps whose points are the likelihood ratio of a copy to the honest rates.

        The rates beyond all candidates are bounded together at the confidence, so that whichever are chosen, their
        bounds hold. That takes no groups for the choice alone, and far steps need every group.

        Args:
            candidates: thresholds, ascending.
        """
        honest = [np.concatenate(parts) for parts in zip(self.pilot, self.rest, strict=True)]
        each = replace(demands, confidence=1.0 - (1.0 - demands.confidence) / len(candidates))
        rates = [_rate(honest, value, each) for value in candidates]
        shares = np.mean([[float(beyond(values, value).mean()) for value in candidates] for values in self.copies], 0)
        points = points_of(np.array(rates), shares)
        steps: list[Step] = []
        for value, rate, number in zip(candidates, rates, points, strict=True):
            if number > (steps[-1].points if steps else 0) and len(steps) < MAX_STEPS:
                steps.append(Step(beyond=value, rate=rate, points=number))
        return tuple(steps) or (Step(beyond=candidates[-1], rate=rates[-1], points=1),)


def points_of(rates: np.ndarray, shares: np.ndarray) -> list[int]:
    """Return the points of each of some ascending thresholds: never fewer than those of the last.

    Between two thresholds, the points are the logarithm of the ratio of the copy's share to the honest rate there, in
    POINTS_OF_DOUBLING for each doubling. Where this ratio falls, neighbours are pooled (the pool-adjacent-violators
    algorithm, Ayer et al. 1955), so that points never fall.

    Args:
        rates, shares: of honest positions and of a copy's that lie beyond each threshold, float64 [C], never ascending.
    """
    honest = -np.diff(rates, prepend=1.0, append=0.0).clip(max=-1e-12)
    copied = -np.diff(shares, prepend=1.0, append=0.0)
    pools: list[tuple[float, float, int]] = []  # share and rate of neighbours, and how many they are
    for share, rate in zip(copied.tolist(), honest.tolist(), strict=True):
        pool = share, rate, 1
        while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = last[0] + pool[0], last[1] + pool[1], last[2] + pool[2]
        pools.append(pool)
    lowest = pools[0][0] / pools[0][1]
    points: list[int] = []
    for share, rate, count in pools:
        doublings = math.log2(max(share / rate / max(lowest, 1e-9), 1.0))
        points += [min(MAX_POINTS, round(POINTS_OF_DOUBLING * doublings))] * count
    return points[1:]


def _columns(name: str, *parts: Sequence[Sequence[GroupMeasurement]]) -> _Columns:
    return _Columns(
        *([np.concatenate([getattr(group, name) for group in groups]) for groups in part] for part in parts)
    )


def _rate(pairs: Sequence[np.ndarray], threshold: float, demands: ThresholdDemands) -> float:
    """Return the honest rate of misses beyond a threshold: the worst pair's bound with headroom; below 1."""

    def bound(values: np.ndarray) -> float:
        events = math.ceil(demands.headroom * int(beyond(values, threshold).sum()))
        return _bound(min(events, len(values)), len(values), demands.confidence)

    return min(max(map(bound, pairs)), _MOST_RATE)


_bound = functools.cache(rate_bound)  # most thresholds have the same few misses beyond them


def beyond(values: np.ndarray, threshold: float) -> np.ndarray:
    """Return which values miss a threshold: bool of their shape. NaN misses every threshold."""
    misses: np.ndarray = ~(values <= threshold)
    return misses


def relative_entropy(share: float, rate: float) -> float:
    """Return the Kullback-Leibler divergence of Bernoulli(share) to Bernoulli(rate) in nats; 0 if share <= rate."""
    if share <= rate:
        return 0.0
    rest = 0.0 if share == 1.0 else (1.0 - share) * math.log((1.0 - share) / (1.0 - rate))
    return share * math.log(share / rate) + rest


@dataclass(frozen=True)
class MeasuredMargins:
    """The margins of a pair, and what they say of larger ones.

    Attributes:
        covered: headroom times the largest margin or shift that was measured; larger margins are extrapolated.
        tail: of the pair's shifts, at the confidence.
    """

    covered: float
    tail: MarginTail
    demands: ThresholdDemands

    @classmethod
    def of(cls, groups: Sequence[GroupMeasurement], demands: ThresholdDemands) -> "MeasuredMargins":
        """Return those of a pair's groups."""
        margins = np.concatenate([group.margins for group in groups]).astype(np.float64)
        shifts = np.concatenate([group.shifts for group in groups]).astype(np.float64)
        shifts = np.maximum(np.where(np.isfinite(shifts), shifts, WIDEST_MARGIN), _ULP)
        largest = max(float(np.nan_to_num(margins, nan=WIDEST_MARGIN, posinf=WIDEST_MARGIN).max()), float(shifts.max()))
        drop = NormalDist().inv_cdf(demands.confidence) ** 2 / 2
        return cls(demands.headroom * largest, MarginTail(shifts, drop, WIDEST_MARGIN), demands)

    @property
    def limit(self) -> float:
        """A margin that an honest token of the pair exceeds with a probability of at most the level."""
        return min(WIDEST_MARGIN, max(self.covered, self.tail.reach(self.demands.level)))

    def rates(self, margins: np.ndarray) -> np.ndarray:
        """Return extrapolated bounds on the rates of margins beyond each, with headroom: float64 [C]."""
        rates: np.ndarray = (self.demands.headroom * self.tail.rates(margins)).clip(_LEAST_RATE, _MOST_RATE)
        return rates


def choose_far_margin(measured: Sequence[MeasuredMargins], limit: float) -> tuple[float, float]:
    """Return a margin beyond all that were measured, and a bound on the rate of honest margins beyond it.

    Of those between what is covered and the limit, it is the margin that is the strongest evidence against a cheat
    which edits one token in a thousand. Where the policy is sure of its token, another one is short by the logarithm of
    the odds, and near 0 where many are equally probable. So edited tokens are taken to be short by more than x in
    1 / (1 + x) of the cases, which has a part in each order of magnitude.
    """
    least = max(pair.covered for pair in measured)
    candidates = np.geomspace(least, limit, _FAR_CANDIDATES) if least < limit else np.array([limit])
    rates = np.max([pair.rates(candidates) for pair in measured], axis=0)
    merits = [
        relative_entropy(share, rate) for share, rate in zip(_EDITED / (1.0 + candidates), rates.tolist(), strict=True)
    ]
    best = int(np.argmax(merits))
    return float(candidates[best]), float(rates[best])


def logprob_tolerance(honest: Honest, demands: ThresholdDemands) -> float:
    """Return headroom times the largest mean shift of a measured group: the two sides' log-probabilities differ less.

    Groups of one rollout have few tokens and vary more than those of a run, so whole groups count if there are any.
    """
    groups = [group for pair in honest.values() for group in pair]
    whole = [group for group in groups if len(group.lengths) > 1] or groups
    means = [float(np.nan_to_num(group.shifts, nan=WIDEST_MARGIN, posinf=WIDEST_MARGIN).mean()) for group in whole]
    return min(WIDEST_MARGIN, demands.headroom * max(_ULP, *means))


def _median(honest: Honest, tolerance: int, demands: ThresholdDemands) -> int:
    """Return the headroom times the largest distance of a single position, at least one unit: far above any group's
    median.

    A group can have a single position, so the bound for single positions is needed.
    """
    largest = max(int(group.distances.max(initial=1)) for groups in honest.values() for group in groups)
    return min(WIDEST_SKETCH, max(tolerance, math.ceil(demands.headroom * largest)))


def widened(spec: Thresholds, honest: Honest, window: int) -> Thresholds:
    """Return the thresholds with rates raised until the measured groups are as probable as independent misses.

    Misses of one prompt may be clustered more than the test assumes. Of m scopes the least probable one should have a
    probability of about 1 / m; the rates are raised while it is below a tenth of that.
    """
    scopes = sum(len(group.lengths) + 5 for groups in honest.values() for group in groups)
    surprisal_threshold = math.log10(scopes) + 1.0
    while True:
        sketch, margin = surprisals(spec, honest, window)
        raised: dict[str, Any] = {}
        if sketch > surprisal_threshold:
            raised |= {"sketch_rate": _raised(spec.sketch_rate), "sketch_steps": _raised_steps(spec.sketch_steps)}
        if margin > surprisal_threshold:
            raised |= {"margin_rate": _raised(spec.margin_rate), "margin_steps": _raised_steps(spec.margin_steps)}
            raised |= {"far_rate": _raised(spec.far_rate)}
        if not raised:
            return spec
        spec = spec.model_copy(update=raised)


def _raised(rate: float) -> float:
    return min(rate * _STEP, _MOST_RATE)


def _raised_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    return tuple(step.model_copy(update={"rate": _raised(step.rate)}) for step in steps)


def surprisals(spec: Thresholds, honest: Honest, window: int) -> tuple[float, float]:
    """Return the largest surprisal of all honest groups and windows, of sketches and of margins, in decades."""
    sketch = margin = 0.0
    for groups in honest.values():
        weighed = [group.weigh(spec) for group in groups]
        sketch = max(sketch, *(evidence.sketch_surprisal for evidence in weighed))
        margin = max(margin, *(evidence.margin_surprisal for evidence in weighed))
        for begin in range(0, len(weighed), window):
            part = weighed[begin : begin + window]
            sketches = [replace(e.counts, margin_misses=0, margin_points=0, far_rollouts=0) for e in part]
            margins = [replace(e.counts, sketch_misses=0, sketch_points=0) for e in part]
            sketch = max(sketch, window_surprisal(sketches, spec))
            margin = max(margin, window_surprisal(margins, spec))
    return sketch, margin


def is_refused(evidence: Evidence, spec: Thresholds) -> bool:
    """Return whether a validator refuses a group for the evidence of its prefill."""
    return evidence.wrong_sketch(spec) or evidence.wrong_sampling(spec)
