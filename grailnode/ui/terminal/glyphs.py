"""Pictures made of characters: sparklines and bars; and the plain characters they become where Unicode is
missing.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from grailnode.ui.series import without_gaps

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"
_PLAIN: Final = str.maketrans(
    dict(zip(_LEVELS, " __..-=##", strict=True))
    | dict(zip(_PARTS[1:8], "..---==", strict=True))
    | {"━": "=", "─": "-", "→": ">", "·": "|", "…": "."}
)


def sparkline(values: Sequence[float | None], width: int, planned: int = 0) -> str:
    """Draw a chart of one line of `width` cells, scaled from the smallest value to the largest. It fills up as values
    come, if it is known how many are planned.

    Gaps are closed: only what was measured is drawn. Longer series are averaged into `width` columns.
    """
    measurements = without_gaps(values)
    if not measurements or width <= 0:
        return " " * width
    span = max(len(measurements), round(planned * len(measurements) / len(values)))
    low, high = min(measurements), max(measurements)
    means = _resampled(measurements, span, width)
    # The lowest value is still visible, which tells it from no value.
    levels = (1 + round(7 * (mean - low) / (high - low)) if high > low else 4 for mean in means)
    return "".join(_LEVELS[level] for level in levels).ljust(width)


def bar(share: float, width: int) -> str:
    """Draw a bar of `share` in [0, 1] of `width` cells, to an eighth of a cell; any share above zero is visible."""
    eighths = min(max(math.ceil(share * width * 8 - 1e-9), 0), width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_PARTS[rest] if rest else "")).ljust(width)


def progress(share: float, width: int) -> tuple[str, str]:
    """Draw a thin bar in two pieces, the share in [0, 1] and the rest, together `width` cells."""
    cells = min(max(round(share * width), 0), width)
    return "━" * cells, "─" * (width - cells)


class AsciiFallback:
    """A renderable in ASCII where the console cannot write Unicode; the widths stay the same."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self._inner, options)
        if not options.ascii_only:
            yield from segments
            return
        for text, style, control in segments:
            plain = text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
            yield Segment(text if control else plain, style, control)


def _resampled(values: Sequence[float], span: int, width: int) -> list[float]:
    """The mean of the values that fall into each column, for as many columns as there are values for."""
    means = []
    for column in range(width):
        first = column * span // width
        last = max(first + 1, -(-(column + 1) * span // width))
        bucket = values[first:last]
        if not bucket:
            break
        means.append(sum(bucket) / len(bucket))
    return means
