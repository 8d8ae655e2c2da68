r"""Parse a normalized answer to an exact value, without `eval` (docs/spec/environments.md).

sum     := ['-' | '+'] product (('+' | '-') product)*
product := power (['*' | '/'] power)*                            a missing sign is a multiplication
power   := atom ['^' (digit | '-'? digits in braces | symbol-free braces)]
atom    := number | mixed | '\frac' argument argument | '\sqrt' argument | symbol | '(' sum ')' | '{' sum '}'
mixed   := digits '\frac' digits-in-braces digits-in-braces      3\frac{1}{2} is 7/2
argument := digit | symbol | '{' sum '}'
"""

import re
from fractions import Fraction
from typing import Final

from protocol.environments.polynomials import NoValueError, Value

MAX_DEPTH: Final = 24
MAX_DIGITS: Final = 60

_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_MIXED: Final = re.compile(r"\\frac(?:\{([0-9]{1,9})\}\{([0-9]{1,9})\}|([0-9])([0-9]))(?![0-9])")
_ENDS: Final = ("", "+", "-", ")", "}")


def value_of(text: str) -> Value:
    """Return the value of an expression without spaces.

    Raises:
        NoValueError: the text is no expression of this grammar, or exceeds a limit.
    """
    reader = _Reader(text)
    value = reader.sum()
    if reader.peek():
        raise NoValueError
    return value


class _Reader:
    """The parser of one expression, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def peek(self) -> str:
        """Return the next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def sum(self) -> Value:
        """Parse a sum, which ends before a closing bracket or at the end of the text."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoValueError
        value = Value.number(0)
        sign = self._take("+-") or "+"
        while sign:
            term = self._product()
            value = value + (term if sign == "+" else -term)
            sign = self._take("+-")
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._power()
        while self.peek() not in _ENDS:
            sign = self._take("*/")
            factor = self._power()
            value = value / factor if sign == "/" else value * factor
        return value

    def _power(self) -> Value:
        base = self._atom()
        if not self._take("^"):
            return base
        exponent = self._argument().rational()
        if exponent == Fraction(1, 2):
            return base.root()
        if exponent.denominator != 1:
            raise NoValueError
        return base ** int(exponent)

    def _atom(self) -> Value:
        number = _NUMBER.match(self._text, self._at)
        if number:
            return self._number(number.group())
        if self._skip(r"\frac"):
            top = self._argument()
            return top / self._argument()
        if self._skip(r"\sqrt"):
            return self._argument().root()
        if self._take("("):
            return self._sum_until(")")
        if self.peek() == "{" or self.peek().isalpha():
            return self._argument()
        raise NoValueError

    def _number(self, digits: str) -> Value:
        if len(digits) > MAX_DIGITS:
            raise NoValueError
        self._at += len(digits)
        value = Fraction(digits)
        mixed = _MIXED.match(self._text, self._at)
        if mixed and "." not in digits:
            top, bottom = (int(part) for part in mixed.groups() if part)
            self._at = mixed.end()
            if bottom == 0:
                raise NoValueError
            value += Fraction(top, bottom)
        return Value.number(value)

    def _argument(self) -> Value:
        """Parse the argument of a command or an exponent: one digit, one symbol, or a sum in braces."""
        if self._take("{"):
            return self._sum_until("}")
        character = self.peek()
        if character in "0123456789" and character:
            self._at += 1
            return Value.number(int(character))
        if character.isalpha():
            self._at += 1
            return Value.symbol(character)
        raise NoValueError

    def _sum_until(self, bracket: str) -> Value:
        value = self.sum()
        if not self._take(bracket):
            raise NoValueError
        return value

    def _take(self, characters: str) -> str:
        """Consume the next character if it is one of `characters` and return it; otherwise return the empty string."""
        character = self.peek()
        if not character or character not in characters:
            return ""
        self._at += 1
        return character

    def _skip(self, command: str) -> bool:
        """Consume a command if it comes next, and return whether it does."""
        if not self._text.startswith(command, self._at) or self._text[self._at + len(command) :][:1].isalpha():
            return False
        self._at += len(command)
        return True
