"""The run manifest: everything that all nodes of a run must agree on, signed by its root keys (docs/spec/run.md).

A run is named by the SHA-256 of the manifest's body, so nodes that have the same id have the same rules.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from protocol import environments, limits
from protocol.beacon import ChainInfo
from protocol.encoding import Line, Record
from protocol.identity.authority import Authority
from protocol.identity.signing import Digest
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from protocol.window import Schedule

_BYTES_PER_TOKEN = 8  # of a rollout: the token and its sketch
_SLACK_BYTES = 1024  # field names and the like

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]


class FileRef(Record):
    """A file that every node needs (of the model bundle, or problems), found by its digest in the trainer's space."""

    kind: ClassVar[str] = "file"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    digest: Digest
    size: Annotated[int, Field(ge=0, le=limits.MAX_MODEL_FILE_BYTES)]


class ModelSpec(Record):
    """The policy's architecture and tokenizer (as `transformers` lays them out), and the digest of version 0's weights."""

    kind: ClassVar[str] = "model"
    files: Annotated[tuple[FileRef, ...], Field(min_length=1, max_length=16)]
    genesis: Digest

    @model_validator(mode="after")
    def _distinct(self) -> "ModelSpec":
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("two files of one name")
        return self


class SamplingSpec(Record):
    """How completions are drawn: see protocol/rollout/sampling.py; the filters let every token through unless they say
    otherwise.
    """

    kind: ClassVar[str] = "sampling"
    temperature: Annotated[float, Field(gt=0.0, le=100.0)]
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)]
    eos: Annotated[int, Field(ge=0, lt=1 << 31)]

    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Share = 0.0

    def params(self) -> SamplingParams:
        """As the engine and the check take it."""
        filters = Filters(self.top_k, self.top_p, self.min_p)
        return SamplingParams(self.temperature, self.max_tokens, self.eos, filters)


class ProofSpec(Record):
    """Thresholds of the check, as `grailnode calibrate` measured them for this model (protocol/judging/evidence.py
    applies them).

    Attributes:
        sketch: the kind of sketch.
        sketch_tolerance: largest difference of a value that counts as agreement, in sketch units.
        sketch_rate: bound on the probability that an honest position lies outside that tolerance.
        sketch_median: largest median distance of an honest group's positions, in sketch units.
        margin: largest shortfall of a chosen token's score that is not counted as a miss, in units of logits /
            temperature.
        margin_rate: bound on the probability that an honest token lies beyond `margin`.
        margin_limit: shortfall that no honest token shows; one token beyond it is enough to refuse.
        level: probability with which a single test may refuse honest work.
        confidence: of both rates as upper bounds; positions: honest positions that they were measured on, 0 where they
            were not.
        audit_ppm, audit_floor_ppm: audited share of a miner's groups, in millionths: of a newcomer, and of one known to
            be good.
        audit_halving: clean windows in which the audited share halves.
    """

    kind: ClassVar[str] = "proof"
    sketch: Literal["projection", "topk"]
    sketch_tolerance: Annotated[int, Field(ge=0, le=64)]
    sketch_rate: Rate
    sketch_median: Annotated[int, Field(ge=0, le=64)]
    margin: Annotated[float, Field(ge=0.0, le=100.0)]
    margin_rate: Rate
    margin_limit: Annotated[float, Field(ge=0.0, le=100.0)]
    level: Annotated[float, Field(gt=0.0, le=0.1)]
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)]
    positions: Annotated[int, Field(ge=0, lt=1 << 53)]
    audit_ppm: Annotated[int, Field(ge=1, le=1_000_000)]
    audit_floor_ppm: Annotated[int, Field(ge=1, le=1_000_000)]
    audit_halving: Annotated[int, Field(ge=1, le=100_000)]

    @model_validator(mode="after")
    def _in_order(self) -> "ProofSpec":
        if self.margin_limit < self.margin:
            raise ValueError("margin_limit lies below margin")
        if self.audit_floor_ppm > self.audit_ppm:
            raise ValueError("audit_floor_ppm exceeds audit_ppm")
        return self

    def audit_share(self, clean: int) -> int:
        """The audited share, in millionths, of a miner with so many clean windows behind it."""
        return max(self.audit_floor_ppm, self.audit_ppm >> min(20, clean // self.audit_halving))


class ScoringSpec(Record):
    """How verdicts become scores.

    Attributes:
        exponent: superlinearity across miners; splitting oneself in two earns less.
        penalty: accepted groups that one rejected group costs; shortfall: that one group pledged and not delivered
            costs.
        deposit: what a key must be worth, in groups, before it earns anything: the price of throwing a key away.
        cap: largest share of one miner.
        windows: how many windows back count; half_life: windows in which the worth of a group halves.
    """

    kind: ClassVar[str] = "scoring"
    exponent: Annotated[float, Field(ge=1.0, le=8.0)]
    penalty: Annotated[float, Field(ge=1.0, le=1e6)]
    shortfall: Annotated[float, Field(ge=0.0, le=1e6)]
    deposit: Annotated[float, Field(ge=0.0, le=1e9)]
    cap: Annotated[float, Field(gt=0.0, le=1.0)]
    windows: Annotated[int, Field(ge=1, le=10_000)]
    half_life: Annotated[float, Field(gt=0.0, le=1e6)]


class RunManifest(Record):
    """The rules of a run.

    Attributes:
        authority: who may act, until a revision says otherwise; its roots sign this manifest.
        environment, data: the task's name, and its file of problems where it reads one.
        group_size: rollouts of a group; groups: most groups of a miner in a window.
        head_ttl: seconds after which a head that was not renewed is refused.
    """

    kind: ClassVar[str] = "run"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES
    name: Annotated[Line, Field(min_length=1, max_length=64)]
    authority: Authority
    model: ModelSpec
    environment: Annotated[Line, Field(min_length=1, max_length=64)]
    data: FileRef | None
    sampling: SamplingSpec
    group_size: Annotated[int, Field(ge=2, le=limits.MAX_GROUP_SIZE)]
    groups: Annotated[int, Field(ge=1, le=limits.MAX_GROUPS)]
    schedule: Schedule
    beacon: ChainInfo
    proof: ProofSpec
    scoring: ScoringSpec
    head_ttl: Annotated[int, Field(ge=1, le=86_400 * 30)]

    @model_validator(mode="after")
    def _consistent(self) -> "RunManifest":
        known = self.environment in environments.names + environments.data_names
        if known and environments.needs(self.environment).data != (self.data is not None):
            raise ValueError("a data file that the environment does not read, or none where it reads one")
        if self.data is not None and self.data.size > limits.MAX_DATA_BYTES:
            raise ValueError("too large a data file")
        return self

    @property
    def group_bytes(self) -> int:
        """More than any group of this run takes: bytes of the record, decompressed."""
        rollout = _BYTES_PER_TOKEN * self.sampling.max_tokens + _SLACK_BYTES
        return min(limits.MAX_GROUP_BYTES, self.group_size * rollout + 4 * limits.MAX_PROMPT_TOKENS + _SLACK_BYTES)

    @property
    def verdict_bytes(self) -> int:
        """More than any verdict on a miner of this run takes: bytes of the record."""
        group = self.group_size * (4 * self.sampling.max_tokens + _SLACK_BYTES) + _SLACK_BYTES
        return min(limits.MAX_VERDICT_BYTES, self.groups * group + _SLACK_BYTES)

    def opening_time(self, window: int) -> float:
        """When a window opens: seconds since the Unix epoch."""
        return self.beacon.due(self.schedule.opening(window))

    def deadline_time(self, window: int) -> float:
        """When commitments must be in storage: seconds since the Unix epoch."""
        return self.beacon.due(self.schedule.deadline(window))

    def window_at(self, moment: float) -> int:
        """The window at a moment (seconds since the Unix epoch); negative before window 0 opens."""
        return self.schedule.window_at(self.beacon.round_at(moment))
