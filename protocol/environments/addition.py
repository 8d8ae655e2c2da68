"""The environments of sums: the prompt '57+68=' must be continued by '125' (docs/spec/environments.md)."""

import functools
import re
from collections import Counter

from protocol.environments.base import Problem
from protocol.environments.final_number import ends_with_number
from protocol.environments.seeded_rng import LeveledProblems, SeededRng, is_held_out


def _level(a: int, b: int) -> str:
    """Return which columns carry, and whether the ones are at the border: they add up to nine."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + (ones > 9)
    columns = {(0, 0): "none", (1, 0): "ones", (0, 1): "tens", (1, 1): "both"}[ones > 9, tens > 9]
    return f"carry-{columns}{'-nine' * (ones == 9)}"


class Addition(LeveledProblems):
    """Two-digit addition. The reward is 1.0 for a text whose last number is the sum, and 0.0 for any other."""

    name = "addition"
    exact = True
    form = "{}+{}="
    low, high = 10, 99

    def problem(self, seed: bytes) -> Problem:
        # Operands are drawn uniformly until they are no held-out pair.
        rng = SeededRng(self.name, seed)
        while True:
            a, b = rng.between(self.low, self.high), rng.between(self.low, self.high)
            if not self._is_held_out_pair(a, b):
                return self._problem(a, b)

    def held_out_problem(self, index: int) -> Problem:
        return self._test_set[index % self.held_out_size]

    @property
    def held_out_size(self) -> int:
        return len(self._test_set)

    @functools.cached_property
    def _test_set(self) -> tuple[Problem, ...]:
        """All held-out problems, in a pseudorandom order that is the same on every machine."""
        numbers = range(self.low, self.high + 1)
        problems = [self._problem(a, b) for a in numbers for b in numbers if self._is_held_out_pair(a, b)]
        rng = SeededRng(f"{self.name} held-out order", b"")
        keys = [rng.below(1 << 63) for _ in problems]
        return tuple(problem for _, problem in sorted(zip(keys, problems, strict=True), key=lambda pair: pair[0]))

    def _is_held_out_pair(self, a: int, b: int) -> bool:
        """Return whether a + b is a held-out problem. The order of the operands does not matter, because a training
        problem b + a would reveal the answer.
        """
        return is_held_out(f"{self.name} {min(a, b)} {max(a, b)}")

    def _problem(self, a: int, b: int) -> Problem:
        return Problem(prompt=self.form.format(a, b), reference=str(a + b))

    @functools.cached_property
    def levels(self) -> dict[str, int]:
        """How many training problems have each level."""
        numbers = range(self.low, self.high + 1)
        return dict(Counter(_level(a, b) for a in numbers for b in numbers if not self._is_held_out_pair(a, b)))

    def level_of(self, problem: Problem) -> str:
        """Return which columns carry, and whether the ones add up to nine."""
        a, b = map(int, re.findall(r"[0-9]+", problem.prompt))
        return _level(a, b)

    def reward(self, problem: Problem, completion: str) -> float:
        return 1.0 if ends_with_number(completion, problem.reference) else 0.0


class Sums(Addition):
    """One-digit addition, asked as 'What is 3+9?'. The reward is that of `Addition`."""

    name = "sums"
    form = "What is {}+{}?"
    low, high = 1, 9
