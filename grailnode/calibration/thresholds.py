"""Chooses a row of thresholds from measurements of honest pairs and of a copy (docs/spec/run.md, `proof`).

Each statistic gets steps, an upper bound on the honest rate of each, and alternatives. Every bound is that of the worst
pair, because a bound over all pairs together would hide its noise, and holds for all candidates together, so that the
choice of steps does not bias it. Rates of margins beyond all that were measured are extrapolated
(grailnode/calibration/tail.py), because counting cannot show that something happens less often than once in all
positions. The scores of an alternative are the logarithms of the likelihood ratio of a cheat to the honest bounds: no
other scores have more evidence against this cheat on average. Whatever the scores are, honest work is safe, because
their growth follows from the rates.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from grailnode import UserError
from grailnode.calibration.pairs import GroupMeasurement
from grailnode.calibration.tail import rate_bounds, tail_rates
from protocol.judging.evidence import NO_EVIDENCE, highest_evidence, tally_values, weigh_tally
from protocol.limits import MAX_STEPS
from protocol.proof import DECADE, LUCK, MEASURED, RATE_UNIT, Alternative, Arithmetic, StatisticName, Table, Thresholds
from protocol.rollout.sampling import LARGEST_NOISE, NOISE_UNIT

Honest = Mapping[str, Sequence[GroupMeasurement]]
"""Measurements of each honest pair, by its name."""

LEAST_GROUPS: Final = 8
WIDEST_MARGIN: Final = 100.0
"""The largest step of margins, in logits / temperature."""
_LAST_RATE: Final = 1e-15  # of the last step of margins: one token beyond it refuses its group
_MOST_RATE: Final = 0.5  # of a step
_FALL: Final = 1.25  # factor by which rates of two steps differ at least
_CIRCLE: Final = 256  # units of a sketch
_ULP: Final = float(np.spacing(np.float32(LARGEST_NOISE)))
_RAISED: Final = 1.25  # factor by which rates are raised if misses are clustered


@dataclass(frozen=True)
class ThresholdDemands:
    """The requirements of the creator of a run."""

    level: float = 1e-8  # honest work is refused within N groups with a probability of at most N times this
    confidence: float = 0.99  # of the bounds on the rates
    # for machines and later versions that were not measured: factor by which an honest pair may miss more often than
    # the worst measured pair. For margins it is the size of errors that such a pair has in addition to those of a
    # measured one, whose margins may be its square root times as frequent
    headroom: float = 4.2
    window: int = 16  # least number of a miner's groups that are audited in a window


def choose_thresholds(
    honest: Honest,
    copies: Sequence[Sequence[GroupMeasurement]],
    arithmetics: tuple[Arithmetic, Arithmetic],
    demands: ThresholdDemands,
) -> Thresholds:
    """Choose the thresholds that accept honest pairs, of each at least LEAST_GROUPS groups, and refuse a copy, whose
    groups one or more pairs measured, after the fewest positions. All pairs have these arithmetics of miners and
    validators.
    """
    check_groups(min(map(len, honest.values())))
    measured = {name: _Statistic(name, honest, list(itertools.chain(*copies)), demands) for name in MEASURED}
    tables: dict[StatisticName, Table] = {
        "sketch": _sketch_table(measured["sketch"]),
        "margin": _margin_table(measured["margin"]),
        "stop": _stop_table(measured["stop"]),
        **_replay_table(honest, demands),
    }
    tolerance, bias = _logprob_bounds(honest, demands)
    alternatives = sum(len(item.alternatives) for item in (*tables.values(), LUCK))
    return Thresholds(
        miner=arithmetics[0],
        validator=arithmetics[1],
        **tables,
        threshold=math.ceil(DECADE * math.log10(alternatives / demands.level)),
        logprob_tolerance=tolerance,
        logprob_bias=bias,
        confidence_ppm=math.floor(1e6 * demands.confidence),
        positions=sum(len(group.values["sketch"]) for groups in honest.values() for group in groups),
    )


def check_groups(groups: int) -> None:
    """Raise UserError for a pair with fewer than LEAST_GROUPS groups."""
    if groups < LEAST_GROUPS:
        raise UserError(f"a pair needs at least {LEAST_GROUPS} groups; ask for more --rollouts")


@dataclass(frozen=True)
class _Statistic:
    """One statistic of all groups that were measured."""

    name: StatisticName
    honest: Honest
    copies: Sequence[GroupMeasurement]
    demands: ThresholdDemands

    def values(self, groups: Iterable[GroupMeasurement]) -> np.ndarray:
        """Return the values of all trials of some groups."""
        return np.concatenate([group.values[self.name] for group in groups])

    @property
    def pairs(self) -> list[np.ndarray]:
        """The values of each honest pair."""
        return list(map(self.values, self.honest.values()))

    def rates(self, candidates: Sequence[int], headroom: float, extrapolated: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Return bounds on the honest rates beyond each candidate: those of the worst pair with headroom, float64 [C].

        All bounds hold together at the confidence. The extrapolated rates of each pair, float64 [C], count where they
        are lower, unless a pair has more misses by three standard deviations.
        """
        pairs = self.pairs
        rates = _counted_rates(pairs, candidates, headroom, self.demands.confidence)
        if extrapolated:
            far = np.max(extrapolated, axis=0)
            expected = np.array([far * len(values) for values in pairs])
            misses = np.array([_misses(values, candidates) for values in pairs])
            is_plausible = (misses <= expected + 3.0 * np.sqrt(expected)).all(axis=0)
            rates = np.where(is_plausible, np.minimum(rates, headroom * far), rates)
        return rates

    def table(self, candidates: Sequence[int], rates: np.ndarray, tails: Sequence[np.ndarray]) -> Table:
        """Return the table against cheats, of steps among some candidates: rates and each tail are float64 [C]. The
        rates are raised until the measured groups are as probable as independent trials.

        Misses of one prompt may be clustered more than the test assumes. In n groups honest work exceeds an evidence of
        log10(10 n J) for one of J alternatives once in ten calibrations, and the rates are raised while it does.
        """
        falling = np.minimum.accumulate(rates.clip(min=_LAST_RATE))
        places = _choose_steps(falling, np.minimum.accumulate(np.array(tails), axis=1))
        beyond, least = [candidates[place] for place in places], falling[places].clip(max=_MOST_RATE)
        scores = [likelihood_scores(least.tolist(), tail[places]) for tail in tails]
        pairs = self.honest.values()
        tallies = [[tally_values(group.values[self.name], beyond) for group in groups] for groups in pairs]
        most = DECADE * math.log10(10 * len(tails) * sum(map(len, pairs)))
        factor = 1.0
        while least[-1] * factor < _RAISED * _MOST_RATE:
            chosen = table(beyond, (factor * least).clip(max=_MOST_RATE).tolist(), scores)
            added = ((weigh_tally(tally, chosen) for tally in own) for own in tallies)
            if all(highest_evidence(NO_EVIDENCE, groups) <= most for groups in added):
                return chosen
            factor *= _RAISED
        raise UserError("an honest pair misses in most of its trials; leave it out (--pairs)")


def _choose_steps(falling: np.ndarray, tails: np.ndarray) -> list[int]:
    """Return the places of at most MAX_STEPS candidates for steps that keep most evidence, by rates that fall, float64
    [C], and the tails of cheats: float64 [J, C].

    Without a step, the trials that reach it count as those of the step before. A cheat of which p and p' trials are
    there, and q and q' of honest work, then has less evidence: p log(p / q) + p' log(p' / q') is more than the same of
    both sums. Of all cheats together, relative to all that each has, the least is given up first.
    """
    places = [int(np.searchsorted(-falling, -falling[-1]))]
    for place in reversed(range(places[0])):
        if falling[places[-1]] * _FALL <= falling[place] <= _MOST_RATE:
            places.append(place)
    places.reverse()
    while len(places) > MAX_STEPS:
        rates = -np.diff(falling[places], prepend=1.0, append=0.0)
        shares = -np.diff(tails[:, places], prepend=1.0, append=0.0)
        parts = _relative_entropies(shares, rates)
        whole = parts.sum(axis=1, keepdims=True).clip(min=1e-12)
        both = _relative_entropies(shares[:, 1:] + shares[:, :-1], rates[1:] + rates[:-1])
        del places[int(((parts[:, 1:] + parts[:, :-1] - both) / whole).sum(axis=0).argmin())]
    return places


def _relative_entropies(shares: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return what the trials at each step add to a cheat's mean evidence, by their shares of all, in nats: [J, K]."""
    result: np.ndarray = shares * np.log(np.maximum(shares, 1e-300) / rates)
    return result


def _misses(values: np.ndarray, beyond: ArrayLike) -> np.ndarray:
    """Return how many values exceed each of some: int64 [C]."""
    misses: np.ndarray = len(values) - np.searchsorted(np.sort(values), beyond, side="right")
    return misses


def _shares(values: np.ndarray, beyond: ArrayLike) -> np.ndarray:
    return _misses(values, beyond) / len(values)


def _counted_rates(
    pairs: Iterable[np.ndarray], candidates: Sequence[int], headroom: float, confidence: float
) -> np.ndarray:
    """Return bounds on the rates beyond each candidate that hold together: those of the worst pair with headroom, by
    counting: float64 [C].
    """
    each = 1.0 - (1.0 - confidence) / len(candidates)
    bounds = [rate_bounds(np.ceil(headroom * _misses(values, candidates)), len(values), each) for values in pairs]
    rates: np.ndarray = np.max(bounds, axis=0)
    return rates


def table(beyond: Sequence[int], rates: Sequence[float], scores: Sequence[Sequence[float]]) -> Table:
    """Return a table with alternatives of these scores, in decades, whose growth follows from the rates."""
    whole = [math.ceil(rate * RATE_UNIT) for rate in rates]
    alternatives = []
    for decades in scores:
        rounded = tuple(math.floor(score * DECADE) for score in decades)
        powers = [1.0, *(10.0 ** (score / DECADE) for score in rounded)]
        mean = sum(
            rate / RATE_UNIT * (high - low) for rate, (low, high) in zip(whole, itertools.pairwise(powers), strict=True)
        )
        growth = math.ceil(DECADE * math.log1p(mean) / math.log(10.0) * (1 + 1e-12)) + 1
        alternatives.append(Alternative(scores=rounded, growth=growth))
    return Table(beyond=tuple(beyond), rates=tuple(whole), alternatives=tuple(alternatives))


def likelihood_scores(rates: Sequence[float], tail: np.ndarray) -> list[float]:
    """Return the scores of a cheat in decades: log10 of its probability, float64 [C], over the honest bound of each
    step, less that of no step, and never falling. The honest rates fall.

    Where the ratio falls, neighbours are pooled: the ratios are the isotonic regression, by its formula of minima and
    maxima (Barlow et al. 1972).
    """
    cheat, honest = (np.array([1.0, *own, 0.0]) for own in (np.minimum.accumulate(tail), rates))
    first, *others = (
        ((cheat[:step, None] - cheat[step:]) / (honest[:step, None] - honest[step:])).min(axis=1).max()
        for step in range(1, len(cheat))
    )
    return [math.log10(max(1.0, ratio / max(first, 1e-9))) for ratio in others]


def _sketch_table(measured: _Statistic) -> Table:
    """Return the table of distances.

    The cheats are copies, whose errors are added to honest noise, noise that is larger than honest noise, and forged
    sketches in some positions.
    """
    grid = np.arange(_CIRCLE // 2)
    # Rounding adds less than one unit. What a tail gives for x is above the rate of values beyond x + 1.
    far = [
        _far_rates(_joined(groups, "sketch_errors")[~_joined(groups, "repeats")], grid - 2.0, measured.demands)
        for groups in measured.honest.values()
    ]
    rates = measured.rates(grid.tolist(), measured.demands.headroom, far)
    forged = 1.0 - ((2 * grid + 1) / _CIRCLE).clip(max=1.0) ** 4  # each of four values is somewhere on the circle
    noise = np.concatenate(measured.pairs).astype(np.float64)
    shares = _shares(noise, grid)
    errors = np.random.default_rng(0).permutation(np.resize(measured.values(measured.copies), len(noise)))
    tails = [_shares(np.hypot(noise, scale * errors), grid) for scale in (1.0, 0.5, 0.25, 0.125)]
    tails += [_shares(factor * noise, grid) for factor in (1.5, 2.0)]
    tails += [(1 - share) * shares + share * tails[0] for share in (0.1, 0.01)]
    tails += [(1 - share) * shares + share * forged for share in (0.3, 0.03, 0.003)]
    return measured.table(grid.tolist(), rates, tails)


def _margin_table(measured: _Statistic) -> Table:
    """Return the table of margins. The cheats are copies, near ties that are decided, tokens of a filter, and edited
    ones.

    Beyond what was measured, an edited token is taken to be short by more than x in 1 / (1 + x) of the cases, which has
    a part in each order of magnitude: where the policy is sure of its token, another one is short by the logarithm of
    the odds, and near 0 where many are equally probable.
    """
    grid = sorted({0, *(math.ceil(10.0 ** (power / 16) / NOISE_UNIT) for power in range(-88, 33))})
    margins = np.array(grid) * NOISE_UNIT
    demands = measured.demands
    far, noise = zip(*(_shift_rates(groups, margins, demands) for groups in measured.honest.values()), strict=True)
    rates = measured.rates(grid, math.sqrt(demands.headroom), far) + np.max(noise, axis=0)
    shares = _shares(np.concatenate(measured.pairs), grid)
    of_copies = measured.values(measured.copies)
    tails = [scale * _shares(of_copies, np.array(grid) / scale) for scale in (1.0, 0.5, 0.25, 0.125)]
    tails += [(1 - share) * shares + share * tails[0] for share in (0.2, 0.04)]
    for near in (0.3, 0.1):  # ties of at most so much are decided, in one token of a hundred
        tails.append(shares + 0.01 * (1 - margins / near).clip(min=0.0))
    tails.append(shares + 1.5e-3 * np.exp(-1.5 * margins))
    tails += [(1 - share) * shares + share / (1 + margins) for share in (1e-3, 2e-4, 4e-5)]
    return measured.table(grid, rates, tails)


def _stop_table(measured: _Statistic) -> Table:
    """Return the table of stops: the cheats end a share of their rollouts where the end is short by up to a bound."""
    grid = sorted({0, *(math.ceil(10.0 ** (power / 4) / NOISE_UNIT) for power in range(-16, 5))})
    margins, honest = np.array(grid) * NOISE_UNIT, _shares(np.concatenate(measured.pairs), grid)
    tails = [
        honest + share * (1 - margins / near).clip(min=0.0)
        for share, near in ((0.4, 0.5), (0.1, 0.1), (0.03, 0.03), (0.03, 0.3), (0.01, 0.01))
    ]
    return measured.table(grid, measured.rates(grid, measured.demands.headroom), tails)


def _replay_table(honest: Honest, demands: ThresholdDemands) -> dict[StatisticName, Table]:
    """Return the table of groups that are not reproduced, if replies are not exact.

    A group is one if one of its rollouts is, however these depend on each other: its rate is at most the sum of theirs.
    The cheats spoil nine, five or two groups of ten.
    """
    pairs = [np.array([not same for group in groups for same in group.reproduced]) for groups in honest.values()]
    if not (replayed := [values for values in pairs if len(values)]):
        return {}
    size = max(len(group.lengths) for groups in honest.values() for group in groups)
    (bound,) = _counted_rates(replayed, (0,), demands.headroom, demands.confidence).tolist()
    rate = min(1.0 - 1e-9, size * bound)  # a smaller one than the bound would refuse honest miners
    tails = [np.array([rate + share * (1.0 - rate)]) for share in (0.9, 0.5, 0.2)]
    return {"replay": table((0,), (rate,), [likelihood_scores((rate,), tail) for tail in tails])}


def _joined(groups: Sequence[GroupMeasurement], name: str) -> np.ndarray:
    """Return a measurement of all positions of some groups: [N]."""
    return np.concatenate([getattr(group, name) for group in groups])


def _shift_rates(
    groups: Sequence[GroupMeasurement], margins: np.ndarray, demands: ThresholdDemands
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds on the rates of a pair's margins beyond each, from the tail of its shifts; and those that normal
    errors cause which are `headroom` times as large as the shifts (root mean square), wherever they are: float64 [M].
    By grailnode/calibration/tail.py both are the mean of 1 - p times the integral of P(S > s) over s > x.
    """
    shifts, rivals = _joined(groups, "shifts"), _joined(groups, "rivals")
    share = float(rivals.mean())
    # A shift counts for the probability of the token's rivals: it is in the sample as often (systematic sampling).
    sampled = np.diff(np.floor(np.cumsum(rivals, dtype=np.float64)), prepend=0.0) > 0
    deviation = demands.headroom * max(_ULP, float(np.sqrt(np.square(_finite(shifts)).mean())))
    normal, units = NormalDist(), margins / deviation
    integrals = np.array([normal.pdf(unit) - unit * normal.cdf(-unit) for unit in units.tolist()]).clip(min=0.0)
    return share * _far_rates(shifts[sampled], margins, demands), 2.0 * share * deviation * integrals


def _far_rates(values: np.ndarray, beyond: np.ndarray, demands: ThresholdDemands) -> np.ndarray:
    """Return bounds on the rates beyond each value, from the tail of differences of a pair: float64 [M]."""
    drop = NormalDist().inv_cdf(demands.confidence) ** 2 / 2
    return tail_rates(np.maximum(_finite(values), _ULP), beyond, drop, _CIRCLE)


def _finite(values: np.ndarray) -> np.ndarray:
    """Return values in which what is no number is the widest margin: float64."""
    return np.where(np.isfinite(values), values, WIDEST_MARGIN).astype(np.float64)


def _logprob_bounds(honest: Honest, demands: ThresholdDemands) -> tuple[int, int]:
    """Return, in millionths, headroom times the largest mean absolute difference of a measured group's
    log-probabilities, and twice the largest mean difference of a pair's that its measurement allows.

    Groups of one rollout have few tokens and vary more than those of a run, so whole groups count if there are any.
    """
    groups = [group for pair in honest.values() for group in pair]
    whole = [group for group in groups if len(group.lengths) > 1] or groups
    means = [float(np.nan_to_num(np.abs(group.differences), nan=WIDEST_MARGIN).mean()) for group in whole]
    biases = []
    for pair in honest.values():
        sums = np.array([np.nan_to_num(group.differences, nan=0.0).sum(dtype=np.float64) for group in pair])
        largest = abs(float(sums.sum())) + 3.0 * float(np.sqrt((sums**2).sum()))
        biases.append(largest / sum(len(group.differences) for group in pair))
    bounds = demands.headroom * max(_ULP, *means), 2.0 * max(biases)
    tolerance, bias = (math.ceil(1e6 * min(WIDEST_MARGIN, bound)) for bound in bounds)
    return tolerance, bias
