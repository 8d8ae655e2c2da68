"""The records of outer rounds: contributions, round manifests and the round pointer (docs/spec/outer-round.md).

This module checks each record by itself. protocol/outer/round_checks.py checks a round manifest against the one before
it, and a contribution against the manifest that opened its round.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from protocol import limits, paths
from protocol.chain.manifest import Epoch
from protocol.encoding import Ascending, Record, Version, ascending_by, one_of
from protocol.errors import MalformedError
from protocol.identity.signing import Digest, Key, OptionalDigest, PublishedRecord
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
    MALFORMED = "malformed"  # no contribution of this worker to this round, no payload, or a revoked key
    OTHER_STATE = "other-state"  # it starts from another state than the round's
    UNDEALT = "undealt"  # it used a group of another worker, or one that is used up
    CONTRADICTORY = "contradictory"  # the worker signed two contributions to the round
    POISONED = "poisoned"  # its values contradict those of the other sites
    QUORUM = "quorum"  # it is sound, but there are too few contributions


class OuterState(Record):
    """The digests of the FP32 state that all sites share between two rounds (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "outer-state"
    step: OuterNumber
    weights: Digest
    momentum: OptionalDigest


class RoundRules(Record):
    """The rules of one round (fields: docs/spec/outer-round.md)."""

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
    spread: Annotated[int, Field(ge=0, le=1)]

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


class PayloadRef(ObjectRef):
    """A reference to a payload: to its first file, which names the others."""

    kind: ClassVar[str] = "payload"
    size: Annotated[int, Field(ge=1, le=limits.MAX_SHARD_BYTES)]
    total: Annotated[int, Field(ge=0, lt=1 << 53)]  # bytes of all files


class RoundContribution(PublishedRecord):
    """What a site publishes in a round (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "contribution"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_CONTRIBUTION_BYTES
    worker: Key
    number: Annotated[int, Field(ge=1, lt=1 << 33)]
    opening: Digest
    state: OuterState
    payload: PayloadRef
    groups: GroupDigests
    local_steps: LocalSteps
    norm: Annotated[float, Field(ge=0.0)]
    feedback: OptionalDigest
    beacon_round: Round

    @property
    def path(self) -> str:
        return paths.contribution(self.worker, self.number)


class CountedContribution(Record):
    """A contribution that counts (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "counted"
    worker: Key
    contribution: Digest
    payload: PayloadRef
    groups: GroupDigests
    factor: Annotated[float, Field(gt=0.0, le=1.0)]


class Refusal(Record):
    """A worker of which nothing counts, and why."""

    kind: ClassVar[str] = "refused"
    worker: Key
    reason: Annotated[str, one_of(RefusalReason)]


class PlannedContribution(Record):
    """A contribution that the coordinator found sound (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "planned"
    worker: Key
    payload: PayloadRef


class RoundPlan(PublishedRecord):
    """Who computes what when a round closes (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "round-plan"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_PLAN_BYTES
    trainer: Key
    number: Annotated[int, Field(ge=1, lt=1 << 33)]
    opening: Digest
    contributions: Annotated[
        tuple[PlannedContribution, ...], Field(max_length=limits.MAX_WORKERS), ascending_by("worker")
    ]
    aggregators: Annotated[tuple[Key, ...], Field(min_length=2, max_length=limits.MAX_WORKERS)]

    @model_validator(mode="after")
    def _consistent(self) -> "RoundPlan":
        if len(set(self.aggregators)) < len(self.aggregators):
            raise ValueError("an aggregator twice")
        return self

    @property
    def path(self) -> str:
        return paths.round_plan(self.trainer, self.number)


class RoundProducts(PublishedRecord):
    """The products that a site computed of some parts (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "products"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_PRODUCTS_BYTES
    worker: Key
    number: Annotated[int, Field(ge=1, lt=1 << 33)]
    subject: Digest
    parts: Annotated[tuple[OuterNumber, ...], Field(max_length=limits.MAX_SHARE_PARTS), Ascending]
    numbers: bytes

    @property
    def path(self) -> str:
        return paths.products(self.worker, self.number, self.subject)


Outcome = Literal["sound", "lost", "wrong"]


class AggregatedShare(Record):
    """A share of a plan, and what became of it (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "aggregated"
    worker: Key
    products: OptionalDigest
    outcome: Outcome
    checker: Key
    repeat: OptionalDigest
    check: Outcome

    @model_validator(mode="after")
    def _consistent(self) -> "AggregatedShare":
        if (not self.products) != (self.outcome == "lost") or (not self.repeat) != (self.check == "lost"):
            raise ValueError("lost products have no digest, and others have one")
        return self


class RoundManifest(PublishedRecord):
    """What closes one outer round and opens the next (fields: docs/spec/outer-round.md)."""

    kind: ClassVar[str] = "round"
    max_bytes: ClassVar[int] = limits.MAX_ROUND_MANIFEST_BYTES
    trainer: Key
    number: OuterNumber
    previous: OptionalDigest
    epoch: Epoch
    counted: Annotated[tuple[CountedContribution, ...], Field(max_length=limits.MAX_WORKERS), ascending_by("worker")]
    refused: Annotated[tuple[Refusal, ...], Field(max_length=limits.MAX_WORKERS), ascending_by("worker")]
    aggregated: Annotated[tuple[AggregatedShare, ...], Field(max_length=limits.MAX_WORKERS)]
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
        if not {item.worker for item in self.counted}.isdisjoint(item.worker for item in self.refused):
            raise ValueError("a worker that is both counted and refused")
        if self.number == 0 and (self.counted or self.refused or self.state.step):
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
    """The pointer to the newest round manifest, and to a state that is in storage (docs/spec/outer-round.md)."""

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
