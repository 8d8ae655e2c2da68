"""Verified groups on their way from the collector to the learner, and the account of what became of every judged group."""

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protocol import limits
from protocol.encoding import Record, Version, Window
from protocol.identity.signing import Digest, Key
from protocol.judging.verdict import Judgement
from protocol.rollout.batch import Group

USED = "used"
CANARY = "canary"
_ROUNDING = 1e-3  # a log-probability is not positive, but for that


class VerifiedGroup(Record):
    """A group that enough validators accepted, with the numbers that they recomputed.

    Attributes:
        digest: SHA-256 of its frame: what the verdicts named and what was fetched.
        logprobs: float32 little-endian, every completion token: the median over the accepting validators.
        rewards: as recomputed, one a rollout: likewise the median, where machines may differ in them.
    """

    kind: ClassVar[str] = "harvested-group"
    digest: Digest
    prompt: bytes
    completions: tuple[bytes, ...]
    logprobs: bytes
    rewards: tuple[float, ...]


class VerifiedBatch(Record):
    """One miner's verified groups of a window."""

    kind: ClassVar[str] = "harvest"
    max_bytes: ClassVar[int] = limits.MAX_BATCH_BYTES
    window: Window
    version: Version
    miner: Key
    groups: tuple[VerifiedGroup, ...]


class Outcome(Record):
    """What became of a judged group.

    Attributes:
        commitment, index, digest: the group as a verdict names it, which may be one that nobody promised.
        outcome: 'used', or the reason why not.
    """

    kind: ClassVar[str] = "outcome"
    commitment: Digest
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    digest: Digest
    outcome: Annotated[str, Field(max_length=64)]

    @property
    def group(self) -> tuple[bytes, int, bytes]:
        """What it is about: commitment, index and digest."""
        return self.commitment, self.index, self.digest


class WindowOutcomes(Record):
    """What became of each judged group of a miner's window."""

    kind: ClassVar[str] = "account"
    max_bytes: ClassVar[int] = 64 * limits.MIB  # hundreds of validators that agree on nothing
    max_items: ClassVar[int] = 1 << 23
    window: Window
    miner: Key
    outcomes: tuple[Outcome, ...]


class Intent(Record):
    """What is decided of a miner's window, before anybody acts on it.

    Attributes:
        before: how many outcomes the account had; with it the harvest has a name of its own.
        harvest: the groups to train on; None where there are none.
        outcomes: what to enter into the account.
    """

    kind: ClassVar[str] = "settled"
    max_bytes: ClassVar[int] = VerifiedBatch.max_bytes + WindowOutcomes.max_bytes
    max_items: ClassVar[int] = WindowOutcomes.max_items
    window: Window
    miner: Key
    before: Annotated[int, Field(ge=0)]
    harvest: VerifiedBatch | None
    outcomes: tuple[Outcome, ...]


class CollectorProgress(Record):
    """How far the collector is: the oldest window of which something may still come."""

    kind: ClassVar[str] = "collecting"
    oldest: Window


def harvested(group: Group, digest: bytes, accepting: tuple[Judgement, ...], *, exact: bool) -> VerifiedGroup | None:
    """An accepted group with the validators' numbers; None where those do not fit the group.

    Args:
        exact: whether all machines compute the same rewards: a judgement with others than the group's then does not
            fit.
    """
    tokens = sum(len(rollout.completion) // 4 for rollout in group.rollouts)
    claims = tuple(rollout.reward for rollout in group.rollouts)
    fitting = [
        (np.frombuffer(judgement.logprobs, dtype="<f4"), judgement.rewards)
        for judgement in accepting
        if len(judgement.logprobs) == 4 * tokens
        and len(judgement.rewards) == len(claims)
        and (not exact or np.allclose(judgement.rewards, claims, rtol=0.0, atol=1e-6))
    ]
    sound = [
        (values, rewards) for values, rewards in fitting if np.isfinite(values).all() and (values <= _ROUNDING).all()
    ]
    if not sound:
        return None
    logprobs = np.median([values for values, _ in sound], axis=0)
    rewards = claims if exact else tuple(np.median([rewards for _, rewards in sound], axis=0).tolist())
    return VerifiedGroup(
        digest=digest,
        prompt=group.prompt,
        completions=tuple(rollout.completion for rollout in group.rollouts),
        logprobs=logprobs.astype("<f4").tobytes(),
        rewards=rewards,
    )
