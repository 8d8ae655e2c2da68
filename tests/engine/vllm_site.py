"""Where the tests of the vLLM engine find vLLM, and the servers that they share."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings

ABSENT = "GRAILNODE_VLLM_PYTHON names no interpreter with vLLM; `grailnode engine install DIR` makes one"


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, or skip the test."""
    path = Path(os.environ.get("GRAILNODE_VLLM_PYTHON", ""))
    if not path.is_file():
        pytest.skip(ABSENT)
    return path


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
        """End the server."""
        super().close()


class ForkedServer(ChildServer):
    """A server of a launcher that several servers have, one after the other, so that vLLM is imported once for all.

    Args:
        launcher: its environment variables are those of the server, and its log has the server's output.
    """

    def __init__(self, settings: ServerSettings, launcher: ServerLauncher) -> None:
        super().__init__(settings)
        self._launcher = launcher

    def close(self) -> None:
        """End the server; the launcher stays."""
        self._launcher.kill_server()


def new_launcher(directory: Path) -> ServerLauncher:
    """Return a launcher of servers on a CPU; it starts with its first server."""
    return ServerLauncher(ChildServer(ServerSettings(vllm_python(), directory, directory))._spawn)


def shared_server(model: Path, directory: Path, **changes: object) -> SharedServer:
    """Return a server for a policy directory; it starts with its first engine."""
    return SharedServer(ServerSettings(vllm_python(), model, directory, sequences=64, **changes))  # type: ignore[arg-type]
