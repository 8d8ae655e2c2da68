"""The page that `grailnode status` prints: a run at one moment."""

from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState, WindowRow
from grailnode.ui.formatting import byte_part_text, byte_text, clean, decimal_text, share_text
from grailnode.ui.terminal.glyphs import AsciiFallback
from grailnode.ui.terminal.sections import alarms, check_rate, heading, line, rounds, trend_rows, verification
from grailnode.ui.terminal.text_tables import Column, fitted, lines_of, miners, nodes, sites
from grailnode.ui.terminal.trends import learning, publication

_RECENT: Final = 8  # windows in the table, the newest last
_WIDEST: Final = 120
_ALL: Final = 1 << 20


def render_status(state: NetworkState) -> RenderableType:
    """Return head, recent windows, miners, scores and alarms, for any width."""
    return AsciiFallback(_Status(state))


class _Status:
    def __init__(self, state: NetworkState) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width = self._state, min(options.max_width, _WIDEST)
        parts: list[RenderableType] = [heading("status", state, width)]
        parts += alarms(state.alarms, width, _ALL)
        parts += [Text(""), *_head(state)]
        if state.windows:
            parts += [trend_rows(learning(state), width), trend_rows(publication(state), width)]
            parts += [Text(""), _windows(state, width), *_strata(state)]
        parts += [Text(""), *verification(state, width, lines=2), *check_rate(state), *_bottleneck(state)]
        if state.miners:
            parts += [Text(""), miners(state.miners, width, _ALL, keyed=True)]
        if state.sites:
            parts += [Text(""), *rounds(state, width), sites(state.sites, width, _ALL)]
        if lines_of(len(state.nodes)):
            parts += [Text(""), nodes(state.nodes, width, _ALL)]
        yield from console.render(Group(*parts), options.update(width=width))


def _head(state: NetworkState) -> list[Text]:
    """Write a line on the newest version, and one on the anchor from which newcomers start."""
    if not state.versions:
        return [line(("no version has been published yet", "dim"))]
    newest = state.versions[-1]
    parts = [f"head    v{newest.version}, optimizer step {newest.optimizer_step}"]
    if newest.patch_bytes is not None and newest.sparsity is not None:
        parts.append(f"patch {byte_part_text(newest.patch_bytes, state.full_bytes)}")
        parts.append(f"sparsity {share_text(newest.sparsity)}")
    lines = [line(", ".join(parts))]
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
    """Write what limits the trainer, and what validators had no time for, over as many lines as it takes."""
    return [Text(item) for item in (*([f"trainer {state.bottleneck}"] if state.bottleneck else []), *state.unjudged)]


def _strata(state: NetworkState) -> list[Text]:
    """Write a line with pass@1 of each kind of held-out problems, where there are kinds."""
    strata = next((row.strata for row in reversed(state.windows) if row.strata), ())
    if len(strata) < 2:
        return []
    parts = [f"{clean(row.name, 24) or 'other'} {row.pass_at_1:.2f} ({row.problems})" for row in strata]
    return [line(f"pass@1 by kind of problem: {', '.join(parts)}")]
