"""Verdicts: what a validator found of a miner's window, group by group (docs/spec/verdict.md)."""

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from protocol import limits, paths
from protocol.encoding import Record, Version, Window
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.judging.evidence import (
    LARGEST_MARGIN,
    MOST_SURPRISE,
    Counts,
    history_surprisal,
    surprisal_threshold,
    window_surprisal,
)
from protocol.run import ProofSpec


class Reason(enum.StrEnum):
    """Why a group was rejected. The first check that fails, in this order, names the reason."""

    MISSING = "missing"  # the promised bytes are not in storage
    MALFORMED = "malformed"  # the bytes are not a group of this commitment
    QUOTA = "over-quota"  # more groups, or other group sizes, than the run allows
    VERSION = "wrong-version"  # not a version that may serve this window
    COPIED = "copied"  # another miner's work, or this miner's earlier work
    PROMPT = "wrong-prompt"  # not the prompt that the seed gives
    TOKENS = "bad-tokens"  # an id outside the vocabulary, or an end that is not where the policy would end
    SKETCH = "wrong-sketch"  # not the hidden states of this policy
    SAMPLING = "wrong-sampling"  # not the tokens that this policy and this noise give
    WINDOW = "improbable-window"  # whatever this group shows, honest work would not make all of the window
    HISTORY = "improbable-history"  # no window shows it, but honest work would not make these windows one after another
    REWARD = "wrong-reward"  # not what the environment pays


def _known(reason: str) -> str:
    if reason and reason not in {known.value for known in Reason}:
        raise ValueError("not a reason")
    return reason


ReasonCode = Annotated[str, AfterValidator(_known)]


class Judgement(Record):
    """What a validator found of one group.

    Attributes:
        index: the group's number; digest: SHA-256 of its frame.
        reason: empty where it was accepted, else a Reason.
        tokens: completion tokens of the group.
        positions: those of the tokens whose sketch says something new; 0 where they were not reached.
        sketch_misses, sketch_median, margin_misses, worst_margin: the statistics that the thresholds are held against,
            as in protocol/judging/evidence.py; 0 where they were not reached.
        surprise: -log10 of the least probability of a scope's misses under honest work.
        rewards: recomputed, one a rollout; empty where rejected.
        logprobs: float32 little-endian, the recomputed log-probability of every completion token, rollouts one behind
            another; empty where rejected.
    """

    kind: ClassVar[str] = "judgement"
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    digest: Digest
    reason: ReasonCode
    tokens: Annotated[int, Field(ge=0)]
    positions: Annotated[int, Field(ge=0)]
    sketch_misses: Annotated[int, Field(ge=0)]
    sketch_median: Annotated[float, Field(ge=0.0, le=254.0)]
    margin_misses: Annotated[int, Field(ge=0)]
    worst_margin: Annotated[float, Field(ge=0.0, le=LARGEST_MARGIN)]
    surprisal: Annotated[float, Field(ge=0.0, le=MOST_SURPRISE)]
    rewards: Annotated[tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...], Field(max_length=limits.MAX_GROUP_SIZE)]
    logprobs: bytes

    @model_validator(mode="after")
    def _consistent(self) -> "Judgement":
        if self.reason and (self.rewards or self.logprobs):
            raise ValueError("rewards or log-probabilities of a rejected group")
        if not self.reason and len(self.logprobs) != 4 * self.tokens:
            raise ValueError("not one log-probability for each token")
        if not self.sketch_misses <= self.positions <= self.tokens or self.margin_misses > self.tokens:
            raise ValueError("more misses than positions, or more of either than tokens")
        return self

    @property
    def accepted(self) -> bool:
        """Whether the group may be trained on."""
        return self.reason == ""

    @property
    def counts(self) -> Counts:
        """For the tests of several groups together."""
        return Counts(self.tokens, self.positions, self.sketch_misses, self.margin_misses)


class Verdict(PublishedRecord):
    """A validator's judgements on one miner's window.

    Attributes:
        commitment: SHA-256 of the commitment's body that was judged.
        pledged: groups that the miner had announced before the window opened; those beyond are not looked at.
        submitted: groups that were committed to, those beyond the pledge left out; judgements cover the audited ones,
            by index.
        seen_ms: when the validator first saw the commitment, milliseconds since the Unix epoch by its own clock.
    """

    kind: ClassVar[str] = "verdict"
    max_bytes: ClassVar[int] = limits.MAX_VERDICT_BYTES
    window: Window
    version: Version
    miner: Key
    validator: Key
    commitment: Digest
    pledged: Annotated[int, Field(ge=1, le=limits.MAX_GROUPS)]
    submitted: Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
    judgements: Annotated[tuple[Judgement, ...], Field(max_length=limits.MAX_GROUPS)]
    seen_ms: Annotated[int, Field(ge=0, lt=1 << 53)]

    @model_validator(mode="after")
    def _once_each(self) -> "Verdict":
        indices = [judgement.index for judgement in self.judgements]
        if indices != sorted(set(indices)) or (indices and indices[-1] >= self.submitted):
            raise ValueError("judgements ascend, one for a group, within what was submitted")
        if self.submitted > self.pledged:
            raise ValueError("more submitted than pledged")
        return self

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.verdict(self.validator, self.window, self.miner)


class ReauditVerdict(Verdict):
    """A verdict on groups of an earlier window that its validator had not audited then.

    Its kind is another one, so that no storage can show it in place of the verdict of that window, or the other way.
    """

    kind: ClassVar[str] = "reaudit"

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.reaudit(self.validator, self.window, self.miner)


def refused_together(judgements: Iterable[Judgement], history: Sequence[Counts], proof: ProofSpec) -> Reason | None:
    """Why none of a window's groups that would be accepted is, where honest work would not make all of them together.

    Those that are refused by themselves count too where their statistics were reached: the one group of a cheat that
    passes by luck falls with those that did not.

    Args:
        history: what the miner's windows before this one showed since its last rejection, oldest first.
    """
    judgements = list(judgements)
    if not any(judgement.accepted for judgement in judgements):
        return None
    found = [judgement.counts for judgement in judgements if judgement.positions]
    if window_surprisal(found, proof) > surprisal_threshold(proof):
        return Reason.WINDOW
    if history_surprisal([*history, sum(found, Counts())], proof) > surprisal_threshold(proof):
        return Reason.HISTORY
    return None


def unpack_logprobs(data: bytes, lengths: Iterable[int]) -> list[np.ndarray]:
    """The log-probabilities of each rollout: float32 [T] each.

    Raises:
        ValueError: the bytes are not those of completions of these lengths.
    """
    lengths = list(lengths)
    if len(data) != 4 * sum(lengths):
        raise ValueError("as many log-probabilities as tokens")
    flat = np.frombuffer(data, dtype="<f4")
    ends = list(itertools.accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]
