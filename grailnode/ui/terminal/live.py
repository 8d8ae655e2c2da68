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

    A view that is left by an exception (Ctrl-C among them) prints its last picture to the normal screen: it is what the
    user was looking at when it happened.

    Args:
        title: stands at the top left.
        console: a terminal; standard output by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        # No refreshing thread: a picture changes when a state arrives, and tests see every one of them.
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
