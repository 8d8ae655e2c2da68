"""The Prometheus metrics of one process: the events in its log, and what it asks of its stores. They are served on this
machine's loopback address only.
"""

import time
from collections.abc import Callable, Mapping

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
from grailnode.node.http_server import Answer, Request, serve_http

# otherwise every counter has a second series with the time at which it was created
_disable_created_metrics: Callable[[], None] = disable_created_metrics  # the function itself has no annotations
_disable_created_metrics()


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
        self._waits = Gauge(
            "grailnode_waiting_since_seconds",
            "Since when the process waits (seconds since the Unix epoch), by what it waits for; 0 when it has ended.",
            ("node", "waits_for"),
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
        if "waits_for" in fields:
            since = 0.0 if name == "waited" else time.time() - float(fields["seconds"])
            self._waits.labels(self._process, fields["waits_for"]).set(since)

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        self._operations.labels(self._process, operation, outcome).inc()
        self._bytes.labels(self._process, operation).inc(payload_bytes)
        self._seconds.labels(self._process, operation).inc(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


async def serve_metrics(port: int, exposition: Callable[[], bytes]) -> None:
    """Serve /metrics and /health until cancelled.

    Args:
        port: of 127.0.0.1.
        exposition: returns the current metrics in Prometheus' text format (`Metrics.exposition`).

    Raises:
        ConfigError: the port is in use, or this process may not listen on it.
    """

    def respond(request: Request) -> Answer:
        if request.path == "/metrics":
            return Answer(exposition(), CONTENT_TYPE_LATEST)
        if request.path == "/health":
            return Answer(b"alive\n")
        return Answer(b"there are /metrics and /health\n", status="404 Not Found")

    try:
        await serve_http("127.0.0.1", port, respond)
    except OSError as error:
        raise ConfigError(f"node.metrics_port: {port} cannot be used ({error.strerror}); choose another") from error
