"""The calculator environment: '57*68+12>' is to be answered by '3888', and a calculator may be asked on the way
(docs/spec/environments.md).

A turn that ends with '=' asks for the value of the expression before it, and the reply is the value: '57*68=' gives
'3876>'. Any other turn ends the episode, and its last number is the answer.
"""

import functools
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.countdown import Expression, NoExpressionError
from protocol.environments.final_number import ends_with_number
from protocol.environments.seeded_rng import DrawnProblems, LeveledProblems, SeededRng

_LOW: Final = 10
_HIGH: Final = 99
_MAX_CHARACTERS: Final = 32  # of a question
_MAX_DIGITS: Final = 9  # of a number, and of a value
_NO_VALUE: Final = "()>"


class CalculatorEpisode:
    """An episode with a calculator."""

    def __init__(self, answer: str) -> None:
        self._right_answer = answer
        self._is_right = False

    def step(self, text: str) -> str | None:
        if text.endswith("="):
            return _value(text[:-1])
        self._is_right = ends_with_number(text, self._right_answer)
        return None

    def reward(self) -> float:
        return 1.0 if self._is_right else 0.0


def _value(question: str) -> str:
    """Return the calculator's reply: an integer, or that there is none."""
    try:
        value = Expression(question, _MAX_DIGITS).value if len(question) <= _MAX_CHARACTERS else None
    except NoExpressionError:
        value = None
    if value is None or value.denominator != 1 or abs(value) >= 10**_MAX_DIGITS:
        return _NO_VALUE
    return f"{value}>"


class Calculator(DrawnProblems, LeveledProblems):
    """A product and a sum of two-digit numbers. The reward is 1.0 for the value as the answer, else 0.0."""

    name = "calculator"
    turns = 4

    def draw(self, rng: SeededRng) -> Problem:
        a, b, c = (rng.between(_LOW, _HIGH) for _ in range(3))
        return Problem(prompt=f"{a}*{b}+{c}>", reference=str(a * b + c))

    @functools.cached_property
    def levels(self) -> dict[str, int]:
        """How many problems have a value of three digits, and of four."""
        numbers = range(_LOW, _HIGH + 1)
        short = sum(a * b + c < 1000 for a in numbers for b in numbers for c in numbers)
        return {"3": short, "4": len(numbers) ** 3 - short}

    def level_of(self, problem: Problem) -> str:
        return str(len(problem.reference))

    def begin(self, problem: Problem, seed: bytes) -> CalculatorEpisode:
        return CalculatorEpisode(problem.reference)

    def reward(self, problem: Problem, completion: str) -> float:
        episode = self.begin(problem, b"")
        episode.step(completion)
        return episode.reward()
