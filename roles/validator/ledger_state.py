"""This validator's ledger: its summaries of the windows that count, stored so that they survive a restart, and compared
with what it has published.

A state that was restored from an old backup, or that has lost windows, must not be continued: its next summary would
not follow the published one, and a window could be sealed twice.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError, error_context
from protocol.identity.signing import PublishedRecord
from protocol.judging.accounts import Accounts
from protocol.judging.ledger import Seal, Summary
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.node.retries import WaitReporter, keep_trying
from roles.ports import NotFoundError, ObjectStore, StateError, StoreError, TooLargeError
from roles.records import FOREIGN, fetch_record
from roles.rosters import find_seal

LEDGER = "ledger/"
FLOOR_PATH = "ledger-floor"
"""The newest window that was sealed although its summary is lost; `grailnode repair` writes it."""

_RETRY_SECONDS: Final = 1.0
_MAX_FOREIGN: Final = 16  # records of other runs that are read, where a key is used in several


def ledger_path(window: int) -> str:
    return f"{LEDGER}{window:010d}"


class Ledger:
    """The newest summaries of one validator, revealed or only sealed. Memory holds the newest one, and the accounts."""

    def __init__(self, state: ObjectStore, run: RunManifest) -> None:
        self._state = state
        self._run = run
        self.accounts = Accounts(run.scoring, run.proof)  # of the miners, by the summaries that count
        self.last: Summary | None = None  # the newest summary; None before the first
        self.windows: list[int] = []
        """The windows of the summaries that count, ascending."""
        self._floor = -1  # windows up to this one were sealed, although their summaries are lost

    @classmethod
    async def open(cls, state: ObjectStore, run: RunManifest) -> "Ledger":
        """Return the ledger that is stored in a state; StateError or ProtocolError if that is damaged, or a summary
        does not follow the one before it.
        """
        ledger = cls(state, run)
        async for item in state.list(LEDGER):
            with error_context(f"{item.path} of this node's state"):
                entry = Summary.from_bytes(await state.get(item.path, Summary.max_bytes))
            if (ledger.last and ledger.tip != entry.previous) or item.path != ledger_path(entry.window):
                raise StateError(f"{item.path} of this node's state", "does not follow the window before it")
            ledger._add(entry)
        with suppress(NotFoundError):
            ledger._floor = int(await state.get(FLOOR_PATH, 32))
        return ledger

    def _add(self, entry: Summary) -> None:
        self.accounts.add(entry)
        self.last = entry
        self.windows.append(entry.window)

    @property
    def closed_window(self) -> int:
        """The newest window that this validator may have sealed, and must not seal again; -1 before the first."""
        return max(self.newest, self._floor)

    @property
    def newest(self) -> int:
        """The newest window in the ledger; -1 before the first."""
        return self.last.window if self.last else -1

    @property
    def tip(self) -> bytes:
        """SHA-256 of the newest summary's body; empty before the first."""
        return content_digest(self.last.to_bytes()) if self.last else b""

    def earning_miners(self) -> set[bytes]:
        """Return the miners that earn something by the newest summary."""
        return {miner for miner, _ in self.last.scores} if self.last else set()

    async def entry(self, window: int) -> Summary:
        """Return the summary of one of `windows`."""
        return Summary.from_bytes(await self._state.get(ledger_path(window), Summary.max_bytes))

    async def record(self, summary: Summary) -> Summary:
        """Add the scores to a window's summary, store and return it; drop the summaries that are too old to count."""
        try:
            self.accounts.add(summary)
            entry = summary.model_copy(update={"scores": self.accounts.scores()})
            data = entry.to_bytes()
            Summary.from_bytes(data)
            await self._state.put(ledger_path(entry.window), data)
        except (ProtocolError, StoreError):  # this window does not count
            self.accounts = (await Ledger.open(self._state, self._run)).accounts
            raise
        self.last = entry
        self.windows.append(entry.window)
        while self.windows[0] <= entry.window - self._run.scoring.windows:
            await self._state.delete(ledger_path(self.windows.pop(0)))
        return entry


async def wait_and_check(node: Node, check: Callable[[], Awaitable[None]]) -> None:
    """Check what this validator has published, as soon as its own storage answers."""
    reporter = WaitReporter(node.telemetry, "own-space-unread")
    await keep_trying(check, reporter, "this node's own storage answers", _RETRY_SECONDS)


async def check_published(node: Node, ledger: Ledger) -> None:
    """Compare a ledger with what this validator has published; StateError if it is behind that, or another one."""
    key, newest = node.key.public, ledger.closed_window
    place = f"{LEDGER} of this node's state"
    for record_type, kind, verb in ((Summary, "summaries", "published"), (Seal, "seals", "sealed")):
        window = await _newer_window(node, record_type, paths.kind_prefix(key, kind), newest)
        if window is not None:
            raise StateError(
                place, f"ends with window {newest}, but this validator has {verb} window {window}: an old state?"
            )
    if newest < 0 or newest != ledger.newest:
        return
    try:
        seal = await find_seal(node, newest, key)
    except (TooLargeError, ProtocolError):
        return  # another's bytes in this validator's space: they are written over
    if seal is not None and seal.record.summary != ledger.tip:
        raise StateError(place, f"this validator has sealed another summary of window {newest}")


async def _newer_window(node: Node, record_type: type[PublishedRecord], prefix: str, newest: int) -> int | None:
    """Return a window after `newest` of which this space shows a record of the run; None if there is none."""
    foreign = 0
    async for item in node.store.list(prefix, after=f"{prefix}{newest:010d}" if newest >= 0 else ""):
        try:
            await fetch_record(node, record_type, item.path)
            return paths.window_of(item.path)
        except FOREIGN:
            foreign += 1
            if foreign == _MAX_FOREIGN:
                return None
    return None
