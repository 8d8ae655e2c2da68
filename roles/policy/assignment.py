"""What a window's randomness asks of a miner: the same prompts, seeds and endings on both sides of the check."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from protocol.environments import Environment, Problem
from protocol.environments.base import SandboxError
from protocol.rollout import challenge
from protocol.rollout.sampling import SamplingParams
from protocol.run import RunManifest
from roles.gather import gather


class Tokenizer(Protocol):
    """Text to token ids and back, the same on every node."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a text."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids; any ids of the vocabulary."""


@dataclass(frozen=True)
class Assignment:
    """One group that a miner has to do: its problem, the prompt's token ids, and the noise seed of each rollout."""

    index: int
    problem: Problem
    prompt: tuple[int, ...]
    seeds: tuple[bytes, ...]


@dataclass(frozen=True)
class Task:
    """The run's task: environment, tokenizer and vocabulary size, and what they make of public randomness.

    Attributes:
        run_sync: runs a function that computes for long, off the event loop's thread.
        at_once: completions that are judged at a time; more than one where judging one takes long, and another
            processor.
    """

    run_id: bytes
    run: RunManifest
    environment: Environment
    tokenizer: Tokenizer
    vocabulary: int
    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    at_once: int = 1

    def assign(self, window: int, randomness: bytes, miner: bytes, index: int) -> Assignment:
        """The group of a number for a miner in a window, from the window's opening randomness."""
        seed = challenge.group_seed(self.run_id, window, randomness, miner, index)
        problem = self.environment.problem(seed)
        seeds = tuple(challenge.rollout_seed(seed, rollout) for rollout in range(self.run.group_size))
        return Assignment(index, problem, self.tokenizer.encode(problem.prompt), seeds)

    async def rewards(self, problem: Problem, completions: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
        """What the environment pays for completions (token ids) of one problem, in order.

        Raises:
            SandboxError: the environment's sandbox broke; nothing was judged.
        """
        return await self.rewards_of([(problem, completion) for completion in completions])

    async def rewards_of(self, tries: Sequence[tuple[Problem, tuple[int, ...]]]) -> tuple[float, ...]:
        """The like for completions of several problems.

        Raises:
            SandboxError: the environment's sandbox broke; nothing was judged.
        """
        size = max(1, len(tries)) if self.at_once == 1 else 1  # microseconds are not worth a change of threads each
        parts = [tries[start : start + size] for start in range(0, len(tries), size)]
        rewards: list[list[float]] = await gather(
            partial(self.run_sync, self._rewards), parts, at_once=self.at_once, errors=(SandboxError,)
        )
        return tuple(reward for part in rewards for reward in part)

    def _rewards(self, tries: Sequence[tuple[Problem, tuple[int, ...]]]) -> list[float]:
        return [self._reward(problem, completion) for problem, completion in tries]

    def _reward(self, problem: Problem, tokens: tuple[int, ...]) -> float:
        text = tokens[:-1] if tokens and tokens[-1] == self.run.sampling.eos else tokens
        return self.environment.reward(problem, self.tokenizer.decode(text))


def ends_as_due(tokens: tuple[int, ...], params: SamplingParams) -> bool:
    """Whether a completion ends where sampling ends: at its only end-of-sequence token, or at the largest length."""
    if not tokens or len(tokens) > params.max_tokens or params.eos in tokens[:-1]:
        return False
    return tokens[-1] == params.eos or len(tokens) == params.max_tokens
