"""Judging computes off the event loop: deadlines are kept while it does, and a cancelled judgement leaves nothing
running.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trio

from protocol.digest import content_digest
from roles.validator.judge import Judge
from tests.support.adversaries.harness import Field

WINDOW = 3


class Gate:
    """Runs functions in worker threads that wait to be let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = trio.Event()
        self.finished: list[str] = []

    async def run_sync(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, by a thread."""
        self.entered.set()

        def wait() -> Any:
            self.open.wait()
            result = function(*arguments)
            self.finished.append(function.__name__)
            return result

        return await trio.to_thread.run_sync(wait)


async def _judge(field: Field, gate: Gate) -> list[Any]:
    judge = Judge(replace(field.task, run_sync=gate.run_sync), await field.serving(), WINDOW, field.randomness(WINDOW))
    groups = await field.honest(field.mining_window(WINDOW), [0, 1])
    return await judge.judge([(group, content_digest(group.to_frame())) for group in groups])


def test_the_loop_runs_on_while_a_judge_computes(field: Field) -> None:
    async def scenario() -> None:
        gate, found = Gate(), []

        async def judge() -> None:
            found.extend(await _judge(field, gate))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(judge)
            await gate.entered.wait()
            for _ in range(3):
                await trio.lowlevel.checkpoint()  # reached only if nobody holds the loop
            assert not found
            gate.open.set()
        assert [judgement.reason for judgement in found] == ["", ""]
        assert {"_check_forms", "_check_positions", "_rewards"} <= set(gate.finished)

    trio.run(scenario)


def test_a_cancelled_judge_waits_for_its_step_and_takes_no_other(field: Field) -> None:
    async def scenario() -> None:
        gate = Gate()

        async def cancel(scope: trio.CancelScope) -> None:
            await gate.entered.wait()
            scope.cancel()
            gate.open.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel, nursery.cancel_scope)
            await _judge(field, gate)
        assert nursery.cancel_scope.cancelled_caught
        assert gate.finished == ["_check_forms"]

    trio.run(scenario)
