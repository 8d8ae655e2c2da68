"""A signed object is refused if any bit is flipped or any field is altered, with the error that fits the place.

An alteration of the signature or of the signed bytes makes the signature invalid; an alteration elsewhere makes the
envelope malformed. No body is parsed before its signature was verified. A group is covered by its digest in the
commitment.
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

RECORDS = [record for record in samples.every_record() if not isinstance(record, Envelope | Group | Trust)]
IDS = [f"{record.kind}-{index}" for index, record in enumerate(RECORDS)]
OTHER = "ABCDEFGHIJ"


def refusal(data: bytes, record: Record) -> ProtocolError:
    """Return the error with which an envelope is refused."""
    with pytest.raises(ProtocolError) as error_info:
        open_signed(data, type(record), [MINER.public])
    return error_info.value


def bit_flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield a copy with each single bit flipped, with the offset of its byte."""
    alteration = bytearray(data)
    for offset in range(len(data)):
        for bit in range(8):
            alteration[offset] ^= 1 << bit
            yield offset, bytes(alteration)
            alteration[offset] ^= 1 << bit


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_every_flipped_bit_of_a_signed_object(record: Record) -> None:
    data = sign(record, MINER)
    fields = unpack(data)
    parts = [fields["body"], *fields["signatures"][0].values()]
    spans = [range(start, start + len(part)) for part in parts for start in (data.rindex(part),)]
    for offset, alteration in bit_flips(data):
        error = refusal(alteration, record)
        inside = any(offset in span for span in spans)
        assert isinstance(error, SignatureError if inside else MalformedError | LimitError), (offset, error)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value of an object that contains no other values, with the path to it."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, tuple | list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def other(value: Any) -> Any:
    """Return another value of the same type."""
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


def replace(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of the object with another value at a path."""
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: replace(value[path[0]], path[1:], new)}
    return tuple(replace(item, path[1:], new) if index == path[0] else item for index, item in enumerate(value))


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_every_altered_field_of_a_signed_object(record: Record) -> None:
    envelope = unpack(sign(record, MINER))
    body = unpack(envelope["body"])
    fields = set()
    for path, value in leaves(body):
        alteration = pack(replace(body, path, other(value)))
        assert alteration != envelope["body"], path
        assert isinstance(refusal(pack(envelope | {"body": alteration}), record), SignatureError), path
        fields.add(path[0])
    assert fields == body.keys()


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_missing_and_unknown_fields_of_a_signed_object_are_malformed(record: Record) -> None:
    body = unpack(record.to_bytes())
    shorter = [{name: value for name, value in body.items() if name != left_out} for left_out in body]
    for fields in (*shorter, body | {"zzz": 1}):
        data = pack(fields)
        message = b"\x00".join((b"grailnode/1", record.kind.encode(), data))
        signature = {"key": MINER.public, "value": MINER.sign(message)}
        error = refusal(pack({"body": data, "of": record.kind, "signatures": (signature,)}), record)
        assert isinstance(error, MalformedError), fields.keys()


@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_an_object_signed_by_another_key_is_refused(record: Record) -> None:
    assert isinstance(refusal(sign(record, VALIDATOR), record), SignatureError)


BATCH, COMMITMENT = assemble([samples.group(0), samples.group(1)], "torch-float32")
FRAMES = [BATCH[offset : offset + size] for offset, size in map(COMMITMENT.extent, range(2))]


def test_every_flipped_bit_of_a_group_is_refused_by_its_digest() -> None:
    for _, alteration in bit_flips(FRAMES[1]):
        with pytest.raises(MalformedError, match="not the bytes that were committed to"):
            open_group(alteration, COMMITMENT, 1)


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
        other_group = group.model_copy(update={name: value})
        frame = other_group.to_frame()
        groups = (COMMITMENT.groups[0], (content_digest(frame), len(frame)))
        other_commitment = COMMITMENT.model_copy(update={"groups": groups})
        with pytest.raises(MalformedError, match="does not belong to its commitment"):
            open_group(frame, other_commitment, 1)
    assert changes.keys() | {"prompt", "rollouts"} == Group.model_fields.keys()


def test_a_group_does_not_open_with_an_altered_commitment() -> None:
    body = unpack(COMMITMENT.to_bytes())
    for path, value in leaves(body):
        try:
            other_commitment = Commitment.from_bytes(pack(replace(body, path, other(value))))
        except MalformedError:
            continue
        if path[0] in {"batch", "groups"} and path != ("groups", 1, 0):
            continue  # these say where the bytes are and how many; only the digest says which bytes
        with pytest.raises(MalformedError):
            open_group(FRAMES[1], other_commitment, 1)
