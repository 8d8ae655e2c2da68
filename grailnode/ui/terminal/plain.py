"""The view for outputs that are no terminal: one line for each window, printed when a later window exists and the row
does not change any more.
"""

from collections.abc import Sequence
from typing import Final, Self

from rich.console import Console
from rich.text import Text

from grailnode.observe.state import NetworkState, WindowRow
from grailnode.ui.formatting import byte_text, clean, decimal_text, duration_text, part_text, share_text

_MOST_ALARMS: Final = 5  # new ones between two windows: strangers can cause alarms, and must not flood a log


class PlainView:
    """Prints ASCII lines without colour or cursor movement."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._state: NetworkState | None = None
        self._last_window = -1
        self._alarms: set[str] = set()
        self._alarms_since_window = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._print_windows(self._state, self._state.windows)

    def update(self, state: NetworkState) -> None:
        """Print the windows and alarms that are new."""
        if self._state is None:
            self._print(_opening_line(self._title, state))
        self._state = state
        for alarm in state.alarms:
            if alarm not in self._alarms and self._alarms_since_window < _MOST_ALARMS:
                self._alarms.add(alarm)
                self._alarms_since_window += 1
                self._print(f"ALARM {clean(alarm, 200)}")
        self._print_windows(state, state.windows[:-1])

    def _print_windows(self, state: NetworkState, rows: Sequence[WindowRow]) -> None:
        """Print a line for each of some windows that has none yet."""
        for row in rows:
            if row.window > self._last_window:
                self._print(_window_line(row, state))
                self._last_window = row.window
                self._alarms_since_window = 0

    def _print(self, line: str) -> None:
        readable = line.encode("ascii", "backslashreplace").decode("ascii")
        self._console.print(Text(readable), soft_wrap=True, highlight=False)


def _opening_line(title: str, state: NetworkState) -> str:
    planned = f"{state.windows_planned} windows" if state.windows_planned else "windows"
    return (
        f"grailnode {clean(title, 24)}: run {clean(state.run_name, 24)} {state.run_id[:8]}, "
        f"{planned} of {state.window_seconds:g} s, full checkpoint {byte_text(state.full_bytes)}"
    )


def _window_line(row: WindowRow, state: NetworkState) -> str:
    """'1:12  window 12 (13/30)  v11  pass@1 0.64  reward 0.61  sparsity 0.971  patch 19 KB (1/83)  ...'."""
    place, planned = "", state.windows_planned
    if planned:
        count = row.window + 1
        place = f" ({count}/{planned})" if count <= planned else f" (after the {planned} planned)"
    parts = [f"{duration_text(state.seconds):>5}", f"window {row.window}{place}", f"v{row.version}"]
    parts += [f"pass@1 {decimal_text(row.pass_at_1)}", f"reward {decimal_text(row.reward)}"]
    version = next((version for version in state.versions if version.version == row.version), None)
    if version is not None and version.patch_bytes is not None and version.sparsity is not None:
        parts.append(f"sparsity {share_text(version.sparsity)}")
        parts.append(f"patch {byte_text(version.patch_bytes)} ({part_text(version.patch_bytes, state.full_bytes)})")
    parts.append(f"groups {row.accepted} verified, {row.rejected} rejected")
    if state.rounds:
        newest = state.rounds[-1]
        parts.append(f"round {newest.number}: {newest.counted} of {newest.sites} sites, {newest.groups} groups")
    return "  ".join(parts)
