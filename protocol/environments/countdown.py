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

from fractions import Fraction
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import DrawnProblems, SeededRng

MAX_COMPLETION_CHARS: Final = 64
"""A longer completion earns nothing. Three numbers need fewer characters, and the limit bounds the parser's time and
depth.
"""

_MAX_DIGITS: Final = 4
_NUMBERS: Final = 3
_MAX_NUMBER: Final = 25
_MAX_TARGET: Final = 99
_WELL_FORMED_REWARD: Final = 0.1


class NoExpressionError(Exception):
    """The text is not in the grammar, or divides by zero."""


class Expression:
    """A parsed expression.

    Args:
        text: short enough for a recursion of its length.
        max_digits: of a number.

    Attributes:
        numbers: the numbers in the expression, from left to right.

    Raises:
        NoExpressionError: the text is no expression.
    """

    def __init__(self, text: str, max_digits: int = _MAX_DIGITS) -> None:
        self._text = text
        self._max_digits = max_digits
        self._at = 0
        self.numbers: list[int] = []
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


class Countdown(DrawnProblems):
    """Countdown. The reward is 1.0 for an expression that reaches the target, 0.1 for one of the right numbers with
    another value, and 0.0 for any other text.
    """

    name = "countdown"

    def draw(self, rng: SeededRng) -> Problem:
        numbers, target = _draw(rng)
        formula = f"{' '.join(map(str, numbers))}>{target}"
        return Problem(prompt=f"{formula}=", reference=formula)

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
