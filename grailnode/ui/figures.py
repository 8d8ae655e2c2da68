"""How numbers and strangers' words are written for people: in the terminal, in plain lines and in report.html alike."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

_BYTE_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def clean(text: str, cells: int = 48) -> str:
    """A stranger's word, made harmless: one line of at most `cells` terminal cells, without control or formatting
    characters.

    Escape sequences, line ends and bidirectional overrides become U+FFFD. Combining marks are dropped, because
    terminals disagree about their width and a pile of them paints over the neighbouring rows.
    """
    composed = unicodedata.normalize("NFC", text[: 4 * cells])
    kept = (char for char in composed if unicodedata.category(char) not in {"Mn", "Me"})
    shown = "".join(char if char.isprintable() else _REPLACEMENT for char in kept)
    if len(text) <= 4 * cells and cell_len(shown) <= cells:
        return shown
    return set_cell_size(shown, cells - 1).rstrip() + "…"


def byte_text(size: int) -> str:
    """Bytes in decimal units: '812 B', '19.2 KB', '1.6 MB'."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def part_text(part: int, whole: int) -> str:
    """A size as a part of another: '1/83', '1/4.2', '1.1 times'; '-' where either is nothing."""
    if part <= 0 or whole <= 0:
        return "-"
    times = whole / part
    if times < 1:
        return f"{part / whole:.1f} times"
    return f"1/{times:.0f}" if times >= 9.95 else f"1/{times:.1f}"


def duration_text(seconds: float) -> str:
    """Seconds as '0:42', '12:05' or '3:02:10'."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration_words(seconds: float) -> str:
    """Seconds as '42 s', '3 min 5 s' or '2 h 10 min'."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def share_text(share: float) -> str:
    """A share in [0, 1] to three digits, and to more where three would round it up to 1."""
    for digits in (3, 4, 5, 6):
        if share >= 1 or f"{share:.{digits}f}" != f"{1:.{digits}f}":
            break
    return f"{share:.{digits}f}"


def percent_text(share: float) -> str:
    """A share in [0, 1] as '4.2%', '0%' or '<0.1%'."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def rate_text(per_second: float) -> str:
    """A rate: '0.4', '37', '12,431'."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:.1f}"


def known(values: Sequence[float | None]) -> list[float]:
    """The values without the gaps."""
    return [value for value in values if value is not None]


def by_count(rejected: Mapping[str, int]) -> list[tuple[str, int]]:
    """Reasons with their counts, the most frequent first; ties by name, so that output repeats."""
    return sorted(((reason, n) for reason, n in rejected.items() if n > 0), key=lambda item: (-item[1], item[0]))


def reasons_text(rejected: Mapping[str, int], cells: int, gap: str = ", ") -> str:
    """As many 'reason n' as fit into `cells`, the most frequent first; '+2' tells how many kinds were left out."""
    ranked = by_count(rejected)
    shown = ""
    for index, (reason, count) in enumerate(ranked):
        longer = f"{shown}{gap if shown else ''}{clean(reason)} {count}"
        left = len(ranked) - index - 1
        tail = f"{gap}+{left}" if left else ""
        if cell_len(longer) + cell_len(tail) > cells:
            rest = f"{gap}+{len(ranked) - index}" if shown else clean(longer, max(cells, 1))
            return shown + rest
        shown = longer
    return shown


def merged(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several tallies."""
    total: dict[str, int] = {}
    for tally in counts:
        for reason, count in tally.items():
            total[reason] = total.get(reason, 0) + count
    return total
