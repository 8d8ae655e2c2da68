"""What a node may hold true about the time: its machine's clock says when to look, the beacon says that it is so.

Somebody may set a clock wrong. A clock that is ahead is found out by a round that should be out and is not. One that
was set back
is found out by what this node knows already: a round that it has seen was due before now, and since then the process
has lived for so long. So what is signed, sealed or closed for ever waits for proof, and a deadline that others must
keep is measured by the later of the clock and what is proven (docs/adr/0230).
"""

from typing import Final

import trio

from protocol.beacon import ChainInfo
from roles.ports import Beacon, BeaconError, Clock, Telemetry

_PATIENCE: Final = 5.0  # seconds for which a round that should be out is waited for, before the clock is asked again
_GLANCE: Final = 1.0  # seconds for the same where nothing waits for the answer, and between two such looks
_LOOK: Final = 0.25  # seconds between two looks at the clock by who waits for a round


class Timekeeper:
    """Implements the Beacon port over another, and remembers what its rounds prove.

    Args:
        chain: whose rounds the beacon gives.
    """

    def __init__(self, beacon: Beacon, chain: ChainInfo, clock: Clock, telemetry: Telemetry) -> None:
        self._beacon = beacon
        self._chain = chain
        self._clock = clock
        self._telemetry = telemetry
        self._proven = 0  # the newest round known to be out
        self._offset = -float("inf")  # what is at least to be added to the process's own time
        self._rest = -float("inf")

    async def randomness(self, round_number: int) -> bytes:
        """Implements Beacon.randomness."""
        randomness = await self._beacon.randomness(round_number)
        self.note(round_number)
        return randomness

    def note(self, round_number: int) -> None:
        """A round is out: by the beacon, or by a signature of this node's own."""
        self._proven = max(self._proven, round_number)
        self._offset = max(self._offset, self._chain.due(round_number) - trio.current_time())

    @property
    def proven(self) -> int:
        """The newest round that this node has seen; 0 before the first."""
        return self._proven

    def now(self) -> float:
        """Seconds since the Unix epoch, at least: by the clock or, where that was set back, by what is proven."""
        return max(self._clock.now(), self._floor)

    @property
    def _floor(self) -> float:
        """The time, at least: seconds since the Unix epoch."""
        return trio.current_time() + self._offset

    async def has_come(self, round_number: int) -> bool:
        """Whether a round that is due by the clock is known to be out."""
        current = self._chain.round_at(self._clock.now())
        if round_number <= self._proven:
            return True
        if round_number > current or trio.current_time() < self._rest:
            return False
        if not await self._prove(current, _GLANCE) and not await self._prove(round_number, _GLANCE):
            self._rest = trio.current_time() + _GLANCE
        return round_number <= self._proven

    async def come(self, round_number: int) -> None:
        """Wait until a round's time has surely come: by the clock and the beacon or, while that is away, by how long
        this process has lived since a round that it has seen.
        """
        while True:
            await self._clock.sleep_until(self._chain.due(round_number))
            if self._floor >= self._chain.due(round_number) or await self.has_come(round_number):
                return
            await trio.sleep(_LOOK)

    async def moment(self) -> float:
        """Seconds since the Unix epoch, as far as the beacon bears it out; a wrong clock waits here until it is right."""
        newest = await self.newest()
        return min(self.now(), self._chain.due(newest + 1))

    async def newest(self) -> int:
        """The newest round at this call, known to be out; 0 before the first. A wrong clock waits here until it is
        right.
        """
        asked = self._chain.round_at(self.now())
        while True:
            number = self._chain.round_at(self.now())
            asked = min(asked, number)  # lower only where the clock was put right
            if number < 1 or await self._prove(number, _PATIENCE):
                return number
            if asked < number and await self._prove(asked, _PATIENCE):
                return asked  # the beacon lags behind, and always will: this round was awaited long enough
            behind = self.now() - self._clock.now()
            error = (
                f"this machine's clock was set back by {behind:.0f} s; nothing is signed until it is right"
                if behind > _PATIENCE
                else "not out yet; are the relays late, or is this machine's clock ahead? nothing is signed until it is out"
            )
            self._telemetry.event("beacon-late", round=number, error=error)

    async def _prove(self, number: int, seconds: float) -> bool:
        """Whether a round comes within some seconds; not, as soon as the clock holds it due no more."""
        with trio.move_on_after(seconds):
            try:
                await self.randomness(number)
            except BeaconError:
                while self._chain.due(number) <= self.now():
                    await trio.sleep(_LOOK)
            else:
                return True
        return False
