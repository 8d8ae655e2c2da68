"""proof.json, which `grailnode calibrate` writes and `init` reads: the thresholds of a policy and their measurement."""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grailnode import UserError
from protocol import bounded_json
from protocol.encoding import Line
from protocol.errors import MalformedError
from protocol.lora import LoraSpec
from protocol.run import ProofSpec

NAME: Final = "proof.json"
"""Name of the file in a policy's directory."""

_MAX_BYTES: Final = 1 << 20
AUDIT: Final = {"audit_ppm": 1_000_000, "audit_floor_ppm": 1_000_000, "audit_halving": 16}
"""The fields of a manifest's `proof` that are no thresholds, with their defaults. They are not in the file: the creator
of a run chooses them.
"""


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0.0)]


class ProofFileError(UserError):
    """A proof.json that cannot be used; the message names it and says why, and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PairRow(_Part):
    """The honest distribution of one pair.

    Attributes:
        generating, checking: how the two sides computed.
        tokens: completion tokens; positions: those whose state no earlier rollout of the group had.
        distances: sketch distances below which 50%, 99%, 99.9% and all positions lie, in sketch units.
        sketch_misses: share of positions beyond the tolerance.
        margins: sampling margins below which 99%, 99.9% and all tokens lie, in logits / temperature.
        margin_misses: share of tokens beyond `margin`.
        largest_shift: the largest difference of the two sides in a token's score relative to the other tokens'.
    """

    name: Line
    generating: Line
    checking: Line
    tokens: Count
    positions: Count
    distances: tuple[Size, Size, Size, Size]
    sketch_misses: Share
    margins: tuple[Size, Size, Size]
    margin_misses: Share
    largest_shift: Size


class CopyRow(_Part):
    """The shares of a copy's rollouts, groups and windows that the thresholds refuse; `bits` are of its weights."""

    bits: Annotated[int, Field(ge=1, le=16)]
    pair: Line
    tokens: Count
    rollouts: Share
    groups: Share
    windows: Share


class MeasuredAdapters(_Part):
    """The adapters with which both sides computed.

    Attributes:
        rank, alpha, targets: of a LoRA run (protocol/lora.py).
        share: of the length of each matrix, by which its adapter changes it.
    """

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0.0)]
    targets: Annotated[tuple[Line, ...], Field(min_length=1, max_length=1000)]
    share: Share

    @classmethod
    def of(cls, lora: LoraSpec, share: float) -> Self:
        """Return the adapters of a run."""
        return cls(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, share=share)

    def __str__(self) -> str:
        return f"adapters of rank {self.rank}, alpha {self.alpha:g}, of {', '.join(self.targets)}"


class Measurement(_Part):
    """The measurement behind thresholds.

    Attributes:
        policy: weight digest of the policy, in hexadecimal.
        prompts: name of the environment or of the file of the prompts.
        chat: whether they were put into the policy's chat template.
        temperature, max_tokens, group_size: of sampling.
        seed: of prompts, noise and projections.
        headroom, window: thresholds.ThresholdDemands.
        torch: its version; processor: name of the machine's processor.
        lora: the adapters of a LoRA run, whose base is the policy; None for a run that trains all weights.
    """

    policy: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    prompts: Line
    chat: bool
    temperature: Annotated[float, Field(gt=0.0)]
    max_tokens: Annotated[int, Field(ge=1)]
    group_size: Annotated[int, Field(ge=1)]
    seed: Count
    headroom: Annotated[float, Field(ge=1.0)]
    window: Annotated[int, Field(ge=1)]
    torch: Line
    processor: Line
    pairs: Annotated[tuple[PairRow, ...], Field(min_length=1, max_length=1000)]
    copies: Annotated[tuple[CopyRow, ...], Field(min_length=1, max_length=1000)]
    lora: MeasuredAdapters | None = None


class ProofFile(_Part):
    """The file: thresholds without the audit fields (AUDIT), and their measurement."""

    thresholds: ProofSpec
    measured: Measurement

    def to_json(self) -> str:
        """Return the text of the file."""
        value = self.model_dump(mode="json")
        for name in AUDIT:
            del value["thresholds"][name]
        if self.measured.lora is None:
            del value["measured"]["lora"]
        return json.dumps(value, indent=2) + "\n"

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse the bytes of a file.

        Raises:
            MalformedError: they are no proof; the error says where.
        """
        value: Any = bounded_json.parse(data)
        if not isinstance(value, dict) or not isinstance(value.get("thresholds"), dict):
            raise MalformedError("not an object with thresholds and their measurement")
        for name in AUDIT:
            if name in value["thresholds"]:
                raise MalformedError(
                    "the audit shares are options of `grailnode init`, not measurements", f"thresholds.{name}"
                )
        thresholds = value["thresholds"] | AUDIT
        try:
            return cls(thresholds=ProofSpec.model_validate(thresholds), measured=value.get("measured"))  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MalformedError(str(first["msg"]), where) from error

    def check(
        self, policy: bytes, temperature: float, max_tokens: int, *, chat: bool, lora: LoraSpec | None = None
    ) -> None:
        """Refuse a run that this proof was not measured for.

        Args:
            policy: weight digest of version 0, or of the base of a LoRA run.
            chat: whether prompts are conversations.
            lora: the adapters of a LoRA run.

        Raises:
            ProofFileError: another policy, temperature or form of prompts, other adapters, or longer completions.
        """
        measurement = self.measured
        if measurement.policy != policy.hex():
            raise ProofFileError(
                f"the proof was measured on weights {measurement.policy[:16]}, the policy's are {policy.hex()[:16]}; "
                "run `grailnode calibrate` on this policy"
            )
        self._check_adapters(lora)
        if measurement.chat != chat:
            forms = "bare prompts", "conversations"
            raise ProofFileError(
                f"the proof was measured on {forms[measurement.chat]}, the run has {forms[chat]}; run `grailnode "
                f"calibrate` {'with' if chat else 'without'} --chat"
            )
        if measurement.temperature != temperature or measurement.max_tokens < max_tokens:
            raise ProofFileError(
                f"the proof was measured at temperature {measurement.temperature:g} up to {measurement.max_tokens} "
                f"tokens, the run has {temperature:g} and {max_tokens}; run `grailnode calibrate` with the run's"
            )

    def _check_adapters(self, lora: LoraSpec | None) -> None:
        measured = self.measured.lora
        run = None if lora is None else MeasuredAdapters.of(lora, 0.0 if measured is None else measured.share)
        if measured == run:
            return
        names = [f"with {item}" if item else "without adapters" for item in (measured, run)]
        options = "without --lora-rank"
        if lora is not None:
            targets = ",".join(lora.targets)
            options = f"with --lora-rank {lora.rank} --lora-alpha {lora.alpha:g} --lora-targets {targets}"
        raise ProofFileError(
            f"the proof was measured {names[0]}, the run computes {names[1]}; run `grailnode calibrate` {options}, and "
            "give `grailnode init` the file that it writes by --proof"
        )


def read(path: Path) -> ProofFile:
    """Read a proof.json.

    Raises:
        ProofFileError: the file cannot be read, or is no proof.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise MalformedError(f"larger than {_MAX_BYTES} bytes")
        return ProofFile.parse(data)
    except OSError as error:
        raise ProofFileError(f"{path}: cannot be read ({error.strerror}); `grailnode calibrate` writes it") from error
    except MalformedError as error:
        raise ProofFileError(f"{path}: not a proof that `grailnode calibrate` wrote ({error})") from error
