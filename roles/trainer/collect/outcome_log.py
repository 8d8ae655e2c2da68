"""The outcome log: what became of every judged group of every miner's window. Durable and append-only."""

from collections.abc import Sequence
from contextlib import suppress

from protocol import paths
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.spool import COLLECTOR_PROGRESS, OUTCOMES
from roles.trainer.verified_batch import CollectorProgress, GroupOutcome, WindowOutcomes


def object_name(window: int, miner: bytes) -> str:
    """Return the name of an object that exists once for a miner's window."""
    return f"{window:010d}-{miner.hex()}"


class OutcomeLog:
    """The outcome log of one trainer.

    Memory holds the entries of windows for which verdicts may still come; of other windows only the miners.
    """

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._windows: dict[int, dict[bytes, tuple[GroupOutcome, ...] | None]] = {}  # None: on disk only
        self.oldest_window: int | None = None
        """The oldest window for which verdicts may still come; None before the first start."""

    async def open(self) -> None:
        """Read which windows and miners have entries, and how far the collector has come."""
        with suppress(NotFoundError):
            data = await self._state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
            self.oldest_window = CollectorProgress.from_bytes(data).oldest_window
        async for item in self._state.list(OUTCOMES):
            path = item.path.removeprefix(OUTCOMES)
            self._windows.setdefault(paths.window_of(path), {})[paths.key_at_end(path)] = None

    def has_entries(self, window: int, miner: bytes) -> bool:
        """Whether something was logged for a miner's window, be it an empty list."""
        return miner in self._windows.get(window, {})

    async def outcomes(self, window: int, miner: bytes) -> tuple[GroupOutcome, ...]:
        """Return what is logged for a miner's window; nothing if there are no entries."""
        if not self.has_entries(window, miner):
            return ()
        outcomes = self._windows[window][miner]
        if outcomes is None:
            data = await self._state.get(OUTCOMES + object_name(window, miner), WindowOutcomes.max_bytes)
            outcomes = self._windows[window][miner] = WindowOutcomes.from_bytes(data).outcomes
        return outcomes

    async def append(self, window: int, miner: bytes, outcomes: Sequence[GroupOutcome]) -> None:
        """Log what became of more groups of a miner's window."""
        record = WindowOutcomes(window=window, miner=miner, outcomes=(*await self.outcomes(window, miner), *outcomes))
        await self._state.put(OUTCOMES + object_name(window, miner), record.to_bytes())
        self._windows.setdefault(window, {})[miner] = record.outcomes

    async def advance(self, oldest_window: int) -> None:
        """Remember the oldest window for which verdicts may still come."""
        self.oldest_window = oldest_window
        await self._state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=oldest_window).to_bytes())

    def release(self, window: int) -> None:
        """Free the memory of a window's entries, which stay on disk."""
        for miner in self._windows.get(window, {}):
            self._windows[window][miner] = None

    async def delete_before(self, window: int) -> None:
        """Delete the entries of all windows before one."""
        for old_window in [number for number in self._windows if number < window]:
            for miner in self._windows.pop(old_window):
                await self._state.delete(OUTCOMES + object_name(old_window, miner))
