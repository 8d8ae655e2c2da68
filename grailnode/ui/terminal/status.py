"""What `grailnode status` prints: a run at one moment, as a page that scrolls by."""

from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState, WindowRow
from grailnode.ui.figures import byte_text, part_text, share_text
from grailnode.ui.terminal.glyphs import AsciiFallback
from grailnode.ui.terminal.sections import alarms, figures, heading, line, verification
from grailnode.ui.terminal.series import learning, publication
from grailnode.ui.terminal.text_tables import Column, fitted, lines_of, miners, nodes

_RECENT: Final = 8  # windows shown, the newest last
_WIDEST: Final = 120
_ALL: Final = 1 << 20


def render_status(state: NetworkState) -> RenderableType:
    """Head, recent windows, miners, scores and alarms, for any width."""
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
            parts += [figures(learning(state), width), figures(publication(state), width)]
            parts += [Text(""), _windows(state, width)]
        parts += [Text(""), *verification(state, width, lines=2)]
        if state.miners:
            parts += [Text(""), miners(state.miners, width, _ALL, keyed=True)]
        if lines_of(len(state.nodes)):
            parts += [Text(""), nodes(state.nodes, width, _ALL)]
        yield from console.render(Group(*parts), options.update(width=width))


def _head(state: NetworkState) -> list[Text]:
    """A line on the newest version, and one on the anchor that newcomers start from."""
    if not state.versions:
        return [line(("no version has been published yet", "dim"))]
    newest = state.versions[-1]
    parts = [f"head    v{newest.version}, optimizer step {newest.optimizer_step}"]
    if newest.patch_bytes is not None:
        parts.append(
            f"patch {byte_text(newest.patch_bytes)} = {part_text(newest.patch_bytes, state.full_bytes)} of full"
        )
        parts.append(f"sparsity {share_text(newest.sparsity)}")
    lines = [line(", ".join(parts))]
    anchor = next((row for row in reversed(state.versions) if row.anchor_bytes is not None), None)
    if anchor is not None and anchor.anchor_bytes is not None:
        lines.append(line(f"anchor  v{anchor.version}, {byte_text(anchor.anchor_bytes)}"))
    return lines


def _windows(state: NetworkState, width: int) -> Table:
    """The newest windows; narrow terminals lose the version."""
    columns = [
        Column("window", 8),
        Column("version", 7) if width >= 60 else None,
        Column("verified", 8),
        Column("rejected", 8),
        Column("reward", 6) if width >= 44 else None,
        Column("pass@1", 6) if width >= 36 else None,
    ]
    return fitted(columns, [_cells(row) for row in state.windows[-_RECENT:]])


def _cells(row: WindowRow) -> list[Text]:
    measured = ["-" if value is None else f"{value:.2f}" for value in (row.reward, row.pass_at_1)]
    return [
        Text(cell)
        for cell in (f"{row.window:,}", f"v{row.version}", f"{row.accepted:,}", f"{row.rejected:,}", *measured)
    ]
