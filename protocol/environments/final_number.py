"""Reads a number as the answer of a text, as a chat model writes it (docs/spec/environments.md)."""

import re
from typing import Final

_number: Final = re.compile(r"[+-]?[0-9]+(?:[.,][0-9]+)*")


def ends_with_number(text: str, number: str) -> bool:
    """Return whether the last number of a text is written like this one. Only one counts, so that a list of guesses
    gains nothing.
    """
    numbers = _number.findall(text)
    return bool(numbers) and numbers[-1] == number
