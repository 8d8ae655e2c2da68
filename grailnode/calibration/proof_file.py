"""proof.json: the thresholds of a policy with the measurement behind them, as `grailnode calibrate` writes and `init`
reads it.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grailnode import UserError
from protocol import bounded_json
from protocol.encoding import Line
from protocol.errors import MalformedError
from protocol.run import ProofSpec

NAME: Final = "proof.json"
"""Of the file in a policy's directory."""

_MAX_BYTES: Final = 1 << 20
AUDIT: Final = {"audit_ppm": 1_000_000, "audit_floor_ppm": 1_000_000, "audit_halving": 16}
"""What a manifest's `proof` says beside the thresholds, as it stands until a founder chooses: it is not in the file."""


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0.0)]


class ProofFileError(UserError):
    """A proof.json that cannot be used: says which, why, and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PairRow(_Part):
    """The honest distribution of one pair.

    Attributes:
        generating, checking: how either side computed.
        tokens: completion tokens; positions: those whose state no earlier rollout of the group has had.
        distances: sketch distances below which 50%, 99%, 99.9% and all positions lie, in sketch units.
        sketch_misses: share of positions beyond the tolerance.
        margins: sampling margins below which 99%, 99.9% and all tokens lie, in logits / temperature.
        margin_misses: share of tokens beyond `margin`.
        largest_shift: by which the two sides' scores of a token differ against its rivals'.
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
    """What the thresholds refuse of a copy with weights of so many bits: shares of its rollouts, groups and windows."""

    bits: Annotated[int, Field(ge=1, le=16)]
    pair: Line
    tokens: Count
    rollouts: Share
    groups: Share
    windows: Share


class Measurement(_Part):
    """How thresholds were measured.

    Attributes:
        policy: weight digest of the policy, in hexadecimal.
        prompts: the environment, or the name of the file, that they were from.
        temperature, max_tokens, group_size: how completions were drawn.
        seed: of prompts, noise and projections.
        headroom, window: measure.Demands.
        torch: version of torch; processor: the machine's.
    """

    policy: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    prompts: Line
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


class Proof(_Part):
    """The file: thresholds without audit shares, which are a founder's choice, and the measurement behind them."""

    thresholds: ProofSpec
    measured: Measurement

    def to_json(self) -> str:
        """The file's text."""
        value = self.model_dump(mode="json")
        for name in AUDIT:
            del value["thresholds"][name]
        return json.dumps(value, indent=2) + "\n"

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The proof in a file's bytes.

        Raises:
            MalformedError: they are none; says where.
        """
        value: Any = bounded_json.parse(data)
        if not isinstance(value, dict) or not isinstance(value.get("thresholds"), dict):
            raise MalformedError("not an object with thresholds and how they were measured")
        for name in AUDIT:
            if name in value["thresholds"]:
                raise MalformedError(
                    "how much is audited is chosen at `grailnode init`, not measured", f"thresholds.{name}"
                )
        thresholds = value["thresholds"] | AUDIT
        try:
            return cls(thresholds=ProofSpec.model_validate(thresholds), measured=value.get("measured"))  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MalformedError(str(first["msg"]), where) from error

    def check(self, policy: bytes, temperature: float, max_tokens: int) -> None:
        """Refuse to serve a run that it was not measured for.

        Args:
            policy: weight digest of version 0.

        Raises:
            ProofFileError: another policy or temperature, or longer completions.
        """
        measured = self.measured
        if measured.policy != policy.hex():
            raise ProofFileError(
                f"the proof was measured on weights {measured.policy[:16]}, the policy's are {policy.hex()[:16]}; "
                "run `grailnode calibrate` on this policy"
            )
        if measured.temperature != temperature or measured.max_tokens < max_tokens:
            raise ProofFileError(
                f"the proof was measured at temperature {measured.temperature:g} up to {measured.max_tokens} tokens, "
                f"the run has {temperature:g} and {max_tokens}; run `grailnode calibrate` with the run's"
            )


def read(path: Path) -> Proof:
    """The proof in a file.

    Raises:
        ProofFileError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise MalformedError(f"larger than {_MAX_BYTES} bytes")
        return Proof.parse(data)
    except OSError as error:
        raise ProofFileError(f"{path}: cannot be read ({error.strerror}); `grailnode calibrate` makes it") from error
    except MalformedError as error:
        raise ProofFileError(f"{path}: not a proof that `grailnode calibrate` wrote ({error})") from error
