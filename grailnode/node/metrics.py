"""The Prometheus metrics of one process: the events in its log, and what it asks of its stores.

`serve_metrics` serves `/metrics` and `/health` over HTTP, on this machine's loopback address only. It answers a request
with one small text and closes the connection: no keep-alive, no bodies, no methods but GET and HEAD. A client that
sends nothing, or sends without end, occupies one of a few connections for a few seconds.
"""

from collections.abc import Callable, Mapping
from typing import Final

import trio
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from grailnode.config import ConfigError

# otherwise every counter has a second series with the time at which it was created
_disable_created_metrics: Callable[[], None] = disable_created_metrics  # the function itself has no annotations
_disable_created_metrics()

_MAX_REQUEST_BYTES: Final = 4096
_CONNECTION_SECONDS: Final = 5.0
_MAX_CONNECTIONS: Final = 8
_PLAIN_TEXT: Final = "text/plain; charset=utf-8"


class Metrics:
    """Implements StoreMeter, and counts events. Every process has a registry, and its name in the label `node`."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, CPU seconds and open files, read from /proc when asked
        self._events = Counter("grailnode_events", "Events in the log.", ("node", "event"), registry=self._registry)
        self._event_values = Gauge(
            "grailnode_event_value",
            "The number that the newest event of a name has in a field, such as the version in 'published'.",
            ("node", "event", "field"),
            registry=self._registry,
        )
        self._operations = Counter(
            "grailnode_store_operations",
            "Operations on stores by outcome: ok, missing, too_large, error, cancelled.",
            ("node", "operation", "outcome"),
            registry=self._registry,
        )
        self._bytes = Counter(
            "grailnode_store_bytes", "Payload bytes read and written.", ("node", "operation"), registry=self._registry
        )
        self._seconds = Counter(
            "grailnode_store_seconds",
            "Seconds spent waiting for stores.",
            ("node", "operation"),
            registry=self._registry,
        )

    def count_event(self, name: str, fields: Mapping[str, str | int | float]) -> None:
        """Count an event, and keep the numbers among its fields as the newest of its name."""
        self._events.labels(self._process, name).inc()
        for field, value in fields.items():
            if isinstance(value, int | float):
                self._event_values.labels(self._process, name, field).set(value)

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        self._operations.labels(self._process, operation, outcome).inc()
        self._bytes.labels(self._process, operation).inc(payload_bytes)
        self._seconds.labels(self._process, operation).inc(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


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
