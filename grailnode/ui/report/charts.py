"""The plots of report and dashboard, each a figure with its legend in words."""

from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup

from grailnode.observe.state import MinerRow, NetworkState, WindowRow
from grailnode.ui.formatting import byte_part_text, byte_text, clean, share_text
from grailnode.ui.report import plot
from grailnode.ui.report.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP
from grailnode.ui.report.templates import part
from grailnode.ui.report_data import Findings
from grailnode.ui.series import by_count, without_gaps

MOST_MINERS: Final = 12  # the rest are in the table
COLOURS: Final = 7  # reasons with a colour of their own; the rarer ones share the last
_NOT_MEASURED: Final = "nothing was measured"
_EDGE: Final = 14.0
_ROW: Final = 52.0
_BAR: Final = 16.0


def learning(state: NetworkState, findings: Findings) -> Markup:
    """Plot held-out pass@1 and reward over windows."""
    values = without_gaps([value for row in state.windows for value in (row.pass_at_1, row.reward)])
    x = plot.count_axis([row.window for row in state.windows], LEFT, RIGHT)
    y = plot.share_axis(values, BOTTOM, TOP)

    def series(name: str, css: str, value_of: Callable[[WindowRow], float | None]) -> Markup:
        points = [(row.window, value_of(row)) for row in state.windows]
        return plot.line(css, points, lambda at, value: f"window {at}: {name} {value:.3f}", x, y)

    changes = [change.ends_text if change else _NOT_MEASURED for change in (findings.pass_at_1, findings.reward)]
    reward = series("reward", "second", lambda row: row.reward)
    body = [reward, series("held-out pass@1", "first", lambda row: row.pass_at_1)]
    drawing = plot.drawing(
        "learning",
        "Held-out pass@1 and reward over windows",
        f"Held-out pass@1 {changes[0]}. Mean reward of accepted rollouts {changes[1]}.",
        plot.grid(x, y, "window"),
        *(body if values else [plot.empty_message(_NOT_MEASURED)]),
    )
    return _figure("Learning", drawing, ("first", "held-out pass@1", changes[0]), ("second", "reward", changes[1]))


def patches(state: NetworkState, findings: Findings) -> Markup:
    """Plot the patch bytes of each version, on a logarithmic scale, against the full checkpoint."""
    full = state.full_bytes
    sizes = [row.patch_bytes for row in state.versions if row.patch_bytes is not None]
    y = plot.byte_axis([*sizes, *([full] if full else [])], BOTTOM, TOP)
    typical = "none was published"
    if findings.patch_bytes is not None:
        typical = f"median {byte_part_text(findings.patch_bytes, full)}"
    drawing = plot.drawing(
        "patches",
        "Patch bytes of each policy version against the full checkpoint, logarithmic scale",
        f"Patches: {typical}.",
        *_versions(
            [(row.version, row.patch_bytes) for row in state.versions],
            y,
            lambda size: byte_part_text(round(size), full),
            "patch was published",
        ),
        *([plot.level(full, f"full checkpoint {byte_text(full)}", y)] if full else []),
    )
    return _figure("Patch size", drawing, ("first", "patch bytes, log scale", typical))


def sparsity(state: NetworkState, findings: Findings) -> Markup:
    """Plot the share of weights that a version does not change."""
    points = [(row.version, row.sparsity) for row in state.versions]
    y = plot.sparsity_axis(without_gaps([value for _, value in points]), BOTTOM, TOP)
    mean = "none" if findings.sparsity is None else f"mean {share_text(findings.sparsity)}"
    drawing = plot.drawing(
        "sparsity",
        "Share of weights that each version leaves unchanged, bit for bit",
        f"Sparsity: {mean}.",
        *_versions(points, y, lambda value: f"{share_text(value)} unchanged", "version changed anything yet"),
    )
    return _figure("Sparsity", drawing, ("first", "unchanged BF16 weights", mean))


def _versions(
    points: Sequence[tuple[int, float | None]], y: plot.Axis, words: Callable[[float], str], absent: str
) -> tuple[Markup, Markup]:
    """Return the grid over policy versions, and the line of some values; a message where there are none."""
    x = plot.count_axis([version for version, _ in points], LEFT, RIGHT)
    line = plot.line("first", points, lambda at, value: f"version {at}: {words(value)}", x, y)
    return plot.grid(x, y, "policy version"), line if without_gaps(
        [value for _, value in points]
    ) else plot.empty_message(f"no {absent}")


def groups(state: NetworkState, findings: Findings) -> Markup:
    """Plot the groups accepted and rejected per miner by reason, the largest miners first."""
    ranked = sorted(state.miners, key=lambda miner: -_whole(miner))
    largest, rest = ranked[:MOST_MINERS], ranked[MOST_MINERS:]
    reasons = by_count(findings.groups.reasons)
    css = {reason: f"r{min(place, COLOURS)}" for place, (reason, _) in enumerate(reasons)}
    widest = max((_whole(miner) for miner in largest), default=0)
    body = [_row(miner, place, widest, css) for place, miner in enumerate(largest)]
    entries = [("ok", "accepted", f"{findings.groups.accepted:,}")]
    entries += [(css[reason], clean(reason, 32), f"{count:,}") for reason, count in reasons[:COLOURS]]
    if rare := reasons[COLOURS:]:
        entries.append((f"r{COLOURS}", f"{len(rare)} other reasons", f"{sum(count for _, count in rare):,}"))
    if unjudged := sum(miner.unjudged for miner in state.miners):
        entries.append(("open", "not judged", f"{unjudged:,}"))
    drawing = plot.drawing(
        "groups",
        "Groups accepted and rejected by reason, for each miner",
        ". ".join(f"{clean(miner.name)}: {_counts(miner)}" for miner in largest) or "No miner took part.",
        *(body or [plot.empty_message("no miner took part")]),
        height=_EDGE + _ROW * len(largest) if largest else HEIGHT,
    )
    note = f"and {len(rest)} smaller miners, in the table below" if rest else ""
    return _figure("Verification", drawing, *entries, note=note)


def _figure(title: str, drawing: Markup, *entries: tuple[str, str, str], note: str = "") -> Markup:
    """Return a plot under its title and its legend, which has entries of (colour class, words, figure)."""
    return part("svg.html", "figure", title, drawing, entries, note)


def _row(miner: MinerRow, place: int, widest: int, css: dict[str, str]) -> Markup:
    scale = (RIGHT - _EDGE) / widest if widest else 0.0
    parts = [("ok", "accepted", miner.accepted)]
    parts += [(css[reason], reason, count) for reason, count in by_count(miner.rejected)]
    parts.append(("open", "not judged", miner.unjudged))
    bars, at = [], _EDGE
    for name, words, count in parts:
        if count:
            width = max(count * scale, 1.5)
            tooltip = f"{clean(miner.name)}: {count} {clean(words)}"
            bars.append((name if width > 4 else f"{name} thin", at, width, _BAR, tooltip))
        at += count * scale
    return part("svg.html", "miner", miner, _counts(miner), bars, _EDGE + _ROW * place, _EDGE, RIGHT)


def _counts(miner: MinerRow) -> str:
    unjudged = f", {miner.unjudged:,} not judged" if miner.unjudged else ""
    return f"{miner.accepted:,} accepted, {miner.rejections:,} rejected{unjudged}"


def _whole(miner: MinerRow) -> int:
    """Return the length of a miner's bar: more groups may be judged than this view read commitments for."""
    return max(miner.submitted, miner.judged)
