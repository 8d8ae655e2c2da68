"""proof.json, which `grailnode calibrate` writes and `init` reads: the thresholds of a policy and their measurement."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grailnode import UserError
from protocol import bounded_json
from protocol.encoding import Line, ascending_by, content_digest, pack
from protocol.environments.record import MixtureSpec
from protocol.errors import MalformedError
from protocol.lora import LoraSpec
from protocol.proof import CALIBRATED, Arithmetic, ProofSpec, Thresholds, pairs_of
from protocol.rollout.sketch import SketchKind

NAME: Final = "proof.json"
"""Name of the file in a policy's directory."""

_MAX_BYTES: Final = 1 << 20

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0.0)]


class ProofFileError(UserError):
    """A proof.json that cannot be used; the message names it and says why, and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PairRow(_Part):
    """The honest distribution of one pair of honest nodes."""

    name: Line
    generating: Line  # how this side computed
    checking: Line  # how this side computed
    tokens: Count  # completion tokens
    positions: Count  # those whose state no earlier rollout of the group had
    # sketch distances below which 50%, 99%, 99.9% and all positions lie, in sketch units
    distances: tuple[Size, Size, Size, Size]
    # sampling margins below which 99%, 99.9% and all tokens lie, in logits / temperature
    margins: tuple[Size, Size, Size]
    margin_misses: Share  # share of tokens with a margin
    stop_misses: Share  # share of rollouts with a margin where the end token is taken or drawn
    largest_shift: Size  # the largest difference of the two sides in a token's score relative to the other tokens'


class CopyRow(_Part):
    """The shares of a copy's groups and windows that the thresholds refuse; `bits` are of its weights."""

    bits: Annotated[int, Field(ge=1, le=16)]
    pair: Line
    tokens: Count
    groups: Share
    windows: Share


class MeasuredAdapters(_Part):
    """The adapters with which both sides computed."""

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0.0)]
    targets: Annotated[tuple[Line, ...], Field(min_length=1, max_length=1000)]
    share: Share  # of the length of each matrix, by which its adapter changes it

    @classmethod
    def of(cls, lora: LoraSpec, share: float) -> Self:
        return cls(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, share=share)

    def __str__(self) -> str:
        return f"adapters of rank {self.rank}, alpha {self.alpha:g}, of {', '.join(self.targets)}"


class RowMeasurement(_Part):
    """The measurement behind a row: honest distributions, what the thresholds refuse, versions and the demands."""

    seed: Count
    level: Annotated[float, Field(gt=0.0, le=0.1)]
    headroom: Annotated[float, Field(ge=1.0)]
    window: Annotated[int, Field(ge=1)]
    torch: Line
    processor: Line
    pairs: Annotated[tuple[PairRow, ...], Field(min_length=1, max_length=1000)]
    copies: Annotated[tuple[CopyRow, ...], Field(min_length=1, max_length=1000)]


class MeasuredRow(_Part):
    """The thresholds of a pair of arithmetics, and their measurement."""

    thresholds: Thresholds
    measured: RowMeasurement


class Subject(_Part):
    """What was measured, which is one for all pairs."""

    policy: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # weight digest of the policy
    prompts: Line  # name of the environment or of the file of the prompts
    chat: bool  # whether they were put into the policy's chat template
    temperature: Annotated[float, Field(gt=0.0)]
    max_tokens: Annotated[int, Field(ge=1)]
    group_size: Annotated[int, Field(ge=1)]
    sketch: SketchKind
    # the adapters of a LoRA run, whose base is the policy; None for a run that trains all weights
    lora: MeasuredAdapters | None = None
    turns: Annotated[int, Field(ge=1)] = 1  # most of an episode, for all of whose turns `max_tokens` is the limit
    # `replies_digest` of the task whose rate of replays was measured; None where replies are exact
    replies: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


def replies_digest(task: MixtureSpec) -> str | None:
    """Return the SHA-256 of the environments that reply in a task, in hexadecimal, whatever they reward; None if their
    replies are exact.
    """
    if all(member.environment.exact for member in task):
        return None
    members = [(member.ppm, member.environment.model_copy(update={"rubric": ()}).to_bytes()) for member in task]
    return content_digest(pack(members)).hex()


class ProofFile(_Part):
    """The file: a table of thresholds, ascending by pair of arithmetics, and what they were measured on."""

    subject: Subject
    table: Annotated[
        tuple[MeasuredRow, ...], Field(min_length=1, max_length=len(CALIBRATED) ** 2), ascending_by("thresholds.pair")
    ]

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if any("exact" in item.thresholds.pair for item in self.table):
            raise ValueError("exact arithmetic has no measured thresholds")
        return self

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=2) + "\n"

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse the bytes of a file; the MalformedError of bytes that are no proof says where."""
        value: Any = bounded_json.parse(data)
        if not isinstance(value, dict) or not isinstance(value.get("table"), list):
            raise MalformedError("not an object with a table of thresholds and their measurement")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MalformedError(str(first["msg"]), where) from error

    def row(self, miner: Arithmetic, validator: Arithmetic) -> Thresholds:
        """Return the thresholds of a pair, or raise ProofFileError if it was not measured."""
        for item in self.table:
            if item.thresholds.pair == (miner, validator):
                return item.thresholds
        raise ProofFileError(
            f"no thresholds for miners in {miner} and validators in {validator}: run "
            f"`{calibration_command(miner, validator)}` with the policy, the prompts and the sampling of the others, "
            "and give the file that it writes by --proof"
        )

    def spec(self, miners: Sequence[Arithmetic], validators: Sequence[Arithmetic], **audit: int) -> ProofSpec:
        """Return the rules of a run that admits some arithmetics."""
        rows = tuple(self.row(*pair) for pair in pairs_of(miners, validators))
        return ProofSpec(sketch=self.subject.sketch, miners=tuple(sorted(set(miners))), table=rows, **audit)

    def with_rows_of(self, other: Self) -> Self:
        """Return this file with the rows of another one on the same subject that it does not have."""
        own = {item.thresholds.pair for item in self.table}
        rows = (*self.table, *(item for item in other.table if item.thresholds.pair not in own))
        return self.model_copy(update={"table": tuple(sorted(rows, key=lambda item: item.thresholds.pair))})

    def check(
        self,
        policy: bytes,
        temperature: float,
        max_tokens: int,
        *,
        chat: bool,
        lora: LoraSpec | None = None,
        turns: int = 1,
        environment: MixtureSpec = (),
        group_size: int = 1,
    ) -> None:
        """Raise ProofFileError for a run that this proof was not measured for: another policy (weight digest of version
        0, or of the base of a LoRA run), temperature or form of prompts, other adapters, longer completions or
        episodes, or larger groups of episodes whose replies are not exact.
        """
        subject, forms = self.subject, ("bare prompts", "conversations")
        replies = replies_digest(environment) if turns > 1 else None
        adapters, options = None, "without --lora-rank"
        if lora is not None:
            adapters = MeasuredAdapters.of(lora, 0.0 if subject.lora is None else subject.lora.share)
            targets = ",".join(lora.targets)
            options = f"with --lora-rank {lora.rank} --lora-alpha {lora.alpha:g} --lora-targets {targets}"
        has_rates = {item.thresholds.replay is not None for item in self.table}
        sampling = f"temperature {subject.temperature:g} up to {subject.max_tokens} tokens"
        for is_wrong, measured, own, how in (
            (subject.lora != adapters, subject.lora or "all weights", adapters or "all weights", options),
            (subject.policy != policy.hex(), f"weights {subject.policy[:16]}", policy.hex()[:16], "on its policy"),
            (subject.chat != chat, forms[subject.chat], forms[chat], f"{'with' if chat else 'without'} --chat"),
            (subject.temperature != temperature, f"completions at {sampling}", temperature, "with --temperature"),
            (
                subject.max_tokens < max_tokens,
                f"completions at {sampling}",
                max_tokens,
                f"with --max-tokens {max_tokens}",
            ),
            (subject.turns < turns, f"episodes of {subject.turns} turns at most", turns, f"with --turns {turns}"),
            (
                subject.replies != replies or has_rates != {replies is not None},
                "other replies",
                "its own",
                "with its environment",
            ),
            (
                replies and subject.group_size < group_size,
                f"groups of {subject.group_size}",
                group_size,
                f"with --group-size {group_size}",
            ),
        ):
            if is_wrong:
                raise ProofFileError(
                    f"the proof was measured on {measured}, the run has {own}: run `grailnode calibrate` {how}, "
                    "other options as here, and give `grailnode init` the file that it writes by --proof"
                )


def calibration_command(miner: Arithmetic, validator: Arithmetic) -> str:
    """Return the command that measures the row of a pair."""
    python = " --python PYTHON" if any(name.startswith("vllm") for name in (miner, validator)) else ""
    return f"grailnode calibrate --miner {miner} --validator {validator}{python}"


def read(path: Path) -> ProofFile:
    """Read a proof.json, or raise ProofFileError if it cannot be read, or is no proof."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise MalformedError(f"larger than {_MAX_BYTES} bytes")
        return ProofFile.parse(data)
    except OSError as error:
        raise ProofFileError(f"{path}: cannot be read ({error.strerror}); `grailnode calibrate` writes it") from error
    except MalformedError as error:
        raise ProofFileError(
            f"{path}: not a proof that `grailnode calibrate` wrote ({error}); measure it again with this version"
        ) from error
