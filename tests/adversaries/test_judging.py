"""A judge computes in worker threads: the event loop runs meanwhile, and a cancelled judge leaves no thread behind."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trio

from protocol.encoding import content_digest
from roles.validator.judge import Judge
from tests.support.adversaries.harness import TrialHarness

WINDOW = 3


class WorkerGate:
    """Runs functions in worker threads, which wait until the gate is open.

    Attributes:
        open: is set to let the functions run.
        has_started: is set when the first function waits.
        function_names: names of the functions that have returned.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.has_started = trio.Event()
        self.function_names: list[str] = []

    async def run_sync(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result, computed by a thread."""
        self.has_started.set()

        def wait() -> Any:
            self.open.wait()
            result = function(*arguments)
            self.function_names.append(function.__name__)
            return result

        return await trio.to_thread.run_sync(wait)


async def _judge(harness: TrialHarness, gate: WorkerGate) -> list[Any]:
    judge = Judge(
        replace(harness.task, run_sync=gate.run_sync),
        await harness.serving_engine(),
        WINDOW,
        harness.randomness(WINDOW),
    )
    groups = await harness.honest_groups(harness.mining_window(WINDOW), [0, 1])
    thresholds = harness.proof.row(harness.arithmetic, judge.arithmetic)
    return await judge.judge([(group, content_digest(group.to_frame())) for group in groups], thresholds)


async def test_the_event_loop_runs_while_a_judge_computes(harness: TrialHarness) -> None:
    gate, judgements = WorkerGate(), []

    async def judge() -> None:
        judgements.extend(await _judge(harness, gate))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judge)
        await gate.has_started.wait()
        for _ in range(3):
            await trio.lowlevel.checkpoint()  # returns only while the loop is free
        assert not judgements
        gate.open.set()
    assert [judgement.reason for judgement in judgements] == ["", ""]
    assert {"_check_forms", "check_positions", "compute"} <= set(gate.function_names)


async def test_a_cancelled_judge_finishes_its_step_and_starts_no_other(harness: TrialHarness) -> None:
    gate = WorkerGate()

    async def cancel(scope: trio.CancelScope) -> None:
        await gate.has_started.wait()
        scope.cancel()
        gate.open.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel, nursery.cancel_scope)
        await _judge(harness, gate)
    assert nursery.cancel_scope.cancelled_caught
    assert gate.function_names == ["_check_forms"]
