"""The Prometheus metrics of one process: the events in its log, and what it asks of its stores."""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

# otherwise every counter has a second series with the time at which it was created
_disable_created_metrics: Callable[[], None] = disable_created_metrics  # the function itself has no annotations
_disable_created_metrics()

_PREFIX: Final = "grailnode"


class Metrics:
    """Implements StoreMeter, and counts events. Every process has a registry of its own.

    Args:
        process: the value of the label `node` of every sample, such as 'trainer/upload'.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, CPU seconds and open files, read from /proc when asked
        self._events = Counter(f"{_PREFIX}_events", "Events in the log.", ("node", "event"), registry=self._registry)
        self._event_values = Gauge(
            f"{_PREFIX}_event_value",
            "The number that the newest event of a name has in a field, such as the version in 'published'.",
            ("node", "event", "field"),
            registry=self._registry,
        )
        self._operations = Counter(
            f"{_PREFIX}_store_operations",
            "Operations on stores by outcome: ok, missing, too_large, error, cancelled.",
            ("node", "operation", "outcome"),
            registry=self._registry,
        )
        self._bytes = Counter(
            f"{_PREFIX}_store_bytes", "Payload bytes read and written.", ("node", "operation"), registry=self._registry
        )
        self._seconds = Counter(
            f"{_PREFIX}_store_seconds",
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
