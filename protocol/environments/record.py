"""How a run manifest names its environments: code, version of Python and configuration (docs/spec/environments.md)."""

import json
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field, model_validator

from protocol import bounded_json, limits
from protocol.encoding import Record, ascending_by
from protocol.environments.rubric import Rubric
from protocol.errors import MalformedError
from protocol.identity.signing import Digest

OWN_DISTRIBUTION: Final = "grailnode"
"""The distribution of the built-in environments."""

SHARES: Final = 1_000_000
"""The sum of the shares of a mixture."""


def canonical_config(value: object) -> bytes:
    """Return the one JSON text of an environment's configuration: sorted names, ASCII, no white space. MalformedError
    if it is no object of plain values, or too large.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError("a configuration that is not of JSON's values") from error
    if not isinstance(value, dict) or len(text) > limits.MAX_CONFIG_BYTES:
        raise MalformedError(f"a configuration that is no JSON object of at most {limits.MAX_CONFIG_BYTES} bytes")
    return text


def _check_config(text: bytes) -> bytes:
    if canonical_config(bounded_json.parse(text, bounded_json.unique)) != text:
        raise ValueError("a configuration that is not in its canonical form")
    return text


class CodeRef(Record):
    """Code of an environment."""

    kind: ClassVar[str] = "environment-code"
    distribution: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=100)]  # as in PEP 503
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9.!+_-]{1,64}$")]
    # digest and size of the wheel; of a built-in environment, the digest of its modules, and 0
    digest: Digest
    size: Annotated[int, Field(ge=0, le=limits.MAX_WHEEL_BYTES)]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.digest.hex()[:16]})"


class EnvironmentSpec(Record):
    """An environment of a run."""

    kind: ClassVar[str] = "environment"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    # the wheels of a plug-in with all that it imports; of a built-in environment, its modules alone
    code: Annotated[
        tuple[CodeRef, ...], Field(min_length=1, max_length=limits.MAX_WHEELS), ascending_by("distribution")
    ]
    # the version of Python that executes foreign code, such as '3.11'; empty if there is none
    python: Annotated[str, Field(pattern=r"^(3\.[1-9][0-9]?)?$")]
    # what it is created with, as `canonical_config` returns it
    config: Annotated[bytes, Field(max_length=limits.MAX_CONFIG_BYTES), AfterValidator(_check_config)]
    exact: bool  # whether every machine computes the same rewards
    rubric: Rubric = ()

    @model_validator(mode="after")
    def _consistent(self) -> "EnvironmentSpec":
        if self.is_plugin and not (self.python and all(part.size for part in self.code)):
            raise ValueError("a plug-in without a version of Python, or with an empty wheel")
        return self

    @property
    def is_plugin(self) -> bool:
        """Whether the code is that of wheels, which the run brings along."""
        return len(self.code) > 1 or self.code[0].size > 0


class EnvironmentShare(Record):
    """A member of a mixture, with its share of all training problems in millionths."""

    kind: ClassVar[str] = "environment-share"
    ppm: Annotated[int, Field(ge=1, le=SHARES)]
    environment: EnvironmentSpec


def _check_mixture(members: tuple[EnvironmentShare, ...]) -> tuple[EnvironmentShare, ...]:
    if sum(member.ppm for member in members) != SHARES:
        raise ValueError(f"shares that do not add up to {SHARES}")
    if len({member.environment.python for member in members} - {""}) > 1:
        raise ValueError("environments for several versions of Python")
    return members


MixtureSpec = Annotated[
    tuple[EnvironmentShare, ...],
    Field(min_length=1, max_length=limits.MAX_MIXTURE_MEMBERS),
    ascending_by("environment.name"),
    AfterValidator(_check_mixture),
]
"""The task of a run: one environment, or several, one of which each group seed draws."""
