"""The run manifest: everything that all nodes of a run must agree on, signed by its root keys (docs/spec/run.md).

A run is named by the SHA-256 of the manifest's body, so nodes that have the same id have the same rules.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from protocol import environments, limits
from protocol.beacon import ChainInfo
from protocol.difficulty import DifficultySpec
from protocol.encoding import OPTIONAL, Ascending, Line, Record
from protocol.environments.record import EnvironmentSpec, MixtureSpec
from protocol.environments.rubric import RubricPart
from protocol.identity.authority import Authority
from protocol.identity.signing import Digest
from protocol.lora import LoraSpec
from protocol.proof import EXACT_PROOF, ProofSpec
from protocol.quantization import Precision
from protocol.rollout.batch import EpisodeRule
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from protocol.window import Schedule

_BYTES_PER_TOKEN = 8  # of a rollout: the token and its sketch
_REPLY_TOKEN_BYTES = 4
_TURN_BYTES = 16  # of the sizes of a turn and its reply
_SLACK_BYTES = 1024  # for field names and other small parts
_ASCII_SPACE = " \t\n\v\f\r"

Numerics = Literal["calibrated", "exact"]
"""How nodes of a run compute: each in its own way within measured thresholds, or all with the same bits
(docs/spec/numerics.md)."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class FileRef(Record):
    """A file that every node needs, of the model or of problems; its path in the trainer's space names its SHA-256."""

    kind: ClassVar[str] = "file"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    digest: Digest
    size: Annotated[int, Field(ge=0, le=limits.MAX_MODEL_FILE_BYTES)]


class ModelSpec(Record):
    """The policy's architecture and tokenizer, as files of `transformers`, and the digest of version 0's weights."""

    kind: ClassVar[str] = "model"
    files: Annotated[tuple[FileRef, ...], Field(min_length=1, max_length=16)]
    genesis: Digest

    @model_validator(mode="after")
    def _distinct(self) -> "ModelSpec":
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("two files of one name")
        return self


class ChatSpec(Record):
    """How a problem's text becomes a conversation: by the text around it (fields: docs/spec/run.md). `grailnode init`
    renders the chat template of the policy's tokenizer once; no node of a run executes a template.
    """

    kind: ClassVar[str] = "chat"
    template: Digest
    system: str
    before: str
    after: str
    trim: bool
    turn_before: str = ""
    turn_after: str = ""

    def prompt(self, text: str) -> str:
        """Return the prompt of a problem's text."""
        return f"{self.before}{text.strip(_ASCII_SPACE) if self.trim else text}{self.after}"


class SamplingSpec(Record):
    """How completions are sampled (protocol/rollout/sampling.py). By default the filters allow every token."""

    kind: ClassVar[str] = "sampling"
    temperature: Annotated[float, Field(gt=0.0, le=100.0)]
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)]
    stops: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=limits.MAX_STOP_TOKENS), Ascending]
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Share = 0.0

    def params(self) -> SamplingParams:
        """Return the parameters that the engine and the check use."""
        filters = Filters(self.top_k, self.top_p, self.min_p)
        return SamplingParams(self.temperature, self.max_tokens, self.stops, filters)


class EpisodeSpec(Record):
    """How long episodes may be (fields: docs/spec/run.md); `max_tokens` of the sampling bounds all turns together."""

    kind: ClassVar[str] = "episode"
    turns: Annotated[int, Field(ge=2, le=limits.MAX_TURNS)]
    turn_tokens: Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)]
    reply_tokens: Annotated[int, Field(ge=1, le=limits.MAX_REPLY_TOKENS)]
    tokens: Annotated[int, Field(ge=1, le=limits.MAX_EPISODE_TOKENS)]

    def rule(self, sampling: SamplingSpec) -> EpisodeRule:
        """Return the rule of turns that are sampled so."""
        return EpisodeRule(**self.model_dump(), max_tokens=sampling.max_tokens, stops=sampling.stops)


class EvaluationSpec(Record):
    """How validators evaluate the policy on held-out problems (fields: docs/spec/run.md)."""

    kind: ClassVar[str] = "evaluation-rule"
    problems: Annotated[int, Field(ge=0, le=limits.MAX_EVALUATION_PROBLEMS)]
    samples: Annotated[int, Field(ge=0, le=limits.MAX_EVALUATION_SAMPLES)]
    pass_at: Annotated[int, Field(ge=1, le=limits.MAX_EVALUATION_SAMPLES)]

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationSpec":
        if self.pass_at > self.completions:
            raise ValueError("pass_at is more than the completions of a problem")
        return self

    @property
    def completions(self) -> int:
        """Completions of each problem."""
        return max(1, self.samples)


class ScoringSpec(Record):
    """How verdicts become scores (fields: docs/spec/run.md)."""

    kind: ClassVar[str] = "scoring"
    penalty: Annotated[int, Field(ge=1_000_000, le=10**12)]
    shortfall: Annotated[int, Field(ge=0, le=10**12)]
    miss_price: Annotated[int, Field(ge=0, le=10**12)]
    deposit: Annotated[int, Field(ge=0, le=10**15)]
    cap: Annotated[int, Field(ge=1, le=1_000_000_000)]
    windows: Annotated[int, Field(ge=1, le=10_000)]
    decay: Annotated[int, Field(ge=0, le=1_000_000_000)]


class RunManifest(Record):
    """The rules of a run (fields: docs/spec/run.md)."""

    kind: ClassVar[str] = "run"
    max_bytes: ClassVar[int] = limits.MAX_RUN_BYTES
    name: Annotated[Line, Field(min_length=1, max_length=64)]
    authority: Authority
    model: ModelSpec
    lora: LoraSpec | None
    precision: Precision
    environment: MixtureSpec
    data: FileRef | None
    chat: ChatSpec | None
    sampling: SamplingSpec
    episode: EpisodeSpec | None
    evaluation: EvaluationSpec
    numerics: Numerics
    group_size: Annotated[int, Field(ge=2, le=limits.MAX_GROUP_SIZE)]
    groups: Annotated[int, Field(ge=1, le=limits.MAX_GROUPS)]
    spares: Annotated[int, Field(ge=0, le=limits.MAX_KEYS)]
    schedule: Schedule
    beacon: ChainInfo
    proof: ProofSpec
    scoring: ScoringSpec
    head_ttl: Annotated[int, Field(ge=1, le=86_400 * 30)]
    difficulty: DifficultySpec | None = OPTIONAL

    @model_validator(mode="after")
    def _consistent(self) -> "RunManifest":
        built_in = environments.names + environments.data_names
        # Those that this program does not know are refused where their code is looked for.
        members = [spec for spec in self.tasks if spec.is_plugin or spec.name in built_in]
        readers = sum(not spec.is_plugin and environments.requirements(spec.name).data for spec in members)
        if readers > 1:
            raise ValueError("several environments that read a data file, of which a run has one")
        if readers != (self.data is not None) and (readers or len(members) == len(self.tasks)):
            raise ValueError("a data file that the environment does not read, or no data file for one that does")
        if not all(map(self._plays_by_rule, members)):
            raise ValueError("an episode that the environment does not play, or none for one that plays episodes")
        if self.episode is not None and any(spec.rubric for spec in self.tasks):
            raise ValueError("a rubric of episodes, which it does not cover")
        if self.group_items > limits.MAX_GROUP_ITEMS:
            raise ValueError(f"groups of up to {self.group_items} values, of which a reader takes less")
        if self.data is not None and self.data.size > limits.MAX_DATA_BYTES:
            raise ValueError("the data file is too large")
        if self.lora is not None and self.precision != "bf16":
            raise ValueError("adapters that are quantized, which the specification does not cover")
        if self.numerics == "exact":
            shares = {name: getattr(self.proof, name) for name in ("audit_ppm", "audit_floor_ppm", "audit_halving")}
            if self.proof != EXACT_PROOF.model_copy(update=shares):
                raise ValueError("thresholds of an exact run that tolerate something")
            if self.sampling.params().filters.active:
                raise ValueError("an exact run with filters, whose sums are not exact")
            if self.lora is not None:
                raise ValueError("an exact run with adapters, which exact arithmetic does not cover")
        elif any("exact" in row.pair or (row.replay and self.exact_replies) for row in self.proof.table):
            raise ValueError("a calibrated run that admits exact arithmetic, or tests how often exact replies differ")
        return self

    def _plays_by_rule(self, spec: EnvironmentSpec) -> bool:
        # What a plug-in plays, its code says.
        return spec.is_plugin or self.plays(environments.requirements(spec.name).turns)

    def plays(self, most: int) -> bool:
        """Return whether an environment whose episodes have at most so many turns plays by this run's rule."""
        return self.episode is None if most == 1 else self.episode is not None and self.episode.turns <= most

    @property
    def tasks(self) -> tuple[EnvironmentSpec, ...]:
        """The environments of the task, ascending by name."""
        return tuple(member.environment for member in self.environment)

    @property
    def task_name(self) -> str:
        """The task as people read it: the environment's name, or of several each with its share in millionths."""
        if len(self.environment) == 1:
            return self.environment[0].environment.name
        return ",".join(f"{member.environment.name}={member.ppm}" for member in self.environment)

    def rubric(self, stratum: str) -> tuple[RubricPart, ...]:
        """Return the parts of the reward of a problem, whose stratum in a mixture is the environment's name."""
        return next(spec.rubric for spec in self.tasks if len(self.tasks) == 1 or spec.name == stratum)

    @property
    def exact_rewards(self) -> bool:
        """Whether every machine computes the same rewards."""
        return all(spec.exact for spec in self.tasks)

    @property
    def exact_replies(self) -> bool:
        """Whether every machine gives the same replies, if there are any."""
        return self.episode is None or self.exact_rewards

    @property
    def episode_rule(self) -> EpisodeRule | None:
        """The rule of turns; None for a run without episodes."""
        if self.episode is None:
            return None
        return self.episode.rule(self.sampling)

    @property
    def group_items(self) -> int:
        """Most values of a group of this run, as limits count them."""
        per_rollout = 7 if self.episode is None else 9 + 3 * self.episode.turns
        return 15 + self.group_size * per_rollout

    @property
    def sites_refusal(self) -> str:
        """Why several sites cannot train in this run; empty if they can."""
        if self.lora is not None:
            return "this run trains LoRA adapters, and has no sites: sites train all weights"
        if self.difficulty is not None:
            return "this run draws problems by difficulty, and has no sites: their rounds count no groups by stratum"
        if self.precision != "bf16":
            return f"this run's weights are quantized ({self.precision}), and it has no sites: sites train BF16 weights"
        return ""

    @property
    def group_bytes(self) -> int:
        """Upper bound on the size of a group of this run: bytes of the record, decompressed."""
        rollout = _BYTES_PER_TOKEN * self.sampling.max_tokens + _SLACK_BYTES
        if self.episode is not None:
            rollout += _REPLY_TOKEN_BYTES * self.episode.tokens + _TURN_BYTES * self.episode.turns
        return min(limits.MAX_GROUP_BYTES, self.group_size * rollout + 4 * limits.MAX_PROMPT_TOKENS + _SLACK_BYTES)

    @property
    def verdict_bytes(self) -> int:
        """Upper bound on the size of a verdict on a miner of this run: bytes of the record."""
        group = _judgement_bytes(self.group_size, self.sampling.max_tokens)
        return min(limits.MAX_VERDICT_BYTES, self.groups * group + _SLACK_BYTES)

    def audit_share(self, clean: int, groups: int) -> int:
        """Return which share of `groups` of a miner that has had `clean` clean windows is audited, in millionths: no
        more than one verdict has room for.
        """
        return min(self.proof.audit_share(clean), self.largest_share(groups))

    def largest_share(self, groups: int) -> int:
        """Return for which share of `groups` one verdict has room, however long they are, in millionths."""
        room = verdict_room(self.group_size, self.sampling.max_tokens)
        return min(1_000_000, 1_000_000 * room // max(1, groups))

    def opening_time(self, window: int) -> float:
        """Return the time at which a window opens: seconds since the Unix epoch."""
        return self.beacon.round_time(self.schedule.opening(window))

    def deadline_time(self, window: int) -> float:
        """Return the time by which commitments must be in storage: seconds since the Unix epoch."""
        return self.beacon.round_time(self.schedule.deadline(window))

    def window_at(self, moment: float) -> int:
        """Return the window that is open at a time (seconds since the Unix epoch); negative before window 0."""
        return self.schedule.window_at(self.beacon.round_at(moment))


def verdict_room(group_size: int, max_tokens: int) -> int:
    """Return for how many groups one verdict has room, however long they are."""
    return max(1, (limits.MAX_VERDICT_BYTES - _SLACK_BYTES) // _judgement_bytes(group_size, max_tokens))


def _judgement_bytes(group_size: int, max_tokens: int) -> int:
    return group_size * (4 * max_tokens + _SLACK_BYTES) + _SLACK_BYTES
