"""Verified groups on their way from the collector to the learner, and the log of what became of every judged group."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from protocol import limits
from protocol.encoding import REWARD_UNIT, Record, Version, Window
from protocol.identity.signing import Digest, Key
from protocol.judging.evidence import count_luck
from protocol.judging.verdict import Judgement, unpack_logprobs
from protocol.rollout.batch import EpisodeRollout, Group, join_turns, unpack_tokens

USED = "used"
CANARY = "canary"
_ROUNDING = 1e-3  # a recomputed log-probability may exceed 0 by this much
_SMALLEST = -1e4  # what is less likely counts as this, so that sums over the tokens of a group fit into 64 bits
_GROUP_BYTES = 512  # memory of a group beside its tokens and log-probabilities, about
_TURN_BYTES = 128  # memory of a turn beside its tokens, about


class VerifiedGroup(Record):
    """A group that enough validators accepted, with the values that they recomputed."""

    kind: ClassVar[str] = "verified-group"
    max_bytes: ClassVar[int] = limits.MAX_BATCH_BYTES
    digest: Digest  # SHA-256 of its frame, which the verdicts name and the fetched bytes have
    version: Version  # the policy version that sampled it
    prompt: bytes  # token ids, 32-bit little-endian words
    # likewise, one for each rollout, up to where most validators draw another token that leads to another reward
    completions: tuple[bytes, ...]
    # of each rollout in a run with episodes, as in the group, up to its last token here; empty in any other
    turns: tuple[tuple[tuple[int, bytes], ...], ...] = ()
    # float32 little-endian, one for each completion token, rollouts in order: the median over the accepting validators
    # of the log-probability under `version` at the sampling temperature
    logprobs: bytes
    # recomputed, one for each rollout, the median over the validators; of one that ends early, of their continuations
    rewards: tuple[float, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "VerifiedGroup":
        if not len(self.completions) == len(self.rewards) > 0:
            raise ValueError("not one reward for each completion")
        if self.turns and len(self.turns) != len(self.completions):
            raise ValueError("not the turns of each completion")
        if any(len(tokens) % 4 for tokens in (self.prompt, *self.completions)):
            raise ValueError("not whole 32-bit words")
        if len(self.logprobs) != sum(map(len, self.completions)):
            raise ValueError("not one log-probability for each token")
        return self

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return unpack_tokens(self.prompt)

    @property
    def completion_tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(unpack_tokens, self.completions))

    @property
    def sequences(self) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        """All tokens behind the prompt of each rollout, and which of them the policy drew."""
        if not self.turns:
            return [(tokens, (True,) * len(tokens)) for tokens in self.completion_tokens]
        turns = [tuple((count, unpack_tokens(reply)) for count, reply in own) for own in self.turns]
        return [join_turns(tokens, own) for tokens, own in zip(self.completion_tokens, turns, strict=True)]

    @property
    def turn_rewards(self) -> list[tuple[float, ...]]:
        """The reward of each turn of each rollout: that of the rollout at its last turn, and 0 before."""
        counts = [len(own) for own in self.turns] or [1] * len(self.rewards)
        return [(*(0.0,) * (count - 1), reward) for count, reward in zip(counts, self.rewards, strict=True)]

    @property
    def completion_logprobs(self) -> list[np.ndarray]:
        """The log-probabilities of each completion: float32 [T] each, read-only."""
        return unpack_logprobs(self.logprobs, (len(completion) // 4 for completion in self.completions))

    @property
    def size(self) -> int:
        """Bytes of memory that it takes, about."""
        replies = sum(_TURN_BYTES + len(reply) for own in self.turns for _, reply in own)
        return _GROUP_BYTES + len(self.prompt) + sum(map(len, self.completions)) + replies + len(self.logprobs)

    @property
    def informative(self) -> bool:
        """Whether its rewards differ: without a better and a worse rollout every advantage is zero."""
        return min(self.rewards) < max(self.rewards)


class VerifiedBatch(Record):
    """One miner's verified groups of a window."""

    kind: ClassVar[str] = "verified-batch"
    max_bytes: ClassVar[int] = limits.MAX_BATCH_BYTES
    max_items: ClassVar[int] = limits.MAX_GROUPS * limits.MAX_GROUP_ITEMS
    window: Window
    miner: Key
    groups: tuple[VerifiedGroup, ...]


class GroupOutcome(Record):
    """What became of a judged group."""

    kind: ClassVar[str] = "group-outcome"
    # with `index` and `digest` the group as the verdict names it, which may be one that nobody promised
    commitment: Digest
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    digest: Digest
    status: Annotated[str, Field(max_length=64)]  # 'used', or the reason why the group is not trained on

    @property
    def group(self) -> tuple[bytes, int, bytes]:
        return self.commitment, self.index, self.digest


class WindowOutcomes(Record):
    """What became of each judged group of a miner's window."""

    kind: ClassVar[str] = "window-outcomes"
    max_bytes: ClassVar[int] = 64 * limits.MIB  # hundreds of validators of which no two judge the same groups
    max_items: ClassVar[int] = 1 << 23
    window: Window
    miner: Key
    outcomes: tuple[GroupOutcome, ...]


class Intent(Record):
    """A write-ahead record: what is decided about a miner's window, before inbox and outcome log are written."""

    kind: ClassVar[str] = "intent"
    max_bytes: ClassVar[int] = VerifiedBatch.max_bytes + WindowOutcomes.max_bytes
    max_items: ClassVar[int] = VerifiedBatch.max_items + WindowOutcomes.max_items
    window: Window
    miner: Key
    previous_outcomes: Annotated[int, Field(ge=0)]  # that the log had before; it also gives the batch a path of its own
    batch: VerifiedBatch | None  # the groups to train on; None if there are none
    outcomes: tuple[GroupOutcome, ...]  # to append to the outcome log


class CollectorProgress(Record):
    """How far the collector has come."""

    kind: ClassVar[str] = "collector-progress"
    oldest_window: Window  # for which verdicts may still come


def whole_logprobs(data: bytes) -> np.ndarray | None:
    """Return recomputed log-probabilities (float32 little-endian) in millionths: int64 [N]; None if they cannot be
    right: they must be finite, and above 0 by rounding errors at most.
    """
    values = np.frombuffer(data, dtype="<f4").astype(np.float64)
    if not (np.isfinite(values).all() and (values <= _ROUNDING).all()):
        return None
    whole: np.ndarray = np.rint(values.clip(_SMALLEST) * 1e6).astype(np.int64)
    return whole


def verified_group(
    group: Group, digest: bytes, accepting: tuple[Judgement, ...], *, exact: bool
) -> VerifiedGroup | None:
    """Return an accepted group with the values of the judgements that fit it; None if none does. If rewards are exact,
    a judgement fits if its rollouts that end early are those whose reward is not the claimed one, and its luck is by
    how much these differ; what counts is at most 1 more or less than a claim.
    """
    lengths = [len(rollout.completion) // 4 for rollout in group.rollouts]
    claims = [rollout.reward for rollout in group.rollouts]
    fitting = [
        (np.frombuffer(judgement.logprobs, dtype="<f4"), judgement.rewards, judgement.ends or lengths)
        for judgement in accepting
        if len(judgement.logprobs) == 4 * sum(lengths)
        and len(judgement.rewards) == len(claims)
        and (not exact or count_luck(zip(claims, judgement.rewards, strict=True)) == judgement.counts.luck)
        and all(
            end <= length and (not exact or (end < length) == (reward != claim))
            for end, length, reward, claim in zip(
                judgement.ends or lengths, lengths, judgement.rewards, claims, strict=True
            )
        )
        and whole_logprobs(judgement.logprobs) is not None
    ]
    if not fitting:
        return None
    median_logprobs, median_rewards = (np.median([item[part] for item in fitting], axis=0) for part in (0, 1))
    if exact:
        median_rewards = np.clip(median_rewards, np.array(claims) - REWARD_UNIT, np.array(claims) + REWARD_UNIT)
    ends = np.sort([item[2] for item in fitting], axis=0)[(len(fitting) - 1) // 2].tolist()
    logprobs = unpack_logprobs(median_logprobs.astype("<f4").tobytes(), lengths)
    return VerifiedGroup(
        digest=digest,
        version=group.version,
        prompt=group.prompt,
        completions=tuple(rollout.completion[: 4 * end] for rollout, end in zip(group.rollouts, ends, strict=True)),
        turns=tuple(
            _turns_until(rollout.turns, end)
            for rollout, end in zip(group.rollouts, ends, strict=True)
            if isinstance(rollout, EpisodeRollout)
        ),
        logprobs=b"".join(values[:end].tobytes() for values, end in zip(logprobs, ends, strict=True)),
        rewards=tuple((median_rewards / REWARD_UNIT).tolist()),
    )


def _turns_until(turns: Sequence[tuple[int, bytes]], end: int) -> tuple[tuple[int, bytes], ...]:
    """Return the turns with the first `end` tokens of the policy, without the reply behind the last of these."""
    result = list[tuple[int, bytes]]()
    for count, reply in turns:
        if count >= end:
            result.append((end, b""))
            break
        result.append((count, reply))
        end -= count
    return tuple(result)
