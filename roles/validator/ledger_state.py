"""This validator's ledger: its summaries over the windows that count; durable, so that a restart forgets nothing."""

from protocol.digest import content_digest
from protocol.judging.evidence import Counts
from protocol.judging.ledger import LedgerRow, Summary, clean_windows, histories, scores
from protocol.run import ScoringSpec
from roles.ports import ObjectStore

_PREFIX = "ledger/"


class Ledger:
    """The newest summaries of one validator, those revealed and those that are only sealed yet."""

    def __init__(self, state: ObjectStore, scoring: ScoringSpec) -> None:
        self._state = state
        self._scoring = scoring
        self._entries: dict[int, Summary] = {}

    @classmethod
    async def open(cls, state: ObjectStore, scoring: ScoringSpec) -> "Ledger":
        """The ledger as it was before a restart.

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
        """The newest window that was judged; -1 before the first."""
        return max(self._entries, default=-1)

    @property
    def tip(self) -> bytes:
        """SHA-256 of the newest summary's body; empty before the first."""
        return content_digest(self._entries[self.newest].to_bytes()) if self._entries else b""

    def entries(self) -> list[Summary]:
        """The summaries at hand, ascending by window."""
        return [self._entries[window] for window in sorted(self._entries)]

    def clean_windows(self) -> dict[bytes, int]:
        """For each miner, its clean windows since the last rejection."""
        return clean_windows(self.entries())

    def histories(self) -> dict[bytes, list[Counts]]:
        """For each miner, what its windows since the last rejection showed."""
        return histories(self.entries())

    def rejections(self, until: int | None = None) -> dict[bytes, int]:
        """For each miner that had groups rejected in the windows at hand (up to one), the newest of these."""
        entries = [entry for entry in self.entries() if until is None or entry.window <= until]
        return {row.miner: entry.window for entry in entries for row in entry.rows if row.rejected}

    def unaudited(self, miner: bytes) -> list[tuple[int, LedgerRow]]:
        """Each (window, row) of a miner with groups that count though nobody has looked at them, ascending."""
        entries = self.entries()
        amended = {item.window for summary in entries for item in summary.amendments if item.miner == miner}
        return [
            (summary.window, row)
            for summary in entries
            for row in summary.rows
            if row.miner == miner and not row.rejected and row.audited < row.submitted and summary.window not in amended
        ]

    async def record(self, summary: Summary) -> Summary:
        """Enter a window's summary with the scores that follow from it, durably; drop what is too old to count.

        Raises:
            StoreError: the state cannot be written.
            ProtocolError: the summary is none that anybody could read.
        """
        ledger = [entry for entry in self.entries() if entry.window > summary.window - self._scoring.windows]
        entered = summary.model_copy(update={"scores": scores([*ledger, summary], self._scoring)})
        data = entered.to_bytes()
        Summary.from_bytes(data)
        await self._state.put(f"{_PREFIX}{entered.window:010d}", data)
        self._entries[entered.window] = entered
        for old in [old for old in self._entries if old <= entered.window - self._scoring.windows]:
            await self._state.delete(f"{_PREFIX}{old:010d}")
            del self._entries[old]
        return entered
