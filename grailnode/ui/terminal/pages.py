"""The page of a run, which `grailnode status` prints and the demo keeps on the screen, the summary of its end, and the
view for outputs that are no terminal: one line for each window, printed when a later window exists.
"""

from collections.abc import Sequence
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState, WindowRow
from grailnode.ui.formatting import (
    byte_part_text,
    byte_text,
    clean,
    decimal_text,
    duration_text,
    duration_words,
    part_text,
    rate_text,
    share_text,
)
from grailnode.ui.report_data import DemoReport, Findings, judgement_text, reference_digest, trainer_wait_text
from grailnode.ui.terminal import sections

_MOST_ALARMS: Final = 5  # new ones between two windows: strangers can cause alarms, and must not flood a log


class PlainView:
    """Prints ASCII lines without colour or cursor movement."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._state: NetworkState | None = None
        self._last_window = -1
        self._alarms: set[str] = set()
        self._alarms_since_window = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._print_windows(self._state, self._state.windows)

    def update(self, state: NetworkState) -> None:
        """Print the windows and alarms that are new."""
        if self._state is None:
            self._print(_opening_line(self._title, state))
        self._state = state
        for alarm in state.alarms:
            if alarm not in self._alarms and self._alarms_since_window < _MOST_ALARMS:
                self._alarms.add(alarm)
                self._alarms_since_window += 1
                self._print(f"ALARM {clean(alarm, 200)}")
        self._print_windows(state, state.windows[:-1])

    def _print_windows(self, state: NetworkState, rows: Sequence[WindowRow]) -> None:
        """Print a line for each of some windows that has none yet."""
        for row in rows:
            if row.window > self._last_window:
                self._print(_window_line(row, state))
                self._last_window = row.window
                self._alarms_since_window = 0

    def _print(self, line: str) -> None:
        readable = line.encode("ascii", "backslashreplace").decode("ascii")
        self._console.print(Text(readable), soft_wrap=True, highlight=False)


def _opening_line(title: str, state: NetworkState) -> str:
    planned = f"{state.windows_planned} windows" if state.windows_planned else "windows"
    return (
        f"grailnode {clean(title, 24)}: run {clean(state.run_name, 24)} {state.run_id[:8]}, "
        f"{planned} of {state.window_seconds:g} s, full checkpoint {byte_text(state.full_bytes)}"
    )


def _window_line(row: WindowRow, state: NetworkState) -> str:
    """'1:12  window 12 (13/30)  v11  pass@1 0.64  reward 0.61  sparsity 0.971  patch 19 KB (1/83)  ...'."""
    place, planned = "", state.windows_planned
    if planned:
        count = row.window + 1
        place = f" ({count}/{planned})" if count <= planned else f" (after the {planned} planned)"
    parts = [f"{duration_text(state.seconds):>5}", f"window {row.window}{place}", f"v{row.version}"]
    parts += [f"pass@1 {decimal_text(row.pass_at_1)}", f"reward {decimal_text(row.reward)}"]
    version = next((version for version in state.versions if version.version == row.version), None)
    if version is not None and version.patch_bytes is not None and version.sparsity is not None:
        parts.append(f"sparsity {share_text(version.sparsity)}")
        parts.append(f"patch {byte_text(version.patch_bytes)} ({part_text(version.patch_bytes, state.full_bytes)})")
    parts.append(f"groups {row.accepted} verified, {row.rejected} rejected")
    if state.rounds:
        newest = state.rounds[-1]
        parts.append(f"round {newest.number}: {newest.counted} of {newest.sites} sites, {newest.groups} groups")
    return "  ".join(parts)


_RECENT: Final = 8  # windows in the table, the newest last
_WIDEST_PAGE: Final = 120
_LIVE_ALARMS: Final = 3  # in a live view
_WIDEST_SUMMARY: Final = 100


def run_page(title: str, state: NetworkState, *, is_live: bool = False) -> RenderableType:
    """Return head, recent windows, miners, scores and alarms; a live view has no room for all of it."""
    blank = Text("")
    parts = [*sections.heading(title, state)]
    parts += sections.alarms(state.alarms, _LIVE_ALARMS if is_live else len(state.alarms))
    parts += [blank, *_head(state, aged=not is_live)]
    if state.windows:
        parts.append(sections.trends(state))
    if state.windows and not is_live:
        parts += [blank, _windows(state), *_strata(state)]
    parts += [blank, *sections.verification(state), *_bottleneck(state)]
    if state.miners:
        parts += [blank, sections.miners(state.miners, keyed=not is_live)]
    if state.sites:
        parts += [blank, *sections.rounds(state), sections.sites(state.sites)]
    if state.nodes:
        parts += [blank, sections.nodes(state.nodes)]
    return Constrain(Group(*parts), _WIDEST_PAGE)


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
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._last: RenderableType | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()
        if error is not None and self._last is not None:
            self._console.print(self._last)

    def update(self, state: NetworkState) -> None:
        self._last = run_page(self._title, state, is_live=True)
        self._live.update(self._last, refresh=True)


def _head(state: NetworkState, *, aged: bool) -> list[Text]:
    """Write a line on the newest version, one on who is silent, and one on the anchor from which newcomers start."""
    silent = [Text(f"silent  {', '.join(state.silent)}", style="red")] if state.silent else []
    if not state.versions:
        return [Text("no version has been published yet", style="dim"), *silent]
    newest = state.versions[-1]
    age = "" if state.head_age is None or not aged else f", renewed {duration_words(state.head_age)} ago"
    parts = [f"head    v{newest.version}{age}, optimizer step {newest.optimizer_step}"]
    if newest.patch_bytes is not None and newest.sparsity is not None:
        parts.append(f"patch {byte_part_text(newest.patch_bytes, state.full_bytes)}")
        parts.append(f"sparsity {share_text(newest.sparsity)}")
    lines = [Text(", ".join(parts)), *silent]
    anchor = next((row for row in reversed(state.versions) if row.anchor_bytes is not None), None)
    if anchor is not None and anchor.anchor_bytes is not None:
        lines.append(Text(f"anchor  v{anchor.version}, {byte_text(anchor.anchor_bytes)}"))
    return lines


def _windows(state: NetworkState) -> Table:
    """Return a table of the newest windows."""
    has_k = state.pass_at > 1
    titles = ["window", "version", "verified", "rejected", "reward", "pass@1", *[f"pass@{state.pass_at}"] * has_k]
    rows = sections.table(*map(sections.number, titles))
    for row in state.windows[-_RECENT:]:
        shares = map(decimal_text, (row.reward, row.pass_at_1, *[row.pass_at_k] * has_k))
        rows.add_row(f"{row.window:,}", f"v{row.version}", f"{row.accepted:,}", f"{row.rejected:,}", *shares)
    return rows


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
    return [Text(f"pass@1 by kind of problem: {', '.join(parts)}")]


def render_summary(report: DemoReport) -> RenderableType:
    """Return the summary of a run that has ended, for any width."""
    state, findings = report.state, Findings.of(report.state, report.weights_digest)
    figures = sections.grid()
    for name, text in _figures(report, findings):
        figures.add_row(name, text)
    parts: list[RenderableType] = [sections.learning(state), figures]
    if state.miners:
        parts += [Text(""), sections.miners(state.miners)]
    if judgement := judgement_text(state, findings):
        good = findings.groups.judged and not findings.false_rejections and not findings.false_acceptances
        parts += [Text(""), Text(judgement, style="green" if good else "red")]
    length = f"{len(state.windows)} windows in {duration_words(state.seconds)}"
    title = Text(f"{clean(state.run_name, 24)}: {length}", style="not dim bold")
    panel = Panel(Group(*parts), box=box.ROUNDED, border_style="dim", title=title, title_align="left")
    return Constrain(panel, _WIDEST_SUMMARY)


def _figures(report: DemoReport, findings: Findings) -> list[tuple[str, str]]:
    """Return (name, words) of the figures beside those of learning."""
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
