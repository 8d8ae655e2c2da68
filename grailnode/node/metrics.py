"""`/metrics` for Prometheus, and `/health`, over HTTP on this machine's loopback address only.

It answers any request with one small text and closes: no keep-alive, no bodies, no other verbs. Somebody who connects
and says nothing, or speaks without end, holds one of a few places for a few seconds.
"""

from collections.abc import Callable
from typing import Final

import trio

from grailnode.config import ConfigError

_MAX_REQUEST_BYTES: Final = 4096
_PATIENCE_SECONDS: Final = 5.0
_AT_ONCE: Final = 8
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


async def serve_metrics(port: int, exposition: Callable[[], str]) -> None:
    """Serve for ever.

    Args:
        port: of 127.0.0.1.
        exposition: the numbers in Prometheus' text format, as they stand now.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    limiter = trio.CapacityLimiter(_AT_ONCE)

    async def answer(stream: trio.SocketStream) -> None:
        async with limiter, stream:
            with trio.move_on_after(_PATIENCE_SECONDS):
                try:
                    await stream.send_all(_response(await _request(stream), exposition))
                except trio.BrokenResourceError:
                    return  # who asked has gone

    try:
        await trio.serve_tcp(answer, port, host="127.0.0.1")
    except OSError as error:
        raise ConfigError(f"node.metrics_port: {port} cannot be used ({error.strerror}); choose another") from error


async def _request(stream: trio.SocketStream) -> bytes:
    """The request's first line; empty where none comes within the bounds."""
    data = b""
    while b"\r\n" not in data and len(data) < _MAX_REQUEST_BYTES:
        piece = await stream.receive_some(_MAX_REQUEST_BYTES - len(data))
        if not piece:
            break
        data += piece
    line, end, _ = data.partition(b"\r\n")
    return line if end else b""


def _response(request: bytes, exposition: Callable[[], str]) -> bytes:
    verb, _, rest = request.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if verb not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", "GET /metrics\n"
    elif path == b"/metrics":
        status, body = "200 OK", exposition()
    elif path == b"/health":
        status, body = "200 OK", "alive\n"
    else:
        status, body = "404 Not Found", "there are /metrics and /health\n"
    data = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if verb == b"HEAD" else data)
