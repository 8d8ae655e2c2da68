"""The unit behind a number, with one spelling for each unit (docs/spec/environments.md). Units are not converted."""

import re
from typing import Final

_SPELLINGS: Final = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "m": "m meter meters metre metres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yards yard",
    "mile": "mi mile miles",
    "unit": "unit units",
    "degree": "degree degrees",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "hour": "hr hrs hour hours",
    "minute": "min mins minute minutes",
    "second": "sec secs second seconds",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "kg": "kg kilogram kilograms",
    "gram": "g gram grams",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "liter": "liter liters litre litres",
    "milliliter": "ml milliliter milliliters millilitre millilitres",
    "point": "point points",
    "person": "person persons people",
    "am": "am a.m",
    "pm": "pm p.m",
}
_UNITS: Final = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_NEEDS_SPACE: Final = frozenset({"m", "g", "in", "mi", "min"})  # 3m may be three times m, 3 m is a length
_NUMBER_WORDS_TEXT: Final = """
    one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty
    ninety hundred hundreds thousand thousands million millions billion billions trillion dozen dozens score half
    halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths tenth tenths hundredth hundredths thousandth thousandths squared cubed factorial times plus minus
    over divided mod modulo base power and or not than less more greater least most about per percent percents
    percentage square cubic root log sin cos tan pi negative positive remainder
"""
_NUMBER_WORDS: Final = frozenset(_NUMBER_WORDS_TEXT.split())
_POWERS: Final = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3", "": ""}
_UNIT: Final = re.compile(
    r"(?P<space>\s*)(?:(?P<kind>square|sq\.?|cubic)\s+)?(?P<name>[A-Za-z]+(?:\.m)?)\s*(?:\^\{(?P<power>[23])\})?"
    r"(?:\s*(?:/|per)\s*(?P<per>[A-Za-z]+))?\.?$"
)
_NUMBER: Final = r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+|[0-9]+/[0-9]+|\\frac\{[0-9]{1,9}\}\{[0-9]{1,9}\})"
_COUNTED: Final = re.compile(rf"(?P<number>{_NUMBER})(?P<words>(?:\s+[A-Za-z]{{3,24}}){{1,3}})\.?")
_BEHIND_NUMBER: Final = re.compile(r"[0-9})π.]\Z")


def split_unit(text: str) -> tuple[str, str]:
    """Return the text in front of a unit, and the unit in its one spelling; the text and '' if it has no unit. The text
    is from `answer_text.plain_text`: its spaces tell a unit from a product of symbols.

    A unit is one of a list, or what is counted: one to three words behind a plain number, none of which belongs to a
    number (`3 million`, `2 thirds`).
    """
    for at in _word_starts(text):
        unit = _known_unit(text[at:])
        before = text[:at].rstrip()
        if unit and _BEHIND_NUMBER.search(before):
            return before, unit
    counted = _COUNTED.fullmatch(text)
    if counted:
        words = counted["words"].lower().split()
        if not _NUMBER_WORDS & set(words):
            last = words[-1]
            return counted["number"], last[:-1] if last.endswith("s") and len(last) > 3 else last
    return text, ""


def _word_starts(text: str) -> list[int]:
    """Return the places, longest rest first, where a unit of up to four words may begin."""
    starts = [match.start() for match in re.finditer(r"(?<![A-Za-z\\])\s*[A-Za-z]", text[-48:])]
    offset = max(0, len(text) - 48)
    return [offset + at for at in starts][-4:]


def _known_unit(rest: str) -> str:
    match = _UNIT.fullmatch(rest)
    if match is None:
        return ""
    name, per = match["name"].lower(), (match["per"] or "").lower()
    if match["name"] in ("M", "G") or (name in _NEEDS_SPACE and not match["space"] and not match["kind"]):
        return ""
    if name == "mph" and not per:
        return "mile/hour"
    if name not in _UNITS or (per and per not in _UNITS):
        return ""
    power = _POWERS[match["kind"] or ""] or match["power"] or ""
    return _UNITS[name] + power + (f"/{_UNITS[per]}" if per else "")
