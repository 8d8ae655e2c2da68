"""Every parser of protocol/ accepts any bytes, and every altered object is refused."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.verifier import Trust
from protocol.compression import decompress
from protocol.encoding import Record, content_digest, pack, unpack
from protocol.errors import LimitError, MalformedError, ProtocolError, SignatureError
from protocol.identity.authority import Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import Envelope, open_announced, open_signed, sign
from protocol.rollout.batch import Group, assemble, open_group
from protocol.rollout.sketch import distances
from tests.support.builders import samples
from tests.support.builders.samples import MINER, VALIDATOR
from tests.support.faults.patch_mutations import mutations
from tests.support.pytest_options.few_daily import few_daily

Parser = Callable[[bytes], object]
_, COMMITMENT = assemble([samples.group()], "torch-float32")
PARSERS: dict[str, Parser] = {
    "unpack": unpack,
    "decompress": lambda data: decompress(data, 10_000),
    "frame": Group.from_frame,
    "safetensors": safetensors.read,
    "open_signed": lambda data: open_signed(data, Announcement, [samples.MINER.public]),
    "open_announced": lambda data: open_announced(data, Announcement),
    "revision": lambda data: Revisions(samples.RUN_ID, samples.authority()).check(1, data),
    "open_group": lambda data: open_group(data, COMMITMENT, 0),
    "sketch": lambda data: distances(data, bytes(20)),
    **{type(record).__name__: record.from_bytes for record in samples.every_record()},
}
SEEDS = [
    *(record.to_bytes() for record in samples.every_record()),
    samples.group().to_frame(),
    sign(samples.announcement(), samples.MINER),
    sign(samples.revision(), samples.ROOT),
    safetensors.write(samples.weights()),
]


def check_parser(name: str, data: bytes) -> None:
    """Check that bytes are refused, or are the one encoding of what they give."""
    try:
        value = PARSERS[name](data)
    except ProtocolError as error:
        assert str(error).encode()  # can be written to any log
        assert len(str(error)) < 1000
    else:
        if isinstance(value, Record) and name == type(value).__name__:
            assert value.to_bytes() == data
        assert name != "unpack" or pack(value) == data


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    check_parser(name, data)


@pytest.mark.parametrize("name", PARSERS)
def test_altered_objects(name: str) -> None:
    for place, seed in enumerate(SEEDS):
        for data in mutations(seed, "anywhere", place, 60):
            check_parser(name, data)


@given(st.text(max_size=100))
def test_any_path(path: str) -> None:
    for parse in (paths.window_of, paths.key_at_end):
        with contextlib.suppress(ProtocolError):
            parse(path)


HEADERS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["BF16", "I8", "F32"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner)
    ),
    max_leaves=12,
)


@given(HEADERS, st.binary(max_size=16))
def test_any_safetensors_header(header: object, body: bytes) -> None:
    text = json.dumps(header).encode()
    check_parser("safetensors", struct.pack("<Q", len(text)) + text + body)


# A signed object is refused if any bit is flipped or any field is altered, with the error that fits the place. An
# alteration of the signature or of the signed bytes makes the signature invalid; an alteration elsewhere makes the
# envelope malformed. No body is parsed before its signature was verified. A group is covered by its digest in the
# commitment.


RECORDS = [record for record in samples.every_record() if not isinstance(record, Envelope | Group | Trust)]
IDS = [f"{record.kind}-{index}" for index, record in enumerate(RECORDS)]


def refusal(data: bytes, record: Record) -> ProtocolError:
    """Return the error with which an envelope is refused."""
    with pytest.raises(ProtocolError) as error_info:
        open_signed(data, type(record), [MINER.public])
    return error_info.value


def bit_flips(data: bytes, every: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield a copy with each `every`-th single bit flipped, with the offset of its byte."""
    alteration = bytearray(data)
    for place in range(0, 8 * len(data), every):
        offset, bit = divmod(place, 8)
        alteration[offset] ^= 1 << bit
        yield offset, bytes(alteration)
        alteration[offset] ^= 1 << bit


@pytest.mark.parametrize("every", few_daily([7, 1], 2))  # by sevens, every byte has a flipped bit
@pytest.mark.parametrize("record", RECORDS, ids=IDS)
def test_every_flipped_bit_of_a_signed_object(record: Record, every: int) -> None:
    data = sign(record, MINER)
    fields = unpack(data)
    parts = [fields["body"], *fields["signatures"][0].values()]
    spans = [range(start, start + len(part)) for part in parts for start in (data.rindex(part),)]
    for offset, alteration in bit_flips(data, every):
        error = refusal(alteration, record)
        inside = any(offset in span for span in spans)
        assert isinstance(error, SignatureError if inside else MalformedError | LimitError), (offset, error)


BATCH, SMALL_COMMITMENT = assemble([samples.group(0), samples.group(1)], "torch-float32")
FRAMES = [BATCH[offset : offset + size] for offset, size in map(SMALL_COMMITMENT.extent, range(2))]


def test_every_flipped_bit_of_a_group_is_refused_by_its_digest() -> None:
    for _, alteration in bit_flips(FRAMES[1]):
        with pytest.raises(MalformedError, match="not the bytes that were committed to"):
            open_group(alteration, SMALL_COMMITMENT, 1)


def test_a_group_belongs_to_one_commitment_and_one_place_in_it() -> None:
    group = samples.group(1)
    assert open_group(FRAMES[1], SMALL_COMMITMENT, 1) == group
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
        groups = (SMALL_COMMITMENT.groups[0], (content_digest(frame), len(frame)))
        other_commitment = SMALL_COMMITMENT.model_copy(update={"groups": groups})
        with pytest.raises(MalformedError, match="does not belong to its commitment"):
            open_group(frame, other_commitment, 1)
    assert changes.keys() | {"prompt", "rollouts"} == Group.model_fields.keys()
