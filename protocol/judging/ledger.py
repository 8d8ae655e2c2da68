"""The ledger: a validator's chain of summaries, and the scores that anybody can compute from it.

A summary states the result of every miner's pledge in a window. A validator publishes its digest, the seal, before it
reveals the summary, so that no validator can wait for another's results and copy them (docs/spec/ledger.md).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import comb
from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, model_validator

from protocol import limits, paths
from protocol.difficulty import Counts as StratumCounts
from protocol.encoding import OPTIONAL, Ascending, Line, Record, Version, Window, ascending_by, content_digest
from protocol.environments.mixture import drawn_member
from protocol.identity.signing import Digest, Key, OptionalDigest, PublishedRecord
from protocol.judging.evidence import NO_COUNTS, Counts, Number
from protocol.judging.roster import Roster
from protocol.judging.verdict import Verdict
from protocol.proof import RATE_UNIT, Arithmetic, OptionalArithmetic, StatisticName, Thresholds
from protocol.rollout import challenge
from protocol.run import ScoringSpec

GROUP: Final = 1_000_000
"""Balances and prices are in millionths of a group."""

SHARE: Final = 1_000_000_000
"""Scores and decays are in billionths."""

Groups = Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
Score = Annotated[int, Field(ge=1, le=SHARE)]


class LedgerRow(Record):
    """The result of one miner's pledge in a window; by default of one of which no group was delivered.

    Attributes:
        verdict: SHA-256 of the verdict's body; empty if nothing was delivered and so nothing judged.
        arithmetic: how the miner computed; empty if nothing was delivered.
        pledged, submitted, dealt, audited, accepted, rejected: numbers of groups; none are audited if the pledge has
            lapsed. Audited ones that are neither accepted nor rejected were not reproduced.
        tokens: of the accepted groups (`Judgement.tokens`).
        counts: of the groups that are evidence in later windows (`Judgement.is_evidence`).
    """

    kind: ClassVar[str] = "ledger-row"
    miner: Key
    verdict: OptionalDigest = b""
    arithmetic: OptionalArithmetic = ""
    pledged: Groups
    submitted: Groups = 0
    dealt: Groups = 0
    audited: Groups = 0
    accepted: Groups = 0
    rejected: Groups = 0
    tokens: Number = 0
    counts: Counts = NO_COUNTS

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not self.accepted + self.rejected <= self.audited <= self.dealt <= self.submitted <= self.pledged:
            raise ValueError("accepted + rejected <= audited <= dealt <= submitted <= pledged must hold")
        if not bool(self.verdict) == bool(self.arithmetic) == bool(self.submitted):
            raise ValueError("a verdict on what was submitted, with an arithmetic, and on nothing else")
        if bool(self.tokens) != bool(self.accepted):
            raise ValueError("tokens of accepted groups where none is accepted, or none where some are")
        return self

    @property
    def lapsed(self) -> bool:
        """Whether the miner's pledge has lapsed: the row counts neither for it nor against it."""
        return bool(self.dealt) and not self.audited

    @property
    def is_clean(self) -> bool:
        """Whether groups were accepted, and all other audited ones count in the rate of groups not reproduced."""
        return 0 < self.accepted == self.audited - sum(self.counts.tally("replay").steps)

    @property
    def counting(self) -> int:
        """The groups that count for the miner if none is audited again: the audited ones stand for all."""
        return self.dealt * (self.accepted + self.rejected) // max(1, self.audited) - self.rejected

    @classmethod
    def of(cls, verdict: Verdict) -> "LedgerRow":
        """Return the row of a verdict."""
        return cls(
            miner=verdict.miner,
            verdict=content_digest(verdict.to_bytes()),
            arithmetic=verdict.miner_arithmetic,
            pledged=verdict.pledged,
            submitted=verdict.submitted,
            dealt=verdict.dealt,
            audited=0 if verdict.lapsed else len(verdict.judgements),
            accepted=sum(judgement.accepted for judgement in verdict.judgements),
            rejected=sum(judgement.rejected for judgement in verdict.judgements),
            tokens=sum(judgement.tokens for judgement in verdict.judgements if judgement.accepted),
            counts=sum((item.counts for item in verdict.judgements if item.is_evidence), NO_COUNTS),
        )


class Amendment(Record):
    """The result of a re-audit: a verdict on those dealt groups of a miner's earlier window that had not been audited.

    Groups that were not audited then and are not counted here lose their credit.
    """

    kind: ClassVar[str] = "amendment"
    window: Window  # the earlier window
    miner: Key
    # SHA-256 of the body of the verdict on these groups; empty if they were not available any more
    verdict: OptionalDigest = b""
    accepted: Groups = 0
    rejected: Groups = 0


class StratumResult(Record):
    """The held-out problems of one kind, by the number of their completions with full reward."""

    kind: ClassVar[str] = "stratum-result"
    # of the stratum; empty for problems of no particular kind
    name: Annotated[Line, Field(max_length=limits.MAX_STRATUM_CHARS)]
    # right[c] is the number of problems of which c completions are right
    right: Annotated[
        tuple[Annotated[int, Field(ge=0, le=limits.MAX_EVALUATION_PROBLEMS)], ...],
        Field(min_length=2, max_length=limits.MAX_EVALUATION_SAMPLES + 1),
    ]

    @property
    def problems(self) -> int:
        return sum(self.right)


def pass_at_k(right: Sequence[int], k: int) -> float:
    """Return the probability that at least one of k completions solves a problem: the mean over problems, at least one,
    of the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1). `right` is as of a StratumResult.

    If c of a problem's n completions are right, 1 - C(n - c, k) / C(n, k) is the share of the choices of k among them,
    1 to n, that have a right one.
    """
    completions = len(right) - 1
    solved = sum(
        (1 - Fraction(comb(completions - count, k), comb(completions, k))) * problems
        for count, problems in enumerate(right)
    )
    return float(Fraction(solved) / sum(right))


class Evaluation(Record):
    """The result of a validator on held-out problems under `version`, by stratum, ascending by name."""

    kind: ClassVar[str] = "evaluation"
    version: Version
    strata: Annotated[
        tuple[StratumResult, ...], Field(min_length=1, max_length=limits.MAX_STRATA), ascending_by("name")
    ]

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len({len(stratum.right) for stratum in self.strata}) > 1:
            raise ValueError("strata with different numbers of completions")
        if not all(stratum.problems for stratum in self.strata):
            raise ValueError("a stratum without problems")
        return self

    @property
    def problems(self) -> int:
        return sum(stratum.problems for stratum in self.strata)

    def pass_at(self, k: int) -> float:
        """Return pass@k over all problems; k is at most the number of completions of a problem."""
        return pass_at_k([sum(column) for column in zip(*(stratum.right for stratum in self.strata), strict=True)], k)


class Summary(PublishedRecord):
    """A validator's report on a window: one entry of its ledger (fields: docs/spec/ledger.md)."""

    kind: ClassVar[str] = "summary"
    max_bytes: ClassVar[int] = limits.MAX_SUMMARY_BYTES
    max_items: ClassVar[int] = limits.MAX_SUMMARY_ITEMS
    window: Window
    version: Version
    validator: Key
    previous: OptionalDigest
    salt: Annotated[bytes, Field(min_length=16, max_length=16)]
    weights: Digest
    arithmetic: Arithmetic
    roster: Annotated[tuple[Key, ...], Field(max_length=limits.MAX_KEYS), Ascending]
    judges: Annotated[int, Field(ge=1, le=limits.MAX_KEYS)]
    rows: Annotated[tuple[LedgerRow, ...], Field(max_length=limits.MAX_WINDOW_MINERS), ascending_by("miner")]
    amendments: Annotated[tuple[Amendment, ...], Field(max_length=limits.MAX_WINDOW_MINERS)]
    scores: Annotated[tuple[tuple[Key, Score], ...], Field(max_length=limits.MAX_WINDOW_MINERS)]
    evaluation: Evaluation | None
    verified_tokens: Annotated[int, Field(ge=0)]
    verify_ms: Annotated[int, Field(ge=0)]
    alarms: Annotated[tuple[Annotated[Line, Field(max_length=500)], ...], Field(max_length=100)]
    strata: StratumCounts | None = OPTIONAL

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.validator not in self.roster:
            raise ValueError("a roster without this validator")
        if self.judges > len(self.roster):
            raise ValueError("more judges than validators")
        if any(amendment.window >= self.window for amendment in self.amendments):
            raise ValueError("an amendment must be of an earlier window")
        return self

    @property
    def path(self) -> str:
        return paths.summary(self.validator, self.window)

    @property
    def dealing(self) -> Roster:
        """The validators among which the groups were dealt."""
        return Roster(self.roster, self.judges)

    @property
    def shows_work(self) -> bool:
        """Whether the validator has audited a group of the window."""
        return any(row.audited for row in self.rows)


class Seal(PublishedRecord):
    """A validator's commitment to the summary that it will reveal on a window: the SHA-256 of the summary's body."""

    kind: ClassVar[str] = "seal"
    window: Window
    validator: Key
    summary: Digest

    @property
    def path(self) -> str:
        return paths.seal(self.validator, self.window)

    @classmethod
    def max_signed_bytes(cls) -> int:
        """Return the largest size in bytes of a seal with its envelope, as a witness contains it."""
        return limits.MAX_SEAL_BYTES


class Witness(PublishedRecord):
    """The others' seals (as envelopes) that a validator saw before it revealed its summary. A validator of whom another
    seal exists for the same window has sealed twice.
    """

    kind: ClassVar[str] = "witness"
    max_bytes: ClassVar[int] = limits.MAX_WITNESS_BYTES
    window: Window
    validator: Key
    seals: Annotated[
        tuple[Annotated[bytes, Field(max_length=limits.MAX_SEAL_BYTES)], ...], Field(max_length=limits.MAX_KEYS)
    ]

    @property
    def path(self) -> str:
        return paths.witness(self.validator, self.window)


SharesOf = Callable[[int], Sequence[int]]
"""Returns the share of each stratum, in millionths, by which the groups of a version draw; empty in a run without."""


def accepted_groups(
    run_id: bytes, randomness: bytes, verdicts: Iterable[Verdict], shares_of: SharesOf
) -> Iterator[tuple[int, bool]]:
    """Yield the number of the stratum of each accepted group, and whether its rewards are not all equal. The randomness
    is that of the round that opened the verdicts' window (docs/spec/difficulty.md).
    """
    for verdict in verdicts:
        accepted = [judgement for judgement in verdict.judgements if judgement.accepted]
        shares = shares_of(verdict.version) if accepted else ()
        for judgement in accepted:
            seed = challenge.group_seed(run_id, verdict.window, randomness, verdict.miner, judgement.index)
            yield drawn_member(shares, seed), len(set(judgement.rewards)) > 1


def priced_step(thresholds: Thresholds, statistic: StatisticName) -> int:
    """Return the first step that honest work reaches at most once in 1000 trials; the last one if there is none, and
    the first one of stops, since a rollout has many tokens.
    """
    rates = thresholds.table(statistic).rates
    rare = (step for step, rate in enumerate(rates) if statistic == "stop" or rate * 1000 <= RATE_UNIT)
    return next(rare, len(rates) - 1)


def excess_misses(row: LedgerRow, thresholds: Thresholds, statistic: StatisticName) -> int:
    """Return how many more misses a window has than are free, in millionths: fewer are negative, and 0 without accepted
    groups. A miss is a trial that reaches the priced step. Luck has no price, since it changes no reward that counts.

    The audited groups stand for all that were dealt and count.
    """
    tally, first = row.counts.tally(statistic), priced_step(thresholds, statistic)
    expected = tally.trials * thresholds.table(statistic).rates[first]
    excess = sum(tally.steps[first:]) * GROUP - expected // (RATE_UNIT // GROUP)
    return row.counting * excess // row.accepted if row.accepted else 0


def shares(balances: Mapping[bytes, int], scoring: ScoringSpec, lengths: Mapping[bytes, int]) -> dict[bytes, int]:
    """Compute each miner's share of the reward, in billionths: proportional to its balance, which is in millionths of a
    group, times the length of its groups, in millionths of a token; and at most `cap`.

    A key earns nothing until its balance exceeds the deposit, and then by its whole balance. So whoever abandons a key
    loses what the next one delivers for the deposit, and miners gain nothing by work under one key instead of several.
    Because of the length, a miner gains nothing by making rollouts shorter, or by withholding its longest groups. The
    deposit and all prices are in groups, whatever their lengths.
    """
    weights = {
        miner: balance * lengths[miner] if balance > scoring.deposit else 0
        for miner, balance in sorted(balances.items())
    }
    total = sum(weights.values())
    return {miner: min(scoring.cap, SHARE * weight // total) if total else 0 for miner, weight in weights.items()}
