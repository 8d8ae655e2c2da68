"""How numbers and strangers' words are written for people: in the terminal, in plain lines and in report.html alike."""

import unicodedata
from typing import Final

from rich.cells import cell_len, set_cell_size

_BYTE_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def clean(text: str, cells: int = 48) -> str:
    """Make a stranger's word harmless: one line of at most `cells` terminal cells, without control or formatting
    characters.

    Escape sequences, line ends and bidirectional overrides become U+FFFD. Combining marks are dropped, because
    terminals disagree about their width and a pile of them paints over the neighbouring rows.
    """
    if text.isascii() and text.isprintable() and len(text) <= cells:
        return text
    composed = unicodedata.normalize("NFC", text[: 4 * cells])
    characters = (char for char in composed if unicodedata.category(char) not in {"Mn", "Me"})
    printable = "".join(char if char.isprintable() else _REPLACEMENT for char in characters)
    if len(text) <= 4 * cells and cell_len(printable) <= cells:
        return printable
    return set_cell_size(printable, cells - 1).rstrip() + "…"


def terminal_text(text: str) -> str:
    """Return lines without characters that act on a terminal, which become U+FFFD."""
    return "".join(char if char.isprintable() or char in "\n\t" else _REPLACEMENT for char in text)


def byte_text(size: int) -> str:
    """Write bytes in decimal units: '812 B', '19.2 KB', '1.6 MB'."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def part_text(part: int, whole: int) -> str:
    """Write a size as a part of another: '1/83', '1/4.2', '1.1 times'; '-' if either is zero."""
    if part <= 0 or whole <= 0:
        return "-"
    times = whole / part
    if times < 1:
        return f"{part / whole:.1f} times"
    return f"1/{times:.0f}" if times >= 9.95 else f"1/{times:.1f}"


def byte_part_text(part: int, whole: int) -> str:
    """Write a size and its part of another: '19.2 KB = 1/83 of 1.6 MB'; the size alone if the other is zero."""
    return f"{byte_text(part)} = {part_text(part, whole)} of {byte_text(whole)}" if whole else byte_text(part)


def duration_text(seconds: float) -> str:
    """Write seconds as '0:42', '12:05' or '3:02:10'."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration_words(seconds: float) -> str:
    """Write seconds as '42 s', '3 min 5 s' or '2 h 10 min'."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def decimal_text(value: float | None, digits: int = 2) -> str:
    """Write a measurement with a fixed number of decimals; '-' if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def share_text(share: float) -> str:
    """Write a share in [0, 1] to three digits, and to more where three would round it up to 1."""
    for digits in (3, 4, 5, 6):
        if share >= 1 or f"{share:.{digits}f}" != f"{1:.{digits}f}":
            break
    return f"{share:.{digits}f}"


def percent_text(share: float) -> str:
    """Write a share in [0, 1] as '4.2%', '0%' or '<0.1%'."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def rate_text(per_second: float) -> str:
    """Write a rate: '0.4', '37', '12,431'."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:.1f}"
