"""The live view: the whole terminal, redrawn at every update."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from grailnode.observe.state import NetworkState
from grailnode.ui.terminal.glyphs import AsciiFallback
from grailnode.ui.terminal.screen import Screen


class LiveView:
    """Draws on the terminal's alternate screen, so that resizing leaves no torn lines and the user's scrollback stays
    clean.

    If its block ends with an exception (Ctrl-C too), the view prints its last picture to the normal screen: what the
    user saw when it happened stays on the terminal.

    Args:
        title: at the top left.
        console: a terminal; standard output by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        # There is no refreshing thread: a picture changes only when a state arrives, so that tests see each of them.
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")
        self._last: Screen | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if error is not None and self._last is not None:
            self._console.print(AsciiFallback(self._last))

    def update(self, state: NetworkState) -> None:
        """Draw a newer state."""
        self._last = Screen(self._title, state)
        self._live.update(AsciiFallback(self._last), refresh=True)
