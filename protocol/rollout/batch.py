"""Groups, batches and commitments, which a miner delivers (docs/spec/rollout.md).

A group is a canonical record in one zstd frame, named by the SHA-256 of the frame. A batch is the concatenation of a
window's frames. The signed commitment lists digest and size of each frame, so that a reader can fetch single groups by
range. A miner draws the turns of an episode by an `EpisodeRule`, and a validator checks their form by it before any
other work.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from protocol import limits, paths
from protocol.compression import compress, decompress
from protocol.encoding import Record, Reward, Version, Window, content_digest
from protocol.errors import MalformedError
from protocol.identity.signing import Digest, Key, PublishedRecord
from protocol.proof import Arithmetic
from protocol.rollout.sketch import BYTES_PER_TOKEN

_TOKEN_BYTES = 4


Turn = tuple[int, tuple[int, ...]]
"""The number of policy tokens of a turn, and the token ids of the environment's reply to it."""


@dataclass(frozen=True)
class EpisodeRule:
    """The lengths of a run's episodes: most turns, most tokens of a turn or reply, in all, and of the policy."""

    turns: int
    turn_tokens: int
    reply_tokens: int
    tokens: int
    max_tokens: int
    stops: tuple[int, ...]

    def room(self, turns: int, drawn: int, total: int) -> int:
        """Return the most policy tokens of the turn after so many turns, policy tokens and tokens; 0 if none."""
        if turns >= self.turns:
            return 0
        return max(0, min(self.turn_tokens, self.max_tokens - drawn, self.tokens - total))

    def is_complete(self, tokens: Sequence[int], turns: Sequence[Turn]) -> bool:
        """Return whether an episode has the form that sampling gives: each turn ends at its only stop token or has as
        many tokens as it may, each reply but the last is followed by a turn, and the last one is empty.
        """
        drawn = total = 0
        for number, (count, reply) in enumerate(turns):
            room, turn = self.room(number, drawn, total), tokens[drawn : drawn + count]
            if not 0 < count <= room or any(token in self.stops for token in turn[:-1]):
                return False
            if (turn[-1] not in self.stops and count < room) or len(reply) > self.reply_tokens:
                return False
            drawn, total = drawn + count, total + count + len(reply)
        return drawn == len(tokens) > 0 and not turns[-1][1]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit words."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the token ids of whole little-endian 32-bit words."""
    return struct.unpack(f"<{len(data) // _TOKEN_BYTES}I", data)


def _check_words(data: bytes) -> bytes:
    if len(data) % _TOKEN_BYTES:
        raise ValueError("not a whole number of 32-bit words")
    return data


Reply = Annotated[bytes, Field(max_length=limits.MAX_REPLY_TOKENS * _TOKEN_BYTES), AfterValidator(_check_words)]
"""Token ids of an environment's reply, 32-bit little-endian words."""


class Rollout(Record):
    """One completion of a group (fields: docs/spec/rollout.md)."""

    kind: ClassVar[str] = "rollout"
    completion: Annotated[bytes, Field(max_length=limits.MAX_COMPLETION_TOKENS * _TOKEN_BYTES)]
    sketch: Annotated[bytes, Field(max_length=limits.MAX_COMPLETION_TOKENS * BYTES_PER_TOKEN)]
    reward: Reward

    _words = field_validator("completion")(_check_words)

    @model_validator(mode="after")
    def _sketch_fits(self) -> "Rollout":
        if len(self.sketch) // BYTES_PER_TOKEN != len(self.completion) // _TOKEN_BYTES or len(self.sketch) % 4:
            raise ValueError("the sketch does not have 4 bytes for each token")
        return self

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the policy drew."""
        return unpack_tokens(self.completion)

    @property
    def decoded_turns(self) -> tuple[Turn, ...]:
        """The turns, with the token ids of their replies: a completion is one turn without a reply."""
        return ((len(self.tokens), ()),)

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens behind the prompt."""
        return self.tokens

    @property
    def drawn(self) -> tuple[bool, ...]:
        """Which tokens of the sequence the policy drew."""
        return (True,) * len(self.tokens)

    @property
    def work(self) -> tuple[bytes, ...]:
        """What a copy by another miner has as well."""
        return (self.completion,)


class EpisodeRollout(Rollout):
    """One episode of a group: turns of the policy and replies of the environment (docs/spec/rollout.md)."""

    kind: ClassVar[str] = "episode-rollout"
    turns: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1, le=limits.MAX_COMPLETION_TOKENS)], Reply], ...],
        Field(min_length=1, max_length=limits.MAX_TURNS),
    ]

    @model_validator(mode="after")
    def _turns_fit(self) -> "EpisodeRollout":
        if sum(count for count, _ in self.turns) * _TOKEN_BYTES != len(self.completion):
            raise ValueError("the turns do not have as many tokens as the completion")
        return self

    @property
    def decoded_turns(self) -> tuple[Turn, ...]:
        return tuple((count, unpack_tokens(reply)) for count, reply in self.turns)

    @property
    def sequence(self) -> tuple[int, ...]:
        return join_turns(self.tokens, self.decoded_turns)[0]

    @property
    def drawn(self) -> tuple[bool, ...]:
        return join_turns(self.tokens, self.decoded_turns)[1]

    @property
    def work(self) -> tuple[bytes, ...]:
        counts = pack_tokens([count for count, _ in self.turns])
        return (self.completion, counts, *(reply for _, reply in self.turns))


def join_turns(tokens: Sequence[int], turns: Sequence[Turn]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the tokens of turns and replies in their order, and which of them the policy drew."""
    sequence: list[int] = []
    drawn: list[bool] = []
    begin = 0
    for count, reply in turns:
        sequence += [*tokens[begin : begin + count], *reply]
        drawn += [True] * count + [False] * len(reply)
        begin += count
    return tuple(sequence), tuple(drawn)


class Group(Record):
    """The rollouts of one prompt by one miner in one window (fields: docs/spec/rollout.md)."""

    kind: ClassVar[str] = "group"
    max_bytes: ClassVar[int] = limits.MAX_GROUP_BYTES
    max_items: ClassVar[int] = limits.MAX_GROUP_ITEMS
    run: Digest
    window: Window
    version: Version
    miner: Key
    index: Annotated[int, Field(ge=0, lt=limits.MAX_GROUPS)]
    prompt: Annotated[bytes, Field(max_length=limits.MAX_PROMPT_TOKENS * _TOKEN_BYTES)]
    rollouts: Annotated[tuple[EpisodeRollout | Rollout, ...], Field(min_length=1, max_length=limits.MAX_GROUP_SIZE)]

    _words = field_validator("prompt")(_check_words)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return unpack_tokens(self.prompt)

    def work_digest(self) -> bytes:
        """Return the SHA-256 of prompt and rollouts (32 bytes). A copy by another miner has the same digest."""
        parts = (self.prompt, *(part for rollout in self.rollouts for part in rollout.work))
        return content_digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))

    def to_frame(self) -> bytes:
        """Return the group's zstd frame, which is named by its SHA-256."""
        return compress(self.to_bytes())

    @classmethod
    def from_frame(cls, frame: bytes, max_bytes: int = limits.MAX_GROUP_BYTES) -> "Group":
        """Decompress and parse a frame."""
        return cls.from_bytes(decompress(frame, max_bytes))


class Commitment(PublishedRecord):
    """A miner's signed promise of its batch, due before the window's deadline (fields: docs/spec/rollout.md)."""

    kind: ClassVar[str] = "commitment"
    max_bytes: ClassVar[int] = limits.MAX_COMMITMENT_BYTES
    window: Window
    version: Version
    miner: Key
    arithmetic: Arithmetic
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
        """Size of the batch in bytes."""
        return sum(size for _, size in self.groups)

    def extent(self, index: int) -> tuple[int, int]:
        """Return offset and size of a group's frame within the batch, in bytes."""
        return sum(size for _, size in self.groups[:index]), self.groups[index][1]

    @property
    def path(self) -> str:
        return paths.commitment(self.miner, self.window)


def assemble(groups: Sequence[Group], arithmetic: Arithmetic) -> tuple[bytes, Commitment]:
    """Build a window's batch, and the commitment to it, of groups of one miner and version that ascend from 0."""
    first = groups[0]
    frames = [group.to_frame() for group in groups]
    batch = b"".join(frames)
    commitment = Commitment(
        run=first.run,
        window=first.window,
        version=first.version,
        miner=first.miner,
        arithmetic=arithmetic,
        batch=content_digest(batch),
        groups=tuple((content_digest(frame), len(frame)) for frame in frames),
    )
    return batch, commitment


def open_group(frame: bytes, commitment: Commitment, index: int, max_bytes: int = limits.MAX_GROUP_BYTES) -> Group:
    """Parse a group, hostile bytes, and check it against the commitment that promised it. LimitError, MalformedError if
    it is not the promised one, no group, that of another place, or larger than `max_bytes` when decompressed.
    """
    place = f"group {index}"
    if content_digest(frame) != commitment.groups[index][0]:
        raise MalformedError("not the bytes that were committed to", place)
    group = Group.from_frame(frame, max_bytes)
    identity = (group.run, group.window, group.version, group.miner, group.index)
    if identity != (commitment.run, commitment.window, commitment.version, commitment.miner, index):
        raise MalformedError("does not belong to its commitment", place)
    return group
