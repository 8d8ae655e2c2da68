"""Make groups of rollouts from a window's randomness. The miner has no choice: everything follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.rollout import challenge, sketch
from protocol.rollout.batch import EpisodeRollout, Group, Rollout, pack_tokens
from protocol.rollout.sketch import SketchKey
from roles.policy.assignment import Assignment, Task
from roles.policy.episodes import OpenEpisode, PlayedEpisode, play
from roles.ports import Engine, Generation, Request


@dataclass(frozen=True)
class MiningWindow:
    """One miner's window: the randomness of its opening, the version that serves it, and this version's shares."""

    window: int
    randomness: bytes
    version: int
    miner: bytes
    shares: tuple[int, ...] = ()

    def shares_of(self, version: int) -> tuple[int, ...]:
        """Return the shares, for a judge of this window's groups."""
        return self.shares if version == self.version else ()


class Producer(Protocol):
    """Makes groups by their numbers."""

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Return the groups of these numbers, in order; raise EngineError if the engine broke."""


class HonestProducer:
    """Samples the assigned prompts, with the assigned seeds, from the policy that serves the window."""

    def __init__(self, task: Task, engine: Engine) -> None:
        self.task = task
        self.engine = engine

    def assignments(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
        """Return the assignments of these group numbers."""
        window, randomness, miner = mining_window.window, mining_window.randomness, mining_window.miner
        return [self.task.assign(window, randomness, miner, index, mining_window.shares) for index in indices]

    async def generate(self, mining_window: MiningWindow, assignments: Sequence[Assignment]) -> list[list[Generation]]:
        """Generate one completion for every seed of every assignment."""
        key = self.sketch_key(mining_window)
        requests = [Request(item.prompt, seed, key) for item in assignments for seed in item.seeds]
        generations = await self.engine.generate(requests, self.task.run.sampling.params())
        size = self.task.run.group_size
        return [generations[start : start + size] for start in range(0, len(generations), size)]

    async def rollouts(
        self, mining_window: MiningWindow, assignment: Assignment, generations: Sequence[Generation]
    ) -> list[Rollout]:
        """Return the completions of one group with their sketches and rewards."""
        sketches = await self.sketches(mining_window, generations)
        rewards = await self.task.rewards(assignment.problem, [item.tokens for item in generations])
        return [
            Rollout(completion=pack_tokens(item.tokens), sketch=own_sketch, reward=reward)
            for item, own_sketch, reward in zip(generations, sketches, rewards, strict=True)
        ]

    async def sketches(self, mining_window: MiningWindow, generations: Sequence[Generation]) -> list[bytes]:
        key = self.sketch_key(mining_window)

        def compute() -> list[bytes]:
            return [item.sketch or sketch.commit(key.kind, item.hidden, key.seed) for item in generations]

        sketches: list[bytes] = await self.task.run_sync(compute)
        return sketches

    def sketch_key(self, mining_window: MiningWindow) -> SketchKey:
        """Return what determines the sketches of a window."""
        seed = challenge.sketch_seed(self.task.run_id, mining_window.window, mining_window.randomness)
        return SketchKey(self.task.run.proof.sketch, seed)

    def group(self, mining_window: MiningWindow, assignment: Assignment, rollouts: Sequence[Rollout]) -> Group:
        return Group(
            run=self.task.run_id,
            window=mining_window.window,
            version=mining_window.version,
            miner=mining_window.miner,
            index=assignment.index,
            prompt=pack_tokens(assignment.prompt),
            rollouts=tuple(rollouts),
        )

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        assignments = await self.task.run_sync(self.assignments, mining_window, indices)
        if self.task.run.episode is not None:
            return await self._produce_episodes(mining_window, assignments)
        groups = []
        for assignment, generations in zip(assignments, await self.generate(mining_window, assignments), strict=True):
            rollouts = await self.rollouts(mining_window, assignment, generations)
            groups.append(self.group(mining_window, assignment, rollouts))
        return groups

    async def _produce_episodes(self, mining_window: MiningWindow, assignments: Sequence[Assignment]) -> list[Group]:
        """Play all episodes of some groups together."""
        played = [
            [
                PlayedEpisode(OpenEpisode(self.task, item.problem, episode_seed), item.prompt, seed)
                for seed, episode_seed in zip(item.seeds, item.episode_seeds, strict=True)
            ]
            for item in assignments
        ]
        episodes = [episode for group in played for episode in group]
        await play(self.task, self.engine, episodes, self.sketch_key(mining_window))
        return [
            self.group(mining_window, assignment, await self.episode_rollouts(mining_window, group))
            for assignment, group in zip(assignments, played, strict=True)
        ]

    async def episode_rollouts(
        self, mining_window: MiningWindow, played: Sequence[PlayedEpisode]
    ) -> list[EpisodeRollout]:
        """Return the records of episodes that have ended."""
        sketches = await self.sketches(mining_window, [item.generation for item in played])
        return [
            EpisodeRollout(
                completion=pack_tokens(item.episode.tokens),
                sketch=own_sketch,
                reward=item.episode.reward,
                turns=tuple((count, pack_tokens(reply)) for count, reply in item.episode.turns),
            )
            for item, own_sketch in zip(played, sketches, strict=True)
        ]
