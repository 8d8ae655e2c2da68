"""Announcements of participants (docs/spec/paths.md), and the form of their spaces' URLs (docs/spec/spaces.md)."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from protocol import limits, paths
from protocol.encoding import Version
from protocol.identity.signing import Key, PublishedRecord
from protocol.proof import OptionalArithmetic

Role = Literal["trainer", "worker", "miner", "validator"]

_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_PORT = "(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"  # 1 to 65535
_SEGMENTS = "(/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,99})*"
SPACE_FORM: Final = (
    rf"^(https://{_LABEL}(\.{_LABEL})*{_PORT}{_SEGMENTS}|http://(127\.0\.0\.1|localhost){_PORT}{_SEGMENTS})?$"
)
"""The form of a space's URL (docs/spec/spaces.md): no user, query, fragment, escape or slash at the end, or empty."""


class Announcement(PublishedRecord):
    """A signed statement that a key takes part in a run (fields: docs/spec/paths.md)."""

    kind: ClassVar[str] = "announcement"
    max_bytes: ClassVar[int] = limits.MAX_ANNOUNCEMENT_BYTES
    key: Key
    role: Role
    name: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9 _.-]*$")]
    space: Annotated[str, Field(max_length=limits.MAX_SPACE_BYTES, pattern=SPACE_FORM)]
    groups: Annotated[int, Field(ge=0, le=limits.MAX_GROUPS)]
    version: Version
    arithmetic: OptionalArithmetic
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]
    credential: Annotated[bytes, Field(max_length=limits.MAX_CREDENTIAL_BYTES)]

    @model_validator(mode="after")
    def _declared(self) -> "Announcement":
        if self.groups and not self.arithmetic:
            raise ValueError("a pledge that does not say how its groups are computed")
        return self

    @property
    def path(self) -> str:
        return paths.participant(self.key)
