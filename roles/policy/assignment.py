"""Derive prompts, seeds and rewards from a window's randomness, for the miner and for the validator that checks it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from protocol.encoding import REWARD_UNIT
from protocol.environments import Environment, Problem, rubric
from protocol.environments.base import SandboxError
from protocol.environments.mixture import drawn_member
from protocol.environments.strata import Strata
from protocol.rollout import challenge
from protocol.run import ChatSpec, RunManifest
from roles.gather import gather


class Tokenizer(Protocol):
    """Text to token ids and back, the same on every node."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text; with the tokens that the tokenizer puts around every text, if `special`."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids; any ids of the vocabulary."""


def encode_prompt(tokenizer: Tokenizer, chat: ChatSpec | None, text: str) -> tuple[int, ...]:
    """Return the token ids of the prompt for a problem's text (docs/spec/run.md).

    Every node that reads, writes or checks a prompt does it here.

    Args:
        chat: how the text becomes a conversation; None where it is the prompt.
    """
    return tokenizer.encode(text) if chat is None else tokenizer.encode(chat.prompt(text), special=False)


@dataclass(frozen=True)
class Assignment:
    """A group that a miner has to generate: its problem, the prompt's token ids, and the noise seed of each rollout.

    In a run with episodes, `episode_seeds` are those of the environment's randomness in each; else it is empty.
    """

    index: int
    problem: Problem
    prompt: tuple[int, ...]
    seeds: tuple[bytes, ...]
    episode_seeds: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Task:
    """The run's task: its environment, tokenizer and vocabulary size. It turns public randomness into assignments.

    Attributes:
        run_sync: runs a function that computes for long, off the event loop's thread.
        at_once: completions that are rewarded at a time; more than one where a reward takes long and another process
            computes it.
        strata: of the environment; None in a run without difficulty tables.
    """

    run_id: bytes
    run: RunManifest
    environment: Environment
    tokenizer: Tokenizer
    vocabulary: int
    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    at_once: int = 1
    strata: Strata | None = None

    def assign(
        self, window: int, randomness: bytes, miner: bytes, index: int, shares: Sequence[int] = ()
    ) -> Assignment:
        """Return the assignment of a miner's group, by the randomness of the round that opened the window.

        Args:
            shares: of the strata by the table of the group's version; empty in a run without tables.
        """
        seed = challenge.group_seed(self.run_id, window, randomness, miner, index)
        problem = self._problem(seed, shares)
        rollouts = range(self.run.group_size)
        seeds = tuple(challenge.rollout_seed(seed, rollout) for rollout in rollouts)
        episodes = rollouts if self.run.episode is not None else range(0)
        episode_seeds = tuple(challenge.episode_seed(seed, rollout) for rollout in episodes)
        return Assignment(index, problem, self.prompt(problem), seeds, episode_seeds)

    def _problem(self, seed: bytes, shares: Sequence[int]) -> Problem:
        rule = self.run.difficulty
        if rule is None or self.strata is None:
            return self.environment.problem(seed)
        assert len(shares) == len(rule.strata)
        return self.strata.problem(rule.strata[drawn_member(shares, seed)].name, seed)

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of a problem's prompt."""
        return encode_prompt(self.tokenizer, self.run.chat, problem.prompt)

    async def rewards(self, problem: Problem, completions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the rewards, in millionths and by the rubric, for completions (token ids) of one problem, in order."""
        attempts = [(problem, completion) for completion in completions]
        return await self._rewards_of(attempts, with_rubric=True)

    async def scores(self, attempts: Sequence[tuple[Problem, tuple[int, ...]]]) -> tuple[int, ...]:
        """Return the environment's own scores, in millionths, for completions (token ids) of several problems."""
        return await self._rewards_of(attempts, with_rubric=False)

    async def _rewards_of(
        self, attempts: Sequence[tuple[Problem, tuple[int, ...]]], *, with_rubric: bool
    ) -> tuple[int, ...]:
        # A reward that takes microseconds is not worth a change of threads of its own.
        size = max(1, len(attempts)) if self.at_once == 1 else 1
        parts = [attempts[start : start + size] for start in range(0, len(attempts), size)]
        rewards: list[list[int]] = await gather(
            partial(self.run_sync, self._rewards, with_rubric), parts, at_once=self.at_once, errors=(SandboxError,)
        )
        return tuple(reward for part in rewards for reward in part)

    def _rewards(self, with_rubric: bool, attempts: Sequence[tuple[Problem, tuple[int, ...]]]) -> list[int]:
        return [self._reward(problem, tokens, with_rubric) for problem, tokens in attempts]

    def _reward(self, problem: Problem, tokens: tuple[int, ...], with_rubric: bool) -> int:
        text = self.tokenizer.decode(self.run.sampling.params().without_stop(tokens))
        score = self.environment.reward(problem, text)
        parts = self.run.rubric(problem.stratum) if with_rubric else ()
        if not parts:
            return round(score * REWARD_UNIT)
        return rubric.reward(parts, score, text, tokens, self.run.sampling.max_tokens)
