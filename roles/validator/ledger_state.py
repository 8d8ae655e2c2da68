"""This validator's ledger: its summaries of the windows that count, stored so that they survive a restart."""

from contextlib import suppress

from protocol.encoding import content_digest
from protocol.errors import ProtocolError, error_context
from protocol.judging.accounts import Accounts
from protocol.judging.ledger import Summary
from protocol.run import RunManifest
from roles.ports import NotFoundError, ObjectStore, StateError

LEDGER = "ledger/"
FLOOR_PATH = "ledger-floor"
"""The newest window that was sealed although its summary is lost; `grailnode repair` writes it."""


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
        except ProtocolError:
            self.accounts = (await Ledger.open(self._state, self._run)).accounts
            raise
        await self._state.put(ledger_path(entry.window), data)
        self.last = entry
        self.windows.append(entry.window)
        while self.windows[0] <= entry.window - self._run.scoring.windows:
            await self._state.delete(ledger_path(self.windows.pop(0)))
        return entry
