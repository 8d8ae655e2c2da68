"""The plots of report.html, each a figure with its legend in words."""

from typing import Final

from grailnode.ui.figures import byte_text, known, part_text, share_text
from grailnode.ui.report.axes import byte_axis, count_axis, share_axis, sparsity_axis
from grailnode.ui.report.findings import Change, Findings
from grailnode.ui.report.markup import Child, Markup, element
from grailnode.ui.report.plot import BOTTOM, LEFT, RIGHT, TOP, Series, drawing, grid, level, line, nothing
from grailnode.ui.report.report_data import DemoReport

NOTHING: Final = "nothing was measured"


def learning(report: DemoReport, findings: Findings) -> Markup:
    """Held-out pass@1 and reward over windows."""
    series = [
        Series(
            "held-out pass@1",
            "first",
            list(zip(report.window_index, report.pass_at_1, strict=True)),
            lambda at, value: f"window {at}: held-out pass@1 {value:.3f}",
        ),
        Series(
            "reward",
            "second",
            list(zip(report.window_index, report.reward, strict=True)),
            lambda at, value: f"window {at}: reward {value:.3f}",
        ),
    ]
    values = [*known(report.pass_at_1), *known(report.reward)]
    x = count_axis(report.window_index, LEFT, RIGHT)
    y = share_axis(values, BOTTOM, TOP)
    changes = [_change_text(change) for change in (findings.pass_at_1, findings.reward)]
    title = "Held-out pass@1 and reward over windows"
    description = f"Held-out pass@1 {changes[0]}. Mean reward of accepted rollouts {changes[1]}."
    body = [line(one, x, y) for one in reversed(series)] if values else [nothing(NOTHING)]
    return figure(
        "Learning",
        drawing("learning", title, description, grid(x, y, "window"), *body),
        legend(("first", "held-out pass@1", changes[0]), ("second", "reward", changes[1])),
    )


def patches(report: DemoReport, findings: Findings) -> Markup:
    """Patch bytes of each version, on a logarithmic scale, against the full checkpoint."""
    sizes = known(report.patch_bytes)
    x = count_axis(report.version_index, LEFT, RIGHT)
    y = byte_axis([round(size) for size in sizes] + ([report.full_bytes] if report.full_bytes else []), BOTTOM, TOP)
    series = Series(
        "patch",
        "first",
        list(zip(report.version_index, report.patch_bytes, strict=True)),
        lambda at, size: (
            f"version {at}: {byte_text(round(size))} = {part_text(round(size), report.full_bytes)} of full"
        ),
    )
    typical = "none was published"
    if findings.patch_bytes is not None:
        share = part_text(findings.patch_bytes, report.full_bytes)
        typical = f"median {byte_text(findings.patch_bytes)} = {share} of {byte_text(report.full_bytes)}"
    body = [line(series, x, y) if sizes else nothing("no patch was published")]
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
    """The share of weights that a version leaves as they were."""
    values = known(report.sparsity)
    x = count_axis(report.version_index, LEFT, RIGHT)
    y = sparsity_axis(values, BOTTOM, TOP)
    series = Series(
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
            line(series, x, y) if values else nothing("no version changed anything yet"),
        ),
        legend(("first", "unchanged BF16 weights", mean)),
    )


def figure(title: str, plot: Markup, key: Markup, *more: Child) -> Markup:
    """A plot under its title and legend."""
    return element("figure", element("figcaption", element("h3", title), key), plot, *more)


def legend(*entries: tuple[str, str, str]) -> Markup:
    """Entries of (colour class, words, figure)."""
    items = [
        element("li", element("i", class_=css), element("span", words), element("b", value) if value else None)
        for css, words, value in entries
    ]
    return element("ul", *items, class_="legend")


def _change_text(change: Change | None) -> str:
    return f"{change.first:.2f} → {change.last:.2f}" if change else NOTHING
