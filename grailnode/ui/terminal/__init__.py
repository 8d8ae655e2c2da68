"""A run in a terminal: the live view, plain lines for a log file, the pages of `status` and `demo`, and the tables of
`verify --rollout`, `inspect` and `calibrate`.
"""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from grailnode.observe.state import NetworkState
from grailnode.ui.terminal.pages import render_status, render_summary
from grailnode.ui.terminal.plain import PlainView
from grailnode.ui.terminal.screen import LiveView
from grailnode.ui.terminal.verb_tables import pairs_table, patch_table, recheck_table, threshold_lines

__all__ = [
    "LiveView",
    "PlainView",
    "View",
    "open_view",
    "pairs_table",
    "patch_table",
    "recheck_table",
    "render_status",
    "render_summary",
    "threshold_lines",
]


class View(Protocol):
    """A view of a run, open during its `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, state: NetworkState) -> None:
        """Show a newer state. It is cheap enough for ten calls a second."""


def open_view(title: str, console: Console | None = None) -> View:
    """Return the live view for a terminal that can show it, plain lines for any other output.

    Args:
        title: the name of the view, at the top.
        console: the output; standard output by default.
    """
    console = console or Console()
    # rich takes FORCE_COLOR for a terminal; a log file that wants colour must not get a full-screen view.
    if console.is_dumb_terminal or not console.file.isatty() or not _writes_utf8(console):
        return PlainView(title, console)
    return LiveView(title, console)


def _writes_utf8(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
