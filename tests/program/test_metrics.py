"""What a process serves at /metrics and /health, to Prometheus and to clients that break the protocol."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from grailnode.config import ConfigError
from grailnode.node.metrics_server import serve_metrics
from grailnode.node.telemetry import NodeTelemetry


@asynccontextmanager
async def serving(telemetry: NodeTelemetry) -> AsyncIterator[int]:
    """Serve the metrics of a process; yields the port."""
    probe = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = probe.socket.getsockname()[1]
    await probe.aclose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_metrics, port, telemetry.metrics.exposition)
        for _ in range(100):
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                break
            except OSError:
                await trio.sleep(0.01)
        yield port
        nursery.cancel_scope.cancel()


async def test_prometheus_reads_events_and_store_operations():
    telemetry = NodeTelemetry("trainer/upload")
    for version in (7, 8):
        telemetry.event("published", version=version, path="manifests/8")
    for outcome in ("ok", "ok", "error"):
        telemetry.metrics.record("put", outcome, 100, 0.25)
    async with serving(telemetry) as port, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        node = {"node": "trainer/upload"}

        def samples(name: str) -> dict[str, float]:
            """Return values by their labels except `node`, as `a=b,c=d`."""
            family_samples = families[name].samples
            assert all(sample.labels.items() >= node.items() for sample in family_samples)
            return {
                ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "node"): sample.value
                for sample in family_samples
            }

        assert samples("grailnode_events") == {"event=published": 2.0}
        assert samples("grailnode_event_value") == {"event=published,field=version": 8.0}
        assert samples("grailnode_store_operations") == {
            "operation=put,outcome=ok": 2.0,
            "operation=put,outcome=error": 1.0,
        }
        assert samples("grailnode_store_bytes") == {"operation=put": 300.0}
        assert samples("grailnode_store_seconds") == {"operation=put": 0.75}
        assert families["process_resident_memory_bytes"].samples[0].value > 0
        assert 'grailnode_events_total{event="published",node="trainer/upload"} 2.0' in answer.text.splitlines()


async def test_two_processes_count_apart():
    one, other = NodeTelemetry("a"), NodeTelemetry("b")
    one.event("started")
    assert b"started" in one.metrics.exposition()
    assert b"started" not in other.metrics.exposition()


async def test_health_and_other_requests():
    async with serving(NodeTelemetry("miner-1")) as port, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).text == "alive\n"
        assert (await client.head(f"http://127.0.0.1:{port}/health")).content == b""
        assert (await client.get(f"http://127.0.0.1:{port}/keys")).status_code == 404
        assert (await client.post(f"http://127.0.0.1:{port}/metrics")).status_code == 405


async def test_broken_requests_delay_no_other_client():
    async with serving(NodeTelemetry("miner-1")) as port:
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        await streams[0].send_all(b"\xff" * 10_000)
        await streams[1].send_all(b"GET /metrics")  # and no more
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
        for stream in streams:
            await stream.aclose()


async def test_a_port_in_use_is_reported_in_one_line():
    async with serving(NodeTelemetry("a")) as port:
        with pytest.raises(ConfigError, match=f"metrics_port: {port} cannot be used"):
            await serve_metrics(port, NodeTelemetry("b").metrics.exposition)
