"""Derive prompts, seeds and rewards from a window's randomness, for the miner and for the validator that checks it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from protocol.encoding import REWARD_UNIT
from protocol.environments import Environment, Problem, rubric
from protocol.environments.base import SandboxError
from protocol.environments.mixture import Strata, drawn_member
from protocol.rollout import challenge
from protocol.rollout.batch import EpisodeRule
from protocol.run import ChatSpec, EvaluationSpec, RunManifest, SamplingSpec
from roles.gather import gather


class Tokenizer(Protocol):
    """Text to token ids and back, the same on every node."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text; with the tokens that the tokenizer puts around every text, if `special`."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids; any ids of the vocabulary."""


def encode_prompt(tokenizer: Tokenizer, chat: ChatSpec | None, text: str) -> tuple[int, ...]:
    """Return a prompt's token ids, of a conversation if there is a `chat`; every node makes and checks them here."""
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


class PolicyRules(Protocol):
    """How a policy is asked: a run's manifest, or what stands in its place for a policy without a run."""

    @property
    def sampling(self) -> SamplingSpec: ...
    @property
    def chat(self) -> ChatSpec | None: ...
    @property
    def episode_rule(self) -> EpisodeRule | None: ...
    @property
    def evaluation(self) -> EvaluationSpec: ...


@dataclass(frozen=True)
class PolicyTask:
    """An environment, and how a policy is asked its problems: with what tokenizer and vocabulary size."""

    run_id: bytes  # of the run; zeros without one
    run: PolicyRules
    environment: Environment
    tokenizer: Tokenizer
    vocabulary: int
    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    # completions that are rewarded at a time; more than one where a reward takes long and another process computes it
    at_once: int = 1

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of a problem's prompt."""
        return encode_prompt(self.tokenizer, self.run.chat, problem.prompt)

    async def scores(self, attempts: Sequence[tuple[Problem, tuple[int, ...]]]) -> tuple[int, ...]:
        """Return the environment's own scores, in millionths, for completions (token ids) of several problems."""
        return await self._each(self._score, attempts)

    async def _each(
        self, reward: Callable[[Problem, tuple[int, ...]], int], attempts: Sequence[tuple[Problem, tuple[int, ...]]]
    ) -> tuple[int, ...]:
        # A reward that takes microseconds is not worth a change of threads of its own.
        size = max(1, len(attempts)) if self.at_once == 1 else 1
        parts = [attempts[start : start + size] for start in range(0, len(attempts), size)]

        def compute(part: Sequence[tuple[Problem, tuple[int, ...]]]) -> list[int]:
            return [reward(problem, tokens) for problem, tokens in part]

        rewards: list[list[int]] = await gather(
            partial(self.run_sync, compute), parts, at_once=self.at_once, errors=(SandboxError,)
        )
        return tuple(reward for part in rewards for reward in part)

    def _score(self, problem: Problem, tokens: tuple[int, ...]) -> int:
        return round(self.environment.reward(problem, self._text(tokens)) * REWARD_UNIT)

    def _text(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(self.run.sampling.params().without_stop(tokens))


@dataclass(frozen=True)
class Task(PolicyTask):
    """The task that a run sets. It turns public randomness into assignments."""

    run: RunManifest
    strata: Strata | None = None  # of the environment; None in a run without difficulty tables

    def assign(
        self, window: int, randomness: bytes, miner: bytes, index: int, shares: Sequence[int] = ()
    ) -> Assignment:
        """Return the assignment of a miner's group, by the randomness of the round that opened the window and the
        shares of the strata in the version's table; these are empty in a run without tables.
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

    async def rewards(self, problem: Problem, completions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the rewards, in millionths and by the rubric, for completions (token ids) of one problem, in order."""
        return await self._each(self._reward, [(problem, completion) for completion in completions])

    def _reward(self, problem: Problem, tokens: tuple[int, ...]) -> int:
        parts = self.run.rubric(problem.stratum)
        if not parts:
            return self._score(problem, tokens)
        text = self._text(tokens)
        score = self.environment.reward(problem, text)
        return rubric.reward(parts, score, text, tokens, self.run.sampling.max_tokens)
