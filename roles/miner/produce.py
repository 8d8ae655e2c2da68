"""From a window's randomness to groups of rollouts. The miner chooses nothing: all of this is a pure function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Group, Rollout, pack_tokens
from roles.policy.assignment import Assignment, Task
from roles.ports import Engine, Generation, Request


@dataclass(frozen=True)
class MiningWindow:
    """One window of one miner.

    Attributes:
        randomness: of the round that opened the window.
        version: the policy version that the engine serves in it.
    """

    window: int
    randomness: bytes
    version: int
    miner: bytes


class Producer(Protocol):
    """Makes the groups of given numbers."""

    async def produce(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """The groups of these numbers, in order.

        Raises:
            EngineError: the engine broke.
        """


class HonestProducer:
    """Samples what the randomness asks for, from the policy that serves the window."""

    def __init__(self, task: Task, engine: Engine) -> None:
        self.task = task
        self.engine = engine

    def assignments(self, turn: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
        """The assignments of these group numbers."""
        return [self.task.assign(turn.window, turn.randomness, turn.miner, index) for index in indices]

    async def generate(self, assignments: Sequence[Assignment]) -> list[list[Generation]]:
        """One completion for every seed of every assignment."""
        requests = [Request(item.prompt, seed) for item in assignments for seed in item.seeds]
        generations = await self.engine.generate(requests, self.task.run.sampling.params())
        size = self.task.run.group_size
        return [generations[start : start + size] for start in range(0, len(generations), size)]

    async def rollouts(self, turn: MiningWindow, assignment: Assignment, done: Sequence[Generation]) -> list[Rollout]:
        """Completions of one group with their sketches and rewards."""
        seed = challenge.sketch_seed(self.task.run_id, turn.window, turn.randomness)
        sketches = sketch.commit(self.task.run.proof.sketch, torch.cat([item.hidden for item in done]), seed)
        rewards = await self.task.rewards(assignment.problem, [item.tokens for item in done])
        rollouts, begin = [], 0
        for item, reward in zip(done, rewards, strict=True):
            end = begin + sketch.BYTES_PER_TOKEN * len(item.tokens)
            rollouts.append(Rollout(completion=pack_tokens(item.tokens), sketch=sketches[begin:end], reward=reward))
            begin = end
        return rollouts

    def group(self, turn: MiningWindow, assignment: Assignment, rollouts: Sequence[Rollout]) -> Group:
        """The record of a finished group."""
        return Group(
            run=self.task.run_id,
            window=turn.window,
            version=turn.version,
            miner=turn.miner,
            index=assignment.index,
            prompt=pack_tokens(assignment.prompt),
            rollouts=tuple(rollouts),
        )

    async def produce(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """The groups of these numbers, in order."""
        assignments = self.assignments(turn, indices)
        groups = []
        for assignment, generations in zip(assignments, await self.generate(assignments), strict=True):
            groups.append(self.group(turn, assignment, await self.rollouts(turn, assignment, generations)))
        return groups
