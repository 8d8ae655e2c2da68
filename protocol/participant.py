"""Announcements: how a participant makes itself known (docs/spec/paths.md)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol import limits
from protocol.encoding import Record
from protocol.signing import Digest, Key

Role = Literal["trainer", "miner", "validator"]


class Announcement(Record):
    """A signed note 'this key takes part in this run'.

    Attributes:
        name: what the participant calls itself: shown to people, trusted by nobody.
        expires_ms: after this (milliseconds since the Unix epoch) it counts no more.
    """

    kind: ClassVar[str] = "announcement"
    max_bytes: ClassVar[int] = limits.MAX_ANNOUNCEMENT_BYTES
    run: Digest
    key: Key
    role: Role
    name: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9 _.-]*$")]
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]
