"""The content and the charts of report.html, a single file that needs no network. Layout and style are in page.html,
report.html and style.css. Its scripts, which draw the charts, stand in it, and its policy allows no others.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from grailnode.observe.state import MinerRow, NetworkState
from grailnode.run.files import write_whole
from grailnode.ui.formatting import byte_part_text, byte_text, clean, duration_words, part_text, rate_text, share_text
from grailnode.ui.report.templates import CHART_SCRIPTS, asset, counted, part, render
from grailnode.ui.report_data import (
    Change,
    DemoReport,
    Findings,
    by_count,
    judgement_text,
    mean,
    reference_digest,
    trainer_wait_text,
    without_gaps,
)

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


Tile = tuple[str, str, str]
"""Name, figure, explanation."""


def write_report(report: DemoReport, directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into `directory` (created if missing), each completely or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / "report.json", directory / "report.html"
    write_whole(as_json, f"{report.model_dump_json(indent=2)}\n".encode())
    write_whole(as_html, page(report).encode())
    return as_json, as_html


def page(report: DemoReport) -> str:
    """Return the whole page. The same report gives the same text."""
    state, findings = report.state, Findings.of(report.state, report.weights_digest)
    scripts = [Markup(asset(name)) for name in CHART_SCRIPTS]  # noqa: S704 - files of this package
    return render(
        "report.html",
        name=run_title(state.run_name),
        report=report,
        state=state,
        lead=lead(state, findings),
        waits=trainer_wait_text(report),
        tiles=_tiles(state, findings),
        figures=figures(state, findings),
        scripts=scripts,
        script_policy=Markup(" ").join(_policy_source(script) for script in scripts),
        reference=reference_digest(report.weights_digest),
    )


def _policy_source(script: str) -> Markup:
    """Return the source expression of a Content-Security-Policy that allows this script and no other."""
    return Markup("'sha256-{}'").format(b64encode(sha256(script.encode()).digest()).decode())


def figures(state: NetworkState, findings: Findings) -> Markup:
    return Markup("\n").join(plot(state, findings) for plot in (learning, patches, sparsity, groups))


def run_title(run_name: str) -> str:
    return clean(run_name, 60) or "unnamed run"


def lead(state: NetworkState, findings: Findings) -> str:
    """Say in a few sentences what happened in this run."""
    sentences = []
    span = f"{counted(len(state.windows), 'window')} and {duration_words(state.seconds)}"
    if (change := findings.pass_at_1) is not None:
        way = f"{'rose' if change.gain > 0 else 'fell'} from {change.first:.2f} to" if change.gain else "stayed at"
        sentences.append(f"In {span}, held-out pass@1 {way} {change.last:.2f}.")
    else:
        sentences.append(f"The run lasted {span}; held-out pass@1 was not measured.")
    sentences.append(judgement_text(state, findings))
    if findings.nodes > 1 and findings.equal_nodes == findings.nodes:
        sentences.append(f"All {findings.nodes} nodes ended with the same weights, bit for bit.")
    elif findings.nodes > 1:
        sentences.append(f"Only {findings.equal_nodes} of {findings.nodes} nodes ended with the same weights.")
    return " ".join(sentence for sentence in sentences if sentence)


def _tiles(state: NetworkState, findings: Findings) -> list[Tile]:
    patch = "-", "none was published"
    if (size := findings.patch_bytes) is not None:
        full = byte_text(state.full_bytes)
        patch = byte_text(size), f"{part_text(size, state.full_bytes)} of the full {full}"
    sparsity_figure = share_text(findings.sparsity) if findings.sparsity is not None else "-"
    reasons = counted(len(findings.groups.reasons), "reason")
    equal_nodes = f"{findings.equal_nodes} of {findings.nodes}" if findings.nodes else "-"
    generated, verified = rate_text(state.generated_per_second), rate_text(state.verified_per_second)
    return [
        change_tile("held-out pass@1", findings.pass_at_1, "by a validator"),
        change_tile("mean reward", findings.reward, "verified rollouts"),
        ("median patch", *patch),
        ("mean sparsity", sparsity_figure, "weights unchanged by a version"),
        ("groups verified", f"{findings.groups.accepted:,}", f"of {findings.groups.judged:,} judged"),
        ("groups rejected", f"{findings.groups.rejected:,}", f"{reasons}, see below"),
        ("equal weights", equal_nodes, "nodes hold the trainer's bits"),
        ("tokens a second", generated, f"generated; {verified} verified"),
    ]


def change_tile(name: str, change: Change | None, note: str) -> Tile:
    if change is None:
        return name, "-", "not measured"
    return name, change.ends_text, f"{change.gain:+.2f}, {note}"
