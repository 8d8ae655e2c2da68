"""The parts of the terminal view that are not tables: heading, trends, verification, alarms."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState
from grailnode.ui.formatting import byte_part_text, byte_text, clean, decimal_text, duration_text, rate_text, share_text
from grailnode.ui.series import Change, Tally, last, mean, reasons_text
from grailnode.ui.terminal.glyphs import progress, sparkline

_LABEL: Final = 15
_WORDS: Final = 26
_WIDEST_SPARK: Final = 64
_UNLIMITED: Final = 1 << 20
_LONGEST_ALARM: Final = 400  # cells


@dataclass(frozen=True)
class Trend:
    """One figure over time: planned are so many values, or 0 if nobody knows; in words, it has a short form."""

    label: str
    style: str
    values: Sequence[float | None]
    planned: int
    words: str
    short: str


def _trends(state: NetworkState) -> tuple[Trend, ...]:
    """Return the trends of held-out pass@1 and reward over windows, and of sparsity and bytes over the patches."""
    rows = [row for row in state.versions if row.patch_bytes is not None]
    sparsity = [row.sparsity for row in rows]
    sizes = [row.patch_bytes for row in rows]
    planned, style = state.windows_planned or 0, "bright_blue"
    return (
        _learning_trend(state, "held-out pass@1", "cyan", [row.pass_at_1 for row in state.windows]),
        _learning_trend(state, "reward", "magenta", [row.reward for row in state.windows]),
        Trend("sparsity", style, sparsity, planned, *_sparsity_words(sparsity)),
        Trend("patch", style, sizes, planned, *_patch_words(sizes, state.full_bytes)),
    )


def _learning_trend(state: NetworkState, label: str, style: str, values: Sequence[float | None]) -> Trend:
    change = Change.of(values)
    words = change.text if change else "not measured yet"
    return Trend(label, style, values, state.windows_planned or 0, words, decimal_text(last(values)))


def _sparsity_words(values: Sequence[float | None]) -> tuple[str, str]:
    newest, average = last(values), mean(values)
    if newest is None or average is None:
        return "no patch yet", "-"
    return f"{share_text(newest)}  mean {share_text(average)}", share_text(newest)


def _patch_words(sizes: Sequence[int | None], full: int) -> tuple[str, str]:
    newest = last(sizes)
    if newest is None:
        return (f"full checkpoint {byte_text(full)}" if full else "-"), "-"
    return byte_part_text(round(newest), full), byte_text(round(newest))


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """Return one line that is cut with an ellipsis if it does not fit."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def heading(title: str, state: NetworkState, width: int) -> list[Text]:
    """Return two lines: the run and its duration, and its progress."""
    version = f"v{state.versions[-1].version}" if state.versions else ""
    name = clean(state.run_name, 24)
    begin = line(("grailnode", "bold"), f" {clean(title, 24)}", f"  run {name}" if name != title else "  run ")
    begin.append(f" {state.run_id[:8]}".replace("  ", " ") if name != title else state.run_id[:8], style="cyan")
    end = f"{version}  {duration_text(state.seconds)}".strip()
    space = width - begin.cell_len - len(end)
    return [line(begin, " " * space, end) if space >= 2 else begin, _position(state, width)]


def _position(state: NetworkState, width: int) -> Text:
    """'window 12 of 30 ━━━━━───── 1:48 left'; an endless run shows the window that is open instead."""
    if state.window is None:
        return line(("waiting for the first window", "dim"))
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
            return line((words, "bold"), "  by the clock, and nothing has been published")
        if state.has_ended or "trainer" in state.silent:
            return line((words, "bold"), "  by the clock, and the run has ended or its trainer has stopped")
        after = f"next in {duration_text(ceil(-late))}" if late < 0 else f"next is late by {duration_text(late)}"
    room = width - len(words) - len(after) - 2
    if room < 6:
        return line((words, "bold"), f" {after}")
    full_part, empty_part = progress(elapsed / length if length > 0 else 0.0, room)
    return line((words, "bold"), " ", (full_part, "green"), (empty_part, "dim"), " ", after)


def trends(state: NetworkState, width: int) -> RenderableType:
    """Return one row for each trend: name, sparkline, words. On narrow terminals the sparkline is left out first."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=min(_LABEL, width), no_wrap=True)
    spark = min(width - _LABEL - _WORDS - 4, _WIDEST_SPARK)
    has_spark = spark >= 8
    words = width - _LABEL - 2 - (spark + 2 if has_spark else 0)
    if has_spark:
        grid.add_column(width=spark, no_wrap=True)
    if words >= 4:
        grid.add_column(width=words, no_wrap=True)
    for trend in _trends(state):
        row = [line(trend.label)]
        if has_spark:
            row.append(Text(sparkline(trend.values, spark, trend.planned), style=trend.style, no_wrap=True))
        if words >= 4:
            row.append(line((trend.words if words >= _WORDS else trend.short, "bold")))
        grid.add_row(*row)
    return grid


def verification(state: NetworkState, width: int) -> list[Text]:
    """Return the groups verified and rejected, with the reasons in this line, or in a second one if they need it."""
    groups = Tally.of(state.miners)
    reasons = groups.reasons
    text = line("groups  ", (f"{groups.accepted:,} verified", "green"), "  ", (f"{groups.rejected:,} rejected", "red"))
    if unjudged := sum(row.unjudged for row in state.miners):
        text.append(f"  {unjudged:,} not judged", style="dim")
    room = width - text.cell_len - 2
    if cell_len(reasons_text(reasons, _UNLIMITED)) > room:
        return [text, line((" " * 8 + reasons_text(reasons, max(width - 8, 1)), "dim"))]
    if reasons and room >= 8:
        text.append("  ").append(reasons_text(reasons, room), style="dim")
    return [text]


def rounds(state: NetworkState, width: int) -> list[Text]:
    """Return a line on the newest round of sites that train together; none where the trainer trains alone."""
    if not state.rounds:
        return []
    newest = state.rounds[-1]
    words = f"{newest.counted} of {newest.sites} contributions, {newest.local_steps} steps, {newest.groups} groups"
    text = line(f"round {newest.number:,}", ("  ", ""), (words, "green" if newest.counted else "red"))
    tail = f"  {byte_text(newest.payload_bytes)}, outer step {newest.step:,}"
    if text.cell_len + cell_len(tail) <= width:
        text.append(tail, style="dim")
    return [text]


def check_rate(state: NetworkState) -> list[Text]:
    """Return a line on how fast validators check; none before the first summary."""
    if not state.check_rate:
        return []
    return [line(f"checks  {rate_text(state.check_rate)} tokens in a second of a validator's time")]


def alarms(lines: Sequence[str], width: int, most: int) -> list[Text]:
    """Return the newest alarms, a line each, in red and with a word, so that no colour is needed to notice them."""
    newest = lines[-most:]
    texts = [
        line(("ALARM ", "bold red"), (clean(alarm, min(max(width - 6, 1), _LONGEST_ALARM)), "red")) for alarm in newest
    ]
    if texts and len(lines) > len(newest):
        tail = f" (+{len(lines) - len(newest)} earlier)"
        if texts[-1].cell_len + cell_len(tail) <= width:
            texts[-1].append(tail, style="dim")
    return texts
