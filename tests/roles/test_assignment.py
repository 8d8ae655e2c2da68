"""Rewards of a task: they are computed off the event loop, a bounded number at a time."""

import threading

import pytest
import trio

from grailnode.engine.policy import PACKAGED_POLICY, Policy
from protocol.environments import Environment, Problem
from protocol.environments.addition import Addition
from protocol.environments.base import SandboxError
from roles.policy.assignment import Task
from tests.support.builders import samples


class BlockingAddition(Addition):
    """Addition whose rewards wait for the event loop, and that counts how many are computed at a time."""

    def __init__(self) -> None:
        self.running_rewards = self.max_running_rewards = 0
        self.lock = threading.Lock()
        self.event_loop_ran = threading.Event()

    def reward(self, problem: Problem, completion: str) -> float:
        with self.lock:
            self.running_rewards += 1
            self.max_running_rewards = max(self.max_running_rewards, self.running_rewards)
        assert self.event_loop_ran.wait(20), "the event loop is blocked while a reward is computed"
        with self.lock:
            self.running_rewards -= 1
        return super().reward(problem, completion)


class BrokenAddition(Addition):
    """Addition in a broken sandbox."""

    def reward(self, problem: Problem, completion: str) -> float:
        raise SandboxError("the sandbox did not start")


def task(environment: Environment, at_once: int = 1) -> Task:
    policy = Policy.load(PACKAGED_POLICY)
    run = samples.run_manifest()
    return Task(samples.RUN_ID, run, environment, policy.tokenizer, policy.vocabulary, at_once=at_once)


PROBLEM = Problem("57+68=", "125")
TEXTS = ("125", "15", "126", "125", "", "1", "125")
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("at_once", [1, 3])
def test_rewards_are_in_order_and_do_not_block_the_event_loop(at_once: int) -> None:
    environment = BlockingAddition()
    addition_task = task(environment, at_once)
    stop = addition_task.run.sampling.stops[0]
    completions = [(*addition_task.tokenizer.encode(text), stop) for text in TEXTS]

    async def run_event_loop() -> None:
        while environment.running_rewards < at_once:
            await trio.sleep(0.001)
        environment.event_loop_ran.set()

    async def scenario() -> tuple[float, ...]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_event_loop)
            return await addition_task.rewards(PROBLEM, completions)

    assert trio.run(scenario) == REWARDS
    assert environment.max_running_rewards == at_once


@pytest.mark.parametrize("at_once", [1, 3])
def test_without_completions_there_are_no_rewards(at_once: int) -> None:
    assert trio.run(task(Addition(), at_once).rewards, PROBLEM, []) == ()


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_broken_sandbox_is_an_error_and_no_reward(at_once: int) -> None:
    with pytest.raises(SandboxError, match="did not start"):
        trio.run(task(BrokenAddition(), at_once).rewards, PROBLEM, [(3,), (4,)])
