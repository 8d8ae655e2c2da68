"""A judge computes in worker threads, and says how much of a case it generates again."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from protocol.encoding import content_digest
from roles.validator.judge import Judge
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import LENIENT

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


@pytest.mark.parametrize(("name", "most"), [("one edited token in 10% of rollouts", 200_000), ("own noise", 10**6)])
async def test_a_judge_waits_for_the_engine_again_by_the_share_of_tokens_behind_misses(
    harness: TrialHarness, name: str, most: int
) -> None:
    loads: list[int] = []

    @asynccontextmanager
    async def at_engine(load: int) -> AsyncIterator[None]:
        loads.append(load)
        yield

    groups = await ADVERSARIES[name].producer(harness).produce(harness.mining_window(WINDOW), range(4))
    judge = Judge(harness.task, await harness.serving_engine(), WINDOW, harness.randomness(WINDOW), draw=bytes(32))
    thresholds = alter(harness.proof.row(harness.arithmetic, judge.arithmetic), **LENIENT)
    await judge.judge([(group, bytes(32)) for group in groups], thresholds, at_engine)
    assert loads[0] == 0
    assert most // 4 < loads[1] <= most
