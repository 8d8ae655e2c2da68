"""zstd frames: they must declare their size and contain exactly so many bytes."""

import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol.compression import compress, decompress
from protocol.errors import LimitError, MalformedError, ProtocolError

LIMIT = 1 << 20
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"abcd"


def make_frame(declared_size: int, blocks: int, *, window: int = 7, last: bool = True) -> bytes:
    """Return a frame that declares a size; each of its blocks of 4 bytes repeats one byte 131,072 times."""
    header = struct.pack("<I", 0xFD2FB528) + bytes([0b1000_0000, window << 3]) + struct.pack("<I", declared_size)
    kinds = [(131072 << 3) | (1 << 1) | (last and place == blocks - 1) for place in range(blocks)]
    return header + b"".join(kind.to_bytes(3, "little") + b"\0" for kind in kinds)


@given(st.binary(max_size=2000))
def test_content_round_trips(data: bytes) -> None:
    assert decompress(compress(data), LIMIT) == data


def test_the_limit_is_exact() -> None:
    frame = compress(bytes(100))
    assert decompress(frame, 100) == bytes(100)
    with pytest.raises(LimitError):
        decompress(frame, 99)


def test_a_crafted_frame_can_be_valid() -> None:
    assert decompress(make_frame(2 * 131072, 2), LIMIT) == bytes(2 * 131072)


@pytest.mark.parametrize("last", [True, False])
def test_blocks_with_more_than_the_declared_size_are_not_decompressed(last: bool) -> None:
    """80 KB would become 2.5 GB, though the declared size is within the limit."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decompress(make_frame(LIMIT, 20_000, last=last), LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


HOSTILE: dict[str, tuple[bytes, type[ProtocolError]]] = {
    "nothing": (b"", MalformedError),
    "no frame": (b"hello", MalformedError),
    "no size": (zstandard.ZstdCompressor(write_content_size=False).compress(b"hello"), MalformedError),
    "a size over the limit": (make_frame(LIMIT + 1, 1), LimitError),
    "less than declared": (make_frame(LIMIT, 1), MalformedError),
    "two frames": (compress(b"a") + compress(b"b"), MalformedError),
    "bytes behind": (compress(b"a") + b"\0", MalformedError),
    "a skippable frame": (SKIPPABLE, MalformedError),
    "a skippable frame in front": (SKIPPABLE + compress(b"a"), MalformedError),
    "a skippable frame behind": (compress(b"a") + SKIPPABLE, MalformedError),
    "a window of gigabytes": (make_frame(1000, 1, window=21), MalformedError),
    "no last block": (make_frame(131072, 1, last=False), MalformedError),
    "a dictionary": (
        zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(b"word " * 100)).compress(b"word word word"),
        MalformedError,
    ),
}


@pytest.mark.parametrize(("frame", "error"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames(frame: bytes, error: type[ProtocolError]) -> None:
    with pytest.raises(error):
        decompress(frame, LIMIT)


def test_every_truncation_is_malformed() -> None:
    frame = compress(bytes(range(256)) * 4)
    for size in range(len(frame)):
        with pytest.raises(MalformedError):
            decompress(frame[:size], LIMIT)
