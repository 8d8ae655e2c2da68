"""The address of an external server at which another program answers: one clear error, and no traceback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio

from grailnode.engine.vllm.engine_limits import EngineLimits
from grailnode.engine.vllm.server_supervisor import ServerSupervisor
from grailnode.engine.vllm.vllm_client import VllmClient
from grailnode.engine.vllm.vllm_server import ExternalServer
from roles.ports import EngineError


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


async def test_nobody_at_the_address() -> None:
    server = ExternalServer("http://127.0.0.1:1", start_seconds=3.0)
    with pytest.raises(EngineError, match=r"engine\.url: http://127\.0\.0\.1:1 .*ConnectError"):
        await server.start()
