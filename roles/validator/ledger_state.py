"""This validator's ledger: its summaries of the windows that count, stored so that they survive a restart."""

from contextlib import suppress

from protocol.encoding import content_digest
from protocol.errors import error_context
from protocol.judging.evidence import Evidence
from protocol.judging.ledger import LedgerRow, Summary, clean_windows, evidence_of, scores
from protocol.judging.roster import Roster
from protocol.run import RunManifest
from roles.ports import NotFoundError, ObjectStore, StateError

LEDGER = "ledger/"
FLOOR_PATH = "ledger-floor"
"""The newest window that was sealed although its summary is lost; `grailnode repair` writes it."""


def ledger_path(window: int) -> str:
    return f"{LEDGER}{window:010d}"


class Ledger:
    """The newest summaries of one validator, revealed or only sealed."""

    def __init__(self, state: ObjectStore, run: RunManifest) -> None:
        self._state = state
        self._scoring = run.scoring
        self._proof = run.proof
        self._entries: dict[int, Summary] = {}
        self._floor = -1  # windows up to this one were sealed, although their summaries are lost

    @classmethod
    async def open(cls, state: ObjectStore, run: RunManifest) -> "Ledger":
        """Return the ledger that is stored in a state.

        Raises:
            StateError: a summary does not follow the one before it.
            StateError, ProtocolError: the state is damaged.
        """
        ledger = cls(state, run)
        tip: bytes | None = None
        async for item in state.list(LEDGER):
            with error_context(f"{item.path} of this node's state"):
                entry = Summary.from_bytes(await state.get(item.path, Summary.max_bytes))
            if tip not in (None, entry.previous) or item.path != ledger_path(entry.window):
                raise StateError(f"{item.path} of this node's state", "does not follow the window before it")
            ledger._entries[entry.window] = entry
            tip = content_digest(entry.to_bytes())
        with suppress(NotFoundError):
            ledger._floor = int(await state.get(FLOOR_PATH, 32))
        return ledger

    @property
    def closed_window(self) -> int:
        """The newest window that this validator may have sealed, and must not seal again; -1 before the first."""
        return max(self.newest, self._floor)

    @property
    def newest(self) -> int:
        """The newest window in the ledger; -1 before the first."""
        return max(self._entries, default=-1)

    @property
    def tip(self) -> bytes:
        """SHA-256 of the newest summary's body; empty before the first."""
        return content_digest(self._entries[self.newest].to_bytes()) if self._entries else b""

    def entries(self) -> list[Summary]:
        """Return the summaries in ascending order of window."""
        return [self._entries[window] for window in sorted(self._entries)]

    def clean_windows(self) -> dict[bytes, int]:
        """Return each miner's clean windows since its last rejection."""
        return clean_windows(self.entries())

    def evidence_of(self, miner: bytes, arithmetic: str) -> Evidence:
        """Return the evidence against a miner from the windows in which it declared an arithmetic."""
        return evidence_of(self.entries(), self._proof, miner, arithmetic)

    def earning_miners(self) -> set[bytes]:
        """Return the miners that earn something by the newest summary."""
        return {miner for miner, _ in self._entries[self.newest].scores} if self._entries else set()

    def rejections(self, until: int | None = None) -> dict[bytes, int]:
        """Return, for each miner with rejected groups, the newest such window (of those up to `until`)."""
        entries = [entry for entry in self.entries() if until is None or entry.window <= until]
        return {row.miner: entry.window for entry in entries for row in entry.rows if row.rejected}

    def unaudited(self, miner: bytes) -> list[tuple[int, LedgerRow]]:
        """Return each (window, row) of a miner in which groups count that were dealt to this validator and that it has
        not audited, in ascending order.
        """
        entries = self.entries()
        amended = {item.window for summary in entries for item in summary.amendments if item.miner == miner}
        return [
            (summary.window, row)
            for summary in entries
            for row in summary.rows
            if row.miner == miner and not (row.rejected or row.lapsed) and row.audited < row.dealt
            if summary.window not in amended
        ]

    def roster(self, window: int) -> Roster:
        """Return the validators among which this one dealt the groups of a window in the ledger."""
        return self._entries[window].dealing

    async def record(self, summary: Summary) -> Summary:
        """Add the scores to a window's summary, store and return it; drop the summaries that are too old to count."""
        earlier = [entry for entry in self.entries() if entry.window > summary.window - self._scoring.windows]
        entry = summary.model_copy(update={"scores": scores([*earlier, summary], self._scoring, self._proof)})
        data = entry.to_bytes()
        Summary.from_bytes(data)
        await self._state.put(ledger_path(entry.window), data)
        self._entries[entry.window] = entry
        for window in [window for window in self._entries if window <= entry.window - self._scoring.windows]:
            await self._state.delete(ledger_path(window))
            del self._entries[window]
        return entry
