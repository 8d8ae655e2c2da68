"""The plots of report.html, each a figure with its legend in words."""

from typing import Final

from grailnode.ui.findings import Findings
from grailnode.ui.formatting import byte_part_text, byte_text, share_text
from grailnode.ui.report.axes import byte_axis, count_axis, share_axis, sparsity_axis
from grailnode.ui.report.markup import Child, Markup, element
from grailnode.ui.report.plot import BOTTOM, LEFT, RIGHT, TOP, PlotSeries, drawing, empty_message, grid, level, line
from grailnode.ui.report_data import DemoReport
from grailnode.ui.series import Change, without_gaps

NOT_MEASURED: Final = "nothing was measured"


def learning(report: DemoReport, findings: Findings) -> Markup:
    """Plot held-out pass@1 and reward over windows."""
    series = [
        PlotSeries(
            "held-out pass@1",
            "first",
            list(zip(report.window_index, report.pass_at_1, strict=True)),
            lambda at, value: f"window {at}: held-out pass@1 {value:.3f}",
        ),
        PlotSeries(
            "reward",
            "second",
            list(zip(report.window_index, report.reward, strict=True)),
            lambda at, value: f"window {at}: reward {value:.3f}",
        ),
    ]
    values = [*without_gaps(report.pass_at_1), *without_gaps(report.reward)]
    x = count_axis(report.window_index, LEFT, RIGHT)
    y = share_axis(values, BOTTOM, TOP)
    changes = [_change_text(change) for change in (findings.pass_at_1, findings.reward)]
    title = "Held-out pass@1 and reward over windows"
    description = f"Held-out pass@1 {changes[0]}. Mean reward of accepted rollouts {changes[1]}."
    body = [line(item, x, y) for item in reversed(series)] if values else [empty_message(NOT_MEASURED)]
    return figure(
        "Learning",
        drawing("learning", title, description, grid(x, y, "window"), *body),
        legend(("first", "held-out pass@1", changes[0]), ("second", "reward", changes[1])),
    )


def patches(report: DemoReport, findings: Findings) -> Markup:
    """Plot the patch bytes of each version, on a logarithmic scale, against the full checkpoint."""
    sizes = without_gaps(report.patch_bytes)
    x = count_axis(report.version_index, LEFT, RIGHT)
    y = byte_axis([round(size) for size in sizes] + ([report.full_bytes] if report.full_bytes else []), BOTTOM, TOP)
    series = PlotSeries(
        "patch",
        "first",
        list(zip(report.version_index, report.patch_bytes, strict=True)),
        lambda at, size: f"version {at}: {byte_part_text(round(size), report.full_bytes)}",
    )
    typical = "none was published"
    if findings.patch_bytes is not None:
        typical = f"median {byte_part_text(findings.patch_bytes, report.full_bytes)}"
    body = [line(series, x, y) if sizes else empty_message("no patch was published")]
    if report.full_bytes:
        body.append(level(report.full_bytes, f"full checkpoint {byte_text(report.full_bytes)}", y))
    return figure(
        "Patch size",
        drawing(
            "patches",
            "Patch bytes of each policy version against the full checkpoint, logarithmic scale",
            f"Patches: {typical}.",
            grid(x, y, "policy version"),
            *body,
        ),
        legend(("first", "patch bytes, log scale", typical)),
    )


def sparsity(report: DemoReport, findings: Findings) -> Markup:
    """Plot the share of weights that a version does not change."""
    values = without_gaps(report.sparsity)
    x = count_axis(report.version_index, LEFT, RIGHT)
    y = sparsity_axis(values, BOTTOM, TOP)
    series = PlotSeries(
        "sparsity",
        "first",
        list(zip(report.version_index, report.sparsity, strict=True)),
        lambda at, value: f"version {at}: {share_text(value)} unchanged",
    )
    mean = "none" if findings.sparsity is None else f"mean {share_text(findings.sparsity)}"
    return figure(
        "Sparsity",
        drawing(
            "sparsity",
            "Share of weights that each version leaves unchanged, bit for bit",
            f"Sparsity: {mean}.",
            grid(x, y, "policy version"),
            line(series, x, y) if values else empty_message("no version changed anything yet"),
        ),
        legend(("first", "unchanged BF16 weights", mean)),
    )


def figure(title: str, plot: Markup, key: Markup, *more: Child) -> Markup:
    """Return a plot under its title and legend."""
    return element("figure", element("figcaption", element("h3", title), key), plot, *more)


def legend(*entries: tuple[str, str, str]) -> Markup:
    """Return a legend from entries of (colour class, words, figure)."""
    items = [
        element("li", element("i", class_=css), element("span", words), element("b", value) if value else None)
        for css, words, value in entries
    ]
    return element("ul", *items, class_="legend")


def _change_text(change: Change | None) -> str:
    return change.ends_text if change else NOT_MEASURED
