"""Named points at which a process can be killed, and the hooks with which a process of a benchmark kills itself there.

The program itself has no hooks. A process under test runs `grailnode.node.processes.main`, in which `install_hook` has
wrapped the stores, or replaced one of the few functions that write to the disk or step the optimizer.
"""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from grailnode.node import node_makers, processes
from grailnode.node.process_launch import Kind, Launch
from grailnode.node.telemetry import NodeTelemetry
from grailnode.store import disk, local
from roles.node.identity import Node
from roles.trainer.learn.learner import Learner
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger

Where = Literal["store", "state", "disk", "step"]


@dataclass(frozen=True)
class Point:
    """A point in the work of a process.

    Attributes:
        kind: kind of the process.
        where: the shared store, the node's own state, the disk below both, or the optimizer.
        operation: operation of the store; for the disk, the function.
        pattern: regular expression that the path matches; unused for the disk.
        after: True if the point is behind the operation, False if it is before.
        at_start: True if the process reaches the point once, before it has logged its ready event.
    """

    name: str
    kind: Kind
    where: Where
    operation: str
    pattern: str
    after: bool
    at_start: bool = False


def _before_and_after(
    name: str, kind: Kind, where: Where, operation: str, pattern: str, *, at_start: bool = False
) -> list[Point]:
    """Return the two points just before and just after an operation."""
    return [
        Point(f"before {name}", kind, where, operation, pattern, False, at_start),
        Point(f"after {name}", kind, where, operation, pattern, True, at_start),
    ]


POINTS: Final = (
    *_before_and_after("the optimizer step", "training", "step", "step", ""),
    *_before_and_after("writing the checkpoint", "training", "state", "put", "^training/"),
    *_before_and_after("handing over the snapshot", "training", "state", "put", "^outbox/"),
    *_before_and_after("acknowledging groups", "training", "state", "put", "^acknowledged$"),
    *_before_and_after("deleting a batch from the inbox", "training", "state", "delete", "^inbox/"),
    *_before_and_after("recording the epoch", "upload", "state", "put", "^chain/epoch", at_start=True),
    *_before_and_after("recording the manifest", "upload", "state", "put", "^chain/manifests/"),
    *_before_and_after("uploading the patch", "upload", "store", "put", "/patches/"),
    *_before_and_after("uploading the manifest", "upload", "store", "put", "/manifests/"),
    *_before_and_after("uploading the head", "upload", "store", "put", "/head$"),
    *_before_and_after("recording the version", "upload", "state", "put", "^chain/weights/"),
    *_before_and_after("deleting the old version", "upload", "state", "delete", "^chain/weights/"),
    *_before_and_after("deleting the snapshot", "upload", "state", "delete", "^outbox/"),
    *_before_and_after("uploading an anchor's shard", "upload", "store", "put", "/anchors/"),
    *_before_and_after("recording the anchor", "upload", "state", "put", "^chain/anchors/"),
    *_before_and_after("writing a file of the weights", "training", "state", "put", "^weights/"),
    *_before_and_after("deleting a file of older weights", "upload", "state", "delete", "^weights/"),
    *_before_and_after("writing an intent", "download", "state", "put", "^intents/"),
    *_before_and_after("deleting an intent", "download", "state", "delete", "^intents/"),
    *_before_and_after("recording the collector's progress", "download", "state", "put", "^collector-progress$"),
    *_before_and_after("writing a verified batch", "download", "state", "put", "^inbox/"),
    *_before_and_after("writing the outcomes", "download", "state", "put", "^outcomes/"),
    *_before_and_after("appending to the ledger", "validator", "state", "put", "^ledger/"),
    *_before_and_after("uploading the seal (commit)", "validator", "store", "put", "/seals/"),
    *_before_and_after("uploading the verdict (reveal)", "validator", "store", "put", "/verdicts/"),
    *_before_and_after("uploading the witness", "validator", "store", "put", "/witnesses/"),
    *_before_and_after("uploading the summary", "validator", "store", "put", "/summaries/"),
    *_before_and_after("uploading the batch", "miner", "store", "put", "/batches/"),
    *_before_and_after("uploading the commitment", "miner", "store", "put", "/commitments/"),
    *_before_and_after("uploading the announcement", "miner", "store", "put", "^participants/"),
    *_before_and_after("recording the trust", "miner", "state", "put", "^trust"),
    Point("while writing a temporary file", "upload", "disk", "write", "", after=False),
    Point("before fsync of the file", "upload", "disk", "fsync", "", after=False),
    Point("between fsync and rename", "upload", "disk", "fsync", "", after=True),
    Point("between rename and fsync of the folder", "upload", "disk", "folder", "", after=False),
    Point("after fsync of the folder", "upload", "disk", "folder", "", after=True),
    Point("while writing a checkpoint's file", "training", "disk", "write", "", after=False),
    Point("while writing a ledger's file", "validator", "disk", "write", "", after=False),
)


@dataclass(frozen=True)
class KillPlan:
    """When a process kills itself.

    Attributes:
        point: the point at which it does so; None if it never does.
        passes: how often the process passes the point before.
        ready_event: name of the event that the process logs once it works. Passes are counted from then on, except
            those of points at the start.
    """

    point: Point | None = None
    passes: int = 0
    ready_event: str = ""


class _KillCounter:
    """Counts the passes of a point."""

    def __init__(self, plan: KillPlan, point: Point) -> None:
        self._remaining_passes = plan.passes
        self._is_counting = point.at_start
        if not self._is_counting:
            self._count_after(plan.ready_event)

    def is_due(self) -> bool:
        """Count a pass and return whether the process must die in this one."""
        if not self._is_counting:
            return False
        self._remaining_passes -= 1
        return self._remaining_passes == -1

    def _count_after(self, ready_event: str) -> None:
        event = NodeTelemetry.event

        def record_event(telemetry: NodeTelemetry, name: str, **attributes: Any) -> None:
            event(telemetry, name, **attributes)
            self._is_counting = self._is_counting or name == ready_event

        setattr(NodeTelemetry, "event", record_event)  # noqa: B010


def kill_this_process() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def main(launch: Launch, plan: KillPlan) -> None:
    """Run a node's process that kills itself as planned."""
    if plan.point is not None:
        install_hook(plan.point, _KillCounter(plan, plan.point))
    processes.main(launch)


def install_hook(point: Point, counter: _KillCounter) -> None:
    """Install the hook of a point in this process; nothing removes it."""
    if point.where == "step":
        _replace(Learner, "update", point, counter)
    elif point.where == "disk":
        _hook_disk(point, counter)
    else:
        _hook_stores(point, counter)


def _hook_stores(point: Point, counter: _KillCounter) -> None:
    async def kill() -> None:
        kill_this_process()

    matches = re.compile(point.pattern)
    trigger = CrashTrigger(
        lambda operation, path: operation == point.operation and matches.search(path) is not None and counter.is_due(),
        0,
        point.after,
        kill,
    )
    original_make_node: Callable[..., Node] = node_makers.make_node

    def make_node(*arguments: Any) -> Node:
        node = original_make_node(*arguments)
        if point.where == "store":
            return replace(node, store=CrashingStore(node.store, trigger))
        return replace(node, state=CrashingStore(node.state, trigger))

    setattr(processes, "make_node", make_node)  # noqa: B010 - mypy knows it as a function


def _hook_disk(point: Point, counter: _KillCounter) -> None:
    if point.operation == "folder":
        _replace(local, "sync_folder", point, counter)
    elif point.operation == "fsync":
        _replace(os, "fsync", point, counter)
    else:
        write = disk.write_through

        def write_half(descriptor: int, *parts: bytes) -> None:
            if counter.is_due():
                data = b"".join(parts)
                os.write(descriptor, data[: len(data) // 2])
                kill_this_process()
            write(descriptor, *parts)

        setattr(local, "write_through", write_half)  # noqa: B010


def _replace(owner: Any, name: str, point: Point, counter: _KillCounter) -> None:
    """Replace a function by one that kills the process before or after the call that is due."""
    function = getattr(owner, name)

    def function_with_kill(*arguments: Any) -> Any:
        is_due = counter.is_due()
        if is_due and not point.after:
            kill_this_process()
        result = function(*arguments)
        if is_due:
            kill_this_process()
        return result

    setattr(owner, name, function_with_kill)
