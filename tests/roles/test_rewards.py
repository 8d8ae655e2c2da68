"""Rewards: judged off the event loop, a bounded number at a time; and whose count where machines may differ in them."""

import threading

import numpy as np
import pytest
import trio

from grailnode.engine.policy import PACKAGED_POLICY, Policy
from protocol.environments import Environment, Problem
from protocol.environments.addition import Addition
from protocol.environments.base import SandboxError
from protocol.judging.verdict import Judgement
from roles.policy.assignment import Task
from roles.trainer.verified_batch import VerifiedGroup, harvested
from tests.support.builders import samples


class Waiting(Addition):
    """Addition whose judging waits for the event loop, and keeps count of how much of it goes on at a time."""

    def __init__(self) -> None:
        self.busy = self.most = 0
        self.lock = threading.Lock()
        self.turned = threading.Event()

    def reward(self, problem: Problem, completion: str) -> float:
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        assert self.turned.wait(20), "the loop stands still while a completion is judged"
        with self.lock:
            self.busy -= 1
        return super().reward(problem, completion)


class Broken(Addition):
    """Addition in a sandbox that broke."""

    def reward(self, problem: Problem, completion: str) -> float:
        raise SandboxError("the sandbox did not start")


def task(environment: Environment, at_once: int = 1) -> Task:
    policy = Policy.load(PACKAGED_POLICY)
    run = samples.run_manifest()
    return Task(samples.RUN_ID, run, environment, policy.tokenizer, policy.vocabulary, at_once=at_once)


PROBLEM = Problem("57+68=", "125")
TEXTS = ("125", "15", "126", "125", "", "1", "125")
DUE = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("at_once", [1, 3])
def test_rewards_come_in_order_and_the_loop_goes_on(at_once: int) -> None:
    waiting = Waiting()
    asked = task(waiting, at_once)
    completions = [(*asked.tokenizer.encode(text), asked.run.sampling.eos) for text in TEXTS]

    async def turn() -> None:
        while waiting.busy < at_once:
            await trio.sleep(0.001)
        waiting.turned.set()

    async def scenario() -> tuple[float, ...]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn)
            return await asked.rewards(PROBLEM, completions)

    assert trio.run(scenario) == DUE
    assert waiting.most == at_once


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_completions_no_rewards(at_once: int) -> None:
    assert trio.run(task(Addition(), at_once).rewards, PROBLEM, []) == ()


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_broken_sandbox_is_no_reward(at_once: int) -> None:
    with pytest.raises(SandboxError, match="did not start"):
        trio.run(task(Broken(), at_once).rewards, PROBLEM, [(3,), (4,)])


GROUP = samples.group()  # claims 0.5 and 1.0
LOGPROBS = np.full(5, -0.5, dtype="<f4").tobytes()


def accepted(*rewards: float) -> Judgement:
    return samples.judgement(rewards=rewards, logprobs=LOGPROBS)


def test_where_rewards_are_exact_a_verdict_with_others_is_not_used() -> None:
    assert harvested(GROUP, samples.digest("frame"), (accepted(0.5, 0.9),), exact=True) is None
    found = harvested(GROUP, samples.digest("frame"), (accepted(0.5, 0.9), accepted(0.5, 1.0)), exact=True)
    assert isinstance(found, VerifiedGroup)
    assert found.rewards == (0.5, 1.0)


def test_where_they_are_not_the_median_of_the_validators_stands() -> None:
    verdicts = (accepted(0.1, 0.9), accepted(0.2, 0.8), accepted(0.2, 1.0))
    found = harvested(GROUP, samples.digest("frame"), verdicts, exact=False)
    assert isinstance(found, VerifiedGroup)
    assert found.rewards == (0.2, 0.9)
