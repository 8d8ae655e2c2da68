"""Series as inline SVG: grid, lines with gaps, points whose tooltip is their value. Colours are in the page's style."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from grailnode.ui.report.axes import Axis
from grailnode.ui.report.markup import Markup, element, join, number

# One size for every plot. The margins are wide enough for the larger letters on phones.
WIDTH: Final = 520.0
HEIGHT: Final = 300.0
LEFT: Final = 74.0
RIGHT: Final = 506.0
TOP: Final = 14.0
BOTTOM: Final = 250.0

_MOST_DOTS: Final = 60  # more points would run together: then only the line is drawn


@dataclass(frozen=True)
class PlotSeries:
    """One line of a plot.

    Attributes:
        label: its name; css: the class that gives its colour.
        points: (x, y) in order, y None where nothing was measured.
        tooltip: writes the tooltip of a point.
    """

    label: str
    css: str
    points: Sequence[tuple[float, float | None]]
    tooltip: Callable[[float, float], str]


def drawing(identity: str, title: str, description: str, *body: Markup, height: float = HEIGHT) -> Markup:
    """Return an SVG that a screen reader can announce: an image with a name and a description."""
    return element(
        "svg",
        element("title", title, id=f"{identity}-title"),
        element("desc", description, id=f"{identity}-desc"),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        role="img",
        aria_labelledby=f"{identity}-title {identity}-desc",
    )


def grid(x: Axis, y: Axis, x_label: str) -> Markup:
    """Draw horizontal rules with their values, and the horizontal axis with its marks and its name."""
    rules = [element("line", class_="rule", x1=LEFT, x2=RIGHT, y1=y.at(value), y2=y.at(value)) for value, _ in y.ticks]
    value_labels = [
        element("text", label, class_="tick", x=LEFT - 8, y=y.at(value), dy="0.35em", text_anchor="end")
        for value, label in y.ticks
    ]
    marks = [
        element("text", label, class_="tick", x=x.at(value), y=BOTTOM + 20, text_anchor="middle")
        for value, label in x.ticks
    ]
    base = element("line", class_="base", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM)
    name = element("text", x_label, class_="name", x=(LEFT + RIGHT) / 2, y=BOTTOM + 42, text_anchor="middle")
    return element("g", *rules, *value_labels, *marks, base, name, aria_hidden="true")


def line(series: PlotSeries, x: Axis, y: Axis) -> Markup:
    """Draw a series: solid at its usual spacing (some are measured every few windows), dashed over longer gaps."""
    points = [(position, at, value) for position, (at, value) in enumerate(series.points) if value is not None]
    usual = median([after - before for (before, *_), (after, *_) in pairwise(points)] or [1])
    solid: list[str] = []
    dashed: list[str] = []
    for (before, x0, y0), (after, x1, y1) in pairwise(points):
        move = f"M{number(x.at(x0))} {number(y.at(y0))}L{number(x.at(x1))} {number(y.at(y1))}"
        (solid if after - before <= usual else dashed).append(move)
    few = len(points) <= _MOST_DOTS
    dots = [
        element(
            "circle",
            element("title", series.tooltip(at, value)),
            class_="dot" if few else "spot",
            cx=x.at(at),
            cy=y.at(value),
            r=(3 if few else 5),
        )
        for _, at, value in points
    ]
    return element(
        "g",
        element("path", class_="line", d="".join(solid)) if solid else None,
        element("path", class_="line gap", d="".join(dashed)) if dashed else None,
        *dots,
        class_=series.css,
    )


def level(value: float, label: str, y: Axis) -> Markup:
    """Draw a dashed horizontal line with a label above its right end."""
    at = y.at(value)
    return element(
        "g",
        element("line", class_="level", x1=LEFT, x2=RIGHT, y1=at, y2=at),
        element("text", label, class_="note", x=RIGHT, y=at - 7, text_anchor="end"),
    )


def empty_message(words: str) -> Markup:
    """Write a message into the middle of an empty plot."""
    middle_x, middle_y = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    return join([element("text", words, class_="name", x=middle_x, y=middle_y, text_anchor="middle")])
