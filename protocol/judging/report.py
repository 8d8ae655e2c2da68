"""What a trainer has to say of the validators: where they contradict each other, and who accepted what is known to be
false.

The trainer runs canaries: miners of its own under keys that nobody else can tell, some of whose groups are false on
purpose. A validator that accepts one of these has not checked (docs/spec/ledger.md).
"""

from typing import Annotated, ClassVar

from pydantic import Field

from protocol import limits, paths
from protocol.encoding import Record, Window
from protocol.identity.signing import Digest, Key, PublishedRecord, SigningKey

Keys = Annotated[tuple[Key, ...], Field(max_length=limits.MAX_KEYS)]
Index = Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]


class Disagreement(Record):
    """One group (by the SHA-256 of its frame) that some validators accept and others reject."""

    kind: ClassVar[str] = "disagreement"
    miner: Key
    index: Index
    digest: Digest
    accepting: Keys
    rejecting: Keys


class CanaryFailure(Record):
    """A validator that accepted a false group of a canary, or rejected a true one; the canary's key is of no use from
    now on.
    """

    kind: ClassVar[str] = "deception"
    validator: Key
    canary: Key
    index: Index
    accepted: bool


class ValidatorReport(PublishedRecord):
    """A trainer's report on the validators of one window."""

    kind: ClassVar[str] = "report"
    window: Window
    trainer: Key
    disagreements: Annotated[tuple[Disagreement, ...], Field(max_length=limits.MAX_GROUPS)]
    deceptions: Annotated[tuple[CanaryFailure, ...], Field(max_length=limits.MAX_GROUPS)]

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.report(self.trainer, self.window)


def canary_key(trainer: SigningKey, number: int) -> SigningKey:
    """The key of a trainer's canary of some number: nobody else can tell whose it is."""
    return SigningKey(trainer.derive("canary key", number))


def is_false(trainer: SigningKey, window: int, index: int) -> bool:
    """Whether a canary's group of this window and number is false on purpose: every second one, by a secret coin."""
    return trainer.derive("canary coin", window, index)[0] & 1 == 1
