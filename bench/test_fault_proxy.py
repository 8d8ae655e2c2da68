"""The proxy injects the fault that was chosen, and changes nothing else."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio

from bench.fault_proxy import NetworkConditions, StreamFault, serve
from tests.support.servers import loopback
from tests.support.servers.loopback import HttpRequest, Reply

BODY = random.Random(1).randbytes(300_000)


@asynccontextmanager
async def proxied_client(conditions: NetworkConditions) -> AsyncIterator[tuple[httpx.AsyncClient, list[HttpRequest]]]:
    """Yield a client of the proxy, and the requests that reach its server."""
    requests: list[HttpRequest] = []

    def answer(request: HttpRequest) -> Reply:
        requests.append(request)
        return Reply(200, BODY if request.method == "GET" else b"")

    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(loopback.serve, answer))
        port = int(url.rpartition(":")[2])
        (near,) = await nursery.start(partial(serve, conditions, {0: ("127.0.0.1", port)}))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{near}", trust_env=False, timeout=3) as client:
            yield client, requests
        nursery.cancel_scope.cancel()


def always(kind: StreamFault) -> NetworkConditions:
    return NetworkConditions(1.0, kinds=(kind,), rng=random.Random(1))


async def test_without_faults_all_requests_use_one_connection() -> None:
    conditions = NetworkConditions()
    async with proxied_client(conditions) as (client, requests):
        for _ in range(3):
            assert (await client.get("/a%20b?x=1")).content == BODY
        assert (await client.put("/c", content=BODY, headers={"Expect": "100-continue"})).status_code == 200
        assert (await client.head("/c")).status_code == 200
    assert [(request.method, request.target) for request in requests[:1]] == [("GET", "/a%20b?x=1")]
    assert requests[3].body == BODY
    assert conditions.counts == {"OK": 5}
    assert (conditions.bytes_up, conditions.bytes_down) == (len(BODY), 3 * len(BODY))


@pytest.mark.parametrize(("kind", "status"), [(StreamFault.ERROR, 500), (StreamFault.SLOW_DOWN, 503)])
async def test_errors_without_effect_do_not_reach_the_server(kind: StreamFault, status: int) -> None:
    async with proxied_client(always(kind)) as (client, requests):
        answer = await client.put("/c", content=BODY)
        assert (answer.status_code, requests) == (status, [])
        assert b"<Code>" in answer.content


@pytest.mark.parametrize(
    ("kind", "raised", "is_delivered"),
    [
        (StreamFault.LOST_REQUEST, httpx.TransportError, False),
        (StreamFault.LOST_ANSWER, httpx.TransportError, True),
        (StreamFault.RESET, httpx.TransportError, True),
        (StreamFault.TRUNCATION, httpx.RemoteProtocolError, True),
        (StreamFault.HANG, httpx.ReadTimeout, False),
    ],
)
async def test_faults_that_lose_the_response(kind: StreamFault, raised: type[Exception], is_delivered: bool) -> None:
    async with proxied_client(always(kind)) as (client, requests):
        with pytest.raises(raised):
            await client.get("/c", timeout=httpx.Timeout(3, read=0.3 if kind is StreamFault.HANG else 3))
        assert bool(requests) == is_delivered


async def test_a_flipped_bit_changes_one_bit_of_the_body() -> None:
    async with proxied_client(always(StreamFault.BIT_FLIP)) as (client, _):
        body = (await client.get("/c")).content
        assert [(a ^ b).bit_count() for a, b in zip(body, BODY, strict=True) if a != b] == [1]


def test_faults_have_the_given_share_and_are_deterministic() -> None:
    def draw_faults() -> list[StreamFault | None]:
        conditions = NetworkConditions(0.05, rng=random.Random(7))
        return [conditions.draw() for _ in range(2000)]

    faults = [fault for fault in draw_faults() if fault is not None]
    assert 60 < len(faults) < 140
    assert set(faults) == set(StreamFault)
    assert draw_faults() == draw_faults()


async def test_latency_delays_each_connection_and_each_request() -> None:
    start_time = trio.current_time()
    async with proxied_client(NetworkConditions(latency=0.02)) as (client, _):
        for _ in range(3):
            await client.head("/c")
    assert trio.current_time() - start_time >= 4 * 0.02
