"""This validator's ledger: its summaries of the windows that count, stored so that they survive a restart."""

from protocol.digest import content_digest
from protocol.judging.evidence import Counts
from protocol.judging.ledger import LedgerRow, Summary, clean_windows, histories, scores
from protocol.run import ScoringSpec
from roles.ports import ObjectStore

_PREFIX = "ledger/"


class Ledger:
    """The newest summaries of one validator, revealed or only sealed."""

    def __init__(self, state: ObjectStore, scoring: ScoringSpec) -> None:
        self._state = state
        self._scoring = scoring
        self._entries: dict[int, Summary] = {}

    @classmethod
    async def open(cls, state: ObjectStore, scoring: ScoringSpec) -> "Ledger":
        """Return the ledger that is stored in a state.

        Raises:
            StoreError, ProtocolError: the state cannot be read.
        """
        ledger = cls(state, scoring)
        async for item in state.list(_PREFIX):
            entry = Summary.from_bytes(await state.get(item.path, Summary.max_bytes))
            ledger._entries[entry.window] = entry
        return ledger

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

    def histories(self) -> dict[bytes, list[Counts]]:
        """Return the counts of each miner's windows since its last rejection, oldest first."""
        return histories(self.entries())

    def rejections(self, until: int | None = None) -> dict[bytes, int]:
        """Return, for each miner with rejected groups, the newest such window (of those up to `until`)."""
        entries = [entry for entry in self.entries() if until is None or entry.window <= until]
        return {row.miner: entry.window for entry in entries for row in entry.rows if row.rejected}

    def unaudited(self, miner: bytes) -> list[tuple[int, LedgerRow]]:
        """Return each (window, row) of a miner in which groups count that nobody has audited, in ascending order."""
        entries = self.entries()
        amended = {item.window for summary in entries for item in summary.amendments if item.miner == miner}
        return [
            (summary.window, row)
            for summary in entries
            for row in summary.rows
            if row.miner == miner and not row.rejected and row.audited < row.submitted and summary.window not in amended
        ]

    async def record(self, summary: Summary) -> Summary:
        """Add the scores to a window's summary and store it; drop the summaries that are too old to count.

        Returns:
            The summary with its scores.

        Raises:
            StoreError: the state cannot be written.
            ProtocolError: the summary could not be read back by anybody.
        """
        earlier = [entry for entry in self.entries() if entry.window > summary.window - self._scoring.windows]
        entry = summary.model_copy(update={"scores": scores([*earlier, summary], self._scoring)})
        data = entry.to_bytes()
        Summary.from_bytes(data)
        await self._state.put(f"{_PREFIX}{entry.window:010d}", data)
        self._entries[entry.window] = entry
        for window in [window for window in self._entries if window <= entry.window - self._scoring.windows]:
            await self._state.delete(f"{_PREFIX}{window:010d}")
            del self._entries[window]
        return entry
