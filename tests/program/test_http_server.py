"""The small HTTP server: what hostile clients and failing answers cost the others."""

import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
import trio.testing

from grailnode.node.http_server import Answer, Request, serve_http


async def endless() -> AsyncGenerator[bytes]:
    while True:
        yield b"piece\n"
        await trio.sleep(0.01)


def respond(request: Request) -> Answer:
    if request.path == "/broken":
        raise OSError("too many open files")
    return Answer(endless() if request.path == "/endless" else b"whole\n")


@asynccontextmanager
async def serving(connections: int) -> AsyncIterator[int]:
    """Serve `respond`; yields the port."""
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(serve_http, connections=connections), "127.0.0.1", 0, respond)
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_a_connection_beyond_the_limit_is_closed_at_once():
    async with serving(2) as port, httpx.AsyncClient() as client:
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
    async with serving(1) as port, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{port}/broken")
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole\n"
    assert "too many open files" in caplog.text


async def test_head_of_a_stream_has_its_headers():
    async with serving(1) as port, httpx.AsyncClient() as client:
        answer = await client.head(f"http://127.0.0.1:{port}/endless")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_client_that_resets_its_connection_harms_no_other():
    async with serving(1) as port, httpx.AsyncClient() as client:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET /endless HTTP/1.1\r\n\r\n")
        await stream.receive_some()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        await trio.sleep(0.1)
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "whole\n"
