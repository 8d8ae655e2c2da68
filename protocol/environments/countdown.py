"""The countdown environment: reach a target from given numbers with + - * / and brackets (docs/spec/environments.md).

The prompt '3 7 25>46=' may be continued by '25+3*7'. Every number must be used exactly once; division is exact
(rational).

Grammar of a completion, which is parsed without `eval`:

    sum     := product (('+' | '-') product)*
    product := atom (('*' | '/') atom)*
    atom    := number | '(' sum ')'
    number  := digit{1,4}, the first one not 0

A number has one spelling, that of the prompt. Brackets that change nothing are allowed, as in every calculator: they
state the same calculation, and the length of a completion limits them.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import DrawnProblems, LeveledProblems, SeededRng

MAX_COMPLETION_CHARS: Final = 64
"""A longer completion earns nothing. Three numbers need fewer characters, and the limit bounds the parser's time and
depth.
"""

_MAX_DIGITS: Final = 4
_NUMBERS: Final = 3
_MAX_NUMBER: Final = 25
_MAX_TARGET: Final = 99
_WELL_FORMED_REWARD: Final = 0.1
_OPERATIONS: Final = {"sum": "+-", "product": "+-*", "quotient": "+-*/"}
"""The levels, easiest first: the first one whose operations reach the target."""


class NoExpressionError(Exception):
    """The text is not in the grammar, or divides by zero."""


class Expression:
    """A parsed expression: a text that is short enough for a recursion of its length, or NoExpressionError."""

    def __init__(self, text: str, max_digits: int = _MAX_DIGITS) -> None:
        self._text = text
        self._max_digits = max_digits  # of a number
        self._at = 0
        self.numbers: list[int] = []  # from left to right
        self.value = self._sum()
        if self._at != len(text):
            raise NoExpressionError

    def _take(self, characters: str) -> str:
        """Return the next character if it is one of `characters`, else the empty string."""
        character = self._text[self._at : self._at + 1]
        if not character or character not in characters:
            return ""
        self._at += 1
        return character

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while sign := self._take("*/"):
            factor = self._atom()
            if sign == "/" and factor == 0:
                raise NoExpressionError
            value = value * factor if sign == "*" else value / factor
        return value

    def _atom(self) -> Fraction:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise NoExpressionError
            return value
        digits = ""
        while digit := self._take("0123456789"):
            digits += digit
        if not 1 <= len(digits) <= self._max_digits or digits[0] == "0":
            raise NoExpressionError
        self.numbers.append(int(digits))
        return Fraction(int(digits))


def _draw(rng: SeededRng) -> tuple[tuple[int, ...], int]:
    """Draw numbers, and a target in 1..99 that is the value of a random expression from left to right."""
    while True:
        numbers = tuple(rng.between(1, _MAX_NUMBER) for _ in range(_NUMBERS))
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            choices = (value + number, value - number, value * number, value / number)
            value = choices[rng.below(len(choices))]
        if value.denominator == 1 and 1 <= value <= _MAX_TARGET:
            return tuple(sorted(numbers)), int(value)


def _values(numbers: Sequence[Fraction], operations: str) -> set[Fraction]:
    """Return the values of all expressions that use each number once, with operations of `+-*/`."""
    values = set(numbers) if len(numbers) == 1 else set()
    for one, two in combinations(range(len(numbers)), 2):
        rest = [number for place, number in enumerate(numbers) if place not in (one, two)]
        a, b = numbers[one], numbers[two]
        results = [a + b, a - b, b - a]
        results += [a * b] if "*" in operations else []
        results += [x / y for x, y in ((a, b), (b, a)) if y] if "/" in operations else []
        values.update(*(_values([*rest, result], operations) for result in results))
    return values


class Countdown(DrawnProblems, LeveledProblems):
    """Countdown. The reward is 1.0 for an expression that reaches the target, 0.1 for one of the right numbers with
    another value, and 0.0 for any other text.
    """

    name = "countdown"

    def draw(self, rng: SeededRng) -> Problem:
        numbers, target = _draw(rng)
        formula = f"{' '.join(map(str, numbers))}>{target}"
        return Problem(prompt=f"{formula}=", reference=formula)

    @property
    def levels(self) -> dict[str, int]:
        return {"sum": 613, "product": 292, "quotient": 95}  # of a thousand problems, as counted in 20,000

    def level_of(self, problem: Problem) -> str:
        numbers, _, target = problem.reference.partition(">")
        values = [Fraction(number) for number in numbers.split(" ")]
        return next(level for level, signs in _OPERATIONS.items() if int(target) in _values(values, signs))

    def reward(self, problem: Problem, completion: str) -> float:
        if len(completion) > MAX_COMPLETION_CHARS:
            return 0.0
        try:
            parsed = Expression(completion)
        except NoExpressionError:
            return 0.0
        numbers, _, target = problem.reference.partition(">")
        if sorted(parsed.numbers) != sorted(map(int, numbers.split(" "))):
            return 0.0
        return 1.0 if parsed.value == int(target) else _WELL_FORMED_REWARD
