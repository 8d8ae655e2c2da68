"""The equivalence of two final answers to a mathematical problem (docs/spec/environments.md).

An answer is read once, into pieces: `x = 3 cm` is a piece with the name x, the unit cm and the value 3. Then the pieces
are compared. A name or a unit counts if both answers have one. There is no floating-point arithmetic and no `eval`, and
both the length of an answer and the work on it are limited, so no text can take long.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.environments.answer_text import SET_CLOSING, SET_OPENING, braced, is_text, plain_text
from protocol.environments.expressions import Work, value_of
from protocol.environments.polynomials import NoValueError, Value
from protocol.environments.units import split_unit

MAX_ANSWER_CHARS: Final = 512
"""A longer answer is equivalent only to the same text."""
MAX_NESTED_LISTS: Final = 4

_OPENING: Final = "([{" + SET_OPENING
_CLOSING: Final = ")]}" + SET_CLOSING
_SEPARATOR: Final = re.compile(r"[,;]\s*(?:(?:and|or)\s)?|\s(?:and|or)\s")
_NAME: Final = re.compile(
    r"\s*((?:[A-Za-z]|\\[a-z]+)(?:_\{[A-Za-z0-9]+\})?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?|"
    r"\([A-Za-z](?:,\s*[A-Za-z])+\))\s*(?:=(?!=)|∈)(?!.*[=<>≤≥≠])\s*"
)
_NAME_BEHIND: Final = re.compile(r"([^=<>≤≥≠]+)=\s*([A-Za-z](?:_\{[A-Za-z0-9]+\})?)\s*")
_AFTER_COMMA: Final = re.compile(r",\s+")
_THOUSANDS: Final = re.compile(r"[-+]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_MIXED: Final = re.compile(r"([-+]?[0-9]{1,9})\s+([0-9]{1,9})\s*/\s*([0-9]{1,9})")
_BETWEEN_DIGITS: Final = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_APART: Final = "\x04"
_RELATION: Final = re.compile(r"[=<>≤≥≠]")
_MIRRORED: Final = str.maketrans("<>≤≥", "><≥≤")


@dataclass(frozen=True)
class _Piece:
    """One of the things that an answer lists."""

    name: str  # what it is said to be (x in x=3); empty if nothing is said
    unit: str  # in one spelling; empty if it has none
    content: Hashable  # what is compared: a value, a list, a relation, or the text if it is none of these
    percent: bool = False  # whether there is a percent sign, which divides the content by 100


def equivalent(gold: str, answer: str) -> bool:
    """Return whether an answer (any text) is equivalent to the gold answer."""
    if gold == answer:
        return True
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return False
    if _same_words(gold, answer):
        return True
    first, second = plain_text(gold), plain_text(answer)
    return _AFTER_COMMA.sub(",", first) == _AFTER_COMMA.sub(",", second) or _same_pieces(_read(first), _read(second))


def has_answer(gold: str) -> bool:
    """Return whether anything of a gold answer is left without its typesetting."""
    return bool(plain_text(gold[:MAX_ANSWER_CHARS]))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, or None if there is no complete one."""
    at = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    return braced(text, text.index("{", at))[0] if at >= 0 else None


def _same_words(gold: str, answer: str) -> bool:
    r"""Return whether both are the same words, of which one is set as text: \text{odd} and Odd."""
    if not (is_text(gold) or is_text(answer)):
        return False
    words, others = plain_text(gold).split(), plain_text(answer).split()
    return [_small_initial(word) for word in words] == [_small_initial(word) for word in others] != []


def _small_initial(word: str) -> str:
    return word[0].lower() + word[1:] if len(word) > 1 else word


def _same_pieces(gold: list[_Piece], answer: list[_Piece]) -> bool:
    if len(gold) != len(answer):
        return False
    in_order = _has_several_names(gold) != _has_several_names(answer)
    have_names = all(any(piece.name for piece in pieces) for pieces in (gold, answer))
    measured = all(any(piece.unit for piece in pieces) for pieces in (gold, answer))

    def same(*, percent: bool) -> bool:
        first, second = (
            [(piece.name * have_names, piece.unit * measured, _content(piece, percent=percent)) for piece in pieces]
            for pieces in (gold, answer)
        )
        return first == second if in_order else Counter(first) == Counter(second)

    return same(percent=True) or (_may_leave_out_percent(gold, answer) and same(percent=False))


def _has_several_names(pieces: Sequence[_Piece]) -> bool:
    return len({piece.name for piece in pieces if piece.name}) > 1


def _content(piece: _Piece, *, percent: bool) -> Hashable:
    if not (percent and piece.percent):
        return piece.content
    try:
        return piece.content / Value.number(100) if isinstance(piece.content, Value) else ("%", piece.content)
    except NoValueError:  # too many bits
        return "%", piece.content


def _may_leave_out_percent(gold: list[_Piece], answer: list[_Piece]) -> bool:
    """Return whether one answer has percent signs and the other may lack them: its numbers are no proportions."""
    signs = {all(piece.percent for piece in pieces) for pieces in (gold, answer)}
    if signs != {True, False} or not any(not any(piece.percent for piece in pieces) for pieces in (gold, answer)):
        return False
    return all(_is_above_one(piece.content) for piece in (*gold, *answer))


def _is_above_one(content: Hashable) -> bool:
    try:
        return isinstance(content, Value) and abs(content.rational()) > 1
    except NoValueError:
        return False


def _read(text: str) -> list[_Piece]:
    """Return the pieces of an answer; a set is the list of its elements."""
    work = Work()
    pieces = [_piece(part, work, MAX_NESTED_LISTS) for part in _parts(text)]
    only = pieces[0]
    if len(pieces) == 1 and isinstance(only.content, tuple) and only.content[:1] == (SET_OPENING + SET_CLOSING,):
        elements: tuple[_Piece, ...] = only.content[1]
        return list(elements)
    return pieces


def _parts(text: str) -> list[str]:
    """Split a list without brackets at commas, semicolons and the words `and` and `or`."""
    number = split_unit(_NAME.sub("", text, count=1))[0]
    if _THOUSANDS.fullmatch(number.rstrip("%").strip()):
        return [text]
    parts = _split(text, _SEPARATOR)
    return [signed for part in parts for signed in _both_signs(part)]


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at separators outside of brackets; brackets that do not match protect nothing."""
    depth, start, parts = 0, 0, []
    depths = []
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        depths.append(depth)
    for match in separator.finditer(text):
        if depths[match.start()] == 0 and text[start : match.start()].strip():
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _both_signs(part: str) -> list[str]:
    """Return the two pieces that one plus-minus sign stands for, or the piece itself."""
    return [part.replace("±", sign) for sign in "+-"] if part.count("±") == 1 else [part]


def _piece(part: str, work: Work, nested_lists: int) -> _Piece:
    behind = _NAME_BEHIND.fullmatch(part)
    if behind and not _NAME.match(part):
        part = f"{behind[2]}={behind[1]}"
    name_match = _NAME.match(part)
    name = "".join(name_match[1].split()) if name_match else ""
    rest, unit = split_unit(part[name_match.end() :].strip() if name_match else part.strip())
    percent = rest.endswith("%") or rest.endswith((" percent", " percents"))
    if percent:
        rest = rest.removesuffix("%").removesuffix("s").removesuffix("percent").strip()
    return _Piece(name, unit, _read_content(rest, work, nested_lists), percent)


def _read_content(text: str, work: Work, nested_lists: int) -> Hashable:
    """Return what is compared of a piece: a list, a union, a relation, a value, or else the text."""
    brackets = _brackets(text)
    if brackets and nested_lists:
        inside = [_piece(part, work, nested_lists - 1) for part in _split(text[1:-1], re.compile("[,;]"))]
        if len(inside) > 1 or brackets == SET_OPENING + SET_CLOSING:
            return brackets, tuple(inside)
    if "∪" in text and nested_lists:
        return "∪", frozenset(_piece(part, work, nested_lists - 1) for part in _split(text, re.compile("∪")))
    text = _joined(text)
    if _RELATION.search(text):
        return _relation(text, work)
    return _value_or_text(text, work)


def _brackets(text: str) -> str:
    """Return the brackets around a whole text, or '' if the first one closes before the end."""
    if not text or text[0] not in _OPENING or text[0] == "{" or text[-1] not in _CLOSING or text[-1] == "}":
        return ""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return text[0] + text[-1] if at == len(text) - 1 else ""
    return ""


def _joined(text: str) -> str:
    """Return a piece without spaces and thousands separators; digits that were apart stay apart."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text) if _MIXED.fullmatch(text) else text
    text = "".join(_BETWEEN_DIGITS.sub(_APART, text).split())
    if len(text) == 3 and text[0] == "(" and text[2] == ")" and text[1].isalpha():
        text = text[1]  # the letter of a multiple-choice answer
    return text


def _relation(text: str, work: Work) -> Hashable:
    """Return the sides and the signs of a chain of relations; x>3 is 3<x, and an equation has no first side."""
    signs = _RELATION.findall(text)
    sides = [_value_or_text(side, work) for side in _RELATION.split(text)]
    if len(sides) == 2 and signs[0] in "=≠":
        return signs[0], frozenset(sides)
    if set(signs) <= set(">≥="):
        signs, sides = [sign.translate(_MIRRORED) for sign in reversed(signs)], sides[::-1]
    return tuple(signs), tuple(sides)


def _value_or_text(text: str, work: Work) -> Hashable:
    if len(text) > 3 and text.isalpha():  # a word, and no product of symbols
        return _small_initial(text)
    try:
        return value_of(text, work)
    except NoValueError:
        return text.removeprefix("+")
