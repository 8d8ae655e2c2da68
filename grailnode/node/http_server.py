"""A small HTTP server, for the metrics of a process and for the dashboard.

It answers a request with one text, and closes the connection: no keep-alive, no bodies, no methods but GET and HEAD. A
client that sends nothing, or sends or reads without end, occupies one of a limited number of connections for a limited
time; while none is free, new ones are closed at once.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

_MAX_REQUEST_BYTES: Final = 1 << 14
_REQUEST_SECONDS: Final = 5.0
log = logging.getLogger(__name__)
PLAIN_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Request:
    """A request: its path and its query as they were sent, and its headers by name in lower case."""

    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    body: bytes
    content_type: str = PLAIN_TEXT
    status: str = "200 OK"
    headers: Mapping[str, str] = field(default_factory=dict)


async def serve_http(
    host: str,
    port: int,
    respond: Callable[[Request], Answer],
    connections: int = 32,
    send_seconds: float = 5.0,
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a number of connections at a time until cancelled; OSError if the port is in use, or not for this process.

    `respond` computes the answer to a GET or HEAD; an exception ends that connection alone, and is logged. A client
    must take a body in `send_seconds`.
    """
    limiter = trio.CapacityLimiter(connections)

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.WouldBlock):
                limiter.acquire_nowait()
                try:
                    await _converse(stream, respond, send_seconds)
                except Exception:
                    log.exception("a request was not answered")
                finally:
                    limiter.release()

    await trio.serve_tcp(answer, port, host=host, task_status=task_status)


async def _converse(stream: trio.SocketStream, respond: Callable[[Request], Answer], send_seconds: float) -> None:
    data = b""
    with trio.move_on_after(_REQUEST_SECONDS), suppress(trio.BrokenResourceError):
        while b"\r\n\r\n" not in data and len(data) < _MAX_REQUEST_BYTES:
            piece = await stream.receive_some(_MAX_REQUEST_BYTES - len(data))
            if not piece:
                break
            data += piece
    with suppress(trio.BrokenResourceError, trio.TooSlowError):  # the client has left, or does not read
        await _send(stream, data, respond, send_seconds)


async def _send(
    stream: trio.SocketStream, data: bytes, respond: Callable[[Request], Answer], send_seconds: float
) -> None:
    line, *lines = data.decode("latin-1").split("\r\n")
    method, _, target = line.partition(" ")
    path, _, query = target.partition(" ")[0].partition("?")
    if method in ("GET", "HEAD") and lines:
        fields = (header.partition(":") for header in lines)
        answer = respond(Request(path, query, {name.lower(): value.strip() for name, _, value in fields}))
    else:
        answer = Answer(b"only GET is answered\n", status="405 Method Not Allowed")
    headers = {"Content-Type": answer.content_type, "Connection": "close", "Content-Length": str(len(answer.body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **answer.headers}.items())
    first = f"HTTP/1.1 {answer.status}\r\n{head}\r\n".encode()
    with trio.fail_after(send_seconds):
        await stream.send_all(first + (answer.body if method != "HEAD" else b""))
