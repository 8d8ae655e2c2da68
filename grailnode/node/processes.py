"""How the processes of a node are started, and how each is run: its lock, its log and its exit code. bodies.py says
what each kind does.

The fork server imports this module, so that a new process has every other module it needs already.
"""

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
import trio

from grailnode.config import Config
from grailnode.node.bodies import BODIES, ProcessBody, follow_rank_0, train, upload_for_host_0
from grailnode.node.metrics import serve_metrics
from grailnode.node.node_makers import make_canary, make_node, newest_saved, state_directory
from grailnode.node.process_launch import TRAINER_KINDS, Kind, Launch, Role, Seat, prepare_rank, process_kinds
from grailnode.node.state_locks import lock_state
from grailnode.node.supervisor import (
    EXIT_PERMANENT,
    EXIT_TRANSIENT,
    ProcessSpec,
    Supervisor,
    run_process,
    run_until_interrupted,
)
from grailnode.node.telemetry import LONG_STEP_SECONDS, LoopWatch, NodeTelemetry, StepReporter
from grailnode.node.user_errors import explain, fault_in, is_transient, with_repair_command
from grailnode.observe.node_logs import equal_failures, recent_starts
from roles.ports import LineReporter

TRAINER_BLOCK = 128 << 10
"""Bytes of a block of memory that a trainer's process gives back when it is freed."""
FOLLOWER_BLOCK = 1 << 20
"""The same of a process that samples or checks: a token's decoding allocates smaller ones again and again."""
_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_FOLLOWERS = ("canary", "miner", "validator")
_TRAINERS = ("training", "site")
_MAX_EQUAL_FAULTS: Final = 6
_OPEN_FILES: Final = 65_536


def run_role(config: Config, role: Role, name: str, report: LineReporter) -> None:
    launches = [Launch(config, kind, name) for kind in process_kinds(config, role)]
    run_until_interrupted(partial(keep_processes, launches, report))
    report(f"{name}: stopped")


async def keep_processes(launches: Sequence[Launch], report: LineReporter) -> None:
    """Keep the processes of a node running. That a signal has ended one is an event in its log, and an alarm."""
    specs = [make_spec(launch) for launch in launches]
    telemetry = {
        spec.name: NodeTelemetry(launch.process, log_of(launch, launch.process), alarm_url=launch.config.node.alarm_url)
        for spec, launch in zip(specs, launches, strict=True)
    }
    try:
        await Supervisor(report, lambda name, how: telemetry[name].event("failed", error=how)).keep(specs)
    finally:
        for process in telemetry.values():
            process.close()


def make_spec(launch: Launch) -> ProcessSpec:
    """Return what the supervisor keeps running: one process, or this host's ranks of a trainer or site."""
    title, trainer = f"{launch.name}/{launch.kind}", launch.config.trainer
    if launch.kind in ("training", "site") and trainer.ranks > 1:
        first, meeting = trainer.host * trainer.gpus, trainer.hosts.meeting if trainer.hosts else ""
        ranks = range(first, first + trainer.gpus)
        seats = [Seat(rank, trainer.ranks, meeting, trainer.gpus) for rank in ranks]
        return ProcessSpec(title, main, (launch, None), seats)
    return ProcessSpec(title, main, (launch,))


def main(launch: Launch, body: ProcessBody | None = None, seat: Seat | None = None) -> None:
    """Run a node's process until it is stopped; one that trains together with others has a seat among them, and those
    other than rank 0 end with it. A `body`, a module-level function, replaces that of the process's kind.
    """
    config, kind, process, meeting = launch.config, launch.kind, launch.process, None
    if seat is not None:
        prepare_rank(seat)
        # It takes half a second, with torch's compiler: before the event loop.
        from grailnode.node.rank_processes import Meeting  # noqa: PLC0415

        meeting = Meeting(seat)
        process = f"{launch.name}/{kind}-{seat.rank}" if seat.rank else process
    if kind in _TRAINERS and config.trainer.optimizer != "adamw":
        import_module("torch._dynamo")  # the optimizer imports it, and what is imported now is frozen below
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Hundreds of spaces may hang at once. A container may allow a billion, which some programs would all try to close.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
    torch.set_num_threads(config.engine.threads)
    return_large_blocks(FOLLOWER_BLOCK if kind in _FOLLOWERS else TRAINER_BLOCK)
    log = log_of(launch, process)
    telemetry = NodeTelemetry(process, log, sys.stderr if launch.echo else None, config.node.alarm_url)
    work: Callable[[], Awaitable[None]] = partial(_run_body, launch, body or BODIES[kind], telemetry, log)
    if meeting is not None and meeting.seat.rank:
        work = partial(follow_rank_0, launch, telemetry, meeting)
    elif meeting is not None:
        run_body = partial(_run_body, launch, partial(train, meeting=meeting), telemetry, log)
        work = partial(meeting.run, run_body, telemetry)
    elif kind == "upload" and config.trainer.host:
        work = partial(upload_for_host_0, launch, telemetry)
    run_process(f"{launch.name}/{kind}", partial(_report_failure, launch, log, telemetry, work))


async def _run_body(launch: Launch, body: ProcessBody, telemetry: NodeTelemetry, log: Path) -> None:
    config, kind = launch.config, launch.kind
    with lock_state(state_directory(config, launch.name), kind):
        starts, since, cause = recent_starts(log, time.time())
        if starts:
            telemetry.event("started", kind=kind, starts=starts + 1, since=since, cause=cause)
        else:
            telemetry.event("started", kind=kind)
        make = make_canary if kind == "canary" else make_node
        node = await trio.to_thread.run_sync(make, config, launch.name, telemetry)
        async with trio.open_nursery() as nursery:
            if config.node.metrics_port:
                nursery.start_soon(serve_metrics, metrics_port(config, kind), telemetry.metrics.exposition)
            await body(node, launch)
            nursery.cancel_scope.cancel()


def metrics_port(config: Config, kind: Kind) -> int:
    """Return the port on which a process serves its metrics; a trainer's ports are consecutive, as in TRAINER_KINDS."""
    return config.node.metrics_port + (TRAINER_KINDS.index(kind) if kind in TRAINER_KINDS else 0)


async def _report_failure(
    launch: Launch, log: Path, telemetry: NodeTelemetry, work: Callable[[], Awaitable[None]]
) -> int:
    """Watch the event loop while a process does its work, and return the exit code: of what fails, a line is logged.

    Training that has one fault again and again, without a new checkpoint or version in between, is not started again.
    Hosts wait minutes for each other, so the supervisor's limit for faults within a minute may never be reached.
    """
    gc.freeze()  # what was imported stays, and to look through it takes tenths of a second on the event loop
    trio.lowlevel.add_instrument(LoopWatch(StepReporter(telemetry), LONG_STEP_SECONDS))
    try:
        await work()
    except Exception as error:
        line = explain(error)
        text = f"{type(fault_in(error)).__name__}, a fault of this program" if line is None else line
        text = with_repair_command(text, launch.config, launch.name)
        place = newest_saved(launch.config, launch.name) if line is None and launch.kind in _TRAINERS else ""
        if place and equal_failures(log, text, place) == _MAX_EQUAL_FAULTS - 1:
            line = text = f"{text}, {_MAX_EQUAL_FAULTS} times at {place}: {error!r}"
        telemetry.event("failed", error=text, **({"place": place} if place else {}))
        await trio.to_thread.run_sync(telemetry.close)
        if line is None:
            raise  # a bug: the traceback goes to standard error, and a restart may help
        return EXIT_TRANSIENT if is_transient(error) else EXIT_PERMANENT
    return 0


def log_of(launch: Launch, process: str) -> Path:
    """Return the log of a process."""
    return launch.config.at(launch.config.node.logs) / f"{process.replace('/', '-')}.jsonl"


def return_large_blocks(limit: int) -> None:
    """Have malloc give each block of `limit` bytes or more back to the kernel when it is freed.

    By itself glibc raises this limit up to 32 MiB, by the blocks that are freed. Then what a step or the writing of a
    file needed for a moment stays with the process, in pieces that do not fit the next need: some bytes for each weight
    (docs/adr/0410-weights-and-state-in-files.md). With another allocator than glibc's, nothing changes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, limit)
