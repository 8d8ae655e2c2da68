"""What a node checks of clock and beacon before it pledges anything: it waits until both are right, and says for what.

The beacon proves the time (docs/adr/0230). If a round that is due by the clock does not come, either the clock is ahead
or nobody serves the beacon; the Date header of the node's own storage tells which. If a later round is out already, the
clock is behind.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import httpx
import trio

from grailnode.config import Config
from grailnode.store.place import PlaceSection
from roles.node.identity import Node
from roles.node.retries import WaitReporter
from roles.ports import Beacon, BeaconError, Clock, Telemetry

TOLERANCE_SECONDS: Final = 3.0
"""An error of the clock that a node starts with; the beacon makes up for it."""

_PATIENCE_SECONDS: Final = 10.0  # for a round that is due
_GLANCE_SECONDS: Final = 1.0  # for one that is not
_PAUSE_SECONDS: Final = 2.0
_HTTP_SECONDS: Final = 5.0
_MAX_SLEEP_SECONDS: Final = 1.0


class SystemClock:
    """Wall-clock time, for deadlines that nodes must agree on."""

    def now(self) -> float:
        return time.time()

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch).

        The clock is read at least once a second, because an operator may set it meanwhile.
        """
        while (remaining := moment - self.now()) > 0:
            await trio.sleep(min(remaining, _MAX_SLEEP_SECONDS))
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True)
class ClockError:
    """How far this machine's clock is from another's, at least."""

    source: str  # the other clock, for people
    seconds: float  # that this machine's clock is ahead; negative if it is behind, 0 if the two may be equal


ReadClockError = Callable[[], Awaitable[ClockError | None]]
"""Compares this machine's clock with another one; None if that one does not answer."""


class ShiftedClock:
    """A clock that is some seconds ahead of another one."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def now(self) -> float:
        return self._clock.now() + self._seconds

    async def sleep_until(self, moment: float) -> None:
        await self._clock.sleep_until(moment - self._seconds)


async def wait_for_time(
    node: Node, make_beacon: Callable[[Clock], Beacon] | None, read_clock_error: ReadClockError, telemetry: Telemetry
) -> None:
    """Wait until clock and beacon are right; the node that runs the beacon itself makes none."""
    reporter = WaitReporter(telemetry, "waiting")
    while (problem := await find_problem(node, make_beacon, read_clock_error)) is not None:
        kind, text = problem
        text += "; waiting, and nothing is pledged meanwhile (Ctrl-C ends this)"
        reporter.waiting(kind.split()[0], text, "clock and beacon are right", kind)
        await trio.sleep(_PAUSE_SECONDS)
    reporter.over()


async def find_problem(
    node: Node, make_beacon: Callable[[Clock], Beacon] | None, read_clock_error: ReadClockError
) -> tuple[str, str] | None:
    """Return why the node cannot start now, None if it can: a kind for reports, and what is wrong and what to do."""
    if make_beacon is None:
        error = await read_clock_error()
        wrong = error is not None and abs(error.seconds) > TOLERANCE_SECONDS
        return _wrong_clock(error) if error is not None and wrong else None
    beacon, chain = make_beacon(node.clock), node.run.beacon
    number = chain.round_at(node.clock.now())
    cause = await _why_missing(beacon, number, _PATIENCE_SECONDS) if number >= 1 else None
    if cause is not None:
        error = await read_clock_error()
        if error is not None and error.seconds > TOLERANCE_SECONDS:
            return _wrong_clock(error)
        agreement = f" ({error.source} agrees with this machine's clock)" if error is not None else ""
        return (
            "beacon",
            f"the beacon does not answer{agreement}: {cause}; is the node that runs it up, or can its relays be "
            "reached?",
        )
    # A round that is due only after the tolerance by this machine's clock must not be out yet.
    later_clock = ShiftedClock(node.clock, TOLERANCE_SECONDS)
    later = chain.round_at(later_clock.now())
    if later > number and await _why_missing(make_beacon(later_clock), later, _GLANCE_SECONDS) is None:
        error = await read_clock_error()
        if error is None or error.seconds >= -TOLERANCE_SECONDS:
            error = ClockError("the beacon", -TOLERANCE_SECONDS)
        return _wrong_clock(error)
    return None


def _wrong_clock(error: ClockError) -> tuple[str, str]:
    side = "ahead of" if error.seconds > 0 else "behind"
    return (
        f"clock {side}",
        f"this machine's clock is at least {abs(error.seconds):.0f} s {side} {error.source}: set it right (NTP)",
    )


async def _why_missing(beacon: Beacon, number: int, seconds: float) -> str | None:
    """Return why a round cannot be read within some seconds; None if it can."""
    with trio.move_on_after(seconds):
        try:
            await beacon.randomness(number)
        except BeaconError as error:
            return str(error)
        else:
            return None
    return f"round {number} is due and does not come"


def clock_urls(config: Config) -> list[str]:
    """Return the URLs of servers whose Date header tells the time: of the storage that this node uses."""
    return [url for place in (config.store, config.store.meeting) if place is not None and (url := _server(place))]


def _server(place: PlaceSection) -> str:
    if place.kind == "s3":
        return place.endpoint or f"https://s3.{place.region}.amazonaws.com"
    return place.url if place.kind == "https" else ""


def date_reader(urls: Sequence[str]) -> ReadClockError:
    """Return a function that compares this machine's clock with the Date header of the first server that answers."""

    async def read() -> ClockError | None:
        async with httpx.AsyncClient(timeout=_HTTP_SECONDS) as client:
            for url in urls:
                start = time.time()
                try:
                    response = await client.head(url)
                    date = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
                except (httpx.HTTPError, ValueError):
                    continue
                return ClockError(url, _difference(start, time.time(), date))
        return None

    return read


def _difference(start: float, end: float, date: float) -> float:
    """Return how far a clock is at least ahead of a server's (negative: behind), all in seconds since the Unix epoch.

    `start` and `end` of the request are by the clock, and the answer's date has lost its fraction of a second.
    """
    return max(0.0, start - (date + 1.0)) + min(0.0, end - date)
