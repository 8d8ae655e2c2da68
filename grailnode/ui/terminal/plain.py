"""The view where there is no terminal: one line for each window, as soon as a later window shows that it is settled."""

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.text import Text

from grailnode.observe.state import NetworkState, VersionRow, WindowRow
from grailnode.ui.figures import byte_text, clean, duration_text, part_text, share_text

_MOST_ALARMS: Final = 5  # new ones between two windows; a log must not be flooded by whoever can raise them


class PlainView:
    """Prints ASCII lines without colour or cursor movement.

    Args:
        title: begins the first line.
        console: where to; standard output by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._state: NetworkState | None = None
        self._printed = -1
        self._alarms: set[str] = set()
        self._alarms_since = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            self._windows(self._state, settled=False)

    def update(self, state: NetworkState) -> None:
        """Print what is new."""
        if self._state is None:
            self._say(_opening(self._title, state))
        self._state = state
        self._warn(state)
        self._windows(state, settled=True)

    def _windows(self, state: NetworkState, *, settled: bool) -> None:
        """A line for each window not yet printed; with `settled` only those that a later one follows."""
        rows = state.windows[:-1] if settled else state.windows
        for row in rows:
            if row.window > self._printed:
                self._say(_window(row, state))
                self._printed = row.window
                self._alarms_since = 0

    def _warn(self, state: NetworkState) -> None:
        for alarm in state.alarms:
            if alarm not in self._alarms and self._alarms_since < _MOST_ALARMS:
                self._alarms.add(alarm)
                self._alarms_since += 1
                self._say(f"ALARM {clean(alarm, 200)}")

    def _say(self, line: str) -> None:
        readable = line.encode("ascii", "backslashreplace").decode("ascii")
        self._console.print(Text(readable), soft_wrap=True, highlight=False)


def _opening(title: str, state: NetworkState) -> str:
    planned = f"{state.windows_planned} windows" if state.windows_planned else "windows"
    return (
        f"grailnode {clean(title, 24)}: run {clean(state.run_name, 24)} {state.run_id[:8]}, "
        f"{planned} of {state.window_seconds:g} s, full checkpoint {byte_text(state.full_bytes)}"
    )


def _window(row: WindowRow, state: NetworkState) -> str:
    """'window 12/30  v11  pass@1 0.64  reward 0.61  sparsity 0.971  patch 19.2 KB (1/83)  groups 8 ok, 2 rejected'."""
    planned = f"/{state.windows_planned}" if state.windows_planned else ""
    parts = [f"{duration_text(state.seconds):>5}", f"window {row.window}{planned}", f"v{row.version}"]
    parts += [f"pass@1 {_decimal(row.pass_at_1)}", f"reward {_decimal(row.reward)}"]
    served = next((version for version in state.versions if version.version == row.version), None)
    if served is not None and served.patch_bytes is not None:
        parts += _patch(served, state.full_bytes)
    parts.append(f"groups {row.accepted} verified, {row.rejected} rejected")
    return "  ".join(parts)


def _patch(row: VersionRow, full: int) -> list[str]:
    size = row.patch_bytes or 0
    return [f"sparsity {share_text(row.sparsity)}", f"patch {byte_text(size)} ({part_text(size, full)})"]


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
