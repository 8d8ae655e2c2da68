"""What a process serves at /metrics and /health, and what `status` says of the trainer's time."""

import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from grailnode import UserError
from grailnode.config import Config, NodeSection
from grailnode.node.http_server import Answer, Request, serve_http
from grailnode.node.metrics import ALARMS, serve_metrics
from grailnode.node.telemetry import NodeTelemetry
from grailnode.observe.node_logs import (
    TrainerTime,
    bottleneck,
    read_trainer_time,
    recent_starts,
    troubles,
    unjudged_cases,
    with_local_knowledge,
)
from grailnode.observe.state import JudgedWindow, MinerRow, NetworkState, VersionRow
from protocol import limits
from protocol.run import verdict_room
from roles.node.retries import WAIT_REPORT_SECONDS, WaitReporter
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, draft
from tests.support.simulation.virtual_clock import running, simulate


@asynccontextmanager
async def serving(telemetry: NodeTelemetry) -> AsyncIterator[int]:
    """Serve the metrics of a process; yields the port."""
    probe = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = probe.socket.getsockname()[1]
    await probe.aclose()
    async with running(serve_metrics, port, telemetry.metrics.exposition):
        for _ in range(100):
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                break
            except OSError:
                await trio.sleep(0.01)
        yield port


async def test_prometheus_reads_events_and_store_operations():
    telemetry = NodeTelemetry("trainer/upload")
    for version in (7, 8):
        telemetry.event("published", version=version, path="manifests/8")
    for groups in (3, 4):
        telemetry.event("delivered", window=5, version=8, groups=groups, bytes=100)
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

        assert samples("grailnode_events") == {f"event={event}": 0.0 for event in ALARMS} | {
            "event=published": 2.0,
            "event=delivered": 2.0,
        }
        assert abs(samples("grailnode_event_timestamp_seconds")["event=published"] - time.time()) < 60
        assert samples("grailnode_published_version") == {"": 8.0}
        assert samples("grailnode_delivered_groups") == {"": 7.0}
        assert samples("grailnode_store_operations") == {
            "operation=put,outcome=ok": 2.0,
            "operation=put,outcome=error": 1.0,
        }
        assert samples("grailnode_store_payload_bytes") == {"operation=put": 300.0}
        assert samples("grailnode_store_wait_seconds") == {"operation=put": 0.75}
        assert families["process_resident_memory_bytes"].samples[0].value > 0
        assert 'grailnode_events_total{event="published",node="trainer/upload"} 2.0' in answer.text.splitlines()


async def test_health_and_other_requests():
    async with serving(NodeTelemetry("miner-1")) as port, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).text == "alive\n"
        head = await client.head(f"http://127.0.0.1:{port}/health")
        assert (head.content, head.headers["content-length"]) == (b"", "6")
        assert (await client.get(f"http://127.0.0.1:{port}/keys")).status_code == 404
        assert (await client.post(f"http://127.0.0.1:{port}/metrics")).status_code == 405


async def test_broken_requests_delay_no_other_client():
    async with serving(NodeTelemetry("miner-1")) as port:
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        await streams[0].send_all(b"\xff" * 10_000)
        await streams[1].send_all(b"GET /metrics")  # and no more
        await streams[2].send_all(b"GET / HTTP/1.1\r\n")
        streams[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await streams[2].aclose()  # resets the connection
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
        for stream in streams:
            await stream.aclose()


async def test_a_port_in_use_is_reported_in_one_line():
    async with serving(NodeTelemetry("a")) as port:
        with pytest.raises(UserError, match=f"metrics_port: {port} cannot be used"):
            await serve_metrics(port, NodeTelemetry("b").metrics.exposition)


# What `grailnode status` says about the trainer's time


def network(submitted: int, accepted: int, rejected: int, steps: tuple[int, ...] = (1, 2, 3)) -> NetworkState:
    miner = MinerRow("a1" * 32, "miner-1", "unknown", submitted, accepted, {"copied": rejected}, 1.0)
    versions = tuple(VersionRow(version, step, version, 10, None, 1, 100) for version, step in enumerate(steps))
    return NetworkState("ab" * 32, "run", 9.0, 3, None, 6.0, 0.0, 200, versions=versions, miners=(miner,))


def with_stranger(state: NetworkState) -> NetworkState:
    stranger = MinerRow("b2" * 32, "stranger", "unknown", 180, 0, {"copied": 12}, 0.0)
    return replace(state, miners=(*state.miners, stranger))


@pytest.mark.parametrize(
    ("time", "state", "expected"),
    [
        (TrainerTime(0.86, 0.0), network(100, 90, 10), "waits 86% of its time for verified groups; add miners"),
        (TrainerTime(0.86, 0.0), network(100, 30, 10), "validators judge 40 of 100 groups: add validators"),
        (TrainerTime(0.5, 0.0), network(0, 0, 0), "add miners"),
        (TrainerTime(0.2, 0.0), network(9, 9, 0), "computes 80% of its time"),
        (TrainerTime(0.2, 0.0), network(9, 9, 0, (0, 3, 6)), "a version every 3.0 steps instead of 1"),
        (TrainerTime(0.1, 0.6), network(9, 9, 0), "storage is slower than steps; raise steps_per_version"),
        (TrainerTime(0.86, 0.0, is_shared=True), network(100, 90, 10), "share this machine's cores"),
        (TrainerTime(0.1, 0.0), network(9, 9, 0, (0,)), "computes 90% of its time"),
        (TrainerTime(0.86, 0.0), with_stranger(network(396, 390, 6)), "add miners"),  # its groups were rejected
    ],
)
def test_the_line_names_the_bottleneck_and_what_to_add(time: TrainerTime, state: NetworkState, expected: str) -> None:
    line = bottleneck(time, state, steps_per_version=1, run=draft(demo_rules(), ("validator-0",)))
    assert expected in line
    assert "\n" not in line


async def test_validators_that_judge_all_that_a_verdict_has_room_for_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Network(demo_rules()).node("trainer")
    event = {"event": "step", "data_wait_fraction": 0.86, "io_wait_fraction": 0}
    (tmp_path / "trainer-training.jsonl").write_text(json.dumps(event) + "\n")
    config, state = Config(node=NodeSection(logs=tmp_path)), network(100, 30, 10)
    assert "add validators" in with_local_knowledge(config, node, state).bottleneck
    monkeypatch.setattr(limits, "MAX_VERDICT_BYTES", 1024)  # room for one group
    assert "add miners" in with_local_knowledge(config, node, state).bottleneck


@pytest.mark.parametrize(("judged_share", "expected"), [(0.3, "add validators"), (0.9, "add miners")])
def test_the_room_of_a_verdict_is_compared_with_what_miners_deliver_and_not_with_what_they_may(
    judged_share: float, expected: str
) -> None:
    run = draft(demo_rules(), ("validator-0",))
    room = verdict_room(run.group_size, run.sampling.max_tokens)
    judged = int(judged_share * room)
    state = replace(network(2 * room, judged, 0), recent={"a1" * 32: (JudgedWindow(1, judged, 0),)})
    assert expected in bottleneck(TrainerTime(0.86, 0.0), state, 1, run.model_copy(update={"groups": 10 * room}))


def test_the_newest_step_in_a_log_counts(tmp_path: Path) -> None:
    assert read_trainer_time(tmp_path) is None
    log = tmp_path / "trainer-training.jsonl"
    log.write_text('{"event": "started"}\n')
    assert read_trainer_time(tmp_path) is None
    steps = [{"event": "step", "data_wait_fraction": share, "io_wait_fraction": 0} for share in (0.9, 0.25)]
    log.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"event": "st')
    assert read_trainer_time(tmp_path) == TrainerTime(0.25, 0.0)
    log.write_bytes(b"x" * (1 << 17) + log.read_bytes())
    (tmp_path / "trainer-upload.jsonl").touch()
    assert read_trainer_time(tmp_path) == TrainerTime(0.25, 0.0)
    (tmp_path / "miner-1.jsonl").touch()
    assert read_trainer_time(tmp_path) == TrainerTime(0.25, 0.0, is_shared=True)
    log.write_bytes(b"\xff\n[]\n")
    assert read_trainer_time(tmp_path) is None


def test_a_line_says_what_a_validator_had_no_time_for(tmp_path: Path) -> None:
    log = tmp_path / "validator-1.jsonl"
    left = {"left_earning": 0, "left_known": 2, "left_stranger": 1500, "left_rejected": 0}
    log.write_text(json.dumps({"event": "judged", "window": 6, "cases": 9, **left}) + "\n")
    assert unjudged_cases(tmp_path) == (
        "validator-1 judged 9 miners' groups of window 6 and left 2 of known miners, 1,500 of strangers: "
        "add validators, or faster ones",
    )
    newer = {"event": "judged", "window": 7, "cases": 9, **dict.fromkeys(left, 0)}
    log.write_text(log.read_text() + json.dumps(newer) + "\n")
    assert unjudged_cases(tmp_path) == ()


# What a node waits for, and how often it was started: log, metrics and status say the same


def test_a_wait_is_in_the_log_the_metrics_and_the_status(tmp_path: Path) -> None:
    telemetry = NodeTelemetry("miner-1", tmp_path / "miner-1.jsonl")

    async def scenario() -> None:
        reporter = WaitReporter(telemetry, "beacon-late")
        for cause in ("late", "late", "set back", "set back"):
            await trio.sleep(WAIT_REPORT_SECONDS / 4)
            reporter.waiting("beacon", f"no round ({cause})", "a relay answers", cause)
        since = time.time() - 0.5 * WAIT_REPORT_SECONDS
        (line,) = troubles(tmp_path, time.time())
        assert line.startswith("miner-1 waits for beacon since ")
        assert line.endswith(": no round (set back) (it ends when a relay answers)")
        values = _waiting(telemetry)
        assert abs(values["beacon"] - since) < 60
        assert not troubles(tmp_path, time.time() + WAIT_REPORT_SECONDS + 120)  # the process was killed
        reporter.over()

    simulate(scenario)
    events = [json.loads(line)["event"] for line in (tmp_path / "miner-1.jsonl").read_text().splitlines()]
    assert events == ["beacon-late", "beacon-late", "waited"]
    assert troubles(tmp_path, time.time()) == ()
    assert _waiting(telemetry) == {"beacon": 0.0}


def test_a_wait_that_goes_on_is_reported_again_rarely(tmp_path: Path) -> None:
    telemetry = NodeTelemetry("miner-1", tmp_path / "log")

    async def scenario() -> None:
        reporter = WaitReporter(telemetry, "disk-failing")
        for _ in range(3600):
            reporter.waiting("disk", "no space left", "there is space")
            await trio.sleep(1.0)

    simulate(scenario)
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "log").read_text().splitlines()]
    assert seconds == [number * WAIT_REPORT_SECONDS for number in range(6)]


def test_a_process_that_is_started_for_ever_says_so(tmp_path: Path) -> None:
    log = tmp_path / "validator.jsonl"
    now = time.time()
    events = [(now - 9000, "started", ""), (now - 9000, "failed", "long ago")]
    for number in range(4):
        events += [(now - 60 + number, "started", ""), (now - 59 + number, "failed", f"cause {number}")]
    assert recent_starts(log, now)[0] == 0
    log.write_text(
        "".join(json.dumps({"time": at, "event": name, "error": error}) + "\n" for at, name, error in events)
    )
    (tmp_path / "miner-1.jsonl").mkdir()  # a log that cannot be read has no events
    (line,) = troubles(tmp_path, now)
    assert line.startswith("validator was started 4 times since ")
    assert line.endswith(", last cause: cause 3")


def _waiting(telemetry: NodeTelemetry) -> dict[str, float]:
    families = text_string_to_metric_families(telemetry.metrics.exposition().decode())
    samples = next(family.samples for family in families if family.name == "grailnode_waiting_since_seconds")
    return {sample.labels["waits_for"]: sample.value for sample in samples}


# The small HTTP server: what hostile clients and failing answers cost the others


def respond(request: Request) -> Answer:
    if request.path == "/broken":
        raise OSError("too many open files")
    return Answer(b"whole\n")


@asynccontextmanager
async def serving_answers(connections: int) -> AsyncIterator[int]:
    """Serve `respond`; yields the port."""
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(serve_http, connections=connections), "127.0.0.1", 0, respond)
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_a_connection_beyond_the_limit_is_closed_at_once():
    async with serving_answers(2) as port, httpx.AsyncClient() as client:
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        late = await trio.open_tcp_stream("127.0.0.1", port)
        with trio.fail_after(2):
            assert await late.receive_some() == b""
        await idle[0].aclose()
        await trio.sleep(0.1)
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole\n"
        await idle[1].aclose()


async def test_an_answer_that_fails_ends_its_connection_alone(caplog: pytest.LogCaptureFixture):
    async with serving_answers(1) as port, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{port}/broken")
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole\n"
    assert "too many open files" in caplog.text
