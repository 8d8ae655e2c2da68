"""Read the rosters of windows: which validators have judged something of late, by their published summaries
(docs/spec/window.md).
"""

from collections import defaultdict
from typing import Final

import trio

from protocol import paths
from protocol.judging.ledger import Summary
from protocol.judging.roster import Roster, presence_windows
from roles.gather import STORAGE_ERRORS, gather
from roles.node.identity import Node
from roles.records import fetch_record

_PATIENCE: Final = 0.5  # for storage that hangs: a share of the time between a window's opening and R1


class Rosters:
    """The rosters of windows as one node sees them. Each is read once, with the authority of that moment. Where nodes
    read differently, a group is judged by one validator too few or too many: it is lost, or costs a prefill more.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._rosters: dict[int, Roster] = {}
        self._locks: defaultdict[int, trio.Lock] = defaultdict(trio.Lock)  # of the windows that are being read
        self._absent: list[str] = []
        self._shown_windows: defaultdict[bytes, set[int]] = defaultdict(set)  # by validator, in which it judged

    async def get(self, window: int) -> Roster:
        """Return the roster of a window; read it if it was not read before."""
        if window not in self._rosters:
            authority, spares = self._node.authority, self._node.run.spares
            if authority.quorum + spares >= len(authority.validators):
                self._rosters[window] = Roster.of(authority.validators, (), authority.quorum, spares)
            else:
                async with self._locks[window]:
                    if window not in self._rosters:
                        await self._read(window)
                self._locks.pop(window, None)
        return self._rosters[window]

    def forget(self, window: int) -> None:
        """Forget the rosters of the windows up to one."""
        self._rosters = {number: roster for number, roster in self._rosters.items() if number > window}

    async def _read(self, window: int) -> None:
        node, authority = self._node, self._node.authority
        windows = presence_windows(node.run.schedule, window)
        present: set[bytes] = set()

        async def look(validator: bytes) -> None:
            seen_windows = self._shown_windows[validator]
            for number in reversed(windows):
                if number in seen_windows or await self._shows_work(validator, number):
                    seen_windows.add(number)
                    present.add(validator)
                    break
            seen_windows.intersection_update(windows)

        seconds = _PATIENCE * node.run.schedule.audit_rounds * node.run.beacon.period_ms / 1000
        with trio.move_on_after(seconds):
            await gather(look, sorted(authority.validators), at_once=len(authority.validators))
        roster = Roster.of(authority.validators, present, authority.quorum, node.run.spares)
        absent = [validator.hex()[:8] for validator in authority.validators if validator not in roster.validators]
        if absent != self._absent:
            self._absent = absent
            node.telemetry.event("roster", window=window, validators=len(roster.validators), absent=",".join(absent))
        self._rosters[window] = roster

    async def _shows_work(self, validator: bytes, window: int) -> bool:
        """Return whether a validator's summary of a window shows that it has judged something."""
        try:
            summary = await fetch_record(self._node, Summary, paths.summary(validator, window))
        except STORAGE_ERRORS:
            return False
        return summary.record.shows_work
