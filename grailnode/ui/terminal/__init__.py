"""A run in a terminal: the live view, plain lines for a log file, the pages of `status` and `demo`, and the tables of
`verify --rollout`, `inspect` and `calibrate`.
"""

from rich.console import Console

from grailnode.ui.terminal.pages import LiveView, PlainView

View = LiveView | PlainView
"""A view of a run, open during its `with` block; an update is cheap enough for ten calls a second."""


def open_view(title: str, console: Console | None = None) -> View:
    """Return the live view for a terminal that can show it, plain lines for any other output."""
    console = console or Console()
    # rich takes FORCE_COLOR for a terminal; a log file that wants colour must not get a full-screen view.
    writes_utf8 = console.encoding.lower().startswith("utf")
    if console.is_dumb_terminal or not console.file.isatty() or not writes_utf8:
        return PlainView(title, console)
    return LiveView(title, console)
