"""A judge computes in worker threads: the event loop runs meanwhile."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import trio

from protocol.encoding import content_digest
from roles.validator.judge import Judge
from tests.support.adversaries.harness import TrialHarness

WINDOW = 3


async def test_the_event_loop_runs_while_a_judge_computes(harness: TrialHarness) -> None:
    judgements, has_started, may_compute = [], trio.Event(), threading.Event()

    async def run_sync(function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result, computed by a thread, which waits until it may compute."""
        has_started.set()
        return await trio.to_thread.run_sync(lambda: (may_compute.wait(), function(*arguments))[1])

    async def judge() -> None:
        task, engine = replace(harness.task, run_sync=run_sync), await harness.serving_engine()
        judge = Judge(task, engine, WINDOW, harness.randomness(WINDOW))
        groups = await harness.honest_groups(harness.mining_window(WINDOW), [0, 1])
        thresholds = harness.proof.row(harness.arithmetic, judge.arithmetic)
        judgements.extend(
            await judge.judge([(group, content_digest(group.to_frame())) for group in groups], thresholds)
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(judge)
        await has_started.wait()
        for _ in range(3):
            await trio.lowlevel.checkpoint()  # returns only while the loop is free
        assert not judgements
        may_compute.set()
    assert [judgement.reason for judgement in judgements] == ["", ""]
