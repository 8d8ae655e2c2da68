"""The operating system's processes of a node, under a trio supervisor that restarts them or stops the node loudly.

Processes come from a fork server that has imported torch once, so a node with several starts in seconds; the server
imports and forks, and never computes. A process dies with its supervisor, even with one that was killed.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final, TypeVar

import trio

_PRELOADED: Final = ["grailnode.node.fork_server", "torch", "grailnode.node.processes"]
EXIT_HOPELESS: Final = 3
"""The exit code of a process that starting again would not help; it has said why."""

_GRACE_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.02
_MOST_RESTARTS: Final = 5
_RESTART_SPAN_SECONDS: Final = 60.0
_PR_SET_NAME: Final = 15


Result = TypeVar("Result")


class ProcessError(Exception):
    """A process that keeps failing, so that the node stops."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running.

    Attributes:
        name: shown to people.
        target: a module-level function; it runs until it is told to stop.
        arguments: for it; picklable.
    """

    name: str
    target: Callable[..., None]
    arguments: tuple[Any, ...]


class Supervisor:
    """Keeps processes running.

    Args:
        report: told what happens to them, one line each.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._report = report
        self._running: dict[str, ForkServerProcess] = {}
        self._unwanted: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items() if process.pid is not None}

    async def keep(self, specs: Sequence[ProcessSpec]) -> None:
        """Run the processes until cancelled, then stop them all.

        Raises:
            ProcessError: one of them failed again and again.
        """
        failures: list[ProcessError] = []

        async def watch(spec: ProcessSpec, scope: trio.CancelScope) -> None:
            try:
                await self._keep_one(spec)
            except ProcessError as error:
                failures.append(error)
                scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                for spec in specs:
                    nursery.start_soon(watch, spec, nursery.cancel_scope)
        finally:
            with trio.CancelScope(shield=True):
                await self._stop_all(list(self._running.values()))
        if failures:
            raise failures[0]

    async def stop(self, name: str) -> None:
        """Stop one process and leave it stopped; nothing happens the second time."""
        if name in self._unwanted:
            return
        self._unwanted.add(name)
        await self._stop_all([self._running[name]])

    async def _keep_one(self, spec: ProcessSpec) -> None:
        ends: deque[float] = deque(maxlen=_MOST_RESTARTS)
        while True:
            process = self._context.Process(target=spec.target, args=spec.arguments, name=spec.name, daemon=True)
            process.start()
            self._running[spec.name] = process
            await trio.lowlevel.wait_readable(process.sentinel)
            process.join()
            if spec.name in self._unwanted:
                return
            if process.exitcode == EXIT_HOPELESS:
                raise ProcessError(f"{spec.name} cannot go on; its last line says why")
            now = trio.current_time()
            if len(ends) == _MOST_RESTARTS and now - ends[0] < _RESTART_SPAN_SECONDS:
                raise ProcessError(f"{spec.name} ended {_MOST_RESTARTS + 1} times within a minute; see its log")
            ends.append(now)
            self._report(f"{spec.name} ended ({_how(process.exitcode)}); starting it again")
            await trio.sleep(0.2 * len(ends))

    @staticmethod
    async def _stop_all(processes: Sequence[ForkServerProcess]) -> None:
        """Ask processes to stop, wait a while, and kill what is left."""
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


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def run_until_interrupted(main: Callable[[], Awaitable[Result]]) -> Result | None:
    """Run a supervisor's async main; Ctrl-C (or SIGTERM) cancels it in good order, wherever it is.

    Returns:
        What `main` returned; None where it was interrupted.
    """

    async def run() -> Result | None:
        result: list[Result] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_at_signal, nursery.cancel_scope, signal.SIGINT, signal.SIGTERM)
            result.append(await main())
            nursery.cancel_scope.cancel()
        return result[0] if result else None

    return trio.run(run)


def run_process(name: str, main: Callable[[], Awaitable[int]]) -> None:
    """Run a child's async main until SIGTERM or its own end, then exit with its code. The child dies with its
    supervisor, whose business Ctrl-C is.

    Args:
        name: shown by `ps -o comm` (its first 15 bytes).
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    sys.exit(trio.run(_until_told, main))


async def _until_told(main: Callable[[], Awaitable[int]]) -> int:
    code = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_die_with_parent)
        nursery.start_soon(_stop_at_signal, nursery.cancel_scope, signal.SIGTERM)
        code = await main()
        nursery.cancel_scope.cancel()
    return code


async def _stop_at_signal(scope: trio.CancelScope, *which: signal.Signals) -> None:
    with trio.open_signal_receiver(*which) as signals:
        async for _ in signals:
            scope.cancel()


async def _die_with_parent() -> None:
    """End at once when the supervisor is gone, as if killed with it: nobody is left to report to."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    await trio.lowlevel.wait_readable(parent.sentinel)
    os._exit(1)
