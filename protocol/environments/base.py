"""What an environment is: the interface that every task implements."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One task instance.

    Attributes:
        prompt: the text that the policy continues.
        reference: what the environment needs to judge a completion; its meaning is the environment's own.
    """

    prompt: str
    reference: str


class Environment(Protocol):
    """A task whose rewards anybody can recompute. The same seed gives the same problem on every machine."""

    @property
    def name(self) -> str:
        """The name that a run manifest gives."""

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed (16 bytes or more); never one of the held-out problems."""

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index (0, 1, 2, ...); never a training problem."""

    def reward(self, problem: Problem, completion: str) -> float:
        """What a completion (text, end-of-sequence token removed) earns: in [0, 1]."""
