"""How a record names an object in storage: by its digest and its size."""

from typing import Annotated, ClassVar

from pydantic import Field

from protocol import limits
from protocol.encoding import Record
from protocol.identity.signing import Digest


class ObjectRef(Record):
    """A reference to an object: its SHA-256 and its size in bytes."""

    kind: ClassVar[str] = "object"
    digest: Digest
    size: Annotated[int, Field(ge=0, le=limits.MAX_SHARD_BYTES)]
