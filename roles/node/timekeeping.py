"""What a node may believe about the time: its clock says when to look, and the beacon proves it.

An operator may set a clock wrong. If it is ahead, a round that should be out is not. If it was set back, the node
knows better: a round that it has seen was due before now, and the process has run for some time since then. So the node
signs and seals nothing, and closes nothing for ever, before the time is proven, and it measures a deadline that others
must keep by the later of the clock and the proven time (docs/adr/0230).
"""

from typing import Final

import trio

from protocol.beacon import ChainInfo
from roles.node.retries import WaitReporter
from roles.ports import Beacon, BeaconError, Clock, Telemetry

_PATIENCE: Final = 5.0  # seconds to wait for a round that should be out, before the clock is read again
_GLANCE: Final = 1.0  # seconds for the same where no task waits for the answer, and between two such tries
_CLOCK_POLL: Final = 0.25  # seconds between two looks at the clock while a task waits for a round


class Timekeeper:
    """Implements the Beacon port over another, and remembers what its rounds prove, and reports a wait for a round."""

    def __init__(self, beacon: Beacon, chain: ChainInfo, clock: Clock, telemetry: Telemetry) -> None:
        self._beacon = beacon
        self._chain = chain
        self._clock = clock
        self.late = WaitReporter(telemetry, "beacon-late")
        self.newest_round = 0
        self._offset = -float("inf")  # from trio's time to a lower bound of the time since the Unix epoch
        self._next_try = -float("inf")  # trio's time before which `has_come` does not ask the beacon

    async def randomness(self, round_number: int) -> bytes:
        randomness = await self._beacon.randomness(round_number)
        self.record_round(round_number)
        return randomness

    def record_round(self, round_number: int) -> None:
        """Remember that a round is out: the beacon gave it, or a signature of this node's own rests on it."""
        self.newest_round = max(self.newest_round, round_number)
        self._offset = max(self._offset, self._chain.round_time(round_number) - trio.current_time())

    def now(self) -> float:
        """Return the later of the clock and the proven time, in seconds since the Unix epoch."""
        return max(self._clock.now(), self._floor)

    @property
    def _floor(self) -> float:
        """A lower bound of the time, in seconds since the Unix epoch."""
        return trio.current_time() + self._offset

    async def has_come(self, round_number: int) -> bool:
        """Return whether a round that is due by the clock is proven to be out."""
        current = self._chain.round_at(self._clock.now())
        if round_number <= self.newest_round:
            return True
        if round_number > current or trio.current_time() < self._next_try:
            return False
        if not await self._prove(current, _GLANCE) and not await self._prove(round_number, _GLANCE):
            self._next_try = trio.current_time() + _GLANCE
        return round_number <= self.newest_round

    async def wait_for_round(self, round_number: int) -> None:
        """Wait until a round's time has come by clock and beacon, or by a round seen and the time since it."""
        while True:
            await self._clock.sleep_until(self._chain.round_time(round_number))
            if self._floor >= self._chain.round_time(round_number) or await self.has_come(round_number):
                return
            await trio.sleep(_CLOCK_POLL)

    async def proven_time(self) -> float:
        """Return the time that the beacon proves, in seconds since the Unix epoch; with a wrong clock this waits."""
        newest = await self.wait_for_newest_round()
        return min(self.now(), self._chain.round_time(newest + 1))

    async def wait_for_newest_round(self) -> int:
        """Return the newest round at this call, proven to be out; 0 before the first. A wrong clock delays this."""
        first_round = self._chain.round_at(self.now())
        while True:
            number = self._chain.round_at(self.now())
            first_round = min(first_round, number)  # lower only where the clock was put right
            if number < 1 or await self._prove(number, _PATIENCE):
                self.late.over()
                return number
            if first_round < number and await self._prove(first_round, _PATIENCE):
                self.late.over()
                return first_round  # the beacon always lags behind: this round was awaited long enough
            behind = self.now() - self._clock.now()
            if behind > _PATIENCE:
                error = f"this machine's clock was set back by {behind:.0f} s; nothing is signed until it is right"
                self.late.waiting("clock", error, "somebody sets the clock right (NTP)", "set back")
            else:
                error = f"round {number} is not out yet: the relays are late, or this machine's clock is ahead"
                self.late.waiting(
                    "beacon", error, "a round comes that is due by the clock (NTP); then it signs", "late"
                )

    async def _prove(self, number: int, seconds: float) -> bool:
        """Return whether a round comes within some seconds; False as soon as it is no longer due by the clock."""
        with trio.move_on_after(seconds):
            try:
                await self.randomness(number)
            except BeaconError:
                while self._chain.round_time(number) <= self.now():
                    await trio.sleep(_CLOCK_POLL)
            else:
                return True
        return False
