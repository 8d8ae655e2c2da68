"""The parts of the terminal view, which rich fits into the terminal: heading, trends, verification, alarms, and the
tables of miners, sites and nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from grailnode.observe.state import MinerRow, NetworkState, NodeRow, SiteRow
from grailnode.ui.formatting import byte_part_text, byte_text, clean, duration_text, rate_text, share_text
from grailnode.ui.report_data import Change, Tally, last, mean, reasons_text, without_gaps

_KIND_STYLE: Final = {"honest": "green", "cheating": "red"}
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_LONGEST_ALARM: Final = 400  # cells

grid = partial(Table.grid, padding=(0, 2, 0, 0), pad_edge=False)
"""Rows without a heading."""
table = partial(Table, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
_word = partial(Column, no_wrap=True)
number = partial(Column, justify="right", no_wrap=True)
"""A column of numbers."""


@dataclass(frozen=True)
class Sparkline:
    """A chart of one line, from the smallest value to the largest, that fills up as values come if it is known how many
    are planned. Gaps are closed: only what was measured is drawn. Longer series are averaged.
    """

    values: Sequence[float | None]
    style: str
    planned: int = 0

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), min(64, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.draw(options.max_width), style=self.style, no_wrap=True)

    def draw(self, width: int) -> str:
        values = without_gaps(self.values)
        if not values:
            return ""
        low, high = min(values), max(values)
        span = max(len(values), round(self.planned * len(values) / len(self.values)))
        ends = [(place * span // width, -(-(place + 1) * span // width)) for place in range(width)]
        columns = [values[begin : max(begin + 1, end)] for begin, end in ends]
        means = [sum(column) / len(column) for column in columns if column]
        return "".join(_LEVELS[round(7 * (value - low) / (high - low)) if high > low else 3] for value in means)


def heading(title: str, state: NetworkState) -> list[RenderableType]:
    """Return two lines: the run and its duration, and its progress."""
    name = clean(state.run_name, 24)
    run = f"run {name} " if name != title else "run "
    version = f"v{state.versions[-1].version}  " if state.versions else ""
    line = grid(Column(ratio=1), number(), expand=True)
    line.add_row(
        Text.assemble(("grailnode", "bold"), f" {clean(title, 24)}  {run}", (state.run_id[:8], "cyan")),
        f"{version}{duration_text(state.seconds)}",
    )
    return [line, _position(state)]


def _position(state: NetworkState) -> RenderableType:
    """'window 12 of 30 ━━━━━───── 1:48 left'; an endless run shows the window that is open instead."""
    if state.window is None:
        return Text("waiting for the first window", style="dim")
    elapsed = min(max(state.window_elapsed, 0.0), state.window_seconds)
    if state.windows_planned:
        length = state.windows_planned * state.window_seconds
        elapsed = min(state.window * state.window_seconds + elapsed, length)
        words = f"window {min(state.window, state.windows_planned)} of {state.windows_planned}"
        after = f"{duration_text(length - elapsed)} left" if elapsed < length else "finishing"
    else:
        length = state.window_seconds
        words, late = f"window {state.window:,}", state.window_elapsed - length
        if not state.versions:
            return Text.assemble((words, "bold"), "  by the clock, and nothing has been published")
        if state.has_ended or "trainer" in state.silent:
            return Text.assemble((words, "bold"), "  by the clock, and the run has ended or its trainer has stopped")
        after = f"next in {duration_text(ceil(-late))}" if late < 0 else f"next is late by {duration_text(late)}"
    line = grid(number(), Column(ratio=1), number(), expand=True)
    line.add_row(Text(words, style="bold"), ProgressBar(length, elapsed), after)
    return line


def learning(state: NetworkState) -> Table:
    """Return a row for held-out pass@1 and one for the reward over windows: its name, its change, its curve."""
    rows = grid(_word(), _word(), Column())
    for label, style, values in (
        ("held-out pass@1", "cyan", [row.pass_at_1 for row in state.windows]),
        ("reward", "magenta", [row.reward for row in state.windows]),
    ):
        change = Change.of(values)
        words = Text(change.text if change else "not measured", style="bold")
        rows.add_row(label, words, Sparkline(values, style, state.windows_planned or 0))
    return rows


def trends(state: NetworkState) -> Table:
    """Return the rows of `learning`, and one each for sparsity and bytes over the patches."""
    rows, patches = learning(state), [row for row in state.versions if row.patch_bytes is not None]
    sparsity, sizes = [row.sparsity for row in patches], [row.patch_bytes for row in patches]
    newest, average, size = last(sparsity), mean(sparsity), last(sizes)
    words, bytes_ = "no patch yet", f"full checkpoint {byte_text(state.full_bytes)}"
    if newest is not None and average is not None and size is not None:
        words = f"{share_text(newest)}  mean {share_text(average)}"
        bytes_ = byte_part_text(round(size), state.full_bytes)
    for label, text, values in (("sparsity", words, sparsity), ("patch", bytes_, sizes)):
        rows.add_row(label, Text(text, style="bold"), Sparkline(values, "bright_blue", state.windows_planned or 0))
    return rows


def verification(state: NetworkState) -> list[Text]:
    """Return a line with the groups verified and rejected, and one on how fast validators check."""
    groups, unjudged = Tally.of(state.miners), sum(row.unjudged for row in state.miners)
    line = Text.assemble(
        "groups  ", (f"{groups.accepted:,} verified", "green"), "  ", (f"{groups.rejected:,} rejected", "red")
    )
    details = [f"{unjudged:,} not judged"] if unjudged else []
    for words in [*details, reasons_text(groups.reasons)]:
        line.append(f"  {words}" if words else "", style="dim")
    rate = f"checks  {rate_text(state.check_rate)} tokens in a second of a validator's time"
    return [line, Text(rate)] if state.check_rate else [line]


def rounds(state: NetworkState) -> list[Text]:
    """Return a line on the newest round of sites that train together; none where the trainer trains alone."""
    if not state.rounds:
        return []
    newest = state.rounds[-1]
    words = f"{newest.counted} of {newest.sites} contributions, {newest.local_steps} steps, {newest.groups} groups"
    tail = f"  {byte_text(newest.payload_bytes)}, outer step {newest.step:,}"
    colour = "green" if newest.counted else "red"
    return [Text.assemble(f"round {newest.number:,}  ", (words, colour), (tail, "dim"))]


def alarms(lines: Sequence[str], most: int) -> list[Text]:
    """Return the newest alarms, a line each, in red and with a word, so that no colour is needed to notice them."""
    texts = [Text.assemble(("ALARM ", "bold red"), (clean(alarm, _LONGEST_ALARM), "red")) for alarm in lines[-most:]]
    if len(lines) > most:
        texts[-1].append(f" (+{len(lines) - most} earlier)", style="dim")
    return texts


def miners(rows: Sequence[MinerRow], *, keyed: bool = False) -> Table:
    """Return one line for each miner; the first 8 digits of the key follow the name if the miners are `keyed`."""
    has_kinds = any(row.kind != "unknown" for row in rows)
    words, numbers = ["miner", *["key"] * keyed, *["kind"] * has_kinds], ["sent", "accepted"]
    rejected = Column("rejected", overflow="fold", min_width=6)
    lines = table(*map(_word, words), *map(number, numbers), rejected, number("score"))
    for row in rows:
        style = _KIND_STYLE.get(row.kind, "")
        lines.add_row(
            Text(clean(row.name, 16), style=style),
            *[Text(row.key[:8], style="dim")] * keyed,
            *[Text(clean(row.kind, 8), style=style)] * has_kinds,
            f"{row.submitted:,}",
            Text(f"{row.accepted:,}", style="green" if row.accepted else ""),
            _rejections(row.rejected, row.unjudged),
            f"{row.score:.2f}",
        )
    return lines


def sites(rows: Sequence[SiteRow]) -> Table:
    """Return one line for each site that trains: its contributions that counted, with their local steps, groups and
    bytes, and those that did not, by reason.
    """
    numbers = map(number, ("counted", "steps", "groups", "sent"))
    lines = table(_word("site"), *numbers, Column("refused", overflow="fold", min_width=6))
    for row in rows:
        lines.add_row(
            Text(clean(row.name, 16)),
            Text(f"{row.rounds:,}", style="green" if row.rounds else ""),
            f"{row.steps:,}",
            f"{row.groups:,}",
            byte_text(row.payload_bytes),
            _rejections(row.refused),
        )
    return lines


def nodes(rows: Sequence[NodeRow]) -> Table:
    """Return one line for each node: name, version, and what it does now."""
    lines = table(_word("node"), number("version"), "now")
    for row in rows:
        version = "-" if row.version is None else f"v{row.version}"
        lines.add_row(Text(clean(row.name, 16)), Text(version, style="cyan"), Text(clean(row.doing, 120)))
    return lines


def _rejections(reasons: Mapping[str, int], unjudged: int = 0) -> Text:
    """Write '45; 675 not judged: copied 30, sketch 15'."""
    total = sum(reasons.values())
    text = Text(f"{total:,}" if total or unjudged else "-", style="red" if total else "dim")
    text.append(f"; {unjudged:,} not judged" if unjudged else "", style="dim")
    return text.append(f": {reasons_text(reasons)}" if total else "", style="dim")
