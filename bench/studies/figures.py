"""Figures of the studies as SVG files, drawn by matplotlib."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STYLE: Final = {
    "svg.hashsalt": "grailnode",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}


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


@dataclass(frozen=True)
class Axis:
    """The scale of an axis (`linear` or `log`), its two ends, and its marks: value and label."""

    scale: str
    low: float
    high: float
    marks: Mapping[float, str]


def write_figure(path: Path, labels: Labels, lines: Sequence[Line], x: Axis, y: Axis) -> None:
    """Write a figure. The same lines give the same bytes."""
    from matplotlib import pyplot  # noqa: PLC0415 - few benches draw

    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
        for item in lines:
            axes.plot(*zip(*item.points, strict=True), label=item.name, marker=".")
        axes.set(title=labels.title, xlabel=labels.x, ylabel=labels.y, xscale=x.scale, yscale=y.scale)
        axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high))
        axes.set_xticks(list(x.marks), list(x.marks.values()), minor=False)
        axes.set_yticks(list(y.marks), list(y.marks.values()), minor=False)
        axes.minorticks_off()
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, metadata={"Date": None, "Title": labels.title, "Description": labels.description})
        pyplot.close(figure)


def log_axis(low: float, high: float, *, marks: Mapping[float, str] | None = None) -> Axis:
    """Return a logarithmic axis, with marks by value; None for shares, marked in percent at each power of ten."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = [10.0**power for power in range(first, last + 1)]
    return Axis("log", low, high, marks or {power: f"{100 * power:g}%" for power in powers})


def linear_axis(low: float, high: float, step: float, *, percent: bool = False) -> Axis:
    """Return a linear axis with a mark at each multiple of a step."""
    values = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis("linear", low, high, {value: f"{100 * value:g}%" if percent else f"{value:g}" for value in values})
