"""The live screen: the layout of a state for the terminal's size at this moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import NetworkState
from grailnode.ui.terminal import sections
from grailnode.ui.terminal.glyphs import AsciiFallback, columns
from grailnode.ui.terminal.sections import Trend, line
from grailnode.ui.terminal.text_tables import lines_of, miners, nodes, sites

# Terminals of this size or more get frames and tall charts; on smaller ones every line counts.
_SPACIOUS_WIDTH: Final = 100
_SPACIOUS_HEIGHT: Final = 34
_MOST_ALARMS: Final = 3
_LEAST_TABLE: Final = 3  # lines: a heading, a row, and the number of further rows


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
        self._last: Screen | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()
        if error is not None and self._last is not None:
            self._console.print(AsciiFallback(self._last))

    def update(self, state: NetworkState) -> None:
        """Draw a newer state."""
        self._last = Screen(self._title, state)
        self._live.update(AsciiFallback(self._last), refresh=True)


@dataclass(frozen=True)
class Screen:
    """A state that is laid out when it is drawn, so that a resized terminal is right at the next update."""

    title: str
    state: NetworkState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        # A margin of one cell on each side, on terminals wide enough for it.
        inner = width - 2 if width >= 60 else width
        spacious = width >= _SPACIOUS_WIDTH and height >= _SPACIOUS_HEIGHT
        lay_out = _spacious if spacious else _compact
        grid = Table.grid(padding=0, pad_edge=False)
        if inner < width:
            grid.add_column(width=1)
        grid.add_column(width=inner)
        body = lay_out(self.title, self.state, inner, height)
        grid.add_row(*([Text(" ")] if inner < width else []), body)
        yield grid


def _compact(title: str, state: NetworkState, width: int, height: int) -> RenderableType:
    """Lay out everything on few lines. On short terminals blank lines go first, then rows of miners, then of nodes."""
    warnings = sections.alarms(state.alarms, width, _MOST_ALARMS)
    room = max(height - 2 - len(warnings) - 4 - 1, 0)
    all_miners, all_nodes = lines_of(len(state.miners)), lines_of(len(state.nodes))
    for_sites = _site_lines(state, room // 2)
    room -= for_sites
    spare = max(room - all_miners - all_nodes, 0)
    tall = 3 if spare >= 10 else 1
    groups = sections.verification(state, width, lines=2 if spare >= 1 else 1)
    blanks = max(spare - 2 * 2 * (tall > 1) - (len(groups) - 1), 0)
    for_miners = min(all_miners, max(room - all_nodes, room // 2))
    if for_miners < min(all_miners, _LEAST_TABLE):
        for_miners = min(all_miners, room)
    for_nodes = min(all_nodes, room - for_miners)
    parts: list[list[RenderableType]] = [[sections.heading(title, state, width)]]
    if warnings:
        parts.append(list(warnings))
    parts.append(
        [
            sections.trend_rows(sections.learning(state), width, tall),
            sections.trend_rows(sections.publication(state), width),
        ]
    )
    parts.append(list(groups))
    if for_miners >= min(all_miners, _LEAST_TABLE) > 0:
        parts.append([miners(state.miners, width, for_miners)])
    if for_sites:
        parts.append([*sections.rounds(state, width), sites(state.sites, width, for_sites - len(state.rounds[-1:]))])
    if for_nodes >= min(all_nodes, _LEAST_TABLE) > 0:
        parts.append([nodes(state.nodes, width, for_nodes)])
    return _spread(parts, blanks)


def _site_lines(state: NetworkState, most: int) -> int:
    """Return how many lines the sites get, the line on the newest round included; 0 if they would not fit."""
    lines = lines_of(len(state.sites)) + len(state.rounds[-1:])
    least = _LEAST_TABLE + len(state.rounds[-1:])
    return min(lines, most) if min(lines, most) >= min(lines, least) else 0


def _spread(parts: Sequence[Sequence[RenderableType]], blanks: int) -> Group:
    """Stack the parts, with a blank line between them, from the top down, until `blanks` are used up."""
    lines: list[RenderableType] = []
    for place, part in enumerate(parts):
        if place and blanks > 0:
            lines.append(Text(""))
            blanks -= 1
        lines.extend(part)
    return Group(*lines)


def _spacious(title: str, state: NetworkState, width: int, height: int) -> RenderableType:
    """Lay out frames: the learning charts, the publication charts, verification with the miners, the nodes."""
    warnings = sections.alarms(state.alarms, width - 4, _MOST_ALARMS)
    top = 3 + (len(warnings) + 2 if warnings else 0)
    # Two rows of charts need at least five lines each; the two frames below them take six beside their tables.
    most = max(height - top - 2 * 5 - 6, 0)
    for_nodes = min(lines_of(len(state.nodes)), most // 2)
    for_sites = _site_lines(state, (most - for_nodes - 2) // 2)
    framed_sites = for_sites + 2 if for_sites else 0
    for_miners = min(lines_of(len(state.miners)), most - for_nodes - framed_sites)
    framed = for_miners + 2 + 2 + framed_sites + (for_nodes + 2 if for_nodes else 0)
    room = height - top - framed - 4
    tall = min(max(room * 3 // 5, 3), 10)
    low = min(max(room - tall, 2), 5)
    parts: list[RenderableType] = [sections.heading(title, state, width), Text("")]
    if warnings:
        parts.append(_frame("alarms", Group(*warnings), "red"))
    parts += [_pair(sections.learning(state), width, tall), _pair(sections.publication(state), width, low)]
    inside = width - 4
    body = Group(*sections.verification(state, inside), Text(""), miners(state.miners, inside, for_miners))
    parts.append(_frame("verification", body, note=sections.rates(state)))
    if for_sites:
        rows = sites(state.sites, inside, for_sites - len(state.rounds[-1:]))
        parts.append(_frame("sites", Group(*sections.rounds(state, inside), rows)))
    if for_nodes >= 2:
        parts.append(_frame("nodes", nodes(state.nodes, inside, for_nodes)))
    return Group(*parts)


def _pair(trends: tuple[Trend, Trend], width: int, height: int) -> RenderableType:
    """Draw two charts in frames, side by side."""
    grid = Table.grid(padding=0, pad_edge=False)
    halves = (width // 2, width - width // 2)
    for half in halves:
        grid.add_column(width=half)
    cells = []
    for trend, half in zip(trends, halves, strict=True):
        lines = columns(trend.values, half - 4, height, trend.planned)
        cells.append(_frame(trend.label, Text("\n".join(lines), style=trend.style, no_wrap=True), note=trend.words))
    grid.add_row(*cells)
    return grid


def _frame(title: str, body: RenderableType, style: str = "dim", note: str = "") -> Panel:
    """Draw a frame with its name at the top left and a figure in its lower edge."""
    return Panel(
        body,
        box=box.ROUNDED,
        border_style=style,
        title=line((f"{title}", "not dim bold")),
        title_align="left",
        subtitle=line((note, "not dim")) if note else None,
        subtitle_align="right",
        padding=(0, 1),
    )
