"""A seeded generator of integers that is the same on every machine and in every version of Python, and problems that
are drawn with it (docs/spec/environments.md).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count
from typing import ClassVar, Final

from protocol.environments.base import Problem

_WORD_BYTES: Final = 8


class SeededRng:
    """A pseudorandom generator of integers, whose label separates the streams of different uses. Word i of a stream is
    the first 8 bytes (big-endian) of SHA-256(label || 0x00 || seed || i as 8 bytes).
    """

    def __init__(self, label: str, seed: bytes) -> None:
        self._start = hashlib.sha256(label.encode() + b"\x00" + seed)
        self._count = 0

    def below(self, bound: int) -> int:
        """Return the next integer in [0, bound); the bias is under bound / 2**64."""
        digest = self._start.copy()
        digest.update(self._count.to_bytes(_WORD_BYTES, "big"))
        self._count += 1
        return int.from_bytes(digest.digest()[:_WORD_BYTES], "big") % bound

    def between(self, low: int, high: int) -> int:
        """Return the next integer in [low, high]."""
        return low + self.below(high - low + 1)


def is_held_out(problem: str) -> bool:
    """Return whether a problem belongs to the held-out tenth, by a text that does not depend on how it was made."""
    return hashlib.sha256(b"held-out\x00" + problem.encode()).digest()[0] < 26


class LeveledProblems(ABC):
    """Training problems that have levels."""

    @property
    @abstractmethod
    def levels(self) -> Mapping[str, int]:
        """How many of the training problems have each level, in any unit."""

    @abstractmethod
    def level_of(self, problem: Problem) -> str:
        """Return the level of a problem."""

    @abstractmethod
    def problem(self, seed: bytes) -> Problem:
        """Return the training problem of a seed."""

    def problem_of_level(self, level: str, seed: bytes) -> Problem:
        """Return the first problem of a level among those of seeds that follow from this one."""
        seeds = (hashlib.sha256(b"level\x00" + seed + attempt.to_bytes(8, "big")).digest() for attempt in count())
        return next(problem for problem in map(self.problem, seeds) if self.level_of(problem) == level)


class DrawnProblems(ABC):
    """Problems of an environment that are drawn until one is on the right side of the split; each has a solution."""

    name: ClassVar[str]
    exact = True
    held_out_size = None

    def problem(self, seed: bytes) -> Problem:
        return self._first(SeededRng(self.name, seed), held_out=False)

    def held_out_problem(self, index: int) -> Problem:
        return self._first(SeededRng(f"{self.name} held-out", str(index).encode()), held_out=True)

    def _first(self, rng: SeededRng, *, held_out: bool) -> Problem:
        while True:
            problem = self.draw(rng)
            if is_held_out(f"{self.name} {problem.reference}") == held_out:
                return problem

    @abstractmethod
    def draw(self, rng: SeededRng) -> Problem:
        """Draw a problem, of either side."""
