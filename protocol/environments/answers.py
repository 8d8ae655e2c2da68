"""The equivalence of two final answers to a mathematical problem (docs/spec/environments.md).

An answer is first normalized (`normalize`). Then two answers are compared as texts, as lists piece by piece, and as
exact values. There is no floating-point arithmetic and no `eval`, and the length of the answers is limited, so no text
can take long.
"""

import re
from typing import Final

from protocol.environments.expressions import value_of
from protocol.environments.polynomials import NoValueError

MAX_ANSWER_CHARS: Final = 512
"""A longer answer is equivalent only to the same text."""

_WRAPPERS: Final = (
    "boxed",
    "fbox",
    "text",
    "textbf",
    "textit",
    "textrm",
    "mathrm",
    "mathbf",
    "mathit",
    "mbox",
    "operatorname",
)
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_REPLACEMENTS: Final = (
    (r"\\", "\x03"),  # the end of a matrix row; it comes first, because its second backslash could begin a command
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"\displaystyle", ""),
    (r"\quad", " "),
    (r"\%", ""),
    ("%", ""),
    (r"\$", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    ("°", ""),
    ("{,}", ","),
    (r"\!", ""),
    (r"\,", " "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    ("~", " "),
    (r"\{", "\x01"),
    (r"\}", "\x02"),
    (r"\cdot", "*"),
    (r"\times", "*"),
    ("×", "*"),
    ("−", "-"),
    (r"\pi", "π"),
    (r"\leq", "≤"),
    (r"\le", "≤"),
    (r"\geq", "≥"),
    (r"\ge", "≥"),
    (r"\infty", "∞"),
)
_UNITS: Final = re.compile(
    r"(?<=[0-9})π])(?:\s+(?:m|g|in)|\s*(?:square|cubic|sq)?\s*"  # 3m may be three times m, 3 m is a length
    r"(?:mm|cm|km|meters?|metres?|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|units?|degrees?|dollars?|cents?|percent|"
    r"hours?|minutes?|seconds?|days?|weeks?|months?|years?|kg|grams?|pounds?|lbs?|liters?|litres?|points?|people|ways))"
    r"(?:\^\{?[23]\}?)?\.?$"
)
_THOUSANDS: Final = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_NAME_PREFIX: Final = re.compile(r"^[A-Za-z](?:\([a-z]\))?\s*(?:=|\\in(?![a-z]))")
_OPENING: Final = "([{\x01"
_CLOSING: Final = ")]}\x02"


def equivalent(gold: str, answer: str) -> bool:
    """Return whether an answer (any text) is equivalent to the gold answer."""
    if gold == answer:
        return True
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return False
    return _same(normalize(gold), normalize(answer))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, or None if there is no complete one."""
    at = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    return _braced(text, text.index("{", at))[0] if at >= 0 else None


def normalize(answer: str) -> str:
    """Remove everything that does not change an answer's meaning: wrappers, units, spaces, thousands separators."""
    text = _unwrap(answer.strip())
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    text = _UNITS.sub("", _drop_wrappers(text).strip().rstrip(".").strip())
    text = _NAME_PREFIX.sub("", text).strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = "".join(text.split())
    if len(text) == 3 and text[0] == "(" and text[2] == ")" and text[1].isalpha():
        text = text[1]  # the letter of a multiple-choice answer
    return text.casefold() if text.isalpha() and len(text) > 1 else text


def _unwrap(text: str) -> str:
    """Remove the mathematics delimiters around the whole text."""
    for opening, closing in _DELIMITERS:
        inside = text[len(opening) : -len(closing)]
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and len(text) > len(opening + closing)
            and closing not in inside
        ):
            return inside.strip()
    return text


def _drop_wrappers(text: str) -> str:
    r"""Replace every command that only sets its argument in another font: \text{cm} becomes ' cm'."""
    for name in _WRAPPERS:
        command = f"\\{name}{{"
        at = text.find(command)
        while at >= 0:
            inside, end = _braced(text, at + len(command) - 1)
            if inside is None:
                break
            text = f"{text[:at]} {inside}{text[end:]}"
            at = text.find(command)
    return text


def _braced(text: str, opening: int) -> tuple[str | None, int]:
    """Return the content of the braces that open at an index, and the index behind them.

    If the braces do not close, the content is None and the index is the end of the text.
    """
    depth = 0
    for at in range(opening, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : at], at + 1
    return None, len(text)


def _same(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    parts, other = _split(gold), _split(answer)
    if parts is None or other is None:
        return False
    (brackets, pieces), (other_brackets, other_pieces) = parts, other
    if brackets != other_brackets or len(pieces) != len(other_pieces):
        return False
    if brackets in ("", "\x01\x02"):  # a bare list or a set: any order
        return _same_in_any_order(pieces, other_pieces)
    return all(_same_piece(piece, other) for piece, other in zip(pieces, other_pieces, strict=True))


def _same_in_any_order(pieces: list[str], others: list[str]) -> bool:
    rest = list(others)
    for piece in pieces:
        match = next((other for other in rest if _same_piece(piece, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same_piece(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    try:
        return value_of(gold) == value_of(answer)
    except NoValueError:
        return False


def _split(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets around a list ('' for none) and its pieces, or None if brackets do not match."""
    ends, commas, depth = [], [], 0
    for at, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth < 0:
                return None
            if depth == 0:
                ends.append(at)
        elif character == "," and depth < 2:
            commas.append((depth, at))
    if depth:
        return None
    outside = [at for level, at in commas if level == 0]
    if outside or not commas or ends != [len(text) - 1] or text[0] not in _OPENING:
        return "", _pieces(text, outside)
    return text[0] + text[-1], _pieces(text[1:-1], [at - 1 for _, at in commas])


def _pieces(text: str, commas: list[int]) -> list[str]:
    starts = [0, *(at + 1 for at in commas)]
    return [text[start:end] for start, end in zip(starts, [*commas, len(text)], strict=True)]
