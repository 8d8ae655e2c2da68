"""Parse untrusted JSON, after a check that bounds its depth.

CPython's parser recurses on the C stack and counts its depth against the interpreter's recursion limit. Any library in
the process may have raised that limit (torch's compiler and py_ecc do, the latter to 100,000 on import), and then
100,000 opening brackets kill the process instead of raising an exception. So depth is counted here, in a loop.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

from protocol.errors import MalformedError

MAX_DEPTH: Final = 32
"""Levels of nested arrays and objects; no format that we read needs more than five."""

_tokens: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def parse(data: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text in UTF-8; MalformedError for other bytes, and for one that is nested deeper than
    MAX_DEPTH. `pairs` builds an object from its (name, value) pairs in order; None builds a `dict`.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError("not JSON in UTF-8") from error
    depth = 0
    for token in _tokens.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group()[0], 0)
        if depth > MAX_DEPTH:
            raise MalformedError(f"JSON nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:  # this includes numbers with too many digits
        raise MalformedError("not JSON in UTF-8") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with the pairs of `parse`, or raise MalformedError if a name occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MalformedError("a name twice in a JSON object")
    return result
