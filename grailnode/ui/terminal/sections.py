"""The parts of the terminal view that are not tables: heading, figures, verification, alarms."""

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState
from grailnode.ui.figures import clean, duration_text, merged, rate_text, reasons_text
from grailnode.ui.terminal.glyphs import columns, progress
from grailnode.ui.terminal.series import Trend

_LABEL: Final = 15
_WORDS: Final = 26
_WIDEST_SPARK: Final = 64
_ENDLESS: Final = 1 << 20


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """One line that is cut with an ellipsis where it does not fit."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def heading(title: str, state: NetworkState, width: int) -> Group:
    """Two lines: what runs for how long, and how far it is."""
    version = f"v{state.versions[-1].version}" if state.versions else ""
    name = clean(state.run_name, 24)
    left = line(("grailnode", "bold"), f" {clean(title, 24)}", f"  run {name}" if name != title else "  run ")
    left.append(f" {state.run_id[:8]}".replace("  ", " ") if name != title else state.run_id[:8], style="cyan")
    right = f"{version}  {duration_text(state.seconds)}".strip()
    return Group(_ends(left, Text(right), width), _position(state, width))


def _ends(left: Text, right: Text, width: int) -> Text:
    """Two texts at the two ends of a line; the right one goes where both do not fit."""
    space = width - left.cell_len - right.cell_len
    if space < 2:
        return left
    return line(left, " " * space, right)


def _position(state: NetworkState, width: int) -> Text:
    """'window 12 of 30 ━━━━━───── 1:48 left'; an endless run shows the window that is open instead."""
    if state.window is None:
        return line(("waiting for the first window", "dim"))
    elapsed = min(max(state.window_elapsed, 0.0), state.window_seconds)
    if state.windows_planned:
        length = state.windows_planned * state.window_seconds
        done = min(state.window * state.window_seconds + elapsed, length)
        words = f"window {min(state.window, state.windows_planned)} of {state.windows_planned}"
        after = f"{duration_text(length - done)} left" if done < length else "finishing"
    else:
        length, done = state.window_seconds, elapsed
        words, after = f"window {state.window:,}", f"next in {duration_text(length - done)}"
    room = width - len(words) - len(after) - 2
    if room < 6:
        return line((words, "bold"), f" {after}")
    finished, todo = progress(done / length if length > 0 else 0.0, room)
    return line((words, "bold"), " ", (finished, "green"), (todo, "dim"), " ", after)


def figures(traces: Sequence[Trend], width: int, height: int = 1) -> RenderableType:
    """One row a trace: name, sparkline of `height` lines, words. The sparkline goes first where it is narrow."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=min(_LABEL, width), no_wrap=True, vertical="bottom")
    spark = min(width - _LABEL - _WORDS - 4, _WIDEST_SPARK)
    drawn = spark >= 8
    words = width - _LABEL - 2 - (spark + 2 if drawn else 0)
    if drawn:
        grid.add_column(width=spark, no_wrap=True)
    if words >= 4:
        grid.add_column(width=words, no_wrap=True, vertical="bottom")
    for trace in traces:
        row = [line(trace.label)]
        if drawn:
            lines = columns(trace.values, spark, height, trace.expected)
            row.append(Text("\n".join(lines), style=trace.style, no_wrap=True))
        if words >= 4:
            row.append(line((trace.words if words >= _WORDS else trace.short, "bold")))
        grid.add_row(*row)
    return grid


def verification(state: NetworkState, width: int, lines: int = 1) -> list[Text]:
    """Groups verified and rejected, with the reasons that fit into this line, or into one of their own where `lines` is
    2.
    """
    accepted = sum(row.accepted for row in state.miners)
    reasons = merged([row.rejected for row in state.miners])
    text = line("groups  ", (f"{accepted:,} verified", "green"), "  ", (f"{sum(reasons.values()):,} rejected", "red"))
    room = width - text.cell_len - 2
    if lines > 1 and cell_len(reasons_text(reasons, _ENDLESS)) > room:
        return [text, line((" " * 8 + reasons_text(reasons, max(width - 8, 1)), "dim"))]
    if reasons and room >= 8:
        text.append("  ").append(reasons_text(reasons, room), style="dim")
    return [text]


def rates(state: NetworkState) -> str:
    """Tokens a second since the view began; empty where nothing was counted."""
    if state.seconds <= 0 or not (state.tokens_generated or state.tokens_verified):
        return ""
    generated, verified = state.tokens_generated / state.seconds, state.tokens_verified / state.seconds
    return f"{rate_text(generated)} tok/s generated, {rate_text(verified)} verified"


def alarms(lines: Sequence[str], width: int, most: int) -> list[Text]:
    """The newest alarms, a line each, in red and with a word, so that no colour is needed to see them."""
    shown = list(lines)[-most:] if most > 0 else []
    texts = [line(("ALARM ", "bold red"), (clean(alarm, max(width - 6, 1)), "red")) for alarm in shown]
    if texts and len(lines) > len(shown):
        tail = f" (+{len(lines) - len(shown)} earlier)"
        if texts[-1].cell_len + cell_len(tail) <= width:
            texts[-1].append(tail, style="dim")
    return texts
