"""Evidence: tests of distances and margins over every scope in which a cheat could hide.

A position is a miss if its statistic lies outside the tolerance. Honest noise makes misses at no more than the rate
that `grailnode calibrate` bounded, so any number of misses has a probability under honest work. A scope is rejected if
this probability lies below the run's level. Scopes are every rollout, every quarter of the rollouts' lengths (against a
cheat that begins late), the group, and a miner's whole window. Groups and windows are tested for the sum of their
points as well, which say how far each statistic lies (protocol/judging/points.py). A sequential test, which may be
evaluated after every window, adds up the evidence of a miner's windows (docs/spec/verdict.md).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from protocol.judging.binomial import binomial_tail
from protocol.judging.points import count_points, log_factors, log_tail
from protocol.limits import MAX_POINTS
from protocol.proof import Step, Thresholds

QUARTERS = 4
MAX_SURPRISAL = 400.0  # decades: a probability below the smallest float64
MAX_MARGIN = 1e6  # the largest margin in a verdict; also the margin of a token for which the policy gives NaN
_DOUBLINGS = np.arange(1, 11)  # the alternatives of the sequential test of misses: the odds doubled so many times


@dataclass(frozen=True)
class Counts:
    """The counts that tests of more than one group use.

    Attributes:
        tokens: completion tokens.
        positions: tokens whose sketch is not repeated (`repeated_positions`).
        sketch_misses: positions outside `sketch_tolerance`.
        margin_misses: tokens beyond `margin`.
        sketch_points, margin_points: the sums of the points of positions and of tokens.
        far_rollouts: rollouts with a far margin (`_count_far_rollouts`).
    """

    tokens: int = 0
    positions: int = 0
    sketch_misses: int = 0
    margin_misses: int = 0
    sketch_points: int = 0
    margin_points: int = 0
    far_rollouts: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(cls, source: Any) -> "Counts":
        """Return the counts that something has as attributes of these names."""
        return cls(**{field.name: getattr(source, field.name) for field in fields(cls)})

    def check(self) -> None:
        """Raise ValueError for counts that no tokens have."""
        if not self.sketch_misses <= self.positions <= self.tokens >= max(self.margin_misses, self.far_rollouts):
            raise ValueError("more misses than positions, or more of either than tokens")
        if self.sketch_points > MAX_POINTS * self.positions or self.margin_points > MAX_POINTS * self.tokens:
            raise ValueError("more points than positions or tokens can have")


@dataclass(frozen=True)
class CountedWindow:
    """The counts of a miner's window, and the thresholds by which they were counted."""

    counts: Counts
    thresholds: Thresholds


@dataclass(frozen=True)
class Evidence:
    """The statistics of a group. The defaults are those of a group without any misses.

    Attributes:
        tokens to far_rollouts: as in `Counts`.
        sketch_median: median distance of the positions, in sketch units.
        worst_margin: largest margin, in units of logits / temperature.
        sketch_surprisal: -log10 of the smallest probability under honest work: of the sketch misses of any scope, or of
            the group's points.
        margin_surprisal: the same for margins, and for the rollouts with a far margin.
    """

    tokens: int = 0
    positions: int = 0
    sketch_misses: int = 0
    sketch_median: float = 0.0
    margin_misses: int = 0
    sketch_points: int = 0
    margin_points: int = 0
    far_rollouts: int = 0
    worst_margin: float = 0.0
    sketch_surprisal: float = 0.0
    margin_surprisal: float = 0.0

    @property
    def counts(self) -> Counts:
        """The counts for tests of several groups together."""
        return Counts.of(self)

    def wrong_sketch(self, thresholds: Thresholds) -> bool:
        """Return whether honest work would not give these sketches."""
        return self.sketch_median > thresholds.sketch_median or self.sketch_surprisal > surprisal_threshold(thresholds)

    def wrong_sampling(self, thresholds: Thresholds) -> bool:
        """Return whether honest work would not sample these tokens."""
        return self.worst_margin > thresholds.margin_limit or self.margin_surprisal > surprisal_threshold(thresholds)


NO_EVIDENCE = Evidence()
"""The statistics of a group whose check ended before they were computed."""


def surprisal_threshold(thresholds: Thresholds) -> float:
    """Return the surprisal above which honest work is ruled out, in decades."""
    return -math.log10(thresholds.level)


def surprisal(misses: int, trials: int, rate: float) -> float:
    """Compute -log10 of the probability of so many misses or more in honest work: decades, at most MAX_SURPRISAL."""
    tail = binomial_tail(misses, trials, rate)
    return min(MAX_SURPRISAL, -math.log10(tail)) if tail > 0.0 else MAX_SURPRISAL


def points_surprisal(points: int, trials: int, steps: tuple[Step, ...]) -> float:
    """Compute -log10 of the largest probability of at least so many points under honest work: decades, at most
    MAX_SURPRISAL.
    """
    return min(MAX_SURPRISAL, -log_tail(points, trials, steps) / math.log(10.0))


def repeated_positions(completions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return a mask of the positions of a group that have the same tokens before them as a position of an earlier
    rollout: bool [N], rollout behind rollout.

    Rollouts of one prompt often begin alike. Two positions with the same tokens before them have the same hidden state
    and the same noise in it, so an honest miss would be counted up to once a rollout. The binomial tests assume
    independent misses.
    """
    arrays = [np.asarray(tokens, dtype=np.int64) for tokens in completions]
    masks = [np.zeros(len(tokens), dtype=bool) for tokens in arrays]
    for number, tokens in enumerate(arrays):
        repeats = max((min(_common_prefix(tokens, other) + 1, len(other)) for other in arrays[:number]), default=0)
        masks[number][:repeats] = True
    return np.concatenate(masks) if masks else np.zeros(0, dtype=bool)


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens two completions have in common from their beginning."""
    shorter = min(len(first), len(second))
    differences = first[:shorter] != second[:shorter]
    return int(differences.argmax()) if differences.any() else shorter


def compute_evidence(
    distances: np.ndarray,
    margins: np.ndarray,
    lengths: Sequence[int],
    thresholds: Thresholds,
    repeats: np.ndarray | None = None,
) -> Evidence:
    """Compute the statistics of a group.

    Args:
        distances: integer [N], the largest of the four sketch differences at each position, rollout behind rollout, in
            sketch units.
        margins: float [N], the sampling shortfall of each token, in units of logits / temperature; NaN where the policy
            gives NaN.
        lengths: tokens of each rollout; their sum is N.
        repeats: bool [N], `repeated_positions`, whose sketch is not tested; None if there are none. Their margins are
            tested, because the sampling noise of each rollout is independent.
    """
    if not len(distances):
        return NO_EVIDENCE
    fresh = np.ones(len(distances), dtype=bool) if repeats is None else ~repeats
    scopes, tokens, positions = _scopes(lengths), len(distances), int(fresh.sum())
    sketch_misses = (distances > thresholds.sketch_tolerance) & fresh
    margin_misses = ~(margins <= thresholds.margin)  # NaN is a miss
    far_rollouts = _count_far_rollouts(~(margins <= thresholds.far_margin), fresh, scopes[0])
    sketch_points = int(count_points(distances[fresh], thresholds.sketch_steps).sum())
    margin_points = int(count_points(margins, thresholds.margin_steps).sum())
    return Evidence(
        tokens=tokens,
        positions=positions,
        sketch_misses=int(sketch_misses.sum()),
        sketch_median=float(np.median(distances[fresh])),
        margin_misses=int(margin_misses.sum()),
        sketch_points=sketch_points,
        margin_points=margin_points,
        far_rollouts=far_rollouts,
        worst_margin=float(np.clip(np.nan_to_num(margins, nan=MAX_MARGIN), 0.0, MAX_MARGIN).max()),
        sketch_surprisal=max(
            _largest_surprisal(sketch_misses, fresh, scopes, thresholds.sketch_rate),
            points_surprisal(sketch_points, positions, thresholds.sketch_steps),
        ),
        margin_surprisal=max(
            _largest_surprisal(margin_misses, np.ones_like(fresh), scopes, thresholds.margin_rate),
            surprisal(far_rollouts, tokens, thresholds.far_rate),
            points_surprisal(margin_points, tokens, thresholds.margin_steps),
        ),
    )


def _count_far_rollouts(far: np.ndarray, fresh: np.ndarray, rollout: np.ndarray) -> int:
    """Return how many rollouts have a far margin at a position that is not repeated. If none has, return 1 for any far
    margin, and else 0.

    A large error of a state may go on in later positions, and rollouts that begin alike share their states. So far
    margins of one rollout, or at repeated positions, may have one cause. Under honest work a large number of such
    rollouts is no more probable than the same number of far margins of independent tokens (union bound; Hoeffding
    1956).

    Args:
        far, fresh: masks of positions; rollout: the number of each position's rollout. [N] each.
    """
    return len(np.unique(rollout[far & fresh])) or int(far.any())


def _scopes(lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return, for each position, the number of its rollout, of its quarter of the rollout's length, and of the whole
    group (always 0): int64 [N] each.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rollout = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(rollout)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rollout, within * QUARTERS // sizes[rollout], np.zeros_like(rollout)


def _largest_surprisal(misses: np.ndarray, tested: np.ndarray, scopes: Sequence[np.ndarray], rate: float) -> float:
    """Return the largest surprisal of any scope, in decades. `misses` and `tested` are masks of positions: bool [N]."""
    counts = {(0, 0)}
    for scope in scopes:
        trials = np.bincount(scope[tested])
        counts.update(zip(np.bincount(scope[misses], minlength=len(trials)).tolist(), trials.tolist(), strict=True))
    return max(surprisal(events, number, rate) for events, number in counts)


def window_surprisal(groups: Iterable[Counts], thresholds: Thresholds) -> float:
    """Return the surprisal of a miner's window as a whole, in decades, from the groups whose statistics were computed.
    It shows a cheat in so few tokens of each group that no group shows it.
    """
    whole = sum(groups, Counts())
    return max(
        surprisal(whole.sketch_misses, whole.positions, thresholds.sketch_rate),
        surprisal(whole.margin_misses, whole.tokens, thresholds.margin_rate),
        surprisal(whole.far_rollouts, whole.tokens, thresholds.far_rate),
        points_surprisal(whole.sketch_points, whole.positions, thresholds.sketch_steps),
        points_surprisal(whole.margin_points, whole.tokens, thresholds.margin_steps),
    )


def history_surprisal(windows: Iterable[CountedWindow]) -> float:
    """Return the surprisal of a miner's windows together, in decades. It shows a cheat that is so small, or in windows
    so short, that no single window shows it.

    The result is log10 of S. R is the Shiryaev-Roberts statistic (Shiryaev 1963, Roberts 1966): the evidence that since
    some window the odds of a miss have been a multiple of the honest ones. R is the mean over k = 1..10 of R_k, where
    R_k(n) = (1 + R_k(n - 1)) * 2^(k x) / (1 + p (2^k - 1))^t for x misses in t trials at the window's honest rate p;
    the odds in R_k are 2^k times the honest ones. For points, R is the mean over k = 1..32, and a window's factor in
    R_k is w^x / M(w)^t with w = 2^(k/16) for x points in t trials (protocol/judging/points.py). S is half of R over all
    windows, plus half of each R over the windows of one arithmetic that the miner declared: a miner can then neither
    leave its evidence behind by another declaration, nor lower it by clean windows under wider thresholds. With one
    declaration, S is R.

    After n windows of honest work the expectation of S is at most n, at whichever window the test stops. So S exceeds
    1 / level within n windows with a probability of at most n * level (Doob), as if each window had a test of its own.

    Args:
        windows: oldest first.
    """
    whole = list(windows)
    declarations = sorted({window.thresholds.miner for window in whole})
    parts = [[window for window in whole if window.thresholds.miner == declared] for declared in declarations]
    sequences = [whole, *parts] if len(parts) > 1 else [whole]  # both halves of S are equal
    return max(
        _change_surprisal([[factors(window) for window in sequence if trials(window.counts)] for sequence in sequences])
        for trials, factors in (
            (_POSITIONS, _sketch_misses),
            (_TOKENS, _margin_misses),
            (_TOKENS, _far_margins),
            (_POSITIONS, _sketch_points),
            (_TOKENS, _margin_points),
        )
    )


_POSITIONS, _TOKENS = attrgetter("positions"), attrgetter("tokens")

# The logarithms of a window's factors in each R_k, for each statistic: float64 [K].


def _sketch_misses(window: CountedWindow) -> np.ndarray:
    return _log_factors_of_misses(window.counts.sketch_misses, window.counts.positions, window.thresholds.sketch_rate)


def _margin_misses(window: CountedWindow) -> np.ndarray:
    return _log_factors_of_misses(window.counts.margin_misses, window.counts.tokens, window.thresholds.margin_rate)


def _far_margins(window: CountedWindow) -> np.ndarray:
    return _log_factors_of_misses(window.counts.far_rollouts, window.counts.tokens, window.thresholds.far_rate)


def _sketch_points(window: CountedWindow) -> np.ndarray:
    return log_factors(window.counts.sketch_points, window.counts.positions, window.thresholds.sketch_steps)


def _margin_points(window: CountedWindow) -> np.ndarray:
    return log_factors(window.counts.margin_points, window.counts.tokens, window.thresholds.margin_steps)


def _log_factors_of_misses(misses: int, trials: int, rate: float) -> np.ndarray:
    factors: np.ndarray = misses * math.log(2.0) * _DOUBLINGS - trials * _growth(rate)
    return factors


def _change_surprisal(sequences: Sequence[Sequence[np.ndarray]]) -> float:
    """Compute log10 of S, between 0 and MAX_SURPRISAL.

    Args:
        sequences: the logarithms of the factors of all windows, then of those of each declaration if there are several.
    """
    logs = np.stack([_change_evidence(sequence) for sequence in sequences if sequence] or [np.full(1, -np.inf)])
    halves = min(2, len(sequences))
    decades = (np.logaddexp.reduce(logs, axis=None) - math.log(halves * logs.shape[1])) / math.log(10.0)
    return float(np.clip(decades, 0.0, MAX_SURPRISAL))


def _change_evidence(windows: Sequence[np.ndarray]) -> np.ndarray:
    """Return ln R_k after windows with these logarithms of factors: float64 [K]."""
    logs = np.full(len(windows[0]), -np.inf)
    for factors in windows:
        logs = np.logaddexp(0.0, logs) + factors
    return logs


@functools.cache
def _growth(rate: float) -> np.ndarray:
    """Return ln(1 + p (2^k - 1)) for an honest rate p, of which a run has few: float64 [10]."""
    growth: np.ndarray = np.log1p(rate * (np.exp2(_DOUBLINGS) - 1.0))
    return growth
