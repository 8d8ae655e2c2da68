"""The page of a run, which `grailnode status` prints and the demo keeps on the screen, and the summary of its end."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState, WindowRow
from grailnode.ui.formatting import (
    byte_part_text,
    byte_text,
    clean,
    decimal_text,
    duration_words,
    rate_text,
    share_text,
)
from grailnode.ui.report_data import DemoReport, Findings, judgement_text, reference_digest, trainer_wait_text
from grailnode.ui.terminal import sections
from grailnode.ui.terminal.glyphs import AsciiFallback, sparkline
from grailnode.ui.terminal.sections import line
from grailnode.ui.terminal.text_tables import Column, fitted, miners, nodes, sites

_RECENT: Final = 8  # windows in the table, the newest last
_WIDEST_STATUS: Final = 120
_LOW: Final = 34  # lines; a live view of less shows no blank ones
_MOST_ALARMS: Final = 3  # in a live view
_ALL: Final = 1 << 20
_WIDEST_SUMMARY: Final = 100
_WIDEST_SPARK: Final = 40
_LABEL: Final = 15
_CHANGE: Final = 18  # cells of '0.43 → 0.79  +0.36'


def render_status(state: NetworkState) -> RenderableType:
    """Return head, recent windows, miners, scores and alarms, for any width."""
    return AsciiFallback(RunPage("status", state))


@dataclass(frozen=True)
class RunPage:
    """The page of a run; a live view cuts long lines."""

    title: str
    state: NetworkState
    is_live: bool = False
    most_rows: int = 0  # if there are more, the last one says how many are left out; 0: all are shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width = self.state, min(options.max_width, _WIDEST_STATUS)
        is_low = self.is_live and (options.height or console.height) < _LOW
        blank = [] if is_low else [Text("")]
        room = width if self.is_live else _ALL
        parts: list[RenderableType] = [*sections.heading(self.title, state, width)]
        parts += sections.alarms(state.alarms, room, _MOST_ALARMS if self.is_live else _ALL)
        parts += [*blank, *_head(state, aged=not self.is_live)]
        if state.windows:
            parts.append(sections.trends(state, width))
        if state.windows and not self.is_live:
            parts += [*blank, _windows(state, width), *_strata(state)]
        parts += [*blank, *sections.verification(state, room), *sections.check_rate(state), *_bottleneck(state)]
        if state.miners:
            parts += [*blank, miners(state.miners, width, wraps=not self.is_live, keyed=not self.is_live)]
        if state.sites:
            parts += [*blank, *sections.rounds(state, width), sites(state.sites, width)]
        if state.nodes:
            parts += [*blank, nodes(state.nodes, width)]
        if not self.is_live:
            for part in parts:
                if isinstance(part, Text):
                    part.no_wrap, part.overflow = False, "fold"
        rows = console.render_lines(Group(*parts), options.update(width=width, height=None), pad=False, new_lines=True)
        hidden = len(rows) - self.most_rows + 1 if self.most_rows else 0
        if hidden > 1:
            rows[-hidden:] = [[Segment(f"{hidden:,} more rows", Style(dim=True))]]
        yield from chain.from_iterable(rows)


class LiveView:
    """Draws on the terminal's alternate screen, so that resizing leaves no torn lines and the user's scrollback stays
    clean.

    If its block ends with an exception (Ctrl-C too), the view prints its last picture to the normal screen: what the
    user saw when it happened stays on the terminal.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        # There is no refreshing thread: a picture changes only when a state arrives, so that tests see each of them.
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")
        self._last: AsciiFallback | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()
        if error is not None and self._last is not None:
            self._console.print(self._last)

    def update(self, state: NetworkState) -> None:
        page = RunPage(self._title, state, is_live=True)
        self._last = AsciiFallback(page)
        self._live.update(AsciiFallback(replace(page, most_rows=self._console.height)), refresh=True)


def _head(state: NetworkState, *, aged: bool) -> list[Text]:
    """Write a line on the newest version, one on who is silent, and one on the anchor from which newcomers start."""
    silent = [Text(f"silent  {', '.join(state.silent)}", style="red")] if state.silent else []
    if not state.versions:
        return [line(("no version has been published yet", "dim")), *silent]
    newest = state.versions[-1]
    age = "" if state.head_age is None or not aged else f", renewed {duration_words(state.head_age)} ago"
    parts = [f"head    v{newest.version}{age}, optimizer step {newest.optimizer_step}"]
    if newest.patch_bytes is not None and newest.sparsity is not None:
        parts.append(f"patch {byte_part_text(newest.patch_bytes, state.full_bytes)}")
        parts.append(f"sparsity {share_text(newest.sparsity)}")
    lines = [line(", ".join(parts)), *silent]
    anchor = next((row for row in reversed(state.versions) if row.anchor_bytes is not None), None)
    if anchor is not None and anchor.anchor_bytes is not None:
        lines.append(line(f"anchor  v{anchor.version}, {byte_text(anchor.anchor_bytes)}"))
    return lines


def _windows(state: NetworkState, width: int) -> Table:
    """Return a table of the newest windows; narrow terminals lose the version, then reward, then pass@1."""
    columns = [
        Column("window", 8),
        Column("version", 7) if width >= 60 else None,
        Column("verified", 8),
        Column("rejected", 8),
        Column("reward", 6) if width >= 44 else None,
        Column("pass@1", 6) if width >= 36 else None,
        Column(f"pass@{state.pass_at}", 7) if width >= 68 and state.pass_at > 1 else None,
    ]
    return fitted(columns, [_cells(row) for row in state.windows[-_RECENT:]])


def _cells(row: WindowRow) -> list[Text]:
    counts = (f"{row.window:,}", f"v{row.version}", f"{row.accepted:,}", f"{row.rejected:,}")
    values = (row.reward, row.pass_at_1, row.pass_at_k)
    return [Text(cell) for cell in (*counts, *map(decimal_text, values))]


def _bottleneck(state: NetworkState) -> list[Text]:
    """Write what the nodes of this machine wait for, what limits the trainer, and what validators had no time for."""
    lines = [Text(clean(item, 400), style="red") for item in state.troubles]
    return lines + [Text(item) for item in (state.bottleneck, *state.unjudged) if item]


def _strata(state: NetworkState) -> list[Text]:
    """Write a line with pass@1 of each kind of held-out problems, where there are kinds."""
    strata = next((row.strata for row in reversed(state.windows) if row.strata), ())
    if len(strata) < 2:
        return []
    parts = [f"{clean(row.name, 24) or 'other'} {row.pass_at_1:.2f} ({row.problems})" for row in strata]
    return [line(f"pass@1 by kind of problem: {', '.join(parts)}")]


def render_summary(report: DemoReport) -> RenderableType:
    """Return the summary of a run that has ended, for any width."""
    return AsciiFallback(_Summary(report))


@dataclass(frozen=True)
class _Summary:
    report: DemoReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST_SUMMARY)
        state, findings = self.report.state, Findings.of(self.report.state, self.report.weights_digest)
        inside = width - 4
        parts: list[RenderableType] = [_figures(self.report, findings, inside)]
        if rows := state.miners:
            parts += [Text(""), miners(rows, inside, wraps=True)]
        if judgement := judgement_text(state, findings):
            good = findings.groups.judged and not findings.false_rejections and not findings.false_acceptances
            parts += [Text(""), Text(judgement, style="green" if good else "red")]
        length = f"{len(state.windows)} windows in {duration_words(state.seconds)}"
        title = line((f"{clean(state.run_name, 24)}: {length}", "not dim bold"))
        yield Panel(Group(*parts), box=box.ROUNDED, border_style="dim", title=title, title_align="left", width=width)


def _figures(report: DemoReport, findings: Findings, width: int) -> Table:
    """Return the figures, a line each; the two figures of learning have a sparkline."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    label = min(_LABEL, max(width // 2, 4))
    grid.add_column(width=label, no_wrap=True)
    grid.add_column(width=max(width - label - 2, 4), overflow="fold")
    room = min(width - label - 2 - _CHANGE - 2, _WIDEST_SPARK)
    for name, change, values, style in (
        ("held-out pass@1", findings.pass_at_1, [row.pass_at_1 for row in report.state.windows], "cyan"),
        ("reward", findings.reward, [row.reward for row in report.state.windows], "magenta"),
    ):
        words = line(((change.text if change else "not measured").ljust(_CHANGE + 2), "bold"))
        if room >= 8 and change is not None:
            words.append(sparkline(values, room), style=style)
        grid.add_row(line(name), words)
    for name, text in _lines(report, findings):
        grid.add_row(line(name), Text(text))
    return grid


def _lines(report: DemoReport, findings: Findings) -> list[tuple[str, str]]:
    """Return (name, words) of the other figures."""
    state, lines = report.state, []
    if findings.patch_bytes is not None:
        lines.append(("median patch", byte_part_text(findings.patch_bytes, state.full_bytes)))
    if findings.sparsity is not None:
        lines.append(("mean sparsity", f"{share_text(findings.sparsity)} of the weights unchanged by a version"))
    if findings.nodes:
        equal = f"{findings.equal_nodes} of {findings.nodes} nodes equal, bit for bit"
        lines.append(("weights", f"{equal} · {(reference_digest(report.weights_digest) or '-')[:12]}"))
    if state.sites:
        rounds = sum(item.counted > 0 for item in state.rounds)
        steps, groups = (sum(getattr(site, name) for site in state.sites) for name in ("steps", "groups"))
        lines.append(("sites", f"{len(state.sites)}, {rounds} rounds, {steps:,} local steps on {groups:,} groups"))
    else:
        lines.append(("trainer waited", trainer_wait_text(report)))
    generated, verified = rate_text(state.generated_per_second), rate_text(state.verified_per_second)
    lines.append(("tokens a second", f"{generated} generated, {verified} verified"))
    return lines
