"""Verdicts: a validator's signed judgements on the groups of a miner's window (docs/spec/verdict.md)."""

import enum
from collections.abc import Iterable
from typing import Annotated, ClassVar, Final

import numpy as np
from pydantic import Field, model_validator

from protocol import limits, paths
from protocol.encoding import Record, Reward, Version, Window, ascending_by, one_of
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.judging.evidence import LUCK_UNIT, NO_COUNTS, Counts, Evidence, exceeded, is_improbable, weigh
from protocol.proof import MEASURED, Arithmetic, StatisticName, Thresholds


class Reason(enum.StrEnum):
    """Why a group was rejected: the first check that fails, in this order."""

    MISSING = "missing"  # the promised bytes are not in storage
    MALFORMED = "malformed"  # the bytes are not a group of this commitment
    QUOTA = "over-quota"  # more groups, or other group sizes, than the run allows
    VERSION = "wrong-version"  # not a version that may serve this window
    LAPSED = "lapsed-version"  # the pledged version could serve this window, and no longer can: nobody's fault
    COPIED = "copied"  # another miner's work, or this miner's earlier work
    PROMPT = "wrong-prompt"  # not the prompt that the seed determines
    TOKENS = "bad-tokens"  # an id outside the vocabulary, or an end that is not where the policy would end
    SKETCH = "wrong-sketch"  # not the hidden states of this policy
    SAMPLING = "wrong-sampling"  # not the tokens that this policy and this noise determine
    STOP = "wrong-stop"  # ends where this policy would not end, or goes on where it would end
    TURN = "wrong-turn"  # not the replies of the environment, or an end where it would go on
    UNREPRODUCED = "unreproduced"  # a limit of this validator's machine, or other replies of an inexact environment
    REWARD = "wrong-reward"  # not the reward that the environment computes
    WINDOW = "improbable-window"  # honest work would not give these windows, whatever this group shows


OWN_REASONS: Final[dict[StatisticName, Reason]] = {
    "sketch": Reason.SKETCH, "margin": Reason.SAMPLING, "stop": Reason.STOP,
}  # fmt: skip
"""The reason against a group that its own statistic refuses."""

ReasonCode = Annotated[str, one_of(("", *Reason))]


class Judgement(Record):
    """A validator's judgement on one group (fields: docs/spec/verdict.md)."""

    kind: ClassVar[str] = "judgement"
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    digest: Digest
    reason: ReasonCode
    tokens: Annotated[int, Field(ge=0, le=limits.MAX_GROUP_SIZE * limits.MAX_COMPLETION_TOKENS)] = 0
    counts: Counts = NO_COUNTS
    rewards: Annotated[tuple[Reward, ...], Field(max_length=limits.MAX_GROUP_SIZE)] = ()
    ends: Annotated[
        tuple[Annotated[int, Field(ge=0, le=limits.MAX_COMPLETION_TOKENS)], ...],
        Field(max_length=limits.MAX_GROUP_SIZE),
    ] = ()
    logprobs: bytes = b""

    @model_validator(mode="after")
    def _consistent(self) -> "Judgement":
        if self.reason and (self.rewards or self.logprobs):
            raise ValueError("rewards or log-probabilities of a rejected group")
        if not self.reason and not 0 < len(self.logprobs) == 4 * self.tokens:
            raise ValueError("not one log-probability for each token, or no token")
        if self.ends and (len(self.ends) != len(self.rewards) or sum(self.ends) >= self.tokens):
            raise ValueError("not one end for each rollout, or none that is before the last token")
        luck = max(self.counts.luck.trials, sum(self.counts.luck.steps))
        if luck > LUCK_UNIT * self.tokens or max(self.counts.tally(name).trials for name in MEASURED) > self.tokens:
            raise ValueError("more trials than tokens can have")
        if self.reason == Reason.LAPSED and self.counts != NO_COUNTS:
            raise ValueError("counts of a group whose version has lapsed")
        replay = self.counts.tally("replay")
        if replay.trials > 1 or (self.accepted and any(replay.steps)):
            raise ValueError("a group that was replayed several times, or accepted though it was not reproduced")
        return self

    @property
    def accepted(self) -> bool:
        """Whether the group may be trained on."""
        return self.reason == ""

    @property
    def rejected(self) -> bool:
        """Whether the group counts against its miner."""
        return self.reason not in ("", Reason.LAPSED, Reason.UNREPRODUCED)

    @property
    def is_evidence(self) -> bool:
        """Whether the group's counts are evidence in later windows: it is not rejected, or rejected for them."""
        return not self.rejected or self.reason in (*OWN_REASONS.values(), Reason.WINDOW)


class Verdict(PublishedRecord):
    """A validator's judgements on one miner's window (fields: docs/spec/verdict.md)."""

    kind: ClassVar[str] = "verdict"
    max_bytes: ClassVar[int] = limits.MAX_VERDICT_BYTES
    window: Window
    version: Version
    miner: Key
    validator: Key
    commitment: Digest
    miner_arithmetic: Arithmetic
    validator_arithmetic: Arithmetic
    pledged: Annotated[int, Field(ge=1, le=limits.MAX_GROUPS)]
    submitted: Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
    dealt: Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
    judgements: Annotated[tuple[Judgement, ...], Field(max_length=limits.MAX_GROUPS), ascending_by("index")]
    seen_ms: Annotated[int, Field(ge=0, lt=1 << 53)]

    @model_validator(mode="after")
    def _fits(self) -> "Verdict":
        if self.judgements and self.judgements[-1].index >= self.submitted:
            raise ValueError("a judgement on a group that was not submitted")
        if not len(self.judgements) <= self.dealt <= self.submitted <= self.pledged:
            raise ValueError("more judged than dealt, more dealt than submitted, or more submitted than pledged")
        lapsed = sum(judgement.reason == Reason.LAPSED for judgement in self.judgements)
        if lapsed not in (0, self.submitted):
            raise ValueError("a version that lapsed for some groups and not for others")
        return self

    @property
    def lapsed(self) -> bool:
        """Whether the miner's pledge has lapsed: nothing counts, neither for the miner nor against it."""
        return bool(self.judgements) and self.judgements[0].reason == Reason.LAPSED

    @property
    def path(self) -> str:
        return paths.verdict(self.validator, self.window, self.miner)


class ReauditVerdict(Verdict):
    """A re-audit: a verdict on groups of an earlier window that the validator had not audited then.

    It has a kind of its own, so that storage cannot serve it in place of the verdict of that window, or vice versa.
    """

    kind: ClassVar[str] = "reaudit"

    @property
    def path(self) -> str:
        return paths.reaudit(self.validator, self.window, self.miner)


def own_rejection(counts: Counts, thresholds: Thresholds) -> Reason | None:
    """Return the reason to reject a group for its own statistics, or None."""
    statistic = exceeded(weigh(counts, thresholds), thresholds)
    return None if statistic is None else OWN_REASONS.get(statistic)


def joint_rejection(judgements: Iterable[Judgement], evidence: Evidence, thresholds: Thresholds) -> Reason | None:
    """Return the reason to reject all groups of a window because of what they show together, or None.

    Groups that were rejected by themselves count too if their statistics were computed, so that a cheat's one group
    that passes by chance is rejected together with the others.
    """
    groups = [item.counts for item in sorted(judgements, key=lambda item: item.index) if item.counts.computed]
    return Reason.WINDOW if is_improbable(evidence, groups, thresholds) else None


def unpack_logprobs(data: bytes, lengths: Iterable[int]) -> list[np.ndarray]:
    """Split a judgement's `logprobs` by rollouts of these lengths, or raise ValueError: float32 [T] each."""
    lengths = list(lengths)
    if len(data) != 4 * sum(lengths):
        raise ValueError(f"{len(data)} bytes of log-probabilities for {sum(lengths)} tokens")
    return np.split(np.frombuffer(data, dtype="<f4"), np.cumsum(lengths))[:-1]
