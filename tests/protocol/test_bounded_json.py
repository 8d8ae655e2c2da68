"""Deeply nested JSON gives an error instead of a crash, whatever recursion limit a library has set."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.bounded_json import MAX_DEPTH, parse
from protocol.errors import MalformedError

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
    try:
        parse(data)
    except MalformedError:
        return
