"""Groups, batches and commitments: what a miner delivers (docs/spec/rollout.md).

A group is a canonical record in one zstd frame; the SHA-256 of the frame names it. A batch is the frames of a window
one behind another; the signed commitment lists digest and size of each, so a reader can fetch the groups it wants by
range.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, field_validator, model_validator

from protocol import limits, paths
from protocol.compression import compress, decompress
from protocol.digest import content_digest
from protocol.encoding import Record, Version, Window
from protocol.errors import MalformedError
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.rollout.sketch import BYTES_PER_TOKEN

_TOKEN_BYTES = 4


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit words."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The token ids of little-endian 32-bit words; the length is a multiple of 4."""
    return struct.unpack(f"<{len(data) // _TOKEN_BYTES}I", data)


def _whole_words(data: bytes) -> bytes:
    if len(data) % _TOKEN_BYTES:
        raise ValueError("not whole 32-bit words")
    return data


class Rollout(Record):
    """One completion of a group.

    Attributes:
        completion: token ids, 32-bit little-endian words.
        sketch: 4 bytes a token.
        reward: what the miner says it earned; the validator computes it again.
    """

    kind: ClassVar[str] = "rollout"
    completion: Annotated[bytes, Field(max_length=limits.MAX_COMPLETION_TOKENS * _TOKEN_BYTES)]
    sketch: Annotated[bytes, Field(max_length=limits.MAX_COMPLETION_TOKENS * BYTES_PER_TOKEN)]
    reward: Annotated[float, Field(ge=-1e6, le=1e6)]

    _words = field_validator("completion")(_whole_words)

    @model_validator(mode="after")
    def _sketch_fits(self) -> "Rollout":
        if len(self.sketch) // BYTES_PER_TOKEN != len(self.completion) // _TOKEN_BYTES or len(self.sketch) % 4:
            raise ValueError("the sketch does not have 4 bytes for each token")
        return self

    @property
    def tokens(self) -> tuple[int, ...]:
        """The completion's token ids."""
        return unpack_tokens(self.completion)


class Group(Record):
    """The rollouts of one prompt by one miner in one window.

    Attributes:
        run: run id; version: the policy version that made them; miner: public key; index: 0, 1, 2, ... within the
            window.
        prompt: token ids, 32-bit little-endian words.
    """

    kind: ClassVar[str] = "group"
    max_bytes: ClassVar[int] = limits.MAX_GROUP_BYTES
    max_items: ClassVar[int] = limits.MAX_GROUP_ITEMS
    run: Digest
    window: Window
    version: Version
    miner: Key
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    prompt: Annotated[bytes, Field(max_length=limits.MAX_PROMPT_TOKENS * _TOKEN_BYTES)]
    rollouts: Annotated[tuple[Rollout, ...], Field(min_length=1, max_length=limits.MAX_GROUP_SIZE)]

    _words = field_validator("prompt")(_whole_words)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return unpack_tokens(self.prompt)

    def work_digest(self) -> bytes:
        """SHA-256 of what was computed (prompt and completions), whoever claims it: equal for a copy under another
        name.
        """
        parts = (self.prompt, *(rollout.completion for rollout in self.rollouts))
        return content_digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))

    def to_frame(self) -> bytes:
        """The group's zstd frame, the thing that digests name."""
        return compress(self.to_bytes())

    @classmethod
    def from_frame(cls, frame: bytes, max_bytes: int = limits.MAX_GROUP_BYTES) -> "Group":
        """Parse a frame of a record of at most `max_bytes`.

        Raises:
            LimitError, MalformedError: not such a frame.
        """
        return cls.from_bytes(decompress(frame, max_bytes))


class Commitment(PublishedRecord):
    """A miner's signed promise of what its batch holds, due before the window's deadline.

    Attributes:
        batch: SHA-256 of the batch object.
        groups: (SHA-256, size in bytes) of each frame, in the order of the group indices.
    """

    kind: ClassVar[str] = "commitment"
    max_bytes: ClassVar[int] = limits.MAX_COMMITMENT_BYTES
    window: Window
    version: Version
    miner: Key
    batch: Digest
    groups: Annotated[
        tuple[tuple[Digest, Annotated[int, Field(ge=1, le=limits.MAX_GROUP_BYTES)]], ...],
        Field(max_length=limits.MAX_GROUPS),
    ]

    @model_validator(mode="after")
    def _deliverable(self) -> "Commitment":
        if self.batch_bytes > limits.MAX_BATCH_BYTES:
            raise ValueError(f"a batch of {self.batch_bytes} bytes")
        return self

    @property
    def batch_bytes(self) -> int:
        """Size of the batch object."""
        return sum(size for _, size in self.groups)

    def extent(self, index: int) -> tuple[int, int]:
        """Offset and size in bytes of a group's frame within the batch."""
        return sum(size for _, size in self.groups[:index]), self.groups[index][1]

    @property
    def path(self) -> str:
        """The only path at which this record may lie."""
        return paths.commitment(self.miner, self.window)


def assemble(groups: Sequence[Group]) -> tuple[bytes, Commitment]:
    """The batch of a window and the commitment to it. At least one group; all of one run, window, version and miner."""
    first = groups[0]
    frames = [group.to_frame() for group in groups]
    batch = b"".join(frames)
    commitment = Commitment(
        run=first.run,
        window=first.window,
        version=first.version,
        miner=first.miner,
        batch=content_digest(batch),
        groups=tuple((content_digest(frame), len(frame)) for frame in frames),
    )
    return batch, commitment


def open_group(frame: bytes, commitment: Commitment, index: int, max_bytes: int = limits.MAX_GROUP_BYTES) -> Group:
    """A group of a batch, checked against the commitment that promised it.

    Raises:
        LimitError, MalformedError: the bytes are not those promised, not a group, or not the group of this place.
    """
    place = f"group {index}"
    if content_digest(frame) != commitment.groups[index][0]:
        raise MalformedError("not the bytes that were committed to", place)
    group = Group.from_frame(frame, max_bytes)
    claimed = (group.run, group.window, group.version, group.miner, group.index)
    if claimed != (commitment.run, commitment.window, commitment.version, commitment.miner, index):
        raise MalformedError("does not belong to its commitment", place)
    return group
