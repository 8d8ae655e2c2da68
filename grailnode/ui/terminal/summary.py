"""The summary that the demo ends with: the run in one screenful."""

from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grailnode.ui.findings import Findings, judgement_text, reference_digest, trainer_wait_text
from grailnode.ui.formatting import byte_part_text, clean, duration_words, rate_text, share_text
from grailnode.ui.report_data import DemoReport
from grailnode.ui.terminal.glyphs import AsciiFallback, columns
from grailnode.ui.terminal.sections import line
from grailnode.ui.terminal.text_tables import miners

_WIDEST: Final = 100
_WIDEST_SPARK: Final = 40
_LABEL: Final = 15
_CHANGE: Final = 18  # cells of '0.43 → 0.79  +0.36'


def render_summary(report: DemoReport) -> RenderableType:
    """Return the summary of a run that has ended, for any width."""
    return AsciiFallback(_Summary(report))


class _Summary:
    def __init__(self, report: DemoReport) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        findings = Findings.of(self._report)
        inside = width - 4
        parts: list[RenderableType] = [_figures(self._report, findings, inside)]
        if rows := self._report.groups:
            parts += [Text(""), miners(rows, inside, len(rows) + 1)]
        if judgement := judgement_text(self._report, findings):
            good = not findings.false_rejections and not findings.false_acceptances
            parts += [Text(""), Text(judgement, style="green" if good else "red")]
        length = f"{self._report.windows} windows in {duration_words(self._report.seconds)}"
        title = line((f"{clean(self._report.run_name, 24)}: {length}", "not dim bold"))
        yield Panel(Group(*parts), box=box.ROUNDED, border_style="dim", title=title, title_align="left", width=width)


def _figures(report: DemoReport, findings: Findings, width: int) -> Table:
    """Return the figures, a line each; the two figures of learning have a sparkline."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    label = min(_LABEL, max(width // 2, 4))
    grid.add_column(width=label, no_wrap=True)
    grid.add_column(width=max(width - label - 2, 4), no_wrap=True)
    room = min(width - label - 2 - _CHANGE - 2, _WIDEST_SPARK)
    for name, change, values, style in (
        ("held-out pass@1", findings.pass_at_1, report.pass_at_1, "cyan"),
        ("reward", findings.reward, report.reward, "magenta"),
    ):
        words = line(((change.text if change else "not measured").ljust(_CHANGE + 2), "bold"))
        if room >= 8 and change is not None:
            words.append(columns(values, room)[0], style=style)
        grid.add_row(line(name), words)
    for name, text in _lines(report, findings):
        grid.add_row(line(name), line(text))
    return grid


def _lines(report: DemoReport, findings: Findings) -> list[tuple[str, str]]:
    """Return (name, words) of the other figures."""
    lines = []
    if findings.patch_bytes is not None:
        lines.append(("median patch", byte_part_text(findings.patch_bytes, report.full_bytes)))
    if findings.sparsity is not None:
        lines.append(("mean sparsity", f"{share_text(findings.sparsity)} of the weights unchanged by a version"))
    if findings.nodes:
        equal = f"{findings.equal_nodes} of {findings.nodes} nodes equal, bit for bit"
        lines.append(("weights", f"{equal} · {(reference_digest(report) or '-')[:12]}"))
    if report.sites:
        rounds = sum(item.counted > 0 for item in report.rounds)
        steps, groups = (sum(getattr(site, name) for site in report.sites) for name in ("steps", "groups"))
        lines.append(("sites", f"{len(report.sites)}, {rounds} rounds, {steps:,} local steps on {groups:,} groups"))
    else:
        lines.append(("trainer waited", trainer_wait_text(report)))
    speed = report.tokens_per_second
    lines.append(("tokens a second", f"{rate_text(speed.generated)} generated, {rate_text(speed.verified)} verified"))
    return lines
