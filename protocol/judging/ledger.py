"""The ledger: a validator's summaries, each naming the one before, and the scores that anybody computes from them.

A summary lists what became of every miner's pledge in a window. Its digest is sealed before it is revealed, so that no
validator can wait for another's findings and repeat them (docs/spec/ledger.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.encoding import Line, Record, Version, Window
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.judging.evidence import Counts
from protocol.judging.verdict import Verdict
from protocol.run import ScoringSpec

Groups = Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Score = Annotated[float, Field(gt=0.0, le=1.0)]
OptionalDigest = Annotated[bytes, Field(max_length=32)]


def _empty_or_digest(data: bytes, what: str) -> None:
    if len(data) not in (0, 32):
        raise ValueError(f"{what} is a digest or empty")


class LedgerRow(Record):
    """What became of one miner's pledge in a window.

    Attributes:
        verdict: SHA-256 of the verdict's body; empty where nothing was delivered, and so nothing judged.
        pledged, submitted, audited, accepted, rejected: groups.
        tokens, positions, sketch_misses, margin_misses: of the accepted groups, for the test of a miner's history.
    """

    kind: ClassVar[str] = "ledger-row"
    miner: Key
    verdict: OptionalDigest
    pledged: Groups
    submitted: Groups
    audited: Groups
    accepted: Groups
    rejected: Groups
    tokens: Count
    positions: Count
    sketch_misses: Count
    margin_misses: Count

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _empty_or_digest(self.verdict, "verdict")
        if not self.accepted + self.rejected == self.audited <= self.submitted <= self.pledged:
            raise ValueError("accepted + rejected = audited <= submitted <= pledged must hold")
        if bool(self.verdict) != bool(self.submitted):
            raise ValueError("a verdict on what was submitted, and on nothing else")
        if not self.sketch_misses <= self.positions <= self.tokens or self.margin_misses > self.tokens:
            raise ValueError("more misses than positions, or more of either than tokens")
        return self

    @property
    def counts(self) -> Counts:
        """For the test of a miner's history."""
        return Counts(self.tokens, self.positions, self.sketch_misses, self.margin_misses)

    @classmethod
    def of(cls, verdict: Verdict) -> "LedgerRow":
        """The row of a verdict."""
        accepted = [judgement.counts for judgement in verdict.judgements if judgement.accepted]
        counts = sum(accepted, Counts())
        return cls(
            miner=verdict.miner,
            verdict=content_digest(verdict.to_bytes()),
            pledged=verdict.pledged,
            submitted=verdict.submitted,
            audited=len(verdict.judgements),
            accepted=len(accepted),
            rejected=len(verdict.judgements) - len(accepted),
            tokens=counts.tokens,
            positions=counts.positions,
            sketch_misses=counts.sketch_misses,
            margin_misses=counts.margin_misses,
        )

    @classmethod
    def undelivered(cls, miner: bytes, pledged: int) -> "LedgerRow":
        """The row of a pledge that was not kept at all."""
        nothing = dict.fromkeys(("submitted", "audited", "accepted", "rejected", *vars(Counts())), 0)
        return cls(miner=miner, verdict=b"", pledged=pledged, **nothing)


class Amendment(Record):
    """What looking back at a miner's earlier window found: of the groups that had not been audited, so many are (not)
    good.

    The credit of groups that were not audited then and are not counted here is gone.

    Attributes:
        verdict: SHA-256 of the body of the verdict on them; empty where they could not be had any more.
    """

    kind: ClassVar[str] = "amendment"
    window: Window
    miner: Key
    verdict: OptionalDigest
    accepted: Groups
    rejected: Groups


class Evaluation(Record):
    """Greedy decoding of held-out problems: how many of `problems` got full reward under `version`."""

    kind: ClassVar[str] = "evaluation"
    version: Version
    problems: Annotated[int, Field(ge=1)]
    solved: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _at_most_all(self) -> Self:
        if self.solved > self.problems:
            raise ValueError("more problems solved than there were")
        return self


class Summary(PublishedRecord):
    """A validator's account of a window: one entry of its ledger.

    Attributes:
        previous: SHA-256 of the body of the validator's summary before this one; empty for its first.
        salt: random bytes, so that the seal tells nothing.
        weights: digest of the weights that the validator rebuilt for the window's version.
        rows: one for each miner that had pledged, ascending by key; amendments: of earlier windows.
        scores: (miner, share) of those who earn over the windows that count, as `scores` computes them from the ledger
            up to here.
        evaluation: of the version that serves the window, where one was made.
        verified_tokens, verify_ms: completion tokens checked, and the milliseconds that it took.
        alarms: one clear line each.
    """

    kind: ClassVar[str] = "summary"
    max_bytes: ClassVar[int] = limits.MAX_SUMMARY_BYTES
    window: Window
    version: Version
    validator: Key
    previous: OptionalDigest
    salt: Annotated[bytes, Field(min_length=16, max_length=16)]
    weights: Digest
    rows: Annotated[tuple[LedgerRow, ...], Field(max_length=limits.MAX_PARTICIPANTS)]
    amendments: Annotated[tuple[Amendment, ...], Field(max_length=limits.MAX_PARTICIPANTS)]
    scores: Annotated[tuple[tuple[Key, Score], ...], Field(max_length=limits.MAX_PARTICIPANTS)]
    evaluation: Evaluation | None
    verified_tokens: Annotated[int, Field(ge=0)]
    verify_ms: Annotated[int, Field(ge=0)]
    alarms: Annotated[tuple[Annotated[Line, Field(max_length=500)], ...], Field(max_length=100)]

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        _empty_or_digest(self.previous, "previous")
        miners = [row.miner for row in self.rows]
        if miners != sorted(set(miners)):
            raise ValueError("rows ascend, one for a miner")
        for amendment in self.amendments:
            _empty_or_digest(amendment.verdict, "verdict")
        if any(amendment.window >= self.window for amendment in self.amendments):
            raise ValueError("an amendment of a window that is not earlier")
        return self

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.summary(self.validator, self.window)


class Seal(PublishedRecord):
    """A validator's promise of what it will reveal on a window: SHA-256 of the summary's body."""

    kind: ClassVar[str] = "seal"
    window: Window
    validator: Key
    summary: Digest

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.seal(self.validator, self.window)

    @classmethod
    def max_signed_bytes(cls) -> int:
        """Return the largest size in bytes of a seal with its envelope: a witness carries them whole."""
        return limits.MAX_SEAL_BYTES


class Witness(PublishedRecord):
    """The others' seals (envelopes) that a validator saw before it revealed: who shows somebody another one has sealed
    twice.
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
        """The only path at which this record may lie."""
        return paths.witness(self.validator, self.window)


def balances(ledger: Sequence[Summary], scoring: ScoringSpec) -> dict[bytes, float]:
    """What each miner's work is worth over the windows that count, in groups of today; negative for who cost more.

    A group that was not audited counts as accepted while nothing speaks against its miner. Every value halves in
    `half_life` windows.

    Args:
        ledger: summaries of one validator, ascending by window.
    """
    if not ledger:
        return {}
    newest = ledger[-1].window
    found: dict[bytes, float] = {}
    amended: dict[tuple[int, bytes], tuple[int, int]] = {}
    for summary in ledger:
        for item in summary.amendments:
            accepted, rejected = amended.get((item.window, item.miner), (0, 0))
            amended[item.window, item.miner] = accepted + item.accepted, rejected + item.rejected
    for summary in ledger:
        age = newest - summary.window
        if age < scoring.windows:
            for row in summary.rows:
                value = _value(row, amended.get((summary.window, row.miner)), scoring)
                found[row.miner] = found.get(row.miner, 0.0) + value * 0.5 ** (age / scoring.half_life)
    return found


def _value(row: LedgerRow, amendment: tuple[int, int] | None, scoring: ScoringSpec) -> float:
    accepted, rejected = amendment or (0, 0)
    accepted, rejected = row.accepted + accepted, row.rejected + rejected
    trusted = amendment is None and row.rejected == 0
    credit = row.submitted if trusted else min(accepted, row.submitted)
    return credit - scoring.penalty * rejected - scoring.shortfall * (row.pledged - row.submitted)


def shares(worth: Mapping[bytes, float], scoring: ScoringSpec) -> dict[bytes, float]:
    """Each miner's share of the reward: superlinear in what it is worth beyond the deposit, at most `cap`.

    The deposit is what a key has to be worth before it earns at all: it is lost with a key that is thrown away, and
    what a key has lost, by rejections or shortfalls, no other key of its owner can make good.
    """
    weights = {miner: max(0.0, worth[miner] - scoring.deposit) ** scoring.exponent for miner in sorted(worth)}
    total = sum(weights.values())
    return {miner: min(scoring.cap, weight / total) if total else 0.0 for miner, weight in weights.items()}


def scores(ledger: Sequence[Summary], scoring: ScoringSpec) -> tuple[tuple[bytes, float], ...]:
    """What a summary's `scores` must be, from the ledger up to it and with it: ascending by miner.

    Of whoever earns something; of more than a summary holds, those who earn most, and among equals the lower key.
    """
    earning = [(miner, share) for miner, share in shares(balances(ledger, scoring), scoring).items() if share]
    earning.sort(key=lambda item: (-item[1], item[0]))
    return tuple(sorted(earning[: limits.MAX_PARTICIPANTS]))


def clean_windows(ledger: Iterable[Summary]) -> dict[bytes, int]:
    """For each miner, windows since its last rejection in which some of its groups were audited and all accepted."""
    counts: dict[bytes, int] = {}
    for summary in ledger:
        for row in summary.rows:
            counts[row.miner] = 0 if row.rejected else counts.get(row.miner, 0) + bool(row.accepted)
    return counts


def histories(ledger: Iterable[Summary]) -> dict[bytes, list[Counts]]:
    """For each miner, what each of its windows since its last rejection showed of accepted groups, oldest first."""
    found: dict[bytes, list[Counts]] = {}
    for summary in ledger:
        for row in summary.rows:
            if row.rejected:
                found.pop(row.miner, None)
            elif row.accepted:
                found.setdefault(row.miner, []).append(row.counts)
    return found
