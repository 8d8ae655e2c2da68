"""The thresholds of the check, for each pair of a miner's and a validator's arithmetic (docs/spec/run.md, `proof`).

Two honest nodes differ by rounding, and by how much depends on how both compute. So each pair has thresholds of its
own, and what admits one pair tolerates nothing of another.
"""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Final, Literal, get_args

from pydantic import Field, model_validator

from protocol.encoding import OPTIONAL, Ascending, Record, one_of
from protocol.errors import PairError
from protocol.limits import MAX_ALTERNATIVES, MAX_STEPS

CalibratedArithmetic = Literal["torch-bfloat16", "torch-float32", "vllm-bfloat16", "vllm-float32"]
"""An arithmetic of runs with measured thresholds."""

Arithmetic = Literal["exact", CalibratedArithmetic]
"""How a node computes the policy: by which engine, in which dtype (docs/spec/numerics.md)."""

ARITHMETICS: Final[tuple[Arithmetic, ...]] = get_args(Arithmetic)
CALIBRATED: Final[tuple[CalibratedArithmetic, ...]] = get_args(CalibratedArithmetic)
"""The arithmetics of runs with measured thresholds, in ascending order."""


def arithmetic_of(engine: str, dtype: str) -> Arithmetic:
    """Return the arithmetic of an engine that computes in a dtype; ValueError if there is none."""
    for arithmetic in CALIBRATED:
        if arithmetic == f"{engine}-{dtype}":
            return arithmetic
    raise ValueError(f"no arithmetic for {engine} in {dtype}; there are: {', '.join(CALIBRATED)}")


OptionalArithmetic = Annotated[str, one_of(("", *ARITHMETICS))]
"""An arithmetic, or empty where there is none to name."""

StatisticName = Literal["sketch", "margin", "stop", "luck", "replay"]

MEASURED: Final[tuple[StatisticName, ...]] = ("sketch", "margin", "stop")
"""The statistics that have a measured table in every row."""

STATISTICS: Final[tuple[StatisticName, ...]] = (*MEASURED, "luck")
"""What is counted of every group (protocol/judging/evidence.py), in the order in which a group is refused for it. Of
episodes whose replies are not exact, `replay` is counted as well.
"""

DECADE: Final = 1_000_000
"""Evidence and scores are in millionths of a decade: micro-decades."""

RATE_UNIT: Final = 10**18
"""Rates are in units of 10^-18."""

Score = Annotated[int, Field(ge=0, le=100 * DECADE)]


class Alternative(Record):
    """A kind of cheat against honest work."""

    kind: ClassVar[str] = "alternative"
    # what a trial that reaches each step, and no later one, adds to the evidence, in micro-decades
    scores: Annotated[tuple[Score, ...], Field(min_length=1, max_length=MAX_STEPS)]
    # what each trial takes off, in micro-decades: at least log10 of the expectation of 10^score
    growth: Annotated[int, Field(ge=1, le=100 * DECADE)]

    @model_validator(mode="after")
    def _in_order(self) -> "Alternative":
        if list(self.scores) != sorted(self.scores):
            raise ValueError("scores that fall")
        return self


class Table(Record):
    """The table of one statistic."""

    kind: ClassVar[str] = "table"
    # the steps: a trial reaches a step if its value exceeds this, in sketch units, or in units of 2^-19 of logits /
    # temperature
    beyond: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(min_length=1, max_length=MAX_STEPS), Ascending
    ]
    # upper bounds on the probabilities that an honest trial reaches each step, in units of 10^-18
    rates: Annotated[tuple[Annotated[int, Field(ge=1, lt=RATE_UNIT)], ...], Field(max_length=MAX_STEPS)]
    # against which the evidence is kept
    alternatives: Annotated[tuple[Alternative, ...], Field(min_length=1, max_length=MAX_ALTERNATIVES)]

    @model_validator(mode="after")
    def _complete(self) -> "Table":
        if not len(self.beyond) == len(self.rates) or list(self.rates) != sorted(self.rates, reverse=True):
            raise ValueError("not one rate for each step, or rates that rise")
        if any(len(alternative.scores) != len(self.beyond) for alternative in self.alternatives):
            raise ValueError("not one score for each step")
        return self


LUCK: Final = Table.model_construct(
    beyond=(0, 0),
    rates=(),
    alternatives=tuple(
        Alternative.model_construct(scores=(-score, score), growth=growth)
        for score, growth in ((29, 1), (58, 4), (117, 16), (235, 64))
    ),
)
"""The table of `luck` in every row, which is no record: its two steps are the sums of what a rollout's reward is lower
and higher by, in thousandths, and its trials are thousandths of squares.
"""


class Thresholds(Record):
    """The row of thresholds for groups that miners generate in one arithmetic and validators check in another, as
    `grailnode calibrate` measures and protocol/judging/evidence.py applies it (fields: docs/spec/run.md).
    """

    kind: ClassVar[str] = "thresholds"
    miner: Arithmetic
    validator: Arithmetic
    sketch: Table
    margin: Table
    stop: Table
    replay: Table | None = OPTIONAL
    threshold: Annotated[int, Field(ge=1, le=100 * DECADE)]
    logprob_tolerance: Annotated[int, Field(ge=0, le=100_000_000)]
    logprob_bias: Annotated[int, Field(ge=0, le=100_000_000)]
    confidence_ppm: Annotated[int, Field(ge=1, lt=1_000_000)]
    positions: Annotated[int, Field(ge=0, lt=1 << 53)]

    @model_validator(mode="after")
    def _counts_groups(self) -> "Thresholds":
        if self.replay is not None and self.replay.beyond != (0,):
            raise ValueError("a table of replays with other steps than 0")
        return self

    def table(self, statistic: StatisticName) -> Table:
        """Return the table of a statistic."""
        table: Table = LUCK if statistic == "luck" else getattr(self, statistic)
        return table

    @property
    def statistics(self) -> tuple[StatisticName, ...]:
        """The statistics that are counted of groups that this row judges."""
        return STATISTICS if self.replay is None else (*STATISTICS, "replay")

    @property
    def alternatives(self) -> tuple[StatisticName, ...]:
        """The statistic of each alternative, in the order of the evidence."""
        return tuple(name for name in self.statistics for _ in self.table(name).alternatives)

    @property
    def pair(self) -> tuple[Arithmetic, Arithmetic]:
        """The arithmetics of the miner and of the validator."""
        return self.miner, self.validator


class ProofSpec(Record):
    """The rules of the check (fields: docs/spec/run.md)."""

    kind: ClassVar[str] = "proof"
    sketch: Literal["projection", "topk"]
    miners: Annotated[tuple[Arithmetic, ...], Field(min_length=1, max_length=len(ARITHMETICS)), Ascending]
    table: Annotated[tuple[Thresholds, ...], Field(min_length=1, max_length=len(ARITHMETICS) ** 2)]
    audit_ppm: Annotated[int, Field(ge=1, le=1_000_000)]
    audit_floor_ppm: Annotated[int, Field(ge=1, le=1_000_000)]
    audit_halving: Annotated[int, Field(ge=1, le=100_000)]

    @model_validator(mode="after")
    def _complete(self) -> "ProofSpec":
        if [row.pair for row in self.table] != pairs_of(self.miners, self.validators):
            raise ValueError("not one row of thresholds for each pair of arithmetics, ascending")
        if len({row.alternatives for row in self.table}) > 1:
            raise ValueError("rows with different statistics, or different numbers of alternatives")
        if self.audit_floor_ppm > self.audit_ppm:
            raise ValueError("audit_floor_ppm exceeds audit_ppm")
        return self

    @property
    def validators(self) -> tuple[Arithmetic, ...]:
        """The arithmetics of validators that the run admits, ascending."""
        return tuple(sorted({row.validator for row in self.table}))

    def row(self, miner: str, validator: str) -> Thresholds:
        """Return the thresholds for groups of a miner's arithmetic that are checked in a validator's; PairError for
        others.
        """
        for row in self.table:
            if row.pair == (miner, validator) and miner in self.miners:
                return row
        admitted = f"it admits miners in {', '.join(self.miners)} and validators in {', '.join(self.validators)}"
        raise PairError(f"the run has no thresholds for miners in {miner} and validators in {validator}; {admitted}")

    def row_between(self, one: str, other: str) -> Thresholds | None:
        """Return the thresholds for what `one` generates and `other` checks, or else the other way round; None if the
        run has neither.
        """
        rows = [row for row in self.table if row.pair in ((one, other), (other, one))]
        return max(rows, key=lambda row: row.pair == (one, other), default=None)

    def logprob_bounds(self, one: str, other: str) -> tuple[int, int]:
        """Return tolerance and bias of the log-probabilities that two honest nodes compute (`Thresholds`), in
        millionths; a negative tolerance, so that nothing agrees, for an arithmetic without thresholds.
        """
        rows = [row for row in self.table if row.pair in ((one, other), (other, one))]
        tolerance = max((row.logprob_tolerance for row in rows), default=-1)
        return tolerance, max((row.logprob_bias for row in rows), default=0)

    def audit_share(self, clean: int) -> int:
        """Return the audited share of the groups of a miner that has had `clean` clean windows, in millionths."""
        return max(self.audit_floor_ppm, self.audit_ppm >> min(20, clean // self.audit_halving))


def pairs_of(miners: Iterable[Arithmetic], validators: Iterable[Arithmetic]) -> list[tuple[Arithmetic, Arithmetic]]:
    """Return the pairs that need thresholds, ascending: each arithmetic in the run beside each of a validator."""
    checking = set(validators)
    return sorted((one, other) for one in checking | set(miners) for other in checking)


_NEVER: Final = Table(beyond=(0,), rates=(1,), alternatives=(Alternative(scores=(12 * DECADE,), growth=1),))
"""One trial of 10^18 may reach the step."""

EXACT_PROOF: Final = ProofSpec(
    sketch="projection",
    miners=("exact",),
    table=(
        Thresholds(
            miner="exact",
            validator="exact",
            **dict.fromkeys(MEASURED, _NEVER),
            threshold=9 * DECADE,
            logprob_tolerance=0,
            logprob_bias=0,
            confidence_ppm=990_000,
            positions=0,
        ),
    ),
    audit_ppm=1_000_000,
    audit_floor_ppm=1_000_000,
    audit_halving=16,
)
"""The rules of an exact run, up to the audit shares: one token, or one sketch that is tested, that differs refuses its
group.
"""
