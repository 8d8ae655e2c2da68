"""Addition of two two-digit numbers: '57+68=' is continued by '125' (docs/spec/environments.md)."""

import functools
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import SeededRng, is_held_out

_LOW: Final = 10
_HIGH: Final = 99


def _held_out(a: int, b: int) -> bool:
    """Whether a + b is a held-out problem. The order of the operands does not matter, or b + a would give it away."""
    return is_held_out(f"addition {min(a, b)} {max(a, b)}")


def _problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}+{b}=", reference=str(a + b))


@functools.cache
def _test_set() -> tuple[Problem, ...]:
    """All held-out problems, in an order that mixes easy and hard ones alike on every machine."""
    numbers = range(_LOW, _HIGH + 1)
    problems = [_problem(a, b) for a in numbers for b in numbers if _held_out(a, b)]
    draws = SeededRng("addition held-out order", b"")
    keys = [draws.below(1 << 63) for _ in problems]
    return tuple(problem for _, problem in sorted(zip(keys, problems, strict=True), key=lambda pair: pair[0]))


class Addition:
    """Two-digit addition. The reward is 1.0 for the sum in plain decimal digits, 0.0 for any other text."""

    name = "addition"
    exact = True

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed: operands drawn uniformly from 10..99 until they are no held-out pair."""
        draws = SeededRng("addition", seed)
        while True:
            a, b = draws.between(_LOW, _HIGH), draws.between(_LOW, _HIGH)
            if not _held_out(a, b):
                return _problem(a, b)

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index; about 800 exist, then they repeat."""
        problems = _test_set()
        return problems[index % len(problems)]

    @property
    def held_out_size(self) -> int:
        """How many held-out problems there are."""
        return len(_test_set())

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 where the completion is the sum and nothing else."""
        return 1.0 if completion == problem.reference else 0.0
