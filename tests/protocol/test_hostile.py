"""Every parser of protocol/ accepts any bytes and returns a value or raises a ProtocolError."""

import contextlib
import json
import random
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import Trust
from protocol.compression import decompress
from protocol.encoding import Record, unpack
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite, ProofOfWorkSolution
from protocol.identity.authority import Revision, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import Envelope, open_announced, open_signed, sign
from protocol.judging.ledger import Seal, Summary, Witness
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import Verdict
from protocol.outer.round_records import RoundContribution, RoundManifest, RoundPointer
from protocol.rollout.batch import Commitment, Group, assemble, open_group
from protocol.rollout.sketch import distances
from protocol.run import RunManifest
from tests.support.builders import samples

Parser = Callable[[bytes], object]
TYPES: tuple[type[Record], ...] = (
    Head,
    Manifest,
    Trust,
    Announcement,
    Revision,
    Invite,
    ProofOfWorkSolution,
    Commitment,
    Group,
    RunManifest,
    Envelope,
    ValidatorReport,
    Seal,
    Summary,
    Verdict,
    Witness,
    RoundManifest,
    RoundContribution,
    RoundPointer,
)
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
    **{record.__name__: record.from_bytes for record in TYPES},
}
SEEDS = [
    *(record.to_bytes() for record in samples.every_record()),
    samples.group().to_frame(),
    sign(samples.announcement(), samples.MINER),
    sign(samples.revision(), samples.ROOT),
    safetensors.write(samples.weights()),
]


def check_parser(parser: Parser, data: bytes) -> None:
    try:
        parser(data)
    except ProtocolError as error:
        assert str(error).encode()  # can be written to any log
        assert len(str(error)) < 1000


def mutations(data: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield altered copies: flipped, replaced, deleted, doubled and inserted bytes, and truncations."""
    for _ in range(count):
        alteration = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            place = rng.randrange(len(alteration) + 1)
            match rng.randrange(6):
                case 0 if alteration:
                    alteration[place % len(alteration)] ^= 1 << rng.randrange(8)
                case 1 if alteration:
                    alteration[place % len(alteration)] = rng.choice(
                        (0, 0x7F, 0x80, 0x90, 0xC1, 0xC4, 0xC6, 0xCA, 0xCF, 0xDB, 0xDD, 0xDF, 0xFF)
                    )
                case 2:
                    del alteration[place : place + rng.randrange(1, 9)]
                case 3:
                    alteration[place:place] = alteration[place : place + rng.randrange(1, 40)]
                case 4:
                    alteration[place:place] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    alteration = alteration[:place]
        yield bytes(alteration)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    check_parser(PARSERS[name], data)


@pytest.mark.parametrize("name", PARSERS)
def test_altered_objects(name: str) -> None:
    rng = random.Random(name)
    for seed in SEEDS:
        for data in mutations(seed, rng, 40):
            check_parser(PARSERS[name], data)


def test_a_batch_is_no_group() -> None:
    batch, commitment = assemble([samples.group(0), samples.group(1)], "torch-float32")
    for data in mutations(batch, random.Random(0), 200):
        check_parser(lambda frame: open_group(frame, commitment, 1), data)


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
    check_parser(safetensors.read, struct.pack("<Q", len(text)) + text + body)
