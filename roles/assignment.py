"""What a window's randomness asks of a miner: the same prompts, seeds and endings on both sides of the check."""

from dataclasses import dataclass
from typing import Protocol

from protocol import challenge
from protocol.environments import Environment, Problem
from protocol.run import RunManifest
from protocol.sampling import SamplingParams


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
    """The run's task: environment, tokenizer and vocabulary size, and what they make of public randomness."""

    run_id: bytes
    run: RunManifest
    environment: Environment
    tokenizer: Tokenizer
    vocabulary: int

    def assign(self, window: int, randomness: bytes, miner: bytes, index: int) -> Assignment:
        """The group of a number for a miner in a window, from the window's opening randomness."""
        seed = challenge.group_seed(self.run_id, window, randomness, miner, index)
        problem = self.environment.problem(seed)
        seeds = tuple(challenge.rollout_seed(seed, rollout) for rollout in range(self.run.group_size))
        return Assignment(index, problem, self.tokenizer.encode(problem.prompt), seeds)

    def reward(self, problem: Problem, tokens: tuple[int, ...]) -> float:
        """What the environment pays for a completion's token ids."""
        text = tokens[:-1] if tokens and tokens[-1] == self.run.sampling.eos else tokens
        return self.environment.reward(problem, self.tokenizer.decode(text))


def ends_as_due(tokens: tuple[int, ...], params: SamplingParams) -> bool:
    """Whether a completion ends where sampling ends: at its only end-of-sequence token, or at the largest length."""
    if not tokens or len(tokens) > params.max_tokens or params.eos in tokens[:-1]:
        return False
    return tokens[-1] == params.eos or len(tokens) == params.max_tokens
