"""Groups and batches: a group is opened only if its bytes are those of the commitment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import limits
from protocol.compression import compress
from protocol.encoding import content_digest, pack, unpack
from protocol.errors import LimitError, MalformedError, ProtocolError
from protocol.rollout.batch import Commitment, Group, Rollout, assemble, open_group, pack_tokens, unpack_tokens
from tests.support.builders import samples

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=20)


def commitment_to(*frames: bytes) -> Commitment:
    group = samples.group()
    return Commitment(
        run=group.run,
        window=group.window,
        version=group.version,
        miner=group.miner,
        arithmetic="torch-float32",
        batch=content_digest(b"".join(frames)),
        groups=tuple((content_digest(frame), len(frame)) for frame in frames),
    )


@given(TOKENS)
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tuple(tokens)
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(-(10**12), 10**12)), min_size=1, max_size=5))
def test_a_frame_round_trips(prompt: list[int], rollouts: list[tuple[list[int], int]]) -> None:
    group = samples.group(
        prompt=pack_tokens(prompt),
        rollouts=tuple(
            Rollout(completion=pack_tokens(tokens), sketch=bytes(4 * len(tokens)), reward=reward)
            for tokens, reward in rollouts
        ),
    )
    again = Group.from_frame(group.to_frame())
    assert again == group
    assert again.prompt_tokens == tuple(prompt)
    assert [rollout.tokens for rollout in again.rollouts] == [tuple(tokens) for tokens, _ in rollouts]


def test_extents_cut_the_batch_into_its_frames() -> None:
    groups = [samples.group(index) for index in range(5)]
    batch, commitment = assemble(groups, "torch-float32")
    assert commitment.batch == content_digest(batch)
    assert commitment.batch_bytes == len(batch)
    for index, group in enumerate(groups):
        offset, size = commitment.extent(index)
        assert open_group(batch[offset : offset + size], commitment, index) == group


NO_GROUPS = {
    "no frame": (b"hello", MalformedError, "zstd"),
    "a frame of something else": (compress(pack(("a", 1))), MalformedError, "group"),
    "a frame of no msgpack": (compress(b"\xc1"), MalformedError, "float32|extension"),
    "two frames": (samples.group().to_frame() * 2, MalformedError, "zstd"),
    "a group with a field more": (
        compress(pack(unpack(samples.group().to_bytes()) | {"more": 1})),
        MalformedError,
        "group.more",
    ),
    "too many values": (compress(pack((None,) * (limits.MAX_GROUP_ITEMS + 1))), LimitError, "values"),
    "too many bytes": (compress(bytes(limits.MAX_GROUP_BYTES + 1)), LimitError, "declared"),
}


@pytest.mark.parametrize(("frame", "error", "cause"), NO_GROUPS.values(), ids=NO_GROUPS.keys())
def test_committed_bytes_that_are_no_group_are_refused(frame: bytes, error: type[ProtocolError], cause: str) -> None:
    with pytest.raises(error, match=cause):
        open_group(frame, commitment_to(frame), 0)


def test_a_frame_may_be_compressed_in_any_way() -> None:
    """A digest is that of the frame, so a miner may compress in any way."""
    data = samples.group().to_bytes()
    other = compress(data, level=19)
    assert open_group(other, commitment_to(other), 0) == samples.group()


def test_a_commitment_to_more_than_the_batch_limit_is_invalid() -> None:
    fields = commitment_to(b"frame").model_dump()
    entry = (samples.digest("frame"), limits.MAX_GROUP_BYTES)
    with pytest.raises(ValidationError, match="a batch of"):
        Commitment(**(fields | {"groups": (entry,) * 17}))
    assert Commitment(**(fields | {"groups": (entry,) * 16})).batch_bytes == limits.MAX_BATCH_BYTES


def test_the_largest_commitment_can_be_written() -> None:
    fields = commitment_to(b"frame").model_dump()
    entry = (samples.digest("frame"), limits.MAX_BATCH_BYTES // limits.MAX_GROUPS)
    Commitment(**(fields | {"groups": (entry,) * limits.MAX_GROUPS})).to_bytes()


def test_the_work_digest_depends_on_tokens_only() -> None:
    group = samples.group()
    copy = group.model_copy(update={"miner": samples.VALIDATOR.public, "window": 9, "index": 5})
    assert copy.work_digest() == group.work_digest()
    first, second = group.rollouts
    longer = first.model_copy(update={"completion": first.completion + second.completion[:4]})
    shorter = second.model_copy(update={"completion": second.completion[4:]})
    assert group.model_copy(update={"rollouts": (longer, shorter)}).work_digest() != group.work_digest()
    assert group.model_copy(update={"rollouts": (second, first)}).work_digest() != group.work_digest()
