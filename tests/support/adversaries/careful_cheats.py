"""Simulated miners with the right policy that decide near ties, or edit tokens: what they gain until they are refused.

Groups are drawn from what was measured, and counted and judged as real ones. Honest trials reach the steps of a row as
often as its rates say, divided by the headroom. A *careful* miner knows all of its evidence, and decides only what
leaves a reserve below the threshold, and does not cost it the price of a miss (docs/spec/ledger.md); others decide
whatever they can.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from protocol.encoding import REWARD_UNIT
from protocol.judging.evidence import (
    NO_COUNTS,
    NO_EVIDENCE,
    Counts,
    Evidence,
    Tally,
    advance,
    count_luck,
    exceeded,
    is_improbable,
)
from protocol.judging.ledger import LedgerRow, excess_misses
from protocol.proof import DECADE, RATE_UNIT, StatisticName, Table, Thresholds
from protocol.rollout.sampling import NOISE_UNIT
from protocol.run import ScoringSpec
from tests.support.adversaries.planned_cheats import accounts_of
from tests.support.builders.proofs import advance_window, proof_of
from tests.support.builders.samples import MINER, TRAINER
from tests.support.builders.samples import row as ledger_row

GROUPS, GROUP_SIZE = 16, 8
HEADROOM = 4.0
RESERVE = 2 * DECADE
"""Of a careful miner, for honest misses that follow."""

Accepts = Callable[[Counts], bool]
"""Returns whether the miner dares to show these counts of a group."""


@dataclass(frozen=True)
class SimulatedGroup:
    """A group as a cheat makes it.

    Attributes:
        counts: what a validator counts; its trials of `margin` are the tokens that the miner generates.
        honest_tokens: that honest work has.
        gained: by how much the rewards that are trained on exceed those of honest work, of all rollouts; nothing if all
            are equal, because then the group teaches nothing.
    """

    counts: Counts
    honest_tokens: int
    gained: float = 0.0

    @property
    def tokens(self) -> int:
        return self.counts.margin.trials


Cheat = Callable[[Thresholds, Generator, Accepts], SimulatedGroup]


@dataclass(frozen=True)
class Gain:
    """What a cheat gains in some windows.

    Attributes:
        pay: balance for each token that is generated, as a multiple of that of a miner beside it that makes the same
            groups honestly; negative for a debt.
        reward: mean reward of a rollout of the accepted windows beyond that of honest work.
        refused: the first refused window, from 1 on; None if there is none.
        refusals: number of refused windows.
    """

    pay: float
    reward: float
    refused: int | None
    refusals: int = 0


def gain(
    cheat: Cheat, thresholds: Thresholds, scoring: ScoringSpec, *, careful: bool, windows: int = 100, seed: int = 0
) -> Gain:
    """Return what a miner gains that cheats in all groups of so many windows.

    Args:
        thresholds: of miners in float32, by name.
    """
    rng, evidence, shown = np.random.default_rng(seed), NO_EVIDENCE, NO_COUNTS
    refused: list[int] = []
    reserved = thresholds.model_copy(update={"threshold": thresholds.threshold - RESERVE})
    results: list[tuple[LedgerRow, LedgerRow]] = []
    made: list[SimulatedGroup] = []
    gained = 0.0
    for window in range(1, windows + 1):
        inside, groups = evidence, list[SimulatedGroup]()
        for _ in range(GROUPS):
            accepts = partial(_dares, inside, shown, reserved) if careful else lambda counts: True
            groups.append(cheat(thresholds, rng, accepts))
            inside, shown = advance(inside, groups[-1].counts, thresholds), shown + groups[-1].counts
        made += groups
        counts = [group.counts for group in groups]
        total, honest_tokens = sum(counts, NO_COUNTS), sum(group.honest_tokens for group in groups)
        if is_improbable(evidence, counts, thresholds):
            refused.append(window)
            own = ledger_row(audited=GROUPS, accepted=0, rejected=GROUPS, counts=total)
        else:
            own = ledger_row(
                audited=GROUPS, accepted=GROUPS, counts=total, tokens=sum(group.tokens for group in groups)
            )
            gained += sum(group.gained for group in groups)
        evidence = advance_window(evidence, total, thresholds)
        other = ledger_row(TRAINER, audited=GROUPS, accepted=GROUPS, counts=NO_COUNTS, tokens=honest_tokens)
        results.append((own, other))
    balances, lengths = accounts_of(results, scoring, proof_of(thresholds)).totals()
    paid, due = (balances[key.public] * lengths[key.public] for key in (MINER, TRAINER))
    work = sum(group.tokens for group in made) / sum(group.honest_tokens for group in made)
    rollouts = GROUP_SIZE * sum(own.accepted for own, _ in results)
    return Gain(paid / due / work, gained / max(1, rollouts), refused[0] if refused else None, len(refused))


def _dares(evidence: Evidence, shown: Counts, reserved: Thresholds, counts: Counts) -> bool:
    """Return whether these counts exceed no threshold, and all have no more misses than cost nothing."""
    row = ledger_row(audited=1, accepted=1, counts=shown + counts)
    is_free = all(excess_misses(row, reserved, name) <= 0 for name in ("margin", "stop"))
    return is_free and exceeded(advance(evidence, counts, reserved), reserved) is None


def take_stops(tokens: int, reach: float) -> Cheat:
    """Return the cheat that takes the end token where it falls short by at most the reach.

    At each token the end is drawn with a probability of 1 / `tokens`, and falls short by less than x with x times that.
    """

    def group(thresholds: Thresholds, rng: Generator, accepts: Accepts) -> SimulatedGroup:
        lengths = rng.geometric(1.0 / tokens, GROUP_SIZE)
        total = int(lengths.sum())
        counts, saved = _honest(thresholds, rng, margin=total, stop=GROUP_SIZE), 0
        for length in lengths.tolist():
            for place in sorted(rng.integers(1, length + 1, rng.poisson(reach * length / tokens)).tolist()):
                miss = _miss(thresholds, reach * rng.random(), "margin", "stop")
                if place < length and accepts(counts + miss):
                    counts, saved = counts + miss, saved + length - place
                    break
        return SimulatedGroup(_shortened(counts, saved), total)

    return group


def choose_lengths(tokens: int, reach: float, density: float, spread: float) -> Cheat:
    """Return the cheat that takes, at near ties of at most the reach, the token behind which it expects fewer tokens.

    What it expects behind each token differs from the mean by a normally distributed share of it.

    Args:
        density: near ties of a token, for each unit of their margin.
        spread: standard deviation of that share.
    """

    def group(thresholds: Thresholds, rng: Generator, accepts: Accepts) -> SimulatedGroup:
        lengths = rng.geometric(1.0 / tokens, GROUP_SIZE)
        total, saved = int(lengths.sum()), 0
        counts = _honest(thresholds, rng, margin=total, stop=GROUP_SIZE)
        for length in lengths.tolist():
            place, end = 0.0, float(length)
            while (place := place + rng.exponential(1.0 / (density * reach))) < end:
                difference = rng.normal(0.0, spread) - rng.normal(0.0, spread)
                miss = _miss(thresholds, reach * rng.random(), "margin")
                if difference < 0.0 and accepts(counts + miss):
                    counts, end = counts + miss, place + (end - place) * max(0.1, 1.0 + difference)
            saved += length - math.ceil(end)
        return SimulatedGroup(_shortened(counts, saved), total)

    return group


def choose_luck(
    tokens: int, reach: float, density: float, rewards: Sequence[Sequence[float]], sacrificed: float = 0.0
) -> Cheat:
    """Return the cheat that decides one near tie of at most the reach in each rollout, if the reward becomes higher.

    What follows from another token has the reward of any rollout of the group, whoever computes it: a validator that
    continues from its own token has the honest reward where the miner decided, and any where both are honest. Of a
    rollout that R1 selects, the validator's reward counts. The miner does not know which ones are selected, and decides
    as if all were.

    Args:
        tokens: of a rollout on average; none has more than four times as many, or 1,024 where all can be selected so.
        density: near ties of a token, for each unit of their margin.
        rewards: of the rollouts of honest groups.
        sacrificed: reach of a tie before it that is decided whatever the reward, so that chance hides what is gained.
    """
    longest = max(4 * tokens, 1024) if tokens > 512 else min(4 * tokens, 1024)
    most_selected = min(GROUP_SIZE, max(1, GROUP_SIZE * 1024 // longest))

    def group(thresholds: Thresholds, rng: Generator, accepts: Accepts) -> SimulatedGroup:
        honest_rewards = np.array(rewards[int(rng.integers(len(rewards)))])
        lengths = np.minimum(rng.geometric(1.0 / tokens, GROUP_SIZE), longest)
        total, rate = int(lengths.sum()), _rates(thresholds.margin)[0]
        missing = [_draw(thresholds.margin, rng) for _ in range(rng.binomial(total, rate))]
        own, others = honest_rewards.copy(), honest_rewards.copy()
        first = rng.geometric(rate, GROUP_SIZE).tolist()  # the place of the first honest miss, or behind the end
        for rollout in np.flatnonzero(first <= lengths).tolist():
            others[rollout] = rng.choice(honest_rewards)
        misses = first <= lengths
        selected = rng.permutation(GROUP_SIZE) < most_selected

        def counts(continued: np.ndarray) -> Counts:
            pairs = np.round(np.stack([own, others], axis=1)[continued] * REWARD_UNIT).astype(int).tolist()
            margin = _tally(thresholds.margin, missing, total)
            return Counts(margin=margin, stop=_tally(thresholds.stop, [], GROUP_SIZE), luck=count_luck(pairs))

        for rollout, length in enumerate(lengths.tolist()):
            begin = 0
            for near, is_chosen in ((sacrificed, False), (reach, True)):
                tie, other = begin + int(rng.geometric(max(density * near, 1e-9))), rng.choice(honest_rewards)
                if tie > length or (is_chosen and other <= own[rollout]):
                    continue
                before = own.copy(), others.copy(), misses.copy()
                own[rollout], misses[rollout] = other, True
                if tie < first[rollout]:
                    others[rollout] = honest_rewards[rollout]
                missing.append(max(1, round(near * rng.random() / NOISE_UNIT)))
                if accepts(counts(misses)):
                    begin = tie
                else:
                    missing.pop()
                    own, others, misses = before
        trained = np.where(selected, honest_rewards, own)
        gained = float((trained - honest_rewards).sum()) if len(set(trained)) > 1 else 0.0
        return SimulatedGroup(counts(misses & selected), total, gained)

    return group


def edit_tokens(tokens: int, edited: int, margins: Sequence[float]) -> Cheat:
    """Return the cheat that replaces so many of the tokens of a window, with margins drawn from some."""
    numbers: list[int] = []  # of edited tokens of the groups that the window still has

    def group(thresholds: Thresholds, rng: Generator, accepts: Accepts) -> SimulatedGroup:
        total = tokens // GROUPS
        counts = _honest(thresholds, rng, margin=total, stop=GROUP_SIZE)
        if not numbers:
            numbers.extend(rng.multinomial(edited, [1.0 / GROUPS] * GROUPS).tolist())
        for margin in rng.choice(margins, numbers.pop()).tolist():
            counts += _miss(thresholds, margin, "margin")
        return SimulatedGroup(counts, total)

    return group


def _rates(table: Table) -> np.ndarray:
    """Return how often honest trials reach each step: float64 [C]."""
    return np.array(table.rates) / RATE_UNIT / HEADROOM


def _draw(table: Table, rng: Generator) -> int:
    """Return the value of an honest trial that reaches the first step."""
    rates = _rates(table)
    return table.beyond[int((rng.random() * rates[0] < rates).sum()) - 1] + 1


def _honest(thresholds: Thresholds, rng: Generator, **trials: int) -> Counts:
    """Return counts of so many honest trials of each statistic."""
    tallies = {}
    for name, number in trials.items():
        table = thresholds.table(name)  # type: ignore[arg-type]
        steps = -np.diff([1.0, *_rates(table), 0.0])
        tallies[name] = Tally(trials=number, steps=tuple(rng.multinomial(number, steps)[1:].tolist()))
    return Counts(**tallies)


def _shortened(counts: Counts, saved: int) -> Counts:
    """Return counts of a group that has so many tokens fewer."""
    margin = Tally(trials=counts.margin.trials - saved, steps=counts.margin.steps)
    return counts.model_copy(update={"margin": margin})


def _tally(table: Table, values: Sequence[int], trials: int) -> Tally:
    reached = np.searchsorted(table.beyond, values, side="left").astype(int)
    steps = np.bincount(reached, minlength=len(table.beyond) + 1)[1:]
    return Tally(trials=trials, steps=tuple(steps.tolist()))


def _miss(thresholds: Thresholds, margin: float, *names: StatisticName) -> Counts:
    """Return what a token that falls short by a margin adds to the counts of some statistics."""
    value = math.ceil(margin / NOISE_UNIT)
    tallies: dict[str, Any] = {name: _tally(thresholds.table(name), [value], 0) for name in names}
    return Counts.model_construct(**tallies)
