"""The rules of a run: what all of its nodes must agree on, and `grailnode init` signs in the manifest; and its place.

A rule stands here once. The options of `init` and `calibrate`, the section [rules] of a recipe and
docs/reference/config.md are made from these fields. This module imports no torch, so that help is printed at once.
"""

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from protocol import limits
from protocol.proof import CalibratedArithmetic
from protocol.window import Schedule
from roles.settings_base import Settings

MAX_TITLE: Final = 64
"""Characters of a run's title."""
_MILLIONTHS: Final = 1_000_000


class TimingRules(Settings):
    """When windows open and close, and which share of the groups is audited: keys of [rules] without options.

    Windows are counted in rounds of the beacon (protocol/window.py).
    """

    rounds: int = 8
    """Beacon rounds in a window. With a public beacon they follow from `window`."""
    commit_rounds: int = 5
    """Rounds from the opening of a window to the deadline of commitments."""
    audit_rounds: int = 6
    """Rounds from the opening to the round that selects the audited groups."""
    seal_rounds: int = 16
    """Rounds from the opening to the one after which no seal counts."""
    verdict_rounds: int = 24
    """Rounds from the opening to the one after which nobody waits."""
    lead: int = 1
    """Windows from the one in which a version is made to the first that it serves."""
    max_lag: int = 2
    """How many versions a miner may be behind the one that serves the window."""
    head_ttl: int = Field(default=3600, ge=1, le=86_400 * 30)
    """Seconds after which a head that was not renewed is refused."""
    audit_ppm: int = Field(default=_MILLIONTHS, ge=1, le=_MILLIONTHS)
    """Audited share of a newcomer's groups, in millionths."""
    audit_floor_ppm: int = Field(default=_MILLIONTHS, ge=1, le=_MILLIONTHS)
    """Smallest audited share of any miner's groups, in millionths."""
    audit_halving: int = Field(default=16, ge=1, le=100_000)
    """Clean windows after which a miner's audited share halves."""

    @model_validator(mode="after")
    def _check_timing(self) -> Self:
        try:
            self.schedule(1)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{place}{message[0].lower()}{message[1:]}") from None
        if self.audit_floor_ppm > self.audit_ppm:
            raise ValueError("audit_floor_ppm exceeds audit_ppm")
        return self

    def schedule(self, first_round: int) -> Schedule:
        """Return the schedule of windows, the first of which the beacon round `first_round` opens."""
        moments = ("rounds", "commit_rounds", "audit_rounds", "seal_rounds", "verdict_rounds", "lead", "max_lag")
        return Schedule(first_round=first_round, **{name: getattr(self, name) for name in moments})

    def in_rounds(self, rounds: int) -> Self:
        """Return these rules with the same proportions for windows of another number of rounds, at least 3."""
        commit, audit, seal, verdict = (
            moment * rounds // self.rounds
            for moment in (self.commit_rounds, self.audit_rounds, self.seal_rounds, self.verdict_rounds)
        )
        commit = max(1, commit)
        audit = max(commit + 1, audit)
        seal = max(audit + 1, seal)
        moments = {
            "rounds": rounds,
            "commit_rounds": commit,
            "audit_rounds": audit,
            "seal_rounds": seal,
            "verdict_rounds": max(seal + 1, verdict),
        }
        return self.model_copy(update=moments)


class Rules(TimingRules):
    """What whoever creates a run decides beside the policy. An option of `init` replaces the rule of its name."""

    title: str | None = None
    """What the run is called. Default: the directory's name."""
    environment: str = "addition"
    """The task (docs/spec/environments.md), or several with shares in millionths: addition=700000,countdown=300000."""
    environment_config: str = "{}"
    """The configuration of a plug-in's task: a JSON object. Of several tasks, an object of these by name."""
    rubric: str = ""
    """Parts of the reward with their weights: score=7/10,thinking=1/10,overlong:512=1. Default: the task's score."""
    data: Path | None = None
    """JSON Lines with the problems, for a task that reads them."""
    chat: bool = False
    """Put prompts into the chat template of the policy's tokenizer. Default: prompts as they are."""
    system_prompt: str = ""
    """With chat: what every conversation begins with."""
    max_tokens: int | None = Field(default=None, ge=1, le=limits.MAX_COMPLETION_TOKENS)
    """The longest completion, of an episode in all turns together. Default: the task's."""
    turns: int | None = Field(default=None, ge=2, le=limits.MAX_TURNS)
    """Most turns of an episode. Default: the task's."""
    turn_tokens: int | None = Field(default=None, ge=1, le=limits.MAX_COMPLETION_TOKENS)
    """The longest turn of an episode. Default: the task's."""
    reply_tokens: int | None = Field(default=None, ge=1, le=limits.MAX_REPLY_TOKENS)
    """The longest reply in an episode, with the text around it. Default: the task's."""
    episode_tokens: int | None = Field(default=None, ge=1, le=limits.MAX_EPISODE_TOKENS)
    """The longest episode behind its prompt, with replies. Default: what turns and replies need."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Of sampling: the divisor of the logits."""
    top_k: int = Field(default=0, ge=0, lt=1 << 31)
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from a nucleus: the most likely tokens of this total probability."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens of at least this share of the largest probability."""
    evaluation_problems: int = Field(default=256, ge=0, le=limits.MAX_EVALUATION_PROBLEMS)
    """Held-out problems that validators solve for every version; 0 for none."""
    evaluation_samples: int = Field(default=0, ge=0, le=limits.MAX_EVALUATION_SAMPLES)
    """Completions of each held-out problem, for pass@k; 0: the most likely one."""
    pass_at: int = Field(default=1, ge=1)
    """k of pass@k."""
    difficulty: bool = False
    """Draw more of the kinds of problems from which the policy learns now: docs/spec/difficulty.md."""
    group_size: int = Field(default=8, ge=2, le=limits.MAX_GROUP_SIZE)
    """Rollouts of a prompt."""
    groups: int = Field(default=16, ge=1, le=limits.MAX_GROUPS)
    """Most groups of a miner in a window."""
    deposit: float = Field(default=32.0, ge=0, le=1e9)
    """Groups that a key must have delivered before it earns and is trained on; 0 where keys are not to be had for
    nothing.
    """
    lora_rank: int = Field(default=0, ge=0, le=limits.MAX_LORA_RANK)
    """Train adapters of this rank instead of all weights; 0: all weights."""
    lora_alpha: float = Field(default=0.0, ge=0, le=limits.MAX_LORA_ALPHA)
    """An adapter's product counts alpha / rank times; 0: alpha is twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get adapters, by the last parts of their names: q_proj,v_proj."""
    precision: Literal["bf16", "fp8", "int8"] = "bf16"
    """What the layers' matrices of all versions consist of: docs/spec/quantized.md."""
    numerics: Literal["calibrated", "exact"] = "calibrated"
    """exact: all miners and validators compute the same bits, on CPUs, and nothing is tolerated."""
    miner_arithmetics: tuple[CalibratedArithmetic, ...] = ()
    """How miners may compute. Default: as the recipe's engine does, or torch-float32."""
    validator_arithmetics: tuple[CalibratedArithmetic, ...] = ()
    """How validators may compute. Default: as the recipe's engine does, or torch-float32."""
    roots: int = Field(default=1, ge=1, le=16)
    """Root keys; 3 for a real run."""
    threshold: int | None = Field(default=None, ge=1, le=16)
    """Root keys that must sign. Default: 2, or 1 of 1."""
    trainers: int = Field(default=1, ge=1, le=limits.MAX_WORKERS)
    """Sites that train together (docs/guide/many-trainers.md)."""
    validators: int = Field(default=1, ge=0, le=16)
    """Keys of validators to make."""
    validator_keys: tuple[str, ...] = ()
    """The public key of a validator that somebody else runs."""
    quorum: int = Field(default=1, ge=1, le=16)
    """Validators that must accept a group."""
    spares: int = Field(default=limits.MAX_KEYS, ge=0, le=limits.MAX_KEYS)
    """Deal each group to the quorum and to so many more validators. Default: every validator judges every group."""
    window: float | None = Field(default=None, ge=0.4, le=3600)
    """Seconds of a window. Default: 2, for one machine; with a public beacon 60."""
    beacon: Literal["own", "quicknet"] = "own"
    """Source of randomness: the run's own trainer, or drand, which nobody can predict."""
    admission: Literal["open", "allowlist", "invite"] = "open"
    """Who may mine: anybody, listed keys, or whoever was invited (`grailnode admit`)."""
    work: int = Field(default=20, ge=0, le=64)
    """Bits of proof of work that each key of an open run's miners does a day; 0 for none."""

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("title")
    @classmethod
    def _check_title(cls, value: str | None) -> str | None:
        if value is not None and not (0 < len(value) <= MAX_TITLE and value.isprintable()):
            raise ValueError(f"give 1 to {MAX_TITLE} printable characters (it is {value!r})")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        validators, is_exact = self.validators + len(self.validator_keys), self.numerics == "exact"
        filters = self.top_k or self.top_p < 1.0 or self.min_p
        never_tried = "a run of several sites trains all weights, in BF16: pseudo-gradients of others were never tried"
        for is_wrong, fault in (
            (self.system_prompt and not self.chat, "a system prompt belongs to a conversation: set chat as well"),
            (
                self.pass_at > max(1, self.evaluation_samples),
                f"pass_at = {self.pass_at} needs evaluation_samples of at least as many",
            ),
            (bool(self.lora_rank) != bool(self.lora_targets), "lora_rank and lora_targets go together"),
            (self.lora_alpha and not self.lora_rank, "lora_alpha belongs to adapters: set lora_rank as well"),
            (
                self.lora_rank and self.precision != "bf16",
                f"precision = {self.precision!r} is for runs that train all weights: drop lora_rank",
            ),
            (self.sites and self.lora_rank, f"{never_tried}; drop lora_rank, or trainers"),
            (self.sites and self.precision != "bf16", f"{never_tried}; drop {self.precision}, or trainers"),
            (self.sites and self.difficulty, "several sites count no groups by stratum: drop difficulty, or trainers"),
            (
                is_exact and (self.miner_arithmetics or self.validator_arithmetics),
                "--numerics exact: all nodes compute alike; drop --miner-arithmetic, --validator-arithmetic",
            ),
            (is_exact and self.lora_rank, "exact arithmetic does not cover adapters; drop --lora-rank or --numerics"),
            (is_exact and filters, "--numerics exact: without --top-k, --top-p and --min-p, whose sums are not exact"),
            (not validators, "a run without validators; name one with --validator, or raise --validators"),
            (
                self.root_threshold > self.roots,
                f"{self.threshold} of {self.roots} root keys can never sign; lower --threshold",
            ),
            (
                self.quorum > validators,
                f"{self.quorum} of {validators} validators can never accept; lower --quorum, or add --validator",
            ),
        ):
            if is_wrong:
                raise ValueError(fault)
        return self

    @property
    def system(self) -> str | None:
        """The system prompt of conversations; None for bare prompts."""
        return self.system_prompt if self.chat else None

    @property
    def root_threshold(self) -> int:
        return min(2, self.roots) if self.threshold is None else self.threshold

    @property
    def sites(self) -> int:
        """The number of sites that train together; 0 if the trainer trains alone."""
        return self.trainers if self.trainers > 1 else 0

    def changed(self, **values: Any) -> Self:
        """Return these rules with other values, which are known to be allowed."""
        assert values.keys() <= type(self).model_fields.keys(), values.keys()
        return self.model_copy(update=values)


class Place(Settings):
    """Where `init` puts a run, or a node of somebody else's run: in which bucket, and how others read it."""

    bucket: str | None = None
    """Keep the run in a bucket: NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX."""
    region: str = ""
    """Of the bucket. Default: us-east-1; auto on R2."""
    url: str = ""
    """Where everybody reads the bucket. Default: the service's own URL; R2 has none."""
    readers: tuple[str, ...] = ()
    """A principal that may read; without any, everybody may."""
    days: int = Field(default=7, ge=1)
    """Days for which objects of closed windows are kept."""
    join: str | None = None
    """Take part in the run whose manifest is there, instead of making one."""
    meeting: str | None = None
    """With --join: the bucket in which participants announce themselves."""
    name: str = "miner-1"
    """With --join: the node's name."""
