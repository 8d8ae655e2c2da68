"""Encodings: canonical msgpack, JSON of bounded depth, and zstd frames of declared size."""

import contextlib
import json
import math
import struct
import sys
import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.bounded_json import MAX_DEPTH, parse
from protocol.compression import compress, decompress
from protocol.encoding import Record, pack, unpack
from protocol.errors import LimitError, MalformedError, ProtocolError
from tests.support.builders import samples

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=40)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)
IDS = [f"{type(record).__name__}-{place}" for place, record in enumerate(samples.every_record())]


def same(a: object, b: object) -> bool:
    """Return whether two values are equal, where 1, 1.0 and True differ, and 0.0 and -0.0 differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(a, b) for a, b in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


@given(VALUES)
def test_a_value_and_its_encoding_round_trip(value: Any) -> None:
    data = pack(value)
    assert same(unpack(data), value)
    assert pack(unpack(data)) == data


def test_keys_ascend_by_code_point() -> None:
    assert list(unpack(pack({"\U0001d11e": 0, "\uffff": 1, "a": 2, "B": 3}))) == ["B", "a", "\uffff", "\U0001d11e"]


NOT_CANONICAL = {
    "5 as uint64": b"\xcf" + bytes(7) + b"\x05",
    "5 as int8": b"\xd0\x05",
    "-1 as int64": b"\xd3" + b"\xff" * 8,
    "300 as int16": b"\xd1\x01\x2c",
    "float32": b"\xca\x3f\x80\x00\x00",
    "infinity": b"\xcb\x7f\xf0" + bytes(6),
    "bytes in bin16 that fit bin8": b"\xc5\x00\x01a",
    "a map in map32 that fits fixmap": b"\xdf\x00\x00\x00\x01\xa1a\x05",
    "a key that is a number": b"\x81\x01\x01",
    "a key that is an array": b"\x81\x90\x01",
    "empty extension": b"\xc7\x00\x01",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "cut off string": b"\xa5abc",
    "cut off length": b"\xdd\x00\x00",
    "cut off array": b"\x93\x01\x02",
    "cut off float": b"\xcb\x00",
    "over-long UTF-8": b"\xa2\xc0\x80",
}


@pytest.mark.parametrize("data", NOT_CANONICAL.values(), ids=NOT_CANONICAL.keys())
def test_other_encodings_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        unpack(data)


BOMBS = {
    "array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "map of 2^32 - 1": b"\xdf\xff\xff\xff\xff",
    "string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "seventeen deep": b"\x91" * 16 + b"\x90",
    "a million deep": b"\x91" * 1_000_000,
    "maps a million deep": b"\x81\xa1a" * 1_000_000,
    "too many empty maps": b"\xdd" + struct.pack(">I", 1 << 19) + b"\x80" * (1 << 19),
    "empty maps in many arrays": b"\xdc\xff\xff" + (b"\x9f" + b"\x80" * 15) * 65535,
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_before_its_value_is_built(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            unpack(data, max_items=limits.MAX_GROUP_ITEMS)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_limits_of_the_format_hold_for_what_is_packed() -> None:
    longest = "a" * limits.MAX_STRING_BYTES
    deepest: tuple[Any, ...] = ()
    for _ in range(limits.MAX_DEPTH - 1):
        deepest = (deepest,)
    pairs: list[tuple[Any, Any]] = [(longest, longest + "a"), (deepest, (deepest,))]
    for value, larger in pairs:
        assert unpack(pack(value)) == value
        with pytest.raises(LimitError):
            pack(larger)


def test_the_limits_of_a_caller_hold() -> None:
    with pytest.raises(LimitError):
        unpack(pack(b"12345"), max_bytes=6)
    with pytest.raises(LimitError):
        unpack(pack((1, 2, 3)), max_items=3)
    assert unpack(pack((1, 2, 3)), max_items=4) == (1, 2, 3)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {1: 2}, {b"a": 1}, object(), bytearray(b"a"), 1 << 64, "\ud800"]
)
def test_values_without_an_encoding_are_not_packed(value: object) -> None:
    with pytest.raises(MalformedError):
        pack(value)


@pytest.mark.parametrize("record", samples.every_record(), ids=IDS)
def test_missing_and_unknown_fields_are_malformed(record: Record) -> None:
    fields = unpack(record.to_bytes())
    for name in fields:
        if type(record).model_fields[name].exclude_if is not None:
            continue  # may be missing
        with pytest.raises(MalformedError):
            type(record).from_bytes(pack({other: value for other, value in fields.items() if other != name}))
    with pytest.raises(MalformedError):
        type(record).from_bytes(pack(fields | {"more": 1}))


WRONG_TYPES: tuple[object, ...] = (None, True, 0, 1, -1, 1.0, "1", b"1", (), {}, (1,), {"a": 1}, (1 << 64) - 1)


@pytest.mark.parametrize("record", samples.every_record(), ids=IDS)
def test_no_field_takes_a_value_of_another_type(record: Record) -> None:
    """An accepted record encodes to the bytes that were read: no value is converted."""
    fields = unpack(record.to_bytes())
    for name, value in fields.items():
        for other in WRONG_TYPES:
            data = pack(fields | {name: other})
            try:
                read = type(record).from_bytes(data)
            except ProtocolError:
                continue
            assert read.to_bytes() == data, name
            assert type(other) is type(value) or value is None or other is None, name


def test_an_error_names_the_field_and_stays_short() -> None:
    fields = unpack(samples.announcement().to_bytes())
    with pytest.raises(MalformedError, match=r"^announcement\.role: "):
        type(samples.announcement()).from_bytes(pack(fields | {"role": "king"}))
    with pytest.raises(MalformedError) as error:
        type(samples.announcement()).from_bytes(pack(fields | {"\x1b[2J" + "x" * 2000: 1}))
    assert len(str(error.value)) < 200
    assert str(error.value).isprintable()


def test_a_record_over_its_size_limit_is_not_written() -> None:
    with pytest.raises(LimitError):
        samples.verdict(
            *(samples.judgement(index, tokens=1 << 21, logprobs=bytes(1 << 23)) for index in range(9))
        ).to_bytes()


# Deeply nested JSON gives an error instead of a crash, whatever recursion limit a library has set


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_ordinary_json_is_read(value: object):
    assert parse(json.dumps(value).encode()) == json.loads(json.dumps(value))


@pytest.mark.parametrize("bomb", [b"[" * 100_000, b'{"a":' * 100_000, b'["\\"[",' * 100_000, b"[{" * 50_000])
def test_depth_is_counted_before_parsing(bomb: bytes):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(MalformedError, match="nested deeper"):
            parse(bomb)
    finally:
        sys.setrecursionlimit(limit)


def test_brackets_in_strings_do_not_count():
    text = '"' + "[" * 1000 + '\\"' + "{" * 1000 + '"'
    assert parse(text.encode()) == json.loads(text)
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None


@pytest.mark.parametrize("data", [b"", b"\xff", b'"', b'"\\', b"{'a': 1}", "[1]".encode("utf-16"), b"1" * 5000])
def test_invalid_json_is_refused(data: bytes):
    with pytest.raises(MalformedError, match="not JSON"):
        parse(data)


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\0', max_size=200).map(str.encode))
def test_any_bytes_give_a_value_or_a_malformed_error(data: bytes):
    with contextlib.suppress(MalformedError):
        parse(data)


# zstd frames: they must declare their size and contain exactly so many bytes


LIMIT = 1 << 20
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"abcd"


def make_frame(declared_size: int, blocks: int, *, window: int = 7, last: bool = True) -> bytes:
    """Return a frame that declares a size; each of its blocks of 4 bytes repeats one byte 131,072 times."""
    header = struct.pack("<I", 0xFD2FB528) + bytes([0b1000_0000, window << 3]) + struct.pack("<I", declared_size)
    kinds = [(131072 << 3) | (1 << 1) | (last and place == blocks - 1) for place in range(blocks)]
    return header + b"".join(kind.to_bytes(3, "little") + b"\0" for kind in kinds)


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


HOSTILE = {
    "nothing": b"",
    "no frame": b"hello",
    "no size": zstandard.ZstdCompressor(write_content_size=False).compress(b"hello"),
    "less than declared": make_frame(LIMIT, 1),
    "two frames": compress(b"a") + compress(b"b"),
    "bytes behind": compress(b"a") + b"\0",
    "a skippable frame": SKIPPABLE,
    "a skippable frame in front": SKIPPABLE + compress(b"a"),
    "a skippable frame behind": compress(b"a") + SKIPPABLE,
    "a window of gigabytes": make_frame(1000, 1, window=21),
    "no last block": make_frame(131072, 1, last=False),
    "a dictionary": zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(b"word " * 100)).compress(
        b"word word word"
    ),
}
TOO_LARGE = {"a size over the limit": make_frame(LIMIT + 1, 1)}


@pytest.mark.parametrize("name", HOSTILE | TOO_LARGE)
def test_hostile_frames(name: str) -> None:
    with pytest.raises(LimitError if name in TOO_LARGE else MalformedError):
        decompress((HOSTILE | TOO_LARGE)[name], LIMIT)
