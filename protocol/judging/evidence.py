"""Evidence against a miner: one sequential test in whole numbers (docs/spec/verdict.md).

Each statistic of a group counts *trials*, and how many of them reach each *step* of the table of its row of thresholds
(protocol/proof.py). For an alternative with scores s_j and growth g, a group with n trials, k_j of which reach step j
and no later one, adds

    e = sum over j of k_j s_j - n g,                 with E[10^e] <= 1 under honest work,

and the evidence is a CUSUM, w(n) = max(0, w(n-1)) + e(n). docs/understand/proofs.md shows why it rarely exceeds a row's
threshold. Everything is in micro-decades: a node only adds, multiplies and compares integers.

`luck` needs no measured rates, and has one table in every row. Where a token of the miner is not the one that the
validator draws, the validator goes on from there with its own engine (roles/validator/judge.py). Of two honest nodes
each may have the higher reward with equal probability, and E[10^(s D - g D^2)] <= 1 for every difference D with that
symmetry, if g >= s^2 ln(10) / 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import mul
from typing import Annotated, ClassVar, Final

import numpy as np
from pydantic import Field, model_validator

from protocol.encoding import OPTIONAL, REWARD_UNIT, Record
from protocol.limits import MAX_STEPS
from protocol.proof import MEASURED, STATISTICS, StatisticName, Table, Thresholds

LUCK_UNIT: Final = 1000
"""Luck is counted in thousandths of a reward, and of the square of a reward."""

_LARGEST: Final = (1 << 31) - 1

Number = Annotated[int, Field(ge=0, lt=1 << 53)]


class Tally(Record):
    """What one statistic counts in some groups.

    Attributes:
        trials: number of trials, of which the table of the statistic says what one is.
        steps: how many of them reach each step, and no later one; as many as the table has.
    """

    kind: ClassVar[str] = "tally"
    trials: Number = 0
    steps: Annotated[tuple[Number, ...], Field(max_length=MAX_STEPS)] = ()

    def __add__(self, other: "Tally") -> "Tally":
        steps = tuple(one + two for one, two in zip_longest(self.steps, other.steps, fillvalue=0))
        return Tally(trials=self.trials + other.trials, steps=steps)


class Counts(Record):
    """What all statistics count in some groups; without steps if none was computed.

    Attributes:
        sketch: positions that are not repeated, by the distance of their sketch.
        margin: tokens, by their margin.
        stop: rollouts, by the largest margin of a token where the end token is taken or drawn.
        luck: rewards that rollouts have less and more than the validator's own continuations of them, two sums in
            thousandths, and the sum of their squares as trials (`count_luck`).
        replay: groups of episodes whose replies are not exact, each of which reaches the only step if it was not
            reproduced; None in a run without such episodes.
    """

    kind: ClassVar[str] = "counts"
    sketch: Tally = Tally()
    margin: Tally = Tally()
    stop: Tally = Tally()
    luck: Tally = Tally()
    replay: Tally | None = OPTIONAL

    @model_validator(mode="after")
    def _possible(self) -> "Counts":
        for name in (*MEASURED, "replay"):
            tally = self.tally(name)
            if sum(tally.steps) > tally.trials:
                raise ValueError(f"more values of {name} than trials")
        if len(self.luck.steps) not in (0, 2) or bool(sum(self.luck.steps)) != bool(self.luck.trials):
            raise ValueError("not two sums of luck, or no squares of them")
        return self

    def __add__(self, other: "Counts") -> "Counts":
        names = STATISTICS if self.replay is other.replay is None else (*STATISTICS, "replay")
        return Counts(**{name: self.tally(name) + other.tally(name) for name in names})

    def tally(self, statistic: StatisticName) -> Tally:
        """Return the tally of a statistic, which is empty if it was not counted."""
        return getattr(self, statistic) or Tally()

    @property
    def computed(self) -> bool:
        """Whether the check came as far as a statistic."""
        return bool(self.margin.steps or self.replay)


REPRODUCED, UNREPRODUCED = (Counts(replay=Tally(trials=1, steps=(missed,))) for missed in (0, 1))
"""What the replies of one group's episodes count, if they are not exact."""

NO_COUNTS: Final = Counts()
"""What is counted of a group whose check ended before the statistics."""

Evidence = tuple[int, ...]
"""The evidence of each alternative, in micro-decades, in the order of `Thresholds.alternatives`."""

NO_EVIDENCE: Final[Evidence] = ()


def weigh_tally(tally: Tally, table: Table) -> Evidence:
    """Return the evidence that a group adds, of the alternatives of one statistic."""
    return tuple(sum(map(mul, tally.steps, item.scores)) - tally.trials * item.growth for item in table.alternatives)


def weigh(counts: Counts, thresholds: Thresholds) -> Evidence:
    """Return the evidence that a group adds, of all alternatives."""
    return sum((weigh_tally(counts.tally(name), thresholds.table(name)) for name in thresholds.statistics), ())


def accumulate(evidence: Evidence, added: Evidence) -> Evidence:
    """Return the evidence after a group that adds some. The evidence of each alternative restarts at zero by itself."""
    return tuple(max(0, before) + value for before, value in zip_longest(evidence, added, fillvalue=0))


def advance(evidence: Evidence, counts: Counts, thresholds: Thresholds) -> Evidence:
    """Return the evidence after one more group, or after the groups of a window whose counts were added."""
    return accumulate(evidence, weigh(counts, thresholds))


def exceeded(evidence: Evidence, thresholds: Thresholds) -> StatisticName | None:
    """Return the first statistic whose evidence rules honest work out; None if none does."""
    named = zip(thresholds.alternatives, evidence, strict=False)  # there may be no evidence
    return next((name for name, value in named if value > thresholds.threshold), None)


def highest_evidence(evidence: Evidence, groups: Iterable[Evidence]) -> int:
    """Return the highest evidence of any alternative after any of some groups, by what each adds; 0 for none."""
    highest = 0
    for added in groups:
        evidence = accumulate(evidence, added)
        highest = max(highest, *evidence)
    return highest


def is_improbable(evidence: Evidence, groups: Iterable[Counts], thresholds: Thresholds) -> bool:
    """Return whether honest work would not give some groups of one window, judged by one row, in their order."""
    return highest_evidence(evidence, (weigh(counts, thresholds) for counts in groups)) > thresholds.threshold


def repeated_positions(completions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return a mask of the positions of a group that have the same tokens before them as a position of an earlier
    rollout: bool [N], rollout behind rollout.

    Rollouts of one prompt often begin alike. Two positions with the same tokens before them have the same hidden state
    and the same rounding in it, so an honest distance would be counted up to once a rollout.
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
    return int(np.logical_and.accumulate(first[:shorter] == second[:shorter]).sum())


def trial_values(
    distances: np.ndarray, margins: np.ndarray, stops: np.ndarray, lengths: Sequence[int], repeats: np.ndarray
) -> dict[StatisticName, np.ndarray]:
    """Return the value of each trial of a group, by measured statistic: of positions, tokens and rollouts, integer.

    Args:
        distances: integer [N], of the sketches at each position, rollout behind rollout, in sketch units.
        margins: integer [N], `whole_margins` of each token.
        stops: bool [N], where the end token is taken or drawn.
        lengths: tokens of each rollout, or of each turn of an episode, at least one; their sum is N.
        repeats: bool [N], `repeated_positions`. Their sketch is not counted. Their margins are, because the noise of
            each rollout is independent.
    """
    largest_stops = np.maximum.reduceat(np.where(stops, margins, 0), np.cumsum([0, *lengths[:-1]]))
    return {"sketch": distances[~repeats], "margin": margins, "stop": largest_stops}


def count_values(values: Mapping[StatisticName, np.ndarray], thresholds: Thresholds) -> Counts:
    """Count the measured statistics of a group by the values of their trials; its luck is 0."""
    tallies = {name: tally_values(own, thresholds.table(name).beyond) for name, own in values.items()}
    return Counts(**tallies, luck=count_luck(()))


def count_luck(rewards: Iterable[tuple[int, int]]) -> Tally:
    """Count by how much the rewards of rollouts differ from those of the validator's continuations of them.

    Differences are cut to whole thousandths of a reward, and to one reward. Squares are rounded up.

    Args:
        rewards: of each rollout, and of its continuation, in millionths.
    """
    less = more = squares = 0
    for own, other in rewards:
        difference = min(abs(own - other) * LUCK_UNIT // REWARD_UNIT, LUCK_UNIT)
        more += difference * (own > other)
        less += difference * (own < other)
        squares += -(-(difference**2) // LUCK_UNIT)
    return Tally(trials=squares, steps=(less, more))


def whole_margins(margins: np.ndarray, unit: float) -> np.ndarray:
    """Return margins in whole units, rounded up, so that a margin exceeds a whole number of units exactly if its whole
    one does: int64 [N]. What is no number is larger than all.
    """
    scaled = np.ceil(margins.astype(np.float64) / unit)
    whole: np.ndarray = np.nan_to_num(scaled, nan=_LARGEST, posinf=_LARGEST).clip(0, _LARGEST).astype(np.int64)
    return whole


def tally_values(values: np.ndarray, beyond: Sequence[int]) -> Tally:
    """Count the values that exceed each of some ascending bounds, and no later one."""
    reached = np.searchsorted(np.array(beyond), values, side="left")
    steps = np.bincount(reached, minlength=len(beyond) + 1)[1:]
    return Tally(trials=len(values), steps=tuple(steps.tolist()))
