"""The Prometheus metrics of one process: the events in its log, and what it asks of its stores. They are served on this
machine's loopback address only. docs/reference/metrics.md lists them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from grailnode import UserError
from grailnode.node.http_server import Answer, Request, serve_http

ALARMS: Final = {
    "alarm": "a contradiction was signed: somebody has a key of this run, or is dishonest",
    "epoch-contested": "a second trainer runs with this key",
    "canary-failure": "a validator judged a canary's work wrongly",
    "validators-disagree": "two validators judged one group differently",
    "validator-excluded": "a validator did not seal or reveal in time",
    "beacon-late": "windows wait for the beacon",
    "cannot-follow": "this node keeps an older version",
    "disk-failing": "the disk refuses this node's state",
    "failed": "a process has ended",
}
"""The events that are alarms, by kind, with what they mean (docs/guide/operate.md)."""

# otherwise every counter has a second series with the time at which it was created
_disable_created_metrics: Callable[[], None] = disable_created_metrics  # the function itself has no annotations
_disable_created_metrics()


@dataclass(frozen=True)
class MetricSpec:
    """A metric, which has the label `node` and others, and the event and field of the log that set it or add to it.

    The name follows Prometheus' conventions. The event is empty for the metrics of events and stores.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    event: str = ""
    field: str = ""


def _gauge(event: str, field: str, name: str, text: str) -> MetricSpec:
    return MetricSpec(f"grailnode_{name}", "gauge", text, event=event, field=field)


def _sum(event: str, field: str, name: str, text: str) -> MetricSpec:
    return MetricSpec(f"grailnode_{name}_total", "counter", text, event=event, field=field)


_EVENTS: Final = MetricSpec("grailnode_events_total", "counter", "Events in the log.", ("event",))
_EVENT_TIME: Final = MetricSpec(
    "grailnode_event_timestamp_seconds", "gauge", "When the newest event of a name was, in Unix time.", ("event",)
)
_OPERATIONS: Final = MetricSpec(
    "grailnode_store_operations_total",
    "counter",
    "Operations on stores by outcome: ok, missing, too_large, error, cancelled.",
    ("operation", "outcome"),
)
_PAYLOAD: Final = MetricSpec(
    "grailnode_store_payload_bytes_total", "counter", "Bytes of objects, read and written.", ("operation",)
)
_WAIT: Final = MetricSpec("grailnode_store_wait_seconds_total", "counter", "Time that they took.", ("operation",))
_WAITING: Final = MetricSpec(
    "grailnode_waiting_since_seconds",
    "gauge",
    "Since when the process waits, in Unix time, by what it waits for; 0 when it has ended.",
    ("waits_for",),
)

SPECS: Final = (
    *(_EVENTS, _EVENT_TIME, _OPERATIONS, _PAYLOAD, _WAIT, _WAITING),
    _gauge("serving", "version", "served_version", "The policy version with which this node samples or judges."),
    _gauge("published", "version", "published_version", "The newest version that this trainer has published."),
    _gauge("published", "patch_bytes", "patch_size_bytes", "Size of the newest version's patch; 0 without one."),
    _gauge("step", "step", "training_steps", "Optimizer steps since the run began."),
    _gauge("step", "reward", "training_reward_ratio", "Mean reward of the newest step's groups."),
    _gauge("step", "loss", "training_loss", "Loss of the newest step."),
    _gauge("step", "entropy", "training_entropy_nats", "Mean entropy of the policy at the newest step's tokens."),
    _gauge("step", "grad_norm", "training_gradient_norm", "Norm of the newest step's gradient, before clipping."),
    _gauge("step", "staleness", "training_staleness_versions", "Mean age of the newest step's groups, in versions."),
    _gauge("step", "buffered", "training_buffered_groups", "Groups that wait for a step."),
    _gauge("step", "data_wait_fraction", "training_data_wait_ratio", "Share of time in which steps wait for groups."),
    _gauge("step", "io_wait_fraction", "training_storage_wait_ratio", "Share in which steps wait for the disk."),
    _sum("collected", "used", "collected_groups", "Verified groups that this trainer has taken."),
    _sum("collected", "unused", "uncollected_groups", "Groups of finished windows that it has not taken."),
    _sum("delivered", "groups", "delivered_groups", "Groups that this miner has delivered."),
    _sum("delivered", "bytes", "delivered_bytes", "Bytes of the batches that this miner has delivered."),
    _sum("judged", "cases", "judged_cases", "Miners' windows that this validator has judged."),
    _sum("judged", "seconds", "judging_seconds", "Time in which it judged."),
    _gauge("judged", "left_earning", "unjudged_cases", "Earning miners of its newest window that it had no time for."),
    _gauge("revealed", "window", "revealed_window", "The newest window whose verdicts this validator has revealed."),
    _gauge("event-loop-blocked", "seconds", "event_loop_blocked_seconds", "The newest report of a long step."),
)
"""Every metric of a process but those of prometheus_client's ProcessCollector."""

_OF_EVENTS: Final = {spec.event: [own for own in SPECS if own.event == spec.event] for spec in SPECS if spec.event}


class Metrics:
    """Implements StoreMeter, and counts events. Every process has a registry, and its name in the label `node`."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, CPU seconds and open files, read from /proc when asked
        kinds = {"counter": Counter, "gauge": Gauge}
        self._metrics = {
            spec.name: kinds[spec.kind](spec.name, spec.help, ("node", *spec.labels), registry=self._registry)
            for spec in SPECS
        }
        for event in ALARMS:  # a counter that begins with 1 has not increased
            self._metrics[_EVENTS.name].labels(process, event)

    def count_event(self, name: str, fields: Mapping[str, str | int | float]) -> None:
        """Count an event, and take over the numbers of it that are metrics."""
        self._add(_EVENTS, 1, name)
        self._metrics[_EVENT_TIME.name].labels(self._process, name).set(time.time())
        for spec in _OF_EVENTS.get(name, ()):
            value = fields.get(spec.field)
            if isinstance(value, int | float):
                self._add(spec, value)
        if "waits_for" in fields:
            since = 0.0 if name == "waited" else time.time() - float(fields["seconds"])
            self._add(_WAITING, since, str(fields["waits_for"]))

    def record(self, operation: str, outcome: str, payload_bytes: int, seconds: float) -> None:
        self._add(_OPERATIONS, 1, operation, outcome)
        self._add(_PAYLOAD, payload_bytes, operation)
        self._add(_WAIT, seconds, operation)

    def _add(self, spec: MetricSpec, value: float, *labels: str) -> None:
        metric = self._metrics[spec.name].labels(self._process, *labels)
        if isinstance(metric, Gauge):
            metric.set(value)
        else:
            metric.inc(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


async def serve_metrics(port: int, exposition: Callable[[], bytes]) -> None:
    """Serve /metrics and /health at a port of 127.0.0.1 until cancelled; UserError if it cannot be used."""

    def respond(request: Request) -> Answer:
        if request.path == "/metrics":
            return Answer(exposition(), CONTENT_TYPE_LATEST)
        if request.path == "/health":
            return Answer(b"alive\n")
        return Answer(b"there are /metrics and /health\n", status="404 Not Found")

    try:
        await serve_http("127.0.0.1", port, respond)
    except OSError as error:
        raise UserError(f"node.metrics_port: {port} cannot be used ({error.strerror}); choose another") from error
