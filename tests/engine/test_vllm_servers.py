"""The life of a server of vLLM, without vLLM: restarts, servers that do not fit, and other programs at the address."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio

from grailnode.engine.vllm.checkpoints import RecoveryStep
from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.server_supervisor import ServerSupervisor, check_description
from grailnode.engine.vllm.vllm_client import BrokenEngineError, VllmClient
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer, ExternalServer, error_in
from grailnode.engine.vllm.vllm_settings import EngineLimits, VllmSettings
from protocol.lora import LoraSpec
from protocol.objects import ObjectRef
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.engine.vllm_site import fitting_description
from tests.support.builders.policies import inline, random_weights

SHAPES = {"a.weight": (2, 3)}
COMMITTED = {"seconds": 0.1, "verified": True}


class FailingServer(ExternalServer):
    """A server that answers commands, until it fails.

    Attributes:
        changes: of what it says of itself.
        starts: how often it was started; it runs until it is stopped.
        failing: names of commands whose connection breaks, each as often as it is listed.
        silent: whether it accepts requests and answers none.
        slow: the command that it answers after a minute.
        is_checking: whether it reads back for ever what it has committed.
    """

    shares_files = True

    def __init__(self, **changes: Any) -> None:
        super().__init__("http://vllm")
        self.changes = changes
        self.starts = 0
        self.runs = False
        self.failing: list[str] = []
        self.silent = False
        self.slow = ""
        self.is_checking = False
        self.commands: list[str] = []

    async def start(self) -> None:
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
        path = request.url.path
        command = json.loads(request.content)["args"][0] if path == "/collective_rpc" else path
        self.commands.append(command)
        if command == self.slow:
            await trio.sleep(59)
        if self.silent:
            await trio.sleep(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("silent")
        if not self.runs or command in self.failing:
            if command in self.failing:
                self.failing.remove(command)
            raise httpx.ConnectError("gone")
        values = {
            "describe": fitting_description(dtype="float32", **self.changes),
            "commit": COMMITTED | {"verified": not self.is_checking},
            "state": {"running": self.is_checking},
        }
        return httpx.Response(200, json={"results": [{"value": values.get(command, {})}]})


async def bring_weights(client: VllmClient) -> int:
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
    # a server whose connection was lost during a commit may be paused
    assert server.commands == ["describe", "/resume", "map", "commit"]
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
    assert server.commands[-4:] == ["describe", "/resume", "map", "commit"]


async def test_a_server_that_does_not_fit_gets_no_weights_and_is_not_started_again() -> None:
    server = FailingServer(quantization="fp8")
    supervisor = supervisor_of(server)
    for _ in range(2):
        with pytest.raises(EngineError, match="fp8"):
            await supervisor.connected()
    assert server.starts == 1
    assert set(server.commands) == {"describe"}


async def test_the_code_of_another_version_in_a_server_is_named() -> None:
    description = fitting_description()
    del description["data_parallel"]
    with pytest.raises(EngineError, match=r"another version of grailnode: .*'data_parallel'"):
        check_description(description, torch.bfloat16)


async def test_a_server_that_draws_without_triton_is_reported() -> None:
    events = list[str]()
    await supervisor_of(FailingServer(triton_fault="Triton cannot compile"), events).connected()
    assert events == ["triton-unusable"]


async def test_a_silent_server_is_noticed(autojump_clock: trio.testing.MockClock) -> None:
    server = FailingServer()
    supervisor = supervisor_of(server)
    client = await supervisor.connected()
    server.silent = True
    with pytest.raises(BrokenEngineError, match="did not answer"):
        await supervisor.watch(client)


@pytest.mark.parametrize("moment", ["/pause", "commit", "/reset_prefix_cache"])
async def test_a_commit_that_is_cancelled_is_whole_or_not_begun(
    model: CausalModel, tmp_path: Path, autojump_clock: trio.testing.MockClock, moment: str
) -> None:
    """A validator cancels what it does when the time of a window is over; requests would wait for ever."""
    server, step = FailingServer(), RecoveryStep("patch", 1, bytes(32), tmp_path)
    await server.start()
    server.slow = moment
    engine = VllmEngine(model, server, tmp_path)
    with trio.move_on_after(1):
        await engine._swap(VllmClient(server), step)
    whole = ["/pause", "commit", "/reset_prefix_cache", "/resume"]
    assert server.commands == (["/pause", "/resume"] if moment == "/pause" else whole)


async def test_a_first_version_does_not_serve_if_the_check_of_its_layout_was_cancelled(
    model: CausalModel, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    server = FailingServer()
    server.slow = "/inference/v1/generate"
    engine = VllmEngine(model, server, tmp_path, run_sync=inline)
    await engine.stage(0, random_weights(model))
    with trio.move_on_after(1):
        await engine.commit()
    assert server.commands[-1] == server.slow
    assert engine.version is None


@pytest.mark.parametrize("lost", [False, True])
async def test_a_server_is_replaced_if_a_commit_is_cancelled_whose_end_is_unknown(
    model: CausalModel,
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    lost: bool,
) -> None:
    """It may be paused, or have weights that were not read back; and the window waits for no check that hangs."""
    server = FailingServer()
    engine = VllmEngine(model, server, tmp_path, run_sync=inline)
    monkeypatch.setattr(engine, "_check_layout", lambda *_, **__: trio.lowlevel.checkpoint())
    await engine.stage(0, random_weights(model))
    await engine.commit()
    await engine.stage(1, random_weights(model))
    client = await engine._server.connected()
    server.is_checking = not lost
    if lost:
        server.slow, server.failing = "commit", ["commit"]
    with trio.move_on_after(1):
        await engine.commit()
    assert trio.current_time() < 65
    server.is_checking, server.slow = False, ""
    assert await engine._server.connected() is not client
    assert engine.version == int(lost)  # what is lost may have been carried out
    assert server.starts == 2


def hanging_server(directory: Path, **settings: Any) -> ChildServer:
    """Return a server whose process never answers."""
    python = directory / "python"
    python.write_text("#!/bin/sh\nread flags\nsetsid sleep 60 >&2 &\necho $!\nwait\n")
    python.chmod(0o700)
    (directory / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}', encoding="utf-8")
    return ChildServer(VllmSettings(python=python, **settings), directory, directory)


async def test_what_strangers_put_beside_a_servers_memory_hinders_no_restart(tmp_path: Path) -> None:
    server, memory = hanging_server(tmp_path), Path("/dev/shm")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.start)
        while server.process_id is None:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    planted, own = (memory / f"{Path(server.socket).name}{name}" for name in ("-planted", "own"))
    planted.mkdir()
    own.touch()
    try:
        await server.stop()
        assert not own.exists()
    finally:
        planted.rmdir()
        server.close()


def test_what_the_processes_of_vllm_compile_lies_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's home may be read-only, as in a container."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    (tmp_path / "pyvenv.cfg").touch()
    server = ChildServer(VllmSettings(python=tmp_path / "bin" / "python"), tmp_path, tmp_path / "state")
    variables = server.environment()
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR")
    for name in (*caches, "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME"):
        assert variables[name] == str(tmp_path / "grailnode-cache")


@pytest.mark.parametrize(
    ("mode", "log", "line"), [(0o600, "log", "Permission denied"), (0o700, "/dev/full", "No space left on device")]
)
async def test_why_a_server_cannot_be_started_is_named(mode: int, log: str, line: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(mode)
    (tmp_path / ChildServer.LOG).symlink_to(log)
    server = ChildServer(VllmSettings(python=python), tmp_path, tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}', encoding="utf-8")
    with pytest.raises(EngineError, match=f"(?s)^vLLM.*{line}"):
        await server.start()
    server.close()


def test_the_error_that_ended_vllm_is_named():
    """It stands before the end of the log, where vLLM's server says only that its engine core has ended."""
    core = "(EngineCore pid=9) ERROR 11-26 19:01:08 [core.py:1510]"
    log = [
        "(APIServer pid=8) WARNING 11-26 18:57:31 [base.py:380] ValueError: no tokenizer",
        f"{core} Traceback (most recent call last):",
        f"{core} ValueError: Free memory on device cuda:0 (8.36/79.18 GiB) is less than desired",
        *["  File entry.py, line 1, in main"] * 12,
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert (
        error_in("\n".join(log)) == ": ValueError: Free memory on device cuda:0 (8.36/79.18 GiB) is less than desired"
    )
    assert not error_in(log[0])


def test_a_key_for_another_server_of_vllm_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has it would refuse our requests."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = ChildServer(VllmSettings(python=tmp_path / "python"), tmp_path, tmp_path)
    assert "secret" not in server.environment().values()


async def test_a_server_that_hangs_while_it_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, kill = list[int | None](), ServerLauncher.kill_server

    def note_and_kill(launcher: ServerLauncher) -> None:
        ended.append(launcher.server_id)
        kill(launcher)

    monkeypatch.setattr(ServerLauncher, "kill_server", note_and_kill)
    for doublings in range(9):  # a busy machine forks it late
        server = hanging_server(tmp_path, start_seconds=0.25 * 2**doublings)
        with pytest.raises(EngineError, match=r"^vLLM did not answer within .* s \(engine\.start_seconds\)"):
            await server.start()
        assert server.process_id is None
        if any(ended):
            break
        server.close()
    assert any(ended)
    server.close()


def test_models_compiled_with_another_factor_are_not_used_again(tmp_path: Path) -> None:
    """Both have the same flags, from which vLLM makes the key of a compiled model."""
    settings = VllmSettings(python=tmp_path / "python")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}', encoding="utf-8")
    base, shards = bytes(32), (ObjectRef(digest=bytes(32), size=1),)
    specs = [LoraSpec(rank=rank, alpha=16.0, targets=("q_proj",), base=base, shards=shards) for rank in (4, 8)]
    servers = [ChildServer(settings, tmp_path, tmp_path, spec) for spec in specs]
    assert servers[0].flags("socket") == servers[1].flags("socket")
    assert len({server.environment()["VLLM_CACHE_ROOT"] for server in servers}) == 2


# A server of vLLM that does not fit is refused in one line, before it gets a weight


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache": "bfloat16"},
        {"device": "cuda:0", "capability": [7, 5]},
        {"device": "cuda:0", "capability": [8, 0], "batch_invariant": True},
        {"device": "cuda:0", "capability": [10, 0], "batch_invariant": True},
    ],
)
def test_a_server_that_fits(changes: dict[str, Any]):
    check_description(fitting_description(**changes), torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vllm": "0.29.0"}, "versions from 0.30 to below 0.34 fit"),
        ({"vllm": "0.34.0rc1"}, "versions from 0.30 to below 0.34 fit"),
        ({"vllm": "nightly"}, "versions from 0.30 to below 0.34 fit"),
        ({"dtype": "float16"}, "it computes in float16, and engine.dtype is bfloat16"),
        ({"head": "bfloat16"}, "it computes logits in bfloat16, and margins need float32"),
        ({"quantization": "fp8"}, "it serves fp8-quantized weights"),
        ({"cache": "fp8_e4m3"}, "it keeps keys and values in fp8_e4m3"),
        ({"matmul": "medium"}, "VLLM_FLOAT32_MATMUL_PRECISION is medium"),
        ({"processor": False}, "it has not loaded our logits processor; start it as `grailnode engine flags` prints"),
        ({"speculative": True}, "speculative decoding"),
        # an output projection that is on another rank has no dtype there
        ({"pipeline_parallel": 2, "head": "bfloat16"}, "--pipeline-parallel-size 2: pipeline parallelism"),
        ({"data_parallel": 2}, "--data-parallel-size 2: data parallelism"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT is set, and it computes on cpu"),
        (
            {"batch_invariant": True, "device": "cuda:0", "capability": [7, 5]},
            "GPUs of compute capability 8.0 and more",
        ),
        ({"probe": [0, 1, 2, 3]}, "its noise has other bits"),
    ],
)
def test_a_server_that_does_not_fit(changes: dict[str, Any], line: str):
    with pytest.raises(EngineError) as refusal:
        check_description(fitting_description(**changes), torch.bfloat16)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


# The address of an external server at which another program answers: one clear error, and no traceback


def answer(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@asynccontextmanager
async def program(reply: bytes) -> AsyncIterator[str]:
    """Yield the URL of a program that gives the same reply to everything, and then ends the connection."""

    async def reply_to(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(reply)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, reply_to, 0)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def restore(_: VllmClient) -> int:
    raise AssertionError("a program that is no vLLM of ours gets no weights")


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (answer("<html>\n<p>It works!"), "vLLM answered /collective_rpc with <html> <p>It works!"),
        (answer("[]"), "vLLM answered without results"),
        (answer('{"results": [{}]}'), "vLLM answered without results"),
        (answer('{"results": [{"value": 3}]}'), "vLLM answered without results"),
        (answer("", "404 Not Found"), "(/health: 404); is vLLM running there?"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "(/health: R"),
        (b"", "(/health: R"),
    ],
)
async def test_another_program_at_the_address_is_refused_in_one_line(reply: bytes, line: str) -> None:
    async with program(reply) as url:
        server = ExternalServer(url, start_seconds=3.0)
        supervisor = ServerSupervisor(
            server, {"a": (1, 2)}, torch.float32, EngineLimits(), restore, lambda *_, **__: None
        )
        with pytest.raises(EngineError) as refusal:
            await supervisor.connected()
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)
