"""The content of report.html, a single file that needs neither network nor scripts. Layout and style are in page.html,
report.html and style.css.
"""

from markupsafe import Markup

from grailnode.ui.formatting import byte_text, clean, duration_words, part_text, rate_text, share_text
from grailnode.ui.report.charts import groups, learning, patches, sparsity
from grailnode.ui.report.templates import counted, render
from grailnode.ui.report_data import (
    DemoReport,
    Findings,
    RunFigures,
    judgement_text,
    reference_digest,
    trainer_wait_text,
)
from grailnode.ui.series import Change

Tile = tuple[str, str, str]
"""Name, figure, explanation."""


def page(report: DemoReport) -> str:
    """Return the whole page. The same report gives the same text."""
    findings = Findings.of(report)
    columns = {"held-out pass@1": report.pass_at_1, "reward": report.reward}
    if report.pass_at > 1:
        columns[f"held-out pass@{report.pass_at}"] = report.pass_at_k
    return render(
        "report.html",
        name=run_title(report.run_name),
        report=report,
        lead=lead(report, findings),
        waits=trainer_wait_text(report),
        tiles=_tiles(report, findings),
        figures=figures(report, findings),
        reference=reference_digest(report),
        by_window=(list(columns), list(zip(report.window_index, *columns.values(), strict=True))),
        by_version=list(zip(report.version_index, report.patch_bytes, report.sparsity, strict=True)),
    )


def figures(report: RunFigures, findings: Findings) -> Markup:
    """Return the plots of a run."""
    return Markup("\n").join(plot(report, findings) for plot in (learning, patches, sparsity, groups))


def run_title(run_name: str) -> str:
    """Return the name of a run as a title."""
    return clean(run_name, 60) or "unnamed run"


def lead(report: DemoReport, findings: Findings) -> str:
    """Say in a few sentences what happened in this run."""
    sentences = []
    span = f"{counted(report.windows, 'window')} and {duration_words(report.seconds)}"
    if (change := findings.pass_at_1) is not None:
        way = f"{'rose' if change.gain > 0 else 'fell'} from {change.first:.2f} to" if change.gain else "stayed at"
        sentences.append(f"In {span}, held-out pass@1 {way} {change.last:.2f}.")
    else:
        sentences.append(f"The run lasted {span}; held-out pass@1 was not measured.")
    sentences.append(judgement_text(report, findings))
    if findings.nodes > 1 and findings.equal_nodes == findings.nodes:
        sentences.append(f"All {findings.nodes} nodes ended with the same weights, bit for bit.")
    elif findings.nodes > 1:
        sentences.append(f"Only {findings.equal_nodes} of {findings.nodes} nodes ended with the same weights.")
    return " ".join(sentence for sentence in sentences if sentence)


def _tiles(report: DemoReport, findings: Findings) -> list[Tile]:
    """Return the tiles at the top."""
    patch = "-", "none was published"
    if (size := findings.patch_bytes) is not None:
        full = byte_text(report.full_bytes)
        patch = byte_text(size), f"{part_text(size, report.full_bytes)} of the full {full}"
    sparsity_figure = share_text(findings.sparsity) if findings.sparsity is not None else "-"
    reasons = counted(len(findings.groups.reasons), "reason")
    equal_nodes = f"{findings.equal_nodes} of {findings.nodes}" if findings.nodes else "-"
    speed = report.tokens_per_second
    return [
        change_tile("held-out pass@1", findings.pass_at_1, "by a validator"),
        change_tile("mean reward", findings.reward, "verified rollouts"),
        ("median patch", *patch),
        ("mean sparsity", sparsity_figure, "weights unchanged by a version"),
        ("groups verified", f"{findings.groups.accepted:,}", f"of {findings.groups.judged:,} judged"),
        ("groups rejected", f"{findings.groups.rejected:,}", f"{reasons}, see below"),
        ("equal weights", equal_nodes, "nodes hold the trainer's bits"),
        ("tokens a second", rate_text(speed.generated), f"generated; {rate_text(speed.verified)} verified"),
    ]


def change_tile(name: str, change: Change | None, note: str) -> Tile:
    """Return the tile of a figure that changes over the run."""
    if change is None:
        return name, "-", "not measured"
    return name, change.ends_text, f"{change.gain:+.2f}, {note}"
