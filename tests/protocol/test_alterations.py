"""Every bit of every signed object flipped, every field of it altered: refused, and for the reason that fits the place.

In what the signature covers, and in the signature itself, it is the signature that does not hold; in the wrapping
around them the envelope is malformed. Nothing inside is parsed before its signature holds. A group is covered by its
digest in the commitment.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.chain.verifier import Trust
from protocol.digest import content_digest
from protocol.encoding import Record, pack, unpack
from protocol.errors import LimitError, MalformedError, ProtocolError, SignatureError
from protocol.identity.signing import Envelope, open_signed, sign
from protocol.rollout.batch import Commitment, Group, assemble, open_group
from tests.support.builders import samples
from tests.support.builders.samples import MINER, VALIDATOR

SIGNED = [record for record in samples.every_record() if not isinstance(record, Envelope | Group | Trust)]
IDS = [f"{record.kind}-{index}" for index, record in enumerate(SIGNED)]
OTHER = "ABCDEFGHIJ"


def refusal(data: bytes, record: Record) -> ProtocolError:
    """Why an envelope is refused."""
    with pytest.raises(ProtocolError) as caught:
        open_signed(data, type(record), [MINER.public])
    return caught.value


def flipped(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each single bit turned round, with the place of its byte."""
    bent = bytearray(data)
    for place in range(len(data)):
        for bit in range(8):
            bent[place] ^= 1 << bit
            yield place, bytes(bent)
            bent[place] ^= 1 << bit


@pytest.mark.parametrize("record", SIGNED, ids=IDS)
def test_every_flipped_bit_of_a_signed_object(record: Record) -> None:
    data = sign(record, MINER)
    fields = unpack(data)
    covered = [fields["body"], *fields["signatures"][0].values()]
    spans = [range(start, start + len(part)) for part in covered for start in (data.rindex(part),)]
    for place, bent in flipped(data):
        error = refusal(bent, record)
        inside = any(place in span for span in spans)
        assert isinstance(error, SignatureError if inside else MalformedError | LimitError), (place, error)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value within an object that holds no others, with the way to it."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, tuple | list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1 if value < 1 << 62 else value - 1
        case float():
            return value / 2 + 0.125
        case bytes():
            return bytes([value[0] ^ 1]) + value[1:] if value else b"\x00"
        case str():
            return next(letter for letter in OTHER if letter != value[:1]) + value[1:]
        case None:
            return 1
        case _:
            return (0,)


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The object with another value at the end of a way."""
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: replaced(value[path[0]], path[1:], new)}
    return tuple(replaced(item, path[1:], new) if index == path[0] else item for index, item in enumerate(value))


@pytest.mark.parametrize("record", SIGNED, ids=IDS)
def test_every_altered_field_of_a_signed_object(record: Record) -> None:
    envelope = unpack(sign(record, MINER))
    body = unpack(envelope["body"])
    seen = set()
    for path, value in leaves(body):
        altered = pack(replaced(body, path, other(value)))
        assert altered != envelope["body"], path
        assert isinstance(refusal(pack(envelope | {"body": altered}), record), SignatureError), path
        seen.add(path[0])
    assert seen == body.keys()


@pytest.mark.parametrize("record", SIGNED, ids=IDS)
def test_fields_that_are_missing_or_unknown_are_malformed_though_they_are_signed(record: Record) -> None:
    body = unpack(record.to_bytes())
    shorter = [{name: value for name, value in body.items() if name != left_out} for left_out in body]
    for fields in (*shorter, body | {"zzz": 1}):
        data = pack(fields)
        message = b"\x00".join((b"grailnode/1", record.kind.encode(), data))
        signature = {"key": MINER.public, "value": MINER.sign(message)}
        error = refusal(pack({"body": data, "of": record.kind, "signatures": (signature,)}), record)
        assert isinstance(error, MalformedError), fields.keys()


@pytest.mark.parametrize("record", SIGNED, ids=IDS)
def test_a_stranger_may_have_signed_it_as_well_as_he_likes(record: Record) -> None:
    assert isinstance(refusal(sign(record, VALIDATOR), record), SignatureError)


BATCH, COMMITMENT = assemble([samples.group(0), samples.group(1)])
FRAMES = [BATCH[offset : offset + size] for offset, size in map(COMMITMENT.extent, range(2))]


def test_every_flipped_bit_of_a_group_misses_the_digest_that_was_committed_to() -> None:
    for _, bent in flipped(FRAMES[1]):
        with pytest.raises(MalformedError, match="not the bytes that were committed to"):
            open_group(bent, COMMITMENT, 1)


def test_a_group_belongs_to_one_commitment_and_one_place_in_it() -> None:
    group = samples.group(1)
    assert open_group(FRAMES[1], COMMITMENT, 1) == group
    changes = {
        "run": samples.digest("other"),
        "window": group.window + 1,
        "version": group.version + 1,
        "miner": VALIDATOR.public,
        "index": group.index + 1,
    }
    for name, value in changes.items():
        stray = group.model_copy(update={name: value})
        frame = stray.to_frame()
        groups = (COMMITMENT.groups[0], (content_digest(frame), len(frame)))
        promised = COMMITMENT.model_copy(update={"groups": groups})
        with pytest.raises(MalformedError, match="does not belong to its commitment"):
            open_group(frame, promised, 1)
    assert changes.keys() | {"prompt", "rollouts"} == Group.model_fields.keys()


def test_every_altered_field_of_a_commitment_is_another_promise() -> None:
    body = unpack(COMMITMENT.to_bytes())
    for path, value in leaves(body):
        try:
            promised = Commitment.from_bytes(pack(replaced(body, path, other(value))))
        except MalformedError:
            continue
        if path[0] in {"batch", "groups"} and path != ("groups", 1, 0):
            continue  # where to find the bytes, and how many they are: digests decide what they are
        with pytest.raises(MalformedError):
            open_group(FRAMES[1], promised, 1)
