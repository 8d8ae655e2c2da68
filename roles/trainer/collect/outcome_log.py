"""What became of every judged group of every miner's window: durable, and an entry that is made never changes."""

from collections.abc import Sequence
from contextlib import suppress

from protocol import paths
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.spool import COLLECTED, COLLECTING
from roles.trainer.verified_batch import CollectorProgress, Outcome, WindowOutcomes


def windowed(window: int, miner: bytes) -> str:
    """The name of what there is once for a miner's window."""
    return f"{window:010d}-{miner.hex()}"


class OutcomeLog:
    """The accounts of one trainer.

    What they say is held in memory for the windows of which something may still come, and for others only that they are
    there.
    """

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self._accounts: dict[int, dict[bytes, tuple[Outcome, ...] | None]] = {}
        self.oldest: int | None = None
        """The oldest window of which something may still come; None before the first."""

    async def open(self) -> None:
        """Remember which there are, and how far they go.

        Raises:
            StoreError, ProtocolError: the state cannot be read.
        """
        with suppress(NotFoundError):
            self.oldest = CollectorProgress.from_bytes(
                await self._state.get(COLLECTING, CollectorProgress.max_bytes)
            ).oldest
        async for item in self._state.list(COLLECTED):
            path = item.path.removeprefix(COLLECTED)
            self._accounts.setdefault(paths.window_of(path), {})[paths.key_at_end(path)] = None

    def holds(self, window: int, miner: bytes) -> bool:
        """Whether a miner's window has an account."""
        return miner in self._accounts.get(window, {})

    async def outcomes(self, window: int, miner: bytes) -> tuple[Outcome, ...]:
        """What is entered for a miner's window; nothing where there is no account.

        Raises:
            StoreError, ProtocolError: the state cannot be read.
        """
        if not self.holds(window, miner):
            return ()
        found = self._accounts[window][miner]
        if found is None:
            data = await self._state.get(COLLECTED + windowed(window, miner), WindowOutcomes.max_bytes)
            found = self._accounts[window][miner] = WindowOutcomes.from_bytes(data).outcomes
        return found

    async def enter(self, window: int, miner: bytes, outcomes: Sequence[Outcome]) -> None:
        """Add what became of more groups.

        Raises:
            StoreError, ProtocolError: the state cannot be read or written; nothing is entered.
        """
        account = WindowOutcomes(window=window, miner=miner, outcomes=(*await self.outcomes(window, miner), *outcomes))
        await self._state.put(COLLECTED + windowed(window, miner), account.to_bytes())
        self._accounts.setdefault(window, {})[miner] = account.outcomes

    async def advance(self, oldest: int) -> None:
        """Remember the oldest window of which something may still come.

        Raises:
            StoreError: the state cannot be written; a restart looks at the window before again.
        """
        self.oldest = oldest
        await self._state.put(COLLECTING, CollectorProgress(oldest=oldest).to_bytes())

    def close(self, window: int) -> None:
        """Let go of what a window's accounts say: nothing more comes of it."""
        for miner in self._accounts.get(window, {}):
            self._accounts[window][miner] = None

    async def forget(self, before: int) -> None:
        """Delete the accounts of windows before one.

        Raises:
            StoreError: the state cannot be written.
        """
        for window in [window for window in self._accounts if window < before]:
            for miner in self._accounts.pop(window):
                await self._state.delete(COLLECTED + windowed(window, miner))
