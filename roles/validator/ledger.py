"""Scores over the last windows, from this validator's own verdicts; durable, so that a restart forgets nothing."""

from typing import Annotated, ClassVar

from pydantic import Field

from protocol import limits
from protocol.encoding import Record
from protocol.rollout import Window
from protocol.run import ScoringSpec
from protocol.signing import Key
from protocol.verdict import Verdict, shares, tally
from roles.ports import ObjectStore

_PREFIX = "ledger/"
Count = Annotated[int, Field(ge=0)]


class Entry(Record):
    """(miner, accepted, rejected) groups of one window."""

    kind: ClassVar[str] = "ledger-entry"
    window: Window
    counts: Annotated[tuple[tuple[Key, Count, Count], ...], Field(max_length=limits.MAX_PARTICIPANTS)]


class Ledger:
    """What each miner delivered over the windows that count."""

    def __init__(self, state: ObjectStore, scoring: ScoringSpec) -> None:
        self._state = state
        self._scoring = scoring
        self._entries: dict[int, Entry] = {}

    @classmethod
    async def open(cls, state: ObjectStore, scoring: ScoringSpec) -> "Ledger":
        """The ledger as it was before a restart.

        Raises:
            StoreError, ProtocolError: the state cannot be read.
        """
        ledger = cls(state, scoring)
        async for item in state.list(_PREFIX):
            entry = Entry.from_bytes(await state.get(item.path, Entry.max_bytes))
            ledger._entries[entry.window] = entry
        return ledger

    @property
    def newest(self) -> int:
        """The newest window that was judged; -1 before the first."""
        return max(self._entries, default=-1)

    async def record(self, window: int, verdicts: list[Verdict]) -> None:
        """Enter a window's verdicts, durably; drop what is too old to count.

        Raises:
            StoreError: the state cannot be written.
        """
        counts = tuple((miner, *pair) for miner, pair in sorted(tally(verdicts).items()))
        entry = Entry(window=window, counts=counts)
        await self._state.put(f"{_PREFIX}{window:010d}", entry.to_bytes())
        self._entries[window] = entry
        for old in [old for old in self._entries if old <= window - self._scoring.windows]:
            await self._state.delete(f"{_PREFIX}{old:010d}")
            del self._entries[old]

    def shares(self) -> dict[bytes, float]:
        """Each miner's share of the reward over the windows that count."""
        totals: dict[bytes, tuple[int, int]] = {}
        for entry in self._entries.values():
            for miner, accepted, rejected in entry.counts:
                before = totals.get(miner, (0, 0))
                totals[miner] = (before[0] + accepted, before[1] + rejected)
        return shares(totals, self._scoring)
