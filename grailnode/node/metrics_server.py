"""Serves `/metrics` for Prometheus and `/health` over HTTP, on this machine's loopback address only.

The server answers a request with one small text and closes the connection: no keep-alive, no bodies, no methods but GET
and HEAD. A client that sends nothing, or sends without end, occupies one of a few connections for a few seconds.
"""

from collections.abc import Callable
from typing import Final

import trio
from prometheus_client import CONTENT_TYPE_LATEST

from grailnode.config import ConfigError

_MAX_REQUEST_BYTES: Final = 4096
_CONNECTION_SECONDS: Final = 5.0
_MAX_CONNECTIONS: Final = 8
_PLAIN_TEXT: Final = "text/plain; charset=utf-8"


async def serve_metrics(port: int, exposition: Callable[[], bytes]) -> None:
    """Serve until cancelled.

    Args:
        port: of 127.0.0.1.
        exposition: returns the current metrics in Prometheus' text format (`Metrics.exposition`).

    Raises:
        ConfigError: the port is in use, or this process may not listen on it.
    """
    limiter = trio.CapacityLimiter(_MAX_CONNECTIONS)

    async def answer(stream: trio.SocketStream) -> None:
        async with limiter, stream:
            with trio.move_on_after(_CONNECTION_SECONDS):
                try:
                    await stream.send_all(_response(await _read_request_line(stream), exposition))
                except trio.BrokenResourceError:
                    return  # the client has closed the connection

    try:
        await trio.serve_tcp(answer, port, host="127.0.0.1")
    except OSError as error:
        raise ConfigError(f"node.metrics_port: {port} cannot be used ({error.strerror}); choose another") from error


async def _read_request_line(stream: trio.SocketStream) -> bytes:
    """Return the first line of the request; empty when none arrives within `_MAX_REQUEST_BYTES`."""
    data = b""
    while b"\r\n" not in data and len(data) < _MAX_REQUEST_BYTES:
        piece = await stream.receive_some(_MAX_REQUEST_BYTES - len(data))
        if not piece:
            break
        data += piece
    line, end, _ = data.partition(b"\r\n")
    return line if end else b""


def _response(request_line: bytes, exposition: Callable[[], bytes]) -> bytes:
    method, _, rest = request_line.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    content_type = _PLAIN_TEXT
    if method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"GET /metrics\n"
    elif path == b"/metrics":
        status, body, content_type = "200 OK", exposition(), CONTENT_TYPE_LATEST
    elif path == b"/health":
        status, body = "200 OK", b"alive\n"
    else:
        status, body = "404 Not Found", b"there are /metrics and /health\n"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)
