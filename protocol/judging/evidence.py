"""From distances and margins to a decision: exact binomial tests over every scope in which a cheat could hide.

A statistic of a position is a miss when it lies outside its tolerance. Honest noise makes misses at no more than the
rate that `grailnode calibrate` bounded, so any number of misses has a probability under honest work, and a scope in
which it lies below the run's level is refused. Scopes are every rollout, every quarter of the rollouts' lengths (a
cheat that begins late), the group, and a miner's whole window; what its windows show one after another is added up by a
test that may be looked at after each of them (docs/spec/verdict.md).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protocol.judging.binomial import binomial_tail
from protocol.run import ProofSpec

QUARTERS = 4
MOST_SURPRISE = 400.0  # decades: less than the smallest float64
LARGEST_MARGIN = 1e6  # as a verdict can say it; also what a policy that gives no numbers is worth
_DOUBLINGS = np.arange(1, 11)  # of the odds of a miss: the alternatives that a history is held against


@dataclass(frozen=True)
class Counts:
    """What the tests of more than one group go by.

    Attributes:
        tokens: completion tokens; positions: those of them whose sketch says something new (`repeated`).
        sketch_misses: of the positions; margin_misses: of the tokens.
    """

    tokens: int = 0
    positions: int = 0
    sketch_misses: int = 0
    margin_misses: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tokens + other.tokens,
            self.positions + other.positions,
            self.sketch_misses + other.sketch_misses,
            self.margin_misses + other.margin_misses,
        )


@dataclass(frozen=True)
class Evidence:
    """The statistics of a group; what is not reached is as in the best of groups.

    Attributes:
        tokens: looked at; positions: those of them whose sketch says something new.
        sketch_misses: positions outside `sketch_tolerance`; sketch_median: the group's median distance, in sketch
            units.
        margin_misses: tokens beyond `margin`; worst_margin: the largest, in units of logits / temperature.
        sketch_surprise, margin_surprise: -log10 of the least probability of a scope's misses under honest work.
    """

    tokens: int = 0
    positions: int = 0
    sketch_misses: int = 0
    sketch_median: float = 0.0
    margin_misses: int = 0
    worst_margin: float = 0.0
    sketch_surprise: float = 0.0
    margin_surprise: float = 0.0

    @property
    def counts(self) -> Counts:
        """For the tests of several groups together."""
        return Counts(self.tokens, self.positions, self.sketch_misses, self.margin_misses)

    def wrong_sketch(self, proof: ProofSpec) -> bool:
        """Whether honest work would not show these sketches."""
        return self.sketch_median > proof.sketch_median or self.sketch_surprise > surprisal_threshold(proof)

    def wrong_sampling(self, proof: ProofSpec) -> bool:
        """Whether honest work would not draw these tokens."""
        return self.worst_margin > proof.margin_limit or self.margin_surprise > surprisal_threshold(proof)


NOT_REACHED = Evidence()


def surprisal_threshold(proof: ProofSpec) -> float:
    """The surprise from which on honest work is ruled out: decades."""
    return -math.log10(proof.level)


def surprisal(misses: int, trials: int, rate: float) -> float:
    """-log10 of the probability that honest work shows at least so many misses: decades, at most MOST_SURPRISE."""
    tail = binomial_tail(misses, trials, rate)
    return min(MOST_SURPRISE, -math.log10(tail)) if tail > 0.0 else MOST_SURPRISE


def repeated(completions: Sequence[Sequence[int]]) -> np.ndarray:
    """Which positions of a group stand behind the very tokens that a position of an earlier rollout stands behind: bool
    [N].

    Rollouts of one prompt begin alike. Where two have the same tokens behind them, their states are the same and so is
    the noise in
    them: honest misses would come eight at a time, which no test of independent ones allows for.
    """
    arrays = [np.asarray(tokens, dtype=np.int64) for tokens in completions]
    again = [np.zeros(len(tokens), dtype=bool) for tokens in arrays]
    for number, tokens in enumerate(arrays):
        behind = max((min(_alike(tokens, earlier) + 1, len(earlier)) for earlier in arrays[:number]), default=0)
        again[number][:behind] = True
    return np.concatenate(again) if again else np.zeros(0, dtype=bool)


def _alike(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two completions have in common before they part."""
    shorter = min(len(left), len(right))
    parted = left[:shorter] != right[:shorter]
    return int(parted.argmax()) if parted.any() else shorter


def weigh(
    distances: np.ndarray,
    margins: np.ndarray,
    lengths: Sequence[int],
    proof: ProofSpec,
    repeats: np.ndarray | None = None,
) -> Evidence:
    """The evidence of a group.

    Args:
        distances: integer [N], the largest of the four differences at each position, rollout behind rollout.
        margins: float [N], the sampling shortfall of each token; not a number where the policy gives none.
        lengths: tokens of each rollout, N in sum.
        repeats: bool [N], positions whose sketch says nothing new (`repeated`); None where there are none. Their
            margins count: the noise that a token was drawn with is each rollout's own.
    """
    if not len(distances):
        return NOT_REACHED
    fresh = np.ones(len(distances), dtype=bool) if repeats is None else ~repeats
    off_sketch = (distances > proof.sketch_tolerance) & fresh
    off_margin = ~(margins <= proof.margin)  # what is no number is a miss
    scopes = _scopes(lengths)
    return Evidence(
        tokens=len(distances),
        positions=int(fresh.sum()),
        sketch_misses=int(off_sketch.sum()),
        sketch_median=float(np.median(distances[fresh])),
        margin_misses=int(off_margin.sum()),
        worst_margin=float(np.clip(np.nan_to_num(margins, nan=LARGEST_MARGIN), 0.0, LARGEST_MARGIN).max()),
        sketch_surprise=_most(off_sketch, fresh, scopes, proof.sketch_rate),
        margin_surprise=_most(off_margin, np.ones_like(fresh), scopes, proof.margin_rate),
    )


def _scopes(lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """To which rollout each position belongs, to which quarter of the rollouts' lengths, and to the one whole: int64
    [N] each.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rollout = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(rollout)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rollout, within * QUARTERS // sizes[rollout], np.zeros_like(rollout)


def _most(misses: np.ndarray, counted: np.ndarray, scopes: Sequence[np.ndarray], rate: float) -> float:
    """The largest surprise of a scope: misses and the positions that count are bool [N]."""
    found = {(0, 0)}
    for scope in scopes:
        trials = np.bincount(scope[counted])
        found.update(zip(np.bincount(scope[misses], minlength=len(trials)).tolist(), trials.tolist(), strict=True))
    return max(surprisal(events, number, rate) for events, number in found)


def window_surprisal(groups: Iterable[Counts], proof: ProofSpec) -> float:
    """The surprise of a miner's window as a whole: a cheat in so few tokens of each group that no group shows it.

    Args:
        groups: the counts of each group whose statistics were reached.
    """
    whole = sum(groups, Counts())
    return max(
        surprisal(whole.sketch_misses, whole.positions, proof.sketch_rate),
        surprisal(whole.margin_misses, whole.tokens, proof.margin_rate),
    )


def history_surprisal(windows: Iterable[Counts], proof: ProofSpec) -> float:
    """The surprise of a miner's windows one after another: a cheat so small, or windows so short, that none of them
    shows it.

    Decades of R, whose expectation after n windows of honest work is at most n, whichever of them one looks at: that it
    exceeds 1 / level in n windows has a probability of at most n * level (Doob), as if each window had a test of its
    own. R is the mean over k = 1..10 of R_k, where R_k(n) = (1 + R_k(n - 1)) * 2^(k x) / (1 + p (2^k - 1))^t for x
    misses in t trials at honest
    rate p: the evidence that since some window the odds of a miss are 2^k times the honest ones (Shiryaev 1963, Roberts
    1966).

    Args:
        windows: the counts of a miner's groups whose statistics were reached, oldest first.
    """
    found = list(windows)
    return max(
        _changed([(item.sketch_misses, item.positions) for item in found], proof.sketch_rate),
        _changed([(item.margin_misses, item.tokens) for item in found], proof.margin_rate),
    )


def _changed(windows: Sequence[tuple[int, int]], rate: float) -> float:
    """log10 of R after (misses, trials) of each window, between 0 and MOST_SURPRISE."""
    growth = np.log1p(rate * (np.exp2(_DOUBLINGS) - 1.0))
    logs = np.full(len(_DOUBLINGS), -np.inf)  # ln R_k
    for misses, trials in windows:
        if trials:
            logs = np.logaddexp(0.0, logs) + misses * math.log(2.0) * _DOUBLINGS - trials * growth
    decades = (np.logaddexp.reduce(logs) - math.log(len(_DOUBLINGS))) / math.log(10.0)
    return float(np.clip(decades, 0.0, MOST_SURPRISE))
