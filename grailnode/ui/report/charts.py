"""The charts of report and dashboard, each a figure with its legend in words. uPlot draws the curves in the browser."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from grailnode.observe.state import MinerRow, NetworkState
from grailnode.ui.formatting import byte_part_text, byte_text, clean, share_text
from grailnode.ui.report.templates import part
from grailnode.ui.report_data import Findings, by_count, mean, without_gaps

MOST_MINERS: Final = 12  # the rest are in the table
COLOURS: Final = 7  # reasons with a colour of their own; the rarer ones share the last
_MOST_POINTS: Final = 400  # more are averaged: no screen shows them apart


class Curve(NamedTuple):
    """A curve: the class of its colour, its name, its figure in words, and its values, None for no measurement."""

    css: str
    name: str
    figure: str
    values: Sequence[float | None]


def learning(state: NetworkState, findings: Findings) -> Markup:
    """Plot held-out pass@1 and reward over windows."""
    held_out, reward = (
        change.ends_text if change else "nothing was measured" for change in (findings.pass_at_1, findings.reward)
    )
    return _curves(
        "Learning",
        f"Held-out pass@1 over windows: {held_out}. Mean reward of accepted rollouts: {reward}.",
        ("window", [row.window for row in state.windows]),
        Curve("first", "held-out pass@1", held_out, [row.pass_at_1 for row in state.windows]),
        Curve("second", "reward", reward, [row.reward for row in state.windows]),
    )


def patches(state: NetworkState, findings: Findings) -> Markup:
    """Plot the patch bytes of each version, on a logarithmic scale, against the full checkpoint."""
    full, size = state.full_bytes, findings.patch_bytes
    typical = "none was published" if size is None else f"median {byte_part_text(size, full)}"
    curves = [Curve("first", "patch bytes, log scale", typical, [row.patch_bytes or None for row in state.versions])]
    if full:
        curves.append(Curve("level", "full checkpoint", byte_text(full), [full] * len(state.versions)))
    words = f"Patch bytes of each policy version: {typical}."
    return _curves("Patch size", words, _versions(state), *curves, unit="bytes")


def sparsity(state: NetworkState, findings: Findings) -> Markup:
    """Plot the share of weights that a version does not change."""
    typical = "none" if findings.sparsity is None else f"mean {share_text(findings.sparsity)}"
    words = f"Share of weights that each version leaves unchanged, bit for bit: {typical}."
    values = [row.sparsity for row in state.versions]
    return _curves("Sparsity", words, _versions(state), Curve("first", "unchanged BF16 weights", typical, values))


def _versions(state: NetworkState) -> tuple[str, list[int]]:
    return "policy version", [row.version for row in state.versions]


def _curves(title: str, words: str, x: tuple[str, Sequence[int]], *curves: Curve, unit: str = "share") -> Markup:
    """Return curves over windows or versions, with data as JSON for charts.js; only words without measurements."""
    (axis, places), size = x, max(1, -(-len(x[1]) // _MOST_POINTS))
    spans = [slice(begin, begin + size) for begin in range(0, len(places), size)]
    data = {
        "unit": unit,
        "colours": [curve.css for curve in curves],
        "names": [axis, *(curve.name for curve in curves)],
        "columns": [[places[span][-1] for span in spans]]
        + [[_digits(mean(curve.values[span])) for span in spans] for curve in curves],
    }
    is_empty = not any(without_gaps(curve.values) for curve in curves if curve.css != "level")
    entries = [(curve.css, curve.name, curve.figure) for curve in curves]
    text = "" if is_empty else escape(json.dumps(data, separators=(",", ":")))
    return part("charts.html", "curves", title.lower().replace(" ", "-"), title, words, entries, text)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def groups(state: NetworkState, findings: Findings) -> Markup:
    """Plot the groups accepted and rejected per miner by reason, the largest miners first."""
    ranked = sorted(state.miners, key=lambda miner: -_whole(miner))
    largest, rest = ranked[:MOST_MINERS], ranked[MOST_MINERS:]
    reasons = by_count(findings.groups.reasons)
    css = {reason: f"r{min(place, COLOURS)}" for place, (reason, _) in enumerate(reasons)}
    entries = [("ok", "accepted", f"{findings.groups.accepted:,}")]
    entries += [(css[reason], clean(reason, 32), f"{count:,}") for reason, count in reasons[:COLOURS]]
    if rare := reasons[COLOURS:]:
        entries.append((f"r{COLOURS}", f"{len(rare)} other reasons", f"{sum(count for _, count in rare):,}"))
    if unjudged := sum(miner.unjudged for miner in state.miners):
        entries.append(("open", "not judged", f"{unjudged:,}"))
    rows = [(miner, _counts(miner), _bars(miner, css)) for miner in largest]
    widest = max(map(_whole, largest), default=0)
    note = f"and {len(rest)} smaller miners, in the table below" if rest else ""
    return part("charts.html", "bars", "Verification", rows, widest, entries, note)


def _bars(miner: MinerRow, css: dict[str, str]) -> list[tuple[str, int, int, str]]:
    """Return the bars of a miner, each with its class, its begin and its length in groups, and its tooltip."""
    parts = [("ok", "accepted", miner.accepted)]
    parts += [(css[reason], reason, count) for reason, count in by_count(miner.rejected)]
    parts.append(("open", "not judged", miner.unjudged))
    ends = accumulate(count for *_, count in parts)
    return [
        (name, end - count, count, f"{clean(miner.name)}: {count} {clean(words)}")
        for (name, words, count), end in zip(parts, ends, strict=True)
        if count
    ]


def _counts(miner: MinerRow) -> str:
    unjudged = f", {miner.unjudged:,} not judged" if miner.unjudged else ""
    return f"{miner.accepted:,} accepted, {miner.rejections:,} rejected{unjudged}"


def _whole(miner: MinerRow) -> int:
    """Return the length of a miner's bar: more groups may be judged than this view read commitments for."""
    return max(miner.submitted, miner.judged)
