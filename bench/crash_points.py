"""Where a process can be killed: named points, and the hooks that a bench's own process installs to be killed there.

The program has no hooks. A process under test is `node_process.main` with its stores wrapped, and with the few
functions that write to the disk or step the optimizer replaced, by `arm`.
"""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from grailnode.node import processes
from grailnode.node.processes import Kind, Launch
from grailnode.node.telemetry import NodeTelemetry
from grailnode.store import disk, local
from roles.node.identity import Node
from roles.trainer.learn.learner import Learner
from tests.support.faults.tripwire import TrippingStore, Tripwire

Where = Literal["store", "state", "disk", "step"]


@dataclass(frozen=True)
class Point:
    """A moment of a process's life.

    Attributes:
        kind: of the process.
        where: the shared store, the node's own state, the disk below both, or the optimizer.
        operation: of the store; at the disk, the function.
        pattern: what the path contains (a regular expression); at the disk, of any path.
        after: once it took effect, instead of before.
        at_start: it comes once in a life, before the process is at work.
    """

    name: str
    kind: Kind
    where: Where
    operation: str
    pattern: str
    after: bool
    at_start: bool = False


def _around(
    name: str, kind: Kind, where: Where, operation: str, pattern: str, *, at_start: bool = False
) -> list[Point]:
    """Just before and just after."""
    return [
        Point(f"before {name}", kind, where, operation, pattern, False, at_start),
        Point(f"after {name}", kind, where, operation, pattern, True, at_start),
    ]


POINTS: Final = (
    *_around("the optimizer step", "training", "step", "step", ""),
    *_around("the checkpoint", "training", "state", "put", "^training/checkpoint"),
    *_around("the snapshot is handed over", "training", "state", "put", "^outbox/"),
    *_around("a read batch is deleted", "training", "state", "delete", "^inbox/"),
    *_around("the epoch is noted", "upload", "state", "put", "^chain/epoch", at_start=True),
    *_around("the manifest is promised", "upload", "state", "put", "^chain/manifests/"),
    *_around("the patch put", "upload", "store", "put", "/patches/"),
    *_around("the manifest put", "upload", "store", "put", "/manifests/"),
    *_around("the head put", "upload", "store", "put", "/head$"),
    *_around("the version is noted", "upload", "state", "put", "^chain/weights/"),
    *_around("the old version is dropped", "upload", "state", "delete", "^chain/weights/"),
    *_around("the snapshot is deleted", "upload", "state", "delete", "^outbox/"),
    *_around("an anchor's shard is kept", "upload", "state", "put", "^chain/shards/"),
    *_around("an anchor's shard put", "upload", "store", "put", "/anchors/"),
    *_around("the anchor is noted", "upload", "state", "put", "^chain/anchors/"),
    *_around("a kept shard is deleted", "upload", "state", "delete", "^chain/shards/"),
    *_around("retention deletes an object", "upload", "store", "delete", ""),
    *_around("an intent is written", "download", "state", "put", "^intents/"),
    *_around("an intent is deleted", "download", "state", "delete", "^intents/"),
    *_around("the collector's progress", "download", "state", "put", "^collector-progress$"),
    *_around("a verified batch put", "download", "state", "put", "^inbox/"),
    *_around("the outcome log", "download", "state", "put", "^outcomes/"),
    *_around("the ledger append", "validator", "state", "put", "^ledger/"),
    *_around("the seal put (commit)", "validator", "store", "put", "/seals/"),
    *_around("the verdict put (reveal)", "validator", "store", "put", "/verdicts/"),
    *_around("the witness put", "validator", "store", "put", "/witnesses/"),
    *_around("the summary put", "validator", "store", "put", "/summaries/"),
    *_around("the batch put", "miner", "store", "put", "/batches/"),
    *_around("the commitment put", "miner", "store", "put", "/commitments/"),
    *_around("the announcement put", "miner", "store", "put", "^participants/"),
    *_around("the trust is noted", "miner", "state", "put", "^trust"),
    Point("in the middle of a temporary file", "upload", "disk", "write", "", after=False),
    Point("before fsync", "upload", "disk", "fsync", "", after=False),
    Point("between fsync and rename", "upload", "disk", "fsync", "", after=True),
    Point("between rename and the folder's fsync", "upload", "disk", "folder", "", after=False),
    Point("after the folder's fsync", "upload", "disk", "folder", "", after=True),
    Point("in the middle of a checkpoint's file", "training", "disk", "write", "", after=False),
    Point("in the middle of a ledger's file", "validator", "disk", "write", "", after=False),
)


@dataclass(frozen=True)
class Trap:
    """A point, and how often it passes unharmed before it kills; None where the process lives.

    Attributes:
        sign: the event by which the process is known to be at work; passes count from there on, except for points at
            the start.
    """

    point: Point | None = None
    passes: int = 0
    sign: str = ""


class _Armed:
    """Whether passes count yet, and how many are left."""

    def __init__(self, trap: Trap, point: Point) -> None:
        self.left = trap.passes
        self.awake = point.at_start
        if not self.awake:
            self._wake_at(trap.sign)

    def falls(self) -> bool:
        """Count a pass; whether it is the deadly one."""
        if not self.awake:
            return False
        self.left -= 1
        return self.left == -1

    def _wake_at(self, sign: str) -> None:
        event = NodeTelemetry.event

        def heard(telemetry: NodeTelemetry, name: str, **fields: Any) -> None:
            event(telemetry, name, **fields)
            self.awake = self.awake or name == sign

        setattr(NodeTelemetry, "event", heard)  # noqa: B010


def kill_myself() -> None:
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def main(launch: Launch, trap: Trap) -> None:
    """A node's process that dies at a point."""
    if trap.point is not None:
        arm(trap.point, _Armed(trap, trap.point))
    processes.main(launch)


def arm(point: Point, armed: _Armed) -> None:
    """Install the hook of a point in this process, for good."""
    if point.where == "step":
        _replace(Learner, "step", point, armed)
    elif point.where == "disk":
        _arm_disk(point, armed)
    else:
        _arm_stores(point, armed)


def _arm_stores(point: Point, armed: _Armed) -> None:
    async def strike() -> None:
        kill_myself()

    matches = re.compile(point.pattern)
    wire = Tripwire(
        lambda operation, path: operation == point.operation and matches.search(path) is not None and armed.falls(),
        0,
        point.after,
        strike,
    )
    make: Callable[..., Node] = processes.make_node

    def made(*arguments: Any) -> Node:
        node = make(*arguments)
        if point.where == "store":
            return replace(node, store=TrippingStore(node.store, wire))
        return replace(node, state=TrippingStore(node.state, wire))

    setattr(processes, "make_node", made)  # noqa: B010 - mypy knows it as a function


def _arm_disk(point: Point, armed: _Armed) -> None:
    if point.operation == "folder":
        _replace(local, "sync_folder", point, armed)
    elif point.operation == "fsync":
        _replace(os, "fsync", point, armed)
    else:
        write = disk.write_through

        def write_half(descriptor: int, data: bytes) -> None:
            if armed.falls():
                os.write(descriptor, data[: len(data) // 2])
                kill_myself()
            write(descriptor, data)

        setattr(local, "write_through", write_half)  # noqa: B010


def _replace(owner: Any, name: str, point: Point, armed: _Armed) -> None:
    """Replace a function by one that kills before or after the call that is due."""
    function = getattr(owner, name)

    def deadly(*arguments: Any) -> Any:
        due = armed.falls()
        if due and not point.after:
            kill_myself()
        result = function(*arguments)
        if due:
            kill_myself()
        return result

    setattr(owner, name, deadly)
