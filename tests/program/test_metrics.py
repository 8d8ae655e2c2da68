"""/metrics as Prometheus asks for it, and as somebody with bad manners does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from grailnode.config import ConfigError
from grailnode.node.metrics import serve_metrics
from grailnode.node.telemetry import Telemetry

pytestmark = pytest.mark.trio


@asynccontextmanager
async def serving(telemetry: Telemetry) -> AsyncIterator[int]:
    """A port on which a telemetry's numbers are served."""
    probe = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = probe.socket.getsockname()[1]
    await probe.aclose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_metrics, port, telemetry.exposition)
        for _ in range(100):
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                break
            except OSError:
                await trio.sleep(0.01)
        yield port
        nursery.cancel_scope.cancel()


async def test_prometheus_gets_gauges_counters_and_events():
    telemetry = Telemetry("trainer/upload")
    telemetry.gauge("version", 7.0)
    telemetry.count("store_put_ok", 2.0)
    telemetry.event("published", version=7)
    async with serving(telemetry) as port, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert 'grailnode_version{node="trainer/upload"} 7.0' in lines
        assert 'grailnode_store_put_ok_total{node="trainer/upload"} 2.0' in lines
        assert 'grailnode_events_total{node="trainer/upload",event="published"} 1' in lines
        assert (await client.get(f"http://127.0.0.1:{port}/health")).text == "alive\n"
        assert (await client.get(f"http://127.0.0.1:{port}/keys")).status_code == 404
        assert (await client.post(f"http://127.0.0.1:{port}/metrics")).status_code == 405


async def test_bytes_that_are_no_request_hold_up_nobody():
    async with serving(Telemetry("miner-1")) as port:
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        await streams[0].send_all(b"\xff" * 10_000)
        await streams[1].send_all(b"GET /metrics")  # and no more
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
        for stream in streams:
            await stream.aclose()


async def test_a_port_that_is_taken_is_one_clear_line():
    async with serving(Telemetry("a")) as port:
        with pytest.raises(ConfigError, match=f"metrics_port: {port} cannot be used"):
            await serve_metrics(port, Telemetry("b").exposition)
