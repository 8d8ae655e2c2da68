"""The addition environment: the prompt '57+68=' must be continued by '125' (docs/spec/environments.md)."""

import functools
from collections import Counter
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.final_number import ends_with_number
from protocol.environments.seeded_rng import SeededRng, is_held_out

_LOW: Final = 10
_HIGH: Final = 99


def _is_held_out_pair(a: int, b: int) -> bool:
    """Return whether a + b is a held-out problem. The order of the operands does not matter, because a training problem
    b + a would reveal the answer.
    """
    return is_held_out(f"addition {min(a, b)} {max(a, b)}")


def _problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}+{b}=", reference=str(a + b))


@functools.cache
def _test_set() -> tuple[Problem, ...]:
    """Return all held-out problems, in a pseudorandom order that is the same on every machine."""
    numbers = range(_LOW, _HIGH + 1)
    problems = [_problem(a, b) for a in numbers for b in numbers if _is_held_out_pair(a, b)]
    rng = SeededRng("addition held-out order", b"")
    keys = [rng.below(1 << 63) for _ in problems]
    return tuple(problem for _, problem in sorted(zip(keys, problems, strict=True), key=lambda pair: pair[0]))


def _level(a: int, b: int) -> str:
    """Return which columns carry."""
    ones = a % 10 + b % 10 > 9
    tens = a // 10 + b // 10 + ones > 9
    return "carry-" + {(0, 0): "none", (1, 0): "ones", (0, 1): "tens", (1, 1): "both"}[ones, tens]


@functools.cache
def _levels() -> dict[str, int]:
    """Return how many training problems have each level."""
    numbers = range(_LOW, _HIGH + 1)
    return dict(Counter(_level(a, b) for a in numbers for b in numbers if not _is_held_out_pair(a, b)))


class Addition:
    """Two-digit addition. The reward is 1.0 for a text whose last number is the sum, and 0.0 for any other."""

    name = "addition"
    exact = True

    def problem(self, seed: bytes) -> Problem:
        # Operands are drawn uniformly from 10..99 until they are no held-out pair.
        rng = SeededRng("addition", seed)
        while True:
            a, b = rng.between(_LOW, _HIGH), rng.between(_LOW, _HIGH)
            if not _is_held_out_pair(a, b):
                return _problem(a, b)

    def held_out_problem(self, index: int) -> Problem:
        return _test_set()[index % self.held_out_size]  # there are about 800

    @property
    def held_out_size(self) -> int:
        return len(_test_set())

    @property
    def levels(self) -> dict[str, int]:
        return _levels()

    def level_of(self, problem: Problem) -> str:
        a, b = map(int, problem.prompt.rstrip("=").split("+"))
        return _level(a, b)

    def reward(self, problem: Problem, completion: str) -> float:
        return 1.0 if ends_with_number(completion, problem.reference) else 0.0
