"""JSON from strangers: bounded in depth before it is parsed.

CPython's parser recurses on the C stack and counts its depth against the interpreter's recursion limit. Any library in
the process may have raised that limit (torch's compiler and py_ecc do, the latter to 100,000 on import), and then
100,000 opening brackets end the process instead of raising. So depth is counted here, in a loop.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

from protocol.errors import MalformedError

MAX_DEPTH: Final = 32
"""Nested arrays and objects; nothing that we read needs more than five."""

_tokens: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def parse(data: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
        pairs: makes an object of its pairs in order, where not `dict`.

    Raises:
        MalformedError: not UTF-8, not JSON, or nested deeper than MAX_DEPTH; or whatever `pairs` raises.
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
    except ValueError as error:  # also numbers of too many digits
        raise MalformedError("not JSON in UTF-8") from error
