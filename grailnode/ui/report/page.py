"""The content of report.html, a single file that needs no network. Layout and style are in page.html, report.html and
style.css. Its scripts, which draw the charts, stand in it, and its policy allows no others.
"""

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from markupsafe import Markup

from grailnode.observe.state import NetworkState
from grailnode.run.files import write_whole
from grailnode.ui.formatting import byte_text, clean, duration_words, part_text, rate_text, share_text
from grailnode.ui.report.charts import groups, learning, patches, sparsity
from grailnode.ui.report.templates import CHART_SCRIPTS, asset, counted, render
from grailnode.ui.report_data import Change, DemoReport, Findings, judgement_text, reference_digest, trainer_wait_text

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
