"""Figures of the studies as SVG files, drawn by the parts of the demo's report (grailnode/ui/report)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from markupsafe import Markup

from grailnode.ui.report.plot import BOTTOM, LEFT, RIGHT, TOP, Axis, drawing, grid, line

END: Final = RIGHT - 84
"""Where the horizontal axis ends; the names of the lines stand behind it."""
_COLOURS: Final = ("#1d5c9e", "#b4531a", "#2f7d5b", "#7b4fa3", "#c0397b", "#8a6d3b", "#4a8a9a")
_STYLE: Final = (
    "svg{font-family:system-ui,'Segoe UI','DejaVu Sans',sans-serif}.paper{fill:#fff}"
    "text{fill:#5b5d57;font-size:12.5px;paint-order:stroke;stroke:#fff;stroke-width:3px}.rule{stroke:#e3e1d8}.base{stroke:#a9a89f}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}.spot{fill:transparent}.gap{stroke-dasharray:2 4}"
    + "".join(
        f".c{number} .line{{stroke:{colour}}}.c{number} .dot{{fill:{colour}}}text.c{number}{{fill:{colour}}}"
        for number, colour in enumerate(_COLOURS)
    )
)
_LINE_HEIGHT: Final = 14.0


@dataclass(frozen=True)
class Line:
    """A line of a figure: its name and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Labels:
    """The words of a figure: title, description for screen readers, names of the axes."""

    title: str
    description: str
    x: str
    y: str


def write_figure(path: Path, labels: Labels, lines: Sequence[Line], x: Axis, y: Axis) -> None:
    """Write a figure with up to seven lines, whose names stand at their ends."""
    svg = drawing(
        path.stem,
        labels.title,
        labels.description,
        Markup('<style>{}</style><rect class="paper" width="100%" height="100%"></rect>').format(Markup(_STYLE)),
        grid(x, y, labels.x),
        Markup('<text x="{:g}" y="{:g}">{}</text>').format(LEFT - 66, TOP - 2, labels.y),
        *(line(f"c{number}", item.points, partial(_tooltip, item.name), x, y) for number, item in enumerate(lines)),
        *_names(lines, y),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg + "\n", encoding="utf-8")


def log_axis(low: float, high: float, *, vertical: bool, marks: Mapping[float, str] | None = None) -> Axis:
    """Return a logarithmic axis, with marks by value; None for shares, marked in percent at each power of ten."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = [10.0**power for power in range(first, last + 1)]
    ticks = tuple((marks or {power: f"{100 * power:g}%" for power in powers}).items())
    start, end = (BOTTOM, TOP + 8) if vertical else (LEFT, END)
    return Axis(low, high, start, end, ticks, log=True)


def linear_axis(low: float, high: float, step: float, *, vertical: bool, percent: bool = False) -> Axis:
    """Return a linear axis with a mark at each multiple of a step."""
    values = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    ticks = tuple((value, f"{100 * value:g}%" if percent else f"{value:g}") for value in values)
    start, end = (BOTTOM, TOP + 8) if vertical else (LEFT, END)
    return Axis(low, high, start, end, ticks)


def _names(lines: Sequence[Line], y: Axis) -> list[Markup]:
    """Return the names of the lines behind their ends, moved apart where they would overlap."""
    places = sorted((y.at(item.points[-1][1]), number) for number, item in enumerate(lines) if item.points)
    lowest = BOTTOM - _LINE_HEIGHT * (len(places) - 1)
    names, least = [], TOP
    for rank, (place, number) in enumerate(places):
        at = min(max(place, least), lowest + _LINE_HEIGHT * rank)
        least = at + _LINE_HEIGHT
        text = Markup('<text class="c{}" x="{:g}" y="{:.6g}" dy="0.35em">{}</text>')
        names.append(text.format(number, END + 8, round(at, 2), lines[number].name))
    return names


def _tooltip(name: str, x: float, y: float) -> str:
    return f"{name}: {x:g}, {y:.3g}"
