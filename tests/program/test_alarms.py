"""`node.alarm_url`: which events reach an operator's pager, how often, and that no node waits for it."""

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode import UserError
from grailnode.config import load
from grailnode.node import processes
from grailnode.node.metrics import ALARMS
from grailnode.node.process_launch import Launch
from grailnode.node.processes import keep_processes, make_spec
from grailnode.node.supervisor import Supervisor
from grailnode.node.telemetry import THROTTLE_SECONDS, AlarmSender, NodeTelemetry
from grailnode.observe.node_logs import recent_starts
from roles.ports import StoreError


@dataclass
class Pager:
    """An HTTP server that keeps what is posted to it."""

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    dripping: bytes = b""  # how an answer begins that goes on for ever, a byte at a time

    def received(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many messages, and return them."""
        deadline = time.monotonic() + 60
        while len(self.messages) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.messages


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            pager.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            with suppress(OSError):
                self.wfile.write(pager.dripping)
                while pager.dripping:
                    time.sleep(0.05)
                    self.wfile.write(b"a")
                self.send_response(pager.status)
                self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        pager.url = f"http://127.0.0.1:{server.server_port}/page?to=me"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield pager
        server.shutdown()


@pytest.mark.parametrize("kind", ALARMS)
def test_an_alarm_reaches_the_pager_with_what_the_log_says(pager: Pager, kind: str) -> None:
    telemetry = NodeTelemetry("validator-1", alarm_url=pager.url)
    telemetry.event("serving", version=3)
    telemetry.event(kind, error="something", window=7)
    (message,) = pager.received(1)
    assert abs(message.pop("time") - time.time()) < 60
    fields = {"error": "something", "window": 7}
    head = {"node": "validator-1", "kind": kind, "meaning": ALARMS[kind], "count": 1}
    assert message == head | {"fields": fields}
    telemetry.close()


def test_each_kind_is_throttled_by_itself_and_counted(pager: Pager) -> None:
    now = 0.0
    sender = AlarmSender(pager.url, "miner-1", lambda: now)
    sender.take("beacon-late", {"round": 0})
    pager.received(1)
    for now in (1.0, 2.0, THROTTLE_SECONDS - 1):
        sender.take("beacon-late", {"round": int(now)})
    now = THROTTLE_SECONDS
    sender.take("cannot-follow", {})
    sender.close()
    seen = [(message["kind"], message["count"], message["fields"]) for message in pager.messages]
    assert seen == [
        ("beacon-late", 1, {"round": 0}),
        ("beacon-late", 3, {"round": int(THROTTLE_SECONDS) - 1}),
        ("cannot-follow", 1, {}),
    ]


async def test_a_pager_that_hangs_or_refuses_stops_nothing(pager: Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grailnode.node.telemetry._ANSWER_SECONDS", 1.0)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")  # takes connections, and never answers
    hanging = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
    pager.status = 500
    for url in (hanging, "http://127.0.0.1:1/", "http://[/", pager.url):
        telemetry = NodeTelemetry("miner-1", alarm_url=url)
        began = time.thread_time()
        telemetry.event("alarm", error="x")
        telemetry.event("disk-failing", error="x")
        assert time.thread_time() - began < 0.5
        telemetry.close()
    assert [message["kind"] for message in pager.received(2)] == ["alarm", "disk-failing"]
    await listener.aclose()


def test_the_next_alarm_of_a_kind_waits_for_its_turn_or_for_the_end(
    pager: Pager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grailnode.node.telemetry.THROTTLE_SECONDS", 1.0)
    sender = AlarmSender(pager.url, "miner-1")
    for number, error in enumerate(("one", "another")):
        pager.received(number)
        sender.take("alarm", {"error": error})
    assert [message["fields"]["error"] for message in pager.received(2)] == ["one", "another"]
    sender.take("alarm", {"error": "a third"})
    sender.close()
    assert pager.messages[-1]["fields"] == {"error": "a third"}


@pytest.mark.parametrize("start", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nServer: "], ids=["body", "head"])
def test_a_pager_whose_answer_does_not_end_receives_the_next_alarm(
    pager: Pager, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("grailnode.node.telemetry._ANSWER_SECONDS", 1.0)
    pager.dripping = start
    sender = AlarmSender(pager.url, "miner-1")
    for kind in ("alarm", "disk-failing"):
        sender.take(kind, {})
    assert [message["kind"] for message in pager.received(2)] == ["alarm", "disk-failing"]
    pager.dripping = b""
    sender.close()


def test_a_message_that_cannot_be_sent_stops_no_later_one(pager: Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = AlarmSender(pager.url, "miner-1")
    monkeypatch.setenv("SSL_CERT_FILE", "/missing/certificates.pem")
    sender.take("alarm", {})
    time.sleep(0.5)
    monkeypatch.delenv("SSL_CERT_FILE")
    sender.take("disk-failing", {})
    assert "disk-failing" in [message["kind"] for message in pager.received(1)]
    sender.close()


async def test_a_process_that_a_bug_ends_has_sent_an_alarm(run_toml: Path, pager: Pager, tmp_path: Path) -> None:
    async def fail() -> None:
        raise ExceptionGroup("of a nursery", [StoreError("down"), KeyError("a key")])

    telemetry = NodeTelemetry("miner-1", alarm_url=pager.url)
    with pytest.raises(ExceptionGroup):
        launch = Launch(load(run_toml), "miner", "miner-1")
        await processes._report_failure(launch, tmp_path / "log", telemetry, fail)
    (message,) = pager.messages  # it has arrived before the traceback is printed
    assert message["fields"]["error"].startswith("KeyError")


async def test_a_process_that_ends_has_sent_its_last_alarm(run_toml: Path, pager: Pager) -> None:
    config = load(run_toml, [f"node.alarm_url={pager.url}"])
    config.at(config.run.manifest).write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot go on"):
        await Supervisor(lambda line: None).keep([make_spec(Launch(config, "miner", "miner-1"))])
    assert [message["kind"] for message in pager.messages] == ["failed"]
    assert "run.manifest" in pager.messages[0]["fields"]["error"]


async def test_a_process_that_a_signal_ends_has_an_alarm_and_the_cause_in_its_log(run_toml: Path, pager: Pager) -> None:
    config = load(run_toml, [f"node.alarm_url={pager.url}"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_processes, [Launch(config, "miner", "miner-1")], lambda line: None)
        while not pager.messages:
            for process in multiprocessing.active_children():
                process.kill()
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    cause = "killed by SIGKILL, as where memory has run out"
    assert (pager.messages[0]["kind"], pager.messages[0]["fields"]["error"]) == ("failed", cause)
    causes = {recent_starts(path, time.time())[2] for path in config.at(config.node.logs).iterdir()}
    assert causes == {cause}
