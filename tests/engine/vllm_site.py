"""Where the tests of the vLLM engine find vLLM, and the servers that they share."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.digest import Weights
from protocol.rollout import sampling
from roles.ports import EngineError

ABSENT = "GRAILNODE_VLLM_PYTHON names no interpreter with vLLM; `grailnode engine install DIR` makes one"


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, or skip the test."""
    path = Path(os.environ.get("GRAILNODE_VLLM_PYTHON", ""))
    if not path.is_file():
        pytest.skip(ABSENT)
    return path


def fitting_description(**changes: Any) -> dict[str, Any]:
    """Return what a worker of a server that fits says of itself, with changes."""
    logits = torch.arange(4096, dtype=torch.float32).remainder(7.0).expand(4, -1)
    words = sampling.seed_words([bytes(range(16))] * 4)
    return {
        "vllm": "0.31.2",
        "dtype": "bfloat16",
        "head": "float32",
        "quantization": None,
        "processor": True,
        "speculative": False,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "device": "cpu",
        "capability": None,
        "batch_invariant": False,
        "triton_fault": "",
        "probe": sampling.choose(logits, words, torch.arange(4), 1.0).tolist(),
    } | changes


@asynccontextmanager
async def url_of(server: ChildServer) -> AsyncIterator[str]:
    """Yield a URL on the loopback interface by which a server that runs on a Unix socket is reached."""

    async def forward(source: trio.abc.ReceiveStream, target: trio.abc.HalfCloseableStream) -> None:
        async for data in source:
            await target.send_all(data)
        await target.send_eof()

    async def connect(client: trio.SocketStream) -> None:
        async with await trio.open_unix_socket(server.socket) as inner, trio.open_nursery() as nursery:
            nursery.start_soon(forward, client, inner)
            nursery.start_soon(forward, inner, client)

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            lambda task_status: trio.serve_tcp(connect, 0, host="127.0.0.1", task_status=task_status)
        )
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


class SharedServer(ChildServer):
    """A server that many engines use one after the other: an engine that is closed leaves it running."""

    async def stop(self) -> None:
        """Do nothing; `end` ends it."""

    def close(self) -> None:
        """Do nothing; `end` ends it."""

    def end(self) -> None:
        super().close()


class BendableServer(SharedServer):
    """A shared server whose weights a test can damage."""

    def environment(self) -> dict[str, str]:
        site = self.log.parent / "site"
        site.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("bendable_extension.py"), site)
        own = super().environment()
        return own | {"PYTHONPATH": os.pathsep.join((own["PYTHONPATH"], str(site)))}

    def flags(self, socket: str) -> list[str]:
        """Return the flags; the last one of a name counts."""
        return [*super().flags(socket), "--worker-extension-cls", "bendable_extension.BendableExtension"]

    async def bend(self, *names: str) -> None:
        async with self.client(60.0, 1) as client:
            answer = await client.post("/collective_rpc", json={"method": "bend", "args": names})
            assert answer.json()["results"] == [{"bent": len(names)}], answer.text


class ForkedServer(ChildServer):
    """A server of a launcher that several servers have, one after the other, so that vLLM is imported once for all.

    Args:
        launcher: its environment variables are those of the server, and its log has the server's output.
    """

    def __init__(self, settings: VllmSettings, model: Path, directory: Path, launcher: ServerLauncher) -> None:
        super().__init__(settings, model, directory)
        self._launcher = launcher

    def close(self) -> None:
        """End the server; the launcher stays."""
        self._launcher.kill_server()


def new_launcher(directory: Path) -> ServerLauncher:
    """Return a launcher of servers on a CPU; it starts with its first server."""
    return ServerLauncher(ChildServer(VllmSettings(python=vllm_python()), directory, directory)._spawn)


def shared_server(model: Path, directory: Path, **changes: object) -> BendableServer:
    """Return a server for a policy directory; it starts with its first engine."""
    return BendableServer(VllmSettings(python=vllm_python(), sequences=64, **changes), model, directory)  # type: ignore[arg-type]


async def check_refusal(engine: VllmEngine, weights: Weights, reason: str) -> None:
    """Check that an engine refuses weights for a reason, and close it."""
    try:
        with pytest.raises(EngineError, match=reason):
            await engine.stage(0, weights)
    finally:
        await engine.close()
