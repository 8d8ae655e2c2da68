"""The life of a server of vLLM, with a server that fails when a test wants it: restarts, and what is ready after them.

The real processes are killed and stopped in test_vllm_faults.py.
"""

import json
from typing import Any

import httpx
import pytest
import torch
import trio

from grailnode.engine.vllm.engine_limits import EngineLimits
from grailnode.engine.vllm.server_supervisor import ServerSupervisor
from grailnode.engine.vllm.vllm_client import BrokenEngineError, VllmClient
from roles.ports import EngineError
from tests.engine.vllm_site import fitting_description

SHAPES = {"a.weight": (2, 3)}


class FailingServer:
    """A server that answers commands, until it fails.

    Attributes:
        changes: of what it says of itself.
        starts: how often it was started; it runs until it is stopped.
        failing: names of commands whose connection breaks, each as often as it is listed.
        silent: whether it accepts requests and answers none.
    """

    shares_files = True

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.starts = 0
        self.runs = False
        self.failing: list[str] = []
        self.silent = False
        self.commands: list[str] = []

    async def start(self) -> None:
        """Start it, if it does not run."""
        self.starts += not self.runs
        self.runs = True

    async def stop(self) -> None:
        """End it; a new one answers."""
        self.runs = self.silent = False

    def close(self) -> None:
        """Do nothing."""

    def client(self, seconds: float, connections: int) -> httpx.AsyncClient:
        """Return a client of which every request is answered here."""
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://vllm", timeout=seconds)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        command = json.loads(request.content)["args"][0]
        self.commands.append(command)
        if self.silent:
            await trio.sleep(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("silent")
        if not self.runs or command in self.failing:
            if command in self.failing:
                self.failing.remove(command)
            raise httpx.ConnectError("gone")
        value = fitting_description(dtype="float32", **self.changes) if command == "describe" else {}
        return httpx.Response(200, json={"results": [{"value": value}]})


async def bring_weights(client: VllmClient) -> int:
    """Bring version 3 into a server."""
    await client.call("commit", version=3)
    return 3


def supervisor_of(server: FailingServer, events: list[str] | None = None) -> ServerSupervisor:
    def report(event: str, **fields: Any) -> None:
        if events is not None:
            events.append(f"{event} {fields.get('version', '')}".strip())

    return ServerSupervisor(server, SHAPES, torch.float32, EngineLimits(hang=0.05), bring_weights, report)


async def test_a_server_is_ready_when_it_fits_and_has_places_and_weights() -> None:
    server = FailingServer()
    supervisor = supervisor_of(server)
    client = await supervisor.connected()
    assert server.commands == ["describe", "map", "commit"]
    assert await supervisor.connected() is client
    assert server.starts == 1


async def test_many_calls_that_notice_one_failure_cause_one_restart() -> None:
    server, events = FailingServer(), list[str]()
    supervisor = supervisor_of(server, events)
    client = await supervisor.connected()
    server.failing = ["take"] * 50
    done = []

    async def call() -> None:
        done.append(await supervisor.repeat(lambda client: client.call("take")))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(call)
    assert len(done) == 50
    assert server.starts == 2
    assert events == ["engine-restarted", "engine-ready 3"]
    assert await supervisor.connected() is not client
    assert server.commands.count("commit") == 2


async def test_work_that_fails_in_every_attempt_raises_its_error() -> None:
    server = FailingServer()
    server.failing = ["take"] * 10
    with pytest.raises(BrokenEngineError, match="cannot be reached"):
        await supervisor_of(server).repeat(lambda client: client.call("take"), attempts=3)
    assert server.starts == 3
    assert server.commands.count("take") == 3


@pytest.mark.parametrize("command", ["describe", "map", "commit"])
async def test_a_server_that_fails_before_it_is_ready_is_replaced(command: str) -> None:
    server = FailingServer()
    server.failing = [command]
    supervisor = supervisor_of(server)
    with pytest.raises(EngineError):
        await supervisor.connected()
    assert not server.runs
    await supervisor.connected()
    assert server.starts == 2
    assert server.commands[-3:] == ["describe", "map", "commit"]


async def test_a_server_that_does_not_fit_gets_no_weights_and_is_not_started_again() -> None:
    server = FailingServer(quantization="fp8")
    supervisor = supervisor_of(server)
    for _ in range(2):
        with pytest.raises(EngineError, match="fp8"):
            await supervisor.connected()
    assert server.starts == 1
    assert set(server.commands) == {"describe"}


async def test_a_silent_server_is_noticed(autojump_clock: trio.testing.MockClock) -> None:
    server = FailingServer()
    supervisor = supervisor_of(server)
    client = await supervisor.connected()
    server.silent = True
    with pytest.raises(BrokenEngineError, match="did not answer"):
        await supervisor.watch(client)
