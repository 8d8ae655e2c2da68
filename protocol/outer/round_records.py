"""The records of outer rounds: contributions, round manifests and the round pointer (docs/spec/outer-round.md).

This module checks each record by itself. protocol/outer/round_checks.py checks a round manifest against the one before
it, and a contribution against the manifest that opened its round.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from protocol import limits, paths
from protocol.chain.manifest import Epoch
from protocol.encoding import Ascending, Record, Version
from protocol.errors import MalformedError
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.objects import ObjectRef
from protocol.pseudogradient import Coding, Kind, Method
from protocol.window import Round

OuterNumber = Annotated[int, Field(ge=0, lt=1 << 33)]
GroupDigests = Annotated[tuple[Digest, ...], Field(max_length=limits.MAX_ROUND_GROUPS), Ascending]
LocalSteps = Annotated[int, Field(ge=1, le=1 << 16)]


class RefusalReason(StrEnum):
    """Why nothing of a worker counts in a round."""

    LOST = "lost"  # no contribution, not even when the others had been checked
    LATE = "late"  # the contribution came only after the round was closed
    WITHHELD = "withheld"  # there is a contribution, but not its payload
    MALFORMED = "malformed"  # no contribution of this worker to this round, or no payload
    OTHER_STATE = "other-state"  # it starts from another state than the round's
    UNDEALT = "undealt"  # it used a group of another worker, or one that is used up
    CONTRADICTORY = "contradictory"  # the worker signed two contributions to the round
    POISONED = "poisoned"  # its values contradict those of the other sites
    QUORUM = "quorum"  # it is sound, but there are too few contributions


def _check_reason(reason: str) -> str:
    if reason not in {member.value for member in RefusalReason}:
        raise ValueError("not a reason")
    return reason


ReasonCode = Annotated[str, AfterValidator(_check_reason)]


def _check_digest_or_empty(data: bytes) -> bytes:
    if len(data) not in (0, 32):
        raise ValueError("neither a digest nor empty")
    return data


OptionalDigest = Annotated[bytes, AfterValidator(_check_digest_or_empty)]


class OuterState(Record):
    """The digests of the FP32 state that all sites share between two rounds.

    Attributes:
        step: number of rounds that changed the weights.
        weights, momentum: digests (protocol/digest.py); `momentum` is empty if there is none.
    """

    kind: ClassVar[str] = "outer-state"
    step: OuterNumber
    weights: Digest
    momentum: OptionalDigest


class RoundRules(Record):
    """The rules of one round.

    Attributes:
        values, fraction, chosen: the coding of the payloads (docs/spec/pseudogradient.md).
        feedback_decay: factor of the error feedback; 0 if there is none.
        frozen_steps: the error feedback stays 0 while the state's step is lower than this.
        momentum: of the outer Nesterov optimizer; 0 for the plain step.
        outer_rate: outer learning rate.
        local_steps: local steps of a site that has the time and the groups.
        quorum: how many contributions a round needs.
        delay: 1 if a site goes on with local steps while a round closes, and 0 if it waits.
        streams: into how many parts the tensors are divided, one of which is sent in each round (`streams_of`).
    """

    kind: ClassVar[str] = "round-rules"
    values: Literal["dense", "exact", "grid", "chunked"]
    fraction: Annotated[int, Field(ge=0, le=255)]
    chosen: Annotated[int, Field(ge=0, lt=1 << 16)]
    feedback_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    frozen_steps: OuterNumber
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)]
    outer_rate: Annotated[float, Field(gt=0.0, le=10.0)]
    local_steps: LocalSteps
    quorum: Annotated[int, Field(ge=1, le=limits.MAX_WORKERS)]
    delay: Annotated[int, Field(ge=0, le=1)]
    streams: Annotated[int, Field(ge=1, le=limits.MAX_STREAMS)]

    @model_validator(mode="after")
    def _codable(self) -> "RoundRules":
        try:
            _ = self.coding
        except MalformedError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def coding(self) -> Coding:
        """The coding of the payloads."""
        return Coding(Kind[self.values.upper()], self.fraction, self.chosen)

    @property
    def method(self) -> Method:
        """The method, which makes the outer step."""
        return Method(
            self.coding, feedback_decay=self.feedback_decay, momentum=self.momentum, outer_rate=self.outer_rate
        )

    def uses_feedback(self, step: int) -> bool:
        """Return whether a round that starts from a state of this step uses and changes the error feedback."""
        return self.feedback_decay > 0 and step >= self.frozen_steps


class RoundContribution(PublishedRecord):
    """What a site publishes in a round.

    Attributes:
        number: the round; opening: digest of the round manifest that opened it.
        state: from which the site started, as it computed it.
        groups: digests of the verified groups that the local steps used, ascending.
        norm: L2 norm of the values.
        feedback: digest of the site's error feedback if this contribution counts; empty for none.
        beacon_round: the newest beacon round when it was signed.
    """

    kind: ClassVar[str] = "contribution"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_CONTRIBUTION_BYTES
    worker: Key
    number: Annotated[int, Field(ge=1, lt=1 << 33)]
    opening: Digest
    state: OuterState
    payload: ObjectRef
    groups: GroupDigests
    local_steps: LocalSteps
    norm: Annotated[float, Field(ge=0.0)]
    feedback: OptionalDigest
    beacon_round: Round

    @property
    def path(self) -> str:
        return paths.contribution(self.worker, self.number)


class CountedContribution(Record):
    """A contribution that counts.

    Attributes:
        contribution: SHA-256 of its record's body.
        factor: by which its values are multiplied.
    """

    kind: ClassVar[str] = "counted"
    worker: Key
    contribution: Digest
    payload: ObjectRef
    groups: GroupDigests
    factor: Annotated[float, Field(gt=0.0, le=1.0)]


class Refusal(Record):
    """A worker of which nothing counts, and why."""

    kind: ClassVar[str] = "refused"
    worker: Key
    reason: ReasonCode


class RoundManifest(PublishedRecord):
    """What closes one outer round and opens the next.

    Attributes:
        number: the round that it closes; 0 closes none.
        previous: SHA-256 of the body of the round manifest before; empty for number 0.
        epoch: the trainer's fencing epoch.
        counted: the contributions that count, in the order in which they are added; refused: all other workers.
        state: after the round; version: the policy version whose weights are the state's, rounded to BF16.
        workers, rules: of the next round.
        beacon_round: the newest one when it was signed; closes: the one at which the next round closes.
    """

    kind: ClassVar[str] = "round"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_MANIFEST_BYTES
    trainer: Key
    number: OuterNumber
    previous: OptionalDigest
    epoch: Epoch
    counted: Annotated[tuple[CountedContribution, ...], Field(max_length=limits.MAX_WORKERS)]
    refused: Annotated[tuple[Refusal, ...], Field(max_length=limits.MAX_WORKERS)]
    state: OuterState
    version: Version
    workers: Annotated[tuple[Key, ...], Field(min_length=1, max_length=limits.MAX_WORKERS), Ascending]
    rules: RoundRules
    beacon_round: Round
    closes: Round

    @model_validator(mode="after")
    def _consistent(self) -> "RoundManifest":
        if len(self.previous) != (32 if self.number else 0):
            raise ValueError("every manifest but number 0 has one before it")
        counted, refused = [item.worker for item in self.counted], [item.worker for item in self.refused]
        if any(keys != sorted(set(keys)) for keys in (counted, refused)):
            raise ValueError("counted or refused workers that do not ascend")
        if not set(counted).isdisjoint(refused):
            raise ValueError("a worker that is both counted and refused")
        if self.number == 0 and (counted or refused or self.state.step):
            raise ValueError("number 0 closes no round")
        if self.rules.quorum > len(self.workers):
            raise ValueError("quorum exceeds the number of workers")
        if self.rules.momentum > 0 and not self.state.momentum:
            raise ValueError("rules with a momentum, and a state without one")
        if self.closes <= self.beacon_round:
            raise ValueError("the next round closes before it opens")
        return self

    @property
    def path(self) -> str:
        return paths.round_manifest(self.trainer, self.number)

    def counted_digest(self, worker: bytes) -> bytes | None:
        """Return the digest of the contribution of a worker that counts; None if none does."""
        return next((item.contribution for item in self.counted if item.worker == worker), None)


class RoundPointer(PublishedRecord):
    """The pointer to the newest round manifest, and to a state that is in storage.

    Attributes:
        newest: number of the newest round manifest; digest: SHA-256 of its body.
        state_number: the round manifest whose state is in storage; shards: the state's bytes, in order.
    """

    kind: ClassVar[str] = "round-pointer"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_POINTER_BYTES
    trainer: Key
    epoch: Epoch
    newest: OuterNumber
    digest: Digest
    state_number: OuterNumber
    shards: Annotated[tuple[ObjectRef, ...], Field(min_length=1, max_length=limits.MAX_STATE_SHARDS)]

    @model_validator(mode="after")
    def _consistent(self) -> "RoundPointer":
        if self.state_number > self.newest:
            raise ValueError("a state of a round that is not closed")
        if any(shard.size > limits.MAX_STATE_SHARD_BYTES for shard in self.shards):
            raise ValueError("a shard that is too large")
        return self

    @property
    def path(self) -> str:
        return paths.newest_round(self.trainer)
