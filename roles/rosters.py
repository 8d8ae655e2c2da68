"""Read what validators publish of windows: their rosters, who has judged something of late by the summaries
(docs/spec/window.md), the seals, and the witnesses that say which seals a validator has seen.
"""

from collections import defaultdict
from contextlib import suppress
from typing import Final

import trio

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, claimed_signers
from protocol.judging.ledger import Seal, Summary, Witness
from protocol.judging.roster import Roster, presence_windows
from roles.gather import STORAGE_ERRORS, gather
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.records import fetch_record, open_record

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


async def find_seal(node: Node, window: int, validator: bytes) -> Signed[Seal] | None:
    """Return the seal of a validator for a window; None if storage shows none."""
    try:
        return await fetch_record(node, Seal, paths.seal(validator, window))
    except NotFoundError:
        return None


async def fetch_witnessed_seals(node: Node, window: int, validator: bytes) -> set[tuple[bytes, bytes]]:
    """Return (validator, digest of its summary) of the seals of current validators that a validator saw before it
    revealed a window. Entries that are none are passed over: they incriminate nobody.
    """
    witness = await fetch_record(node, Witness, paths.witness(validator, window))
    summaries: set[tuple[bytes, bytes]] = await node.run_sync(_open_seals, node, witness.record)
    return summaries


def _open_seals(node: Node, witness: Witness) -> set[tuple[bytes, bytes]]:
    summaries: set[tuple[bytes, bytes]] = set()
    for item in witness.seals:
        with suppress(ProtocolError):
            for signer in set(claimed_signers(item, Seal)).intersection(node.authority.validators):
                seal = open_record(node, Seal, paths.seal(signer, witness.window), item)
                summaries.add((signer, seal.record.summary))
    return summaries
