"""The proxy of the benches does to requests what it says, and nothing else."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio

from tests.support.faults.fault_proxy import Weather, Wire, serve
from tests.support.servers import loopback
from tests.support.servers.loopback import Asked, Reply

BODY = random.Random(1).randbytes(300_000)


@asynccontextmanager
async def behind(weather: Weather) -> AsyncIterator[tuple[httpx.AsyncClient, list[Asked]]]:
    """A client of a proxy, and what its server was asked."""
    asked: list[Asked] = []

    def answer(request: Asked) -> Reply:
        asked.append(request)
        return Reply(200, BODY if request.method == "GET" else b"")

    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(loopback.serve, answer))
        port = int(url.rpartition(":")[2])
        (near,) = await nursery.start(partial(serve, weather, {0: ("127.0.0.1", port)}))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{near}", trust_env=False, timeout=3) as client:
            yield client, asked
        nursery.cancel_scope.cancel()


def always(kind: Wire) -> Weather:
    return Weather(1.0, kinds=(kind,), rng=random.Random(1))


@pytest.mark.trio
async def test_in_good_weather_everything_passes_over_one_connection() -> None:
    weather = Weather()
    async with behind(weather) as (client, asked):
        for _ in range(3):
            assert (await client.get("/a%20b?x=1")).content == BODY
        assert (await client.put("/c", content=BODY, headers={"Expect": "100-continue"})).status_code == 200
        assert (await client.head("/c")).status_code == 200
    assert [(request.method, request.target) for request in asked[:1]] == [("GET", "/a%20b?x=1")]
    assert asked[3].body == BODY
    assert weather.met == {"OK": 5}
    assert (weather.bytes_up, weather.bytes_down) == (len(BODY), 3 * len(BODY))


@pytest.mark.trio
@pytest.mark.parametrize(("kind", "status"), [(Wire.ERROR, 500), (Wire.SLOW_DOWN, 503)])
async def test_an_error_that_the_server_never_hears_of(kind: Wire, status: int) -> None:
    async with behind(always(kind)) as (client, asked):
        answer = await client.put("/c", content=BODY)
        assert (answer.status_code, asked) == (status, [])
        assert b"<Code>" in answer.content


@pytest.mark.trio
@pytest.mark.parametrize(
    ("kind", "raised", "heard"),
    [
        (Wire.LOST, httpx.TransportError, False),
        (Wire.LOST_ANSWER, httpx.TransportError, True),
        (Wire.RESET, httpx.TransportError, True),
        (Wire.TRUNCATED, httpx.RemoteProtocolError, True),
        (Wire.HANG, httpx.ReadTimeout, False),
    ],
)
async def test_an_answer_that_does_not_come(kind: Wire, raised: type[Exception], heard: bool) -> None:
    async with behind(always(kind)) as (client, asked):
        with pytest.raises(raised):
            await client.get("/c", timeout=httpx.Timeout(3, read=0.3 if kind is Wire.HANG else 3))
        assert bool(asked) == heard


@pytest.mark.trio
async def test_a_bit_that_is_flipped() -> None:
    async with behind(always(Wire.FLIPPED)) as (client, _):
        body = (await client.get("/c")).content
        assert [(a ^ b).bit_count() for a, b in zip(body, BODY, strict=True) if a != b] == [1]


def test_the_share_of_faults_and_their_repetition() -> None:
    def drawn() -> list[Wire | None]:
        weather = Weather(0.05, rng=random.Random(7))
        return [weather.draw() for _ in range(2000)]

    faults = [fault for fault in drawn() if fault is not None]
    assert 60 < len(faults) < 140
    assert set(faults) == set(Wire)
    assert drawn() == drawn()


@pytest.mark.trio
async def test_latency_is_paid_for_a_connection_and_for_each_request() -> None:
    began = trio.current_time()
    async with behind(Weather(latency=0.02)) as (client, _):
        for _ in range(3):
            await client.head("/c")
    assert trio.current_time() - began >= 4 * 0.02
