"""Runs a node's operating system processes under a trio supervisor, which restarts them or stops the node.

A fork server imports torch once and forks the processes, so that a node with several starts in seconds; the server
itself never computes. A process ends when its supervisor ends, even when the supervisor is killed.
"""

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final, TypeVar

import trio

from grailnode import UserError
from grailnode.node.process_launch import Seat
from roles.gather import first_failure
from roles.node.retries import Pause
from roles.ports import LineReporter

PRELOADED: Final = (
    *("grailnode.node.fork_server", "torch", "grailnode.node.processes", "protocol.rollout.gumbel_max"),
    *("numpy.ctypeslib", "numpy.ma"),
)
"""What the fork server imports, with the kernels of miners and validators, and with what numpy imports when it is first
used. A later import is a long step of the event loop itself (20 ms and more), and the garbage collector would look
through its objects again and again, in others.
"""
EXIT_PERMANENT: Final = 3
"""The exit code of a process whose failure a restart would not mend; it has logged the cause."""
EXIT_TRANSIENT: Final = 4
"""The exit code of a process that storage or the machine has stopped; it has logged the cause."""

_GRACE_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.02
_MAX_RESTARTS: Final = 5  # after faults of the program, within _RESTART_SPAN_SECONDS
_RESTART_SPAN_SECONDS: Final = 60.0
_RESTART_PAUSE: Final = Pause(first=0.2, longest=30.0, factor=1.5)
_OUTSIDE_CAUSES: Final = {EXIT_TRANSIENT, -signal.SIGKILL, -signal.SIGTERM}
"""Ends that say nothing about the program: storage, the machine (also its memory running out), or somebody's signal."""
_PR_SET_NAME: Final = 15

Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running."""

    name: str
    target: Callable[..., None]  # a module-level function that runs until the process is stopped
    arguments: tuple[Any, ...]  # of the target, picklable
    # of processes that are started together, each with its seat as another argument. When one of them ends, the others
    # are killed, and all are started again
    seats: Sequence[Seat] = ()


class Supervisor:
    """Keeps processes running, and reports a line for each restart.

    `log_end` is called with the name of a process that a signal has ended, which could not log that, and how it ended.
    """

    def __init__(self, report: LineReporter, log_end: Callable[[str, str], None] = lambda name, how: None) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._report = report
        self._log_end = log_end
        self._processes: dict[str, list[ForkServerProcess]] = {}
        self._stopped_names: set[str] = set()

    async def keep(self, specs: Sequence[ProcessSpec]) -> None:
        """Run the processes until cancelled, then stop them all."""
        try:
            async with first_failure(UserError) as tasks:
                for spec in specs:
                    tasks.start_soon(self._keep_one, spec)
        finally:
            with trio.CancelScope(shield=True):
                await self._stop_all([process for group in self._processes.values() for process in group])

    async def stop(self, name: str) -> None:
        """Stop one process for good. Does nothing when it is stopped already."""
        if name in self._stopped_names:
            return
        self._stopped_names.add(name)
        await self._stop_all(self._processes[name])

    async def _keep_one(self, spec: ProcessSpec) -> None:
        """Start a process again whenever it ends: for ever after ends with an outside cause, with a growing delay."""
        faults: deque[float] = deque(maxlen=_MAX_RESTARTS)
        delay, first_start = 0.0, datetime.now(UTC)
        for starts in itertools.count(2):
            start = trio.current_time()
            exit_code = await self._run_once(spec)
            if spec.name in self._stopped_names:
                return
            if exit_code == EXIT_PERMANENT:
                raise UserError(f"{spec.name} cannot go on; its last line says why")
            now = trio.current_time()
            if exit_code not in _OUTSIDE_CAUSES:
                if len(faults) == _MAX_RESTARTS and now - faults[0] < _RESTART_SPAN_SECONDS:
                    raise UserError(f"{spec.name} ended {_MAX_RESTARTS + 1} times within a minute; see its log")
                faults.append(now)
            if exit_code is not None and exit_code < 0:
                self._log_end(spec.name, _describe_exit(exit_code))
            delay = next_delay(delay, now - start)
            again = f"starting it again in {delay:.1f} s (start {starts} since {first_start:%Y-%m-%d %H:%M} UTC)"
            self._report(f"{spec.name} ended ({_describe_exit(exit_code)}); {again}")
            await trio.sleep(delay)

    async def _run_once(self, spec: ProcessSpec) -> int | None:
        """Start a spec's processes, wait until one ends, kill the others, and return its exit code."""
        with tempfile.TemporaryDirectory(prefix="grailnode-ranks-") if spec.seats else nullcontext("") as directory:
            seats: list[tuple[Seat, ...]] = [
                (replace(seat, meeting=seat.meeting or f"file://{directory}/meeting"),) for seat in spec.seats
            ]
            processes = [
                self._context.Process(target=spec.target, args=spec.arguments + seat, name=spec.name, daemon=True)
                for seat in (seats or [()])
            ]
            for process in processes:
                process.start()
            self._processes[spec.name] = processes
            await _wait_for_any([process.sentinel for process in processes])
            exit_codes = [process.exitcode for process in processes if process.exitcode is not None]
            for process in processes:
                process.kill()
                process.join()
        return EXIT_PERMANENT if EXIT_PERMANENT in exit_codes else exit_codes[0]

    @staticmethod
    async def _stop_all(processes: Sequence[ForkServerProcess]) -> None:
        """Ask processes to stop, and kill those that still run after `_GRACE_SECONDS`."""
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.terminate()
        with trio.move_on_after(_GRACE_SECONDS):
            while any(process.is_alive() for process in alive):
                await trio.sleep(_POLL_SECONDS)
        for process in alive:
            if process.is_alive():
                process.kill()
            process.join()


def next_delay(delay: float, uptime: float) -> float:
    """Return how many seconds to wait before a process is started again, given the delay before its last start and the
    seconds that it then ran; after a minute it begins anew.
    """
    return _RESTART_PAUSE.after(0.0 if uptime >= _RESTART_SPAN_SECONDS else delay)


async def _wait_for_any(sentinels: Sequence[int]) -> None:
    async def wait(sentinel: int) -> None:
        await trio.lowlevel.wait_readable(sentinel)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for sentinel in sentinels:
            nursery.start_soon(wait, sentinel)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code == EXIT_TRANSIENT:
        return "storage or this machine failed; its last line says how"
    if exit_code is not None and exit_code < 0:
        hint = ", as where memory has run out" if exit_code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-exit_code).name}{hint}"
    return f"exit code {exit_code}"


def run_until_interrupted(main: Callable[[], Awaitable[Result]]) -> Result | None:
    """Return what a main returns; None if SIGINT (Ctrl-C) or SIGTERM has cancelled it."""
    return trio.run(_run_until_signal, main, signal.SIGINT, signal.SIGTERM)


def run_process(name: str, main: Callable[[], Awaitable[int]]) -> None:
    """Run a child process's async main until it returns or SIGTERM arrives, then exit with the code it returned.

    The process also ends when its supervisor ends. It ignores Ctrl-C, which the supervisor handles. `ps -o comm` shows
    the first 15 bytes of its name.
    """

    async def run() -> int | None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_die_with_parent)
            code = await _run_until_signal(main, signal.SIGTERM)
            nursery.cancel_scope.cancel()
        return code

    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    sys.exit(trio.run(run))


async def _run_until_signal(main: Callable[[], Awaitable[Result]], *signals: signal.Signals) -> Result | None:
    result: list[Result] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_at_signal, nursery.cancel_scope, *signals)
        result.append(await main())
        nursery.cancel_scope.cancel()
    return result[0] if result else None


async def _stop_at_signal(scope: trio.CancelScope, *signals: signal.Signals) -> None:
    with trio.open_signal_receiver(*signals) as receiver:
        async for _ in receiver:
            scope.cancel()


async def _die_with_parent() -> None:
    """End the process at once, without cleaning up, when the supervisor is gone: nothing is left to report to."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    await trio.lowlevel.wait_readable(parent.sentinel)
    os._exit(1)
