"""A node whose clock is wrong, or whose beacon is silent, waits at its start, says for what, and pledges nothing."""

import time
from email.utils import formatdate
from pathlib import Path

import pytest
import trio

from grailnode.beacon.relays import StoreBeacon
from grailnode.config import load
from grailnode.node.time_check import ClockError, clock_urls, date_reader, wait_for_time
from roles.ports import Beacon, Clock
from tests.support.servers.loopback import HttpRequest, Reply, serve
from tests.support.simulation.faulty_network import WrongClock
from tests.support.simulation.network import Log, Network
from tests.support.simulation.network_runs import RULES
from tests.support.simulation.virtual_clock import running, simulate


def lines_of_start(
    error: float, date_error: float | None, *, begins: float = 0.0, ends: float = 60.0, own: bool = False
) -> list[str]:
    """Return what a node reports until it starts.

    Args:
        error: of its clock, in seconds, until `ends`; date_error: what the storage says about it.
        begins: seconds until the beacon begins to answer.
        own: whether it runs the beacon itself.
    """

    async def scenario() -> list[str]:
        network = Network(RULES)
        clock = WrongClock(network.clock)
        node = network.node("miner-1")
        log = Log("node")

        def make_beacon(clock: Clock) -> Beacon:
            return StoreBeacon(network.store, network.run.beacon, clock)

        async def read() -> ClockError | None:
            await trio.lowlevel.checkpoint()
            seconds = date_error if clock.error_seconds else 0.0
            return None if seconds is None else ClockError("https://storage.example", seconds)

        async def run_beacon() -> None:
            await trio.sleep(begins)
            await network.run_beacon()

        async def set_clock() -> None:
            await trio.sleep(ends)
            clock.error_seconds = 0.0

        await trio.sleep(30)  # the beacon has been at work for some time
        clock.error_seconds = error
        async with running(run_beacon) as nursery:
            nursery.start_soon(set_clock)
            await trio.sleep(1.0)
            object.__setattr__(node, "clock", clock)
            await wait_for_time(node, None if own else make_beacon, read, log)
            assert bool(log.events) == (trio.current_time() > 45)
        return [str(fields.get("error", name)) for name, fields in log.events]

    return simulate(scenario)


@pytest.mark.parametrize("error", [0.0, 0.2, -1.0])
def test_a_node_whose_clock_is_right_starts_at_once(error: float):
    assert lines_of_start(error, error) == []


@pytest.mark.parametrize("own", [False, True], ids=["joiner", "runs the beacon"])
@pytest.mark.parametrize(
    ("error", "words"),
    [(20.0, "at least 20 s ahead of"), (3600.0, "at least 3600 s ahead of"), (-20.0, "at least 20 s behind")],
)
def test_a_wrong_clock_is_waited_for(error: float, words: str, own: bool):
    waiting, right = lines_of_start(error, error, own=own)
    assert f"this machine's clock is {words} https://storage.example: set it right (NTP); waiting" in waiting
    assert "nothing is pledged" in waiting
    assert right == "waited"


def test_a_clock_that_is_behind_is_noticed_by_the_beacon_alone():
    waiting, _ = lines_of_start(-20.0, None)
    assert "this machine's clock is at least 3 s behind the beacon" in waiting


@pytest.mark.parametrize(
    ("date_error", "words"), [(0.0, "(https://storage.example agrees with this machine's clock)"), (None, "answer: ")]
)
def test_a_beacon_that_does_not_answer_is_waited_for(date_error: float | None, words: str):
    waiting, _ = lines_of_start(1e-6, date_error, begins=60.0)
    assert "the beacon does not answer" in waiting
    assert words in waiting
    assert "waiting, and nothing is pledged" in waiting


@pytest.mark.parametrize("offset", [-100.0, 0.0, 100.0])
async def test_the_date_of_a_server_tells_the_time(offset: float):
    def answer(request: HttpRequest) -> Reply:
        return Reply(403, b"", {"Date": formatdate(time.time() - offset, usegmt=True)})

    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve, answer)
        error = await date_reader(["http://127.0.0.1:1", url])()
        nursery.cancel_scope.cancel()
    assert error is not None
    assert offset - 60 < error.seconds < offset + 60  # whole seconds, and a machine that may be slow
    assert bool(error.seconds) == bool(offset)


def test_servers_that_do_not_answer_tell_nothing():
    assert trio.run(date_reader(["http://127.0.0.1:1"])) is None


def test_the_time_is_asked_of_the_storage(run_toml: Path):
    assert clock_urls(load(run_toml)) == []
    places = ["store.kind=s3", "store.bucket=mine", "store.url=https://mine.example", "store.region=eu-west-1"]
    square = ["store.meeting.kind=s3", "store.meeting.bucket=square", "store.meeting.endpoint=https://s3.example"]
    assert clock_urls(load(run_toml, [*places, *square])) == [
        "https://s3.eu-west-1.amazonaws.com",
        "https://s3.example",
    ]
