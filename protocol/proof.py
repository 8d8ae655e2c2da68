"""The thresholds of the check, for each pair of a miner's and a validator's arithmetic (docs/spec/run.md, `proof`).

Two honest nodes differ by rounding, and by how much depends on how both compute. So each pair has thresholds of its
own, and what admits one pair tolerates nothing of another.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from protocol.encoding import Ascending, Record
from protocol.errors import PairError
from protocol.limits import MAX_POINTS, MAX_STEPS

CalibratedArithmetic = Literal["torch-bfloat16", "torch-float32", "vllm-bfloat16", "vllm-float32"]
"""An arithmetic of runs with measured thresholds."""

Arithmetic = Literal["exact", CalibratedArithmetic]
"""How a node computes the policy: by which engine, in which dtype (docs/spec/numerics.md)."""

ARITHMETICS: Final[tuple[Arithmetic, ...]] = get_args(Arithmetic)
CALIBRATED: Final[tuple[CalibratedArithmetic, ...]] = get_args(CalibratedArithmetic)
"""The arithmetics of runs with measured thresholds, in ascending order."""


def arithmetic_of(engine: str, dtype: str) -> Arithmetic:
    """Return the arithmetic of an engine that computes in a dtype.

    Raises:
        ValueError: there is none of this name.
    """
    for arithmetic in CALIBRATED:
        if arithmetic == f"{engine}-{dtype}":
            return arithmetic
    raise ValueError(f"no arithmetic for {engine} in {dtype}; there are: {', '.join(CALIBRATED)}")


Rate = Annotated[float, Field(gt=0.0, lt=1.0)]


def _check_arithmetic(name: str) -> str:
    if name and name not in ARITHMETICS:
        raise ValueError(f"no arithmetic: {name!r}")
    return name


OptionalArithmetic = Annotated[str, AfterValidator(_check_arithmetic)]
"""An arithmetic, or empty where there is none to name."""


class Step(Record):
    """A step of a statistic: a position has the points of the last step that its statistic lies beyond.

    Attributes:
        beyond: in the units of the statistic.
        rate: upper bound on the probability that an honest position lies beyond it.
        points: of a position beyond it.
    """

    kind: ClassVar[str] = "step"
    beyond: Annotated[float, Field(ge=0.0, le=100.0)]
    rate: Rate
    points: Annotated[int, Field(ge=1, le=MAX_POINTS)]


def _check_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    for one, other in itertools.pairwise(steps):
        if one.beyond >= other.beyond or one.points >= other.points or one.rate < other.rate:
            raise ValueError("steps and their points must strictly ascend, and their rates never do")
    return steps


Steps = Annotated[tuple[Step, ...], Field(min_length=1, max_length=MAX_STEPS), AfterValidator(_check_steps)]


class Thresholds(Record):
    """The thresholds for groups that miners generate in one arithmetic and validators check in another, as measured by
    `grailnode calibrate` and applied by protocol/judging/evidence.py.

    Attributes:
        sketch_tolerance: largest difference of a value that is no miss, in sketch units.
        sketch_rate: upper bound on the probability that an honest position lies outside that tolerance.
        sketch_steps: the steps of a position's largest difference, in sketch units.
        sketch_median: largest median distance of an honest group's positions, in sketch units.
        margin: largest shortfall of a chosen token's score that is no miss, in units of logits / temperature.
        margin_rate: upper bound on the probability that an honest token lies beyond `margin`.
        margin_steps: the steps of a chosen token's shortfall.
        far_margin: largest shortfall of a chosen token's score that is no far margin: beyond all that were measured.
        far_rate: upper bound, extrapolated, on the probability that an honest token lies beyond `far_margin`.
        margin_limit: shortfall that no honest token shows; a group with one token beyond it is rejected.
        logprob_tolerance: largest mean absolute difference of the log-probabilities that two honest nodes, one in each
            arithmetic, compute for a group's tokens.
        level: probability with which a single test may reject honest work.
        confidence: confidence of each rate as an upper bound.
        positions: honest positions on which the rates were measured; 0 if they were not measured.
    """

    kind: ClassVar[str] = "thresholds"
    miner: Arithmetic
    validator: Arithmetic
    sketch_tolerance: Annotated[int, Field(ge=0, le=64)]
    sketch_rate: Rate
    sketch_steps: Steps
    sketch_median: Annotated[int, Field(ge=0, le=64)]
    margin: Annotated[float, Field(ge=0.0, le=100.0)]
    margin_rate: Rate
    margin_steps: Steps
    far_margin: Annotated[float, Field(ge=0.0, le=100.0)]
    far_rate: Rate
    margin_limit: Annotated[float, Field(ge=0.0, le=100.0)]
    logprob_tolerance: Annotated[float, Field(ge=0.0, le=100.0)]
    level: Annotated[float, Field(gt=0.0, le=0.1)]
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)]
    positions: Annotated[int, Field(ge=0, lt=1 << 53)]

    @model_validator(mode="after")
    def _in_order(self) -> "Thresholds":
        if self.margin_limit < max(self.margin, self.far_margin):
            raise ValueError("margin_limit lies below margin or far_margin")
        return self

    @property
    def pair(self) -> tuple[Arithmetic, Arithmetic]:
        """The arithmetics of the miner and of the validator."""
        return self.miner, self.validator


class ProofSpec(Record):
    """The rules of the check.

    Attributes:
        miners: the arithmetics of miners that the run admits, ascending.
        table: thresholds, ascending by pair, one for each arithmetic of a miner or a validator beside each arithmetic
            of a validator. Those of two validators' arithmetics bound how far the two differ.
        audit_ppm: audited share of a newcomer's groups, in millionths.
        audit_floor_ppm: smallest audited share of any miner's groups, in millionths.
        audit_halving: clean windows after which the audited share halves.
    """

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
        if self.audit_floor_ppm > self.audit_ppm:
            raise ValueError("audit_floor_ppm exceeds audit_ppm")
        return self

    @property
    def validators(self) -> tuple[Arithmetic, ...]:
        """The arithmetics of validators that the run admits, ascending."""
        return tuple(sorted({row.validator for row in self.table}))

    def row(self, miner: str, validator: str) -> Thresholds:
        """Return the thresholds for groups of a miner's arithmetic that are checked in a validator's.

        Raises:
            PairError: the run does not admit this pair.
        """
        for row in self.table:
            if row.pair == (miner, validator) and miner in self.miners:
                return row
        admitted = f"it admits miners in {', '.join(self.miners)} and validators in {', '.join(self.validators)}"
        raise PairError(f"the run has no thresholds for miners in {miner} and validators in {validator}; {admitted}")

    def widest(self, *miners: str) -> Thresholds:
        """Return thresholds for groups of some arithmetics of miners within which those of every validator lie."""
        rows = [self.row(miner, validator) for miner in sorted(miners) for validator in self.validators]
        bounds = Thresholds.model_fields.keys() - {"miner", "validator", "confidence", "sketch_steps", "margin_steps"}
        widest: dict[str, Any] = {name: max(getattr(row, name) for row in rows) for name in bounds}
        for name in ("sketch_steps", "margin_steps"):
            widest[name] = _widest_steps([getattr(row, name) for row in rows])
        return rows[0].model_copy(update=widest | {"level": min(row.level for row in rows)})

    def logprob_tolerance(self, one: str, other: str) -> float:
        """Return the largest mean absolute difference of the log-probabilities of a group's tokens that two honest
        nodes compute; negative, so that nothing agrees, if one of them computes in an arithmetic without thresholds.
        """
        pairs = ((one, other), (other, one))
        return max((row.logprob_tolerance for row in self.table if row.pair in pairs), default=-1.0)

    def audit_share(self, clean: int) -> int:
        """Return the audited share of the groups of a miner that has had `clean` clean windows, in millionths."""
        return max(self.audit_floor_ppm, self.audit_ppm >> min(20, clean // self.audit_halving))


def _widest_steps(rows: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """Return steps by which points are at least as probable under honest work as by each row, whichever counted them.

    Honest work has at least so many points, for each number that occurs, at the largest rate of any row.
    """
    widest = []
    for points in sorted({step.points for steps in rows for step in steps}):
        reached = [
            next(step for step in steps if step.points >= points) for steps in rows if steps[-1].points >= points
        ]
        beyond, rate = max(step.beyond for step in reached), max(step.rate for step in reached)
        widest.append(Step(beyond=beyond, rate=rate, points=points))
    return tuple(widest)


def pairs_of(miners: Iterable[Arithmetic], validators: Iterable[Arithmetic]) -> list[tuple[Arithmetic, Arithmetic]]:
    """Return the pairs for which a run needs thresholds, ascending: each arithmetic of a miner or a validator beside
    each of a validator.
    """
    checking = set(validators)
    return sorted((one, other) for one in checking | set(miners) for other in checking)


EXACT_PROOF: Final = ProofSpec(
    sketch="projection",
    miners=("exact",),
    table=(
        Thresholds(
            miner="exact",
            validator="exact",
            sketch_tolerance=0,
            sketch_rate=1e-15,
            sketch_steps=(Step(beyond=0.0, rate=1e-15, points=MAX_POINTS),),
            sketch_median=0,
            margin=0.0,
            margin_rate=1e-15,
            margin_steps=(Step(beyond=0.0, rate=1e-15, points=MAX_POINTS),),
            far_margin=0.0,
            far_rate=1e-15,
            margin_limit=0.0,
            logprob_tolerance=0.0,
            level=1e-9,
            confidence=0.99,
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
