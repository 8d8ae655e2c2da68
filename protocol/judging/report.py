"""A trainer's report on the validators: where they contradict each other, and which of them misjudged a canary.

The trainer runs canaries: miners of its own, under keys that nobody else can recognize, some of whose groups are false
on purpose. A validator that accepts one of these groups has not checked it (docs/spec/ledger.md).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol import limits, paths
from protocol.encoding import Record, Window
from protocol.identity.signing import Digest, Key, PublishedRecord, SigningKey

Keys = Annotated[tuple[Key, ...], Field(max_length=limits.MAX_KEYS)]
Index = Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]


class Disagreement(Record):
    """A group that some validators accept and others reject, or with other log-probabilities (docs/spec/ledger.md)."""

    kind: ClassVar[str] = "disagreement"
    miner: Key
    index: Index
    digest: Digest
    about: Literal["verdict", "logprobs"]
    accepting: Keys
    rejecting: Keys


class CanaryFailure(Record):
    """A validator's wrong judgement on a canary's group (fields: docs/spec/ledger.md).

    It reveals the canary's key, which cannot be used again.
    """

    kind: ClassVar[str] = "canary-failure"
    validator: Key
    canary: Key
    index: Index
    accepted: bool
    about: Literal["verdict", "logprobs"]


class ValidatorReport(PublishedRecord):
    """A trainer's report on the validators of one window."""

    kind: ClassVar[str] = "report"
    window: Window
    trainer: Key
    disagreements: Annotated[tuple[Disagreement, ...], Field(max_length=limits.MAX_GROUPS)]
    canary_failures: Annotated[tuple[CanaryFailure, ...], Field(max_length=limits.MAX_GROUPS)]

    @property
    def path(self) -> str:
        return paths.report(self.trainer, self.window)


def canary_key(trainer: SigningKey, number: int) -> SigningKey:
    """Derive the key of the trainer's canary of a number; nobody else can tell that the key belongs to the trainer."""
    return SigningKey(trainer.derive("canary key", number))


def is_false_group(trainer: SigningKey, window: int, index: int) -> bool:
    """Return whether a canary's group is false on purpose, which secret coins decide: one whether a window has false
    groups at all, and then one for each group. A false group refuses its whole window, so only a window without any
    shows what validators say of true groups.
    """
    coins = trainer.derive("canary window", window), trainer.derive("canary coin", window, index)
    return all(coin[0] & 1 for coin in coins)
