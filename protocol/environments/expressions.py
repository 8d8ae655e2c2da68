r"""Parse a normalized answer to an exact value, without `eval` (docs/spec/environments.md).

sum     := ['-' | '+'] product (('+' | '-') product)*
product := power (['*' | '/'] power)*                            a missing sign is a multiplication
power   := atom ['^' (digit | '-'? digits in braces | symbol-free braces)]
atom    := number | mixed | '\frac' argument argument | '\sqrt' argument | symbol | '(' sum ')' | '{' sum '}' | call
mixed   := digits '\frac' digits-in-braces digits-in-braces      3\frac{1}{2} is 7/2
number  := digits ['.' digits] ['\overline{' digits '}' behind a point]
argument := digit | symbol | '{' sum '}'
symbol  := letter ['_{' letters and digits '}']
call    := function ['_{' sum '}'] (number | symbol | '(' sum ')' | '{' sum '}')      only before a sign or the end

A function of a value is a symbol of its own: \log_{2}(3) is known to equal \log_{2}(6/2), and nothing else about it.
"""

import re
from fractions import Fraction
from typing import Final

from protocol.environments.polynomials import MAX_EXPONENT, MAX_TERMS, NoValueError, Value

MAX_DEPTH: Final = 24
MAX_DIGITS: Final = 60
MAX_WORK: Final = 5_000
"""The products of two terms that reading one answer may take; a square root costs a tenth of the steps that find it."""

_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_MIXED: Final = re.compile(r"\\frac(?:\{([0-9]{1,9})\}\{([0-9]{1,9})\}|([0-9])([0-9]))(?![0-9])")
_REPEATING: Final = re.compile(r"([0-9]*)\.([0-9]{0,9})\\overline\{([0-9]{1,9})\}")
_SUBSCRIPT: Final = re.compile(r"_\{([A-Za-z0-9]{1,16})\}")
_FUNCTIONS: Final = re.compile(r"\\?(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![a-z])")
_ENDS: Final = ("", "+", "-", ")", "}")
_AFTER_CALL: Final = ("", "+", "-", ")", "}", "*", "/", "\\")


class Work:
    """The work that is left for one answer, the same on every machine."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, amount: int) -> None:
        """Spend some of it, or raise NoValueError if not so much is left."""
        self._left -= amount
        if self._left < 0:
            raise NoValueError


def value_of(text: str, work: Work) -> Value:
    """Return the value of an expression without spaces; NoValueError if it is none, or exceeds a limit."""
    reader = _Reader(text, work)
    value = reader.sum()
    if reader.peek():
        raise NoValueError
    return value


class _Reader:
    """The parser of one expression, from left to right."""

    def __init__(self, text: str, work: Work) -> None:
        self._text = text
        self._work = work
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
            self._work.spend(len(value) + len(term))
            value = value + (term if sign == "+" else -term)
            sign = self._take("+-")
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._power()
        while self.peek() not in _ENDS:
            sign = self._take("*/")
            factor = self._power()
            self._work.spend(1 + len(value) * len(factor))
            value = value / factor if sign == "/" else value * factor
        return value

    def _power(self) -> Value:
        base = self._atom()
        if not self._take("^"):
            return base
        exponent = self._argument().rational()
        if exponent == Fraction(1, 2):
            return self._root(base)
        if exponent.denominator != 1:
            raise NoValueError
        self._work.spend(min(abs(int(exponent)), MAX_EXPONENT) * len(base) * MAX_TERMS)
        return base ** int(exponent)

    def _root(self, value: Value) -> Value:
        self._work.spend(1 + value.root_steps() // 10)
        return value.root()

    def _atom(self) -> Value:
        number = _REPEATING.match(self._text, self._at) or _NUMBER.match(self._text, self._at)
        if number:
            return self._repeating(number) if number.re is _REPEATING else self._number(number.group())
        if self._skip(r"\frac"):
            top = self._argument()
            return top / self._argument()
        if self._skip(r"\sqrt"):
            return self._root(self._argument())
        if self._take("("):
            return self._sum_until(")")
        call = _FUNCTIONS.match(self._text, self._at)
        if call:
            return self._call(call)
        if self.peek() == "{" or self.peek().isalpha():
            return self._argument()
        raise NoValueError

    def _call(self, match: re.Match[str]) -> Value:
        """Parse a function of a value. Without brackets, its argument ends only where a sign follows."""
        self._at = match.end()
        base = ""
        if self._take("_"):
            if self.peek() != "{":
                raise NoValueError
            base = self._argument().canonical()
        number = _NUMBER.match(self._text, self._at)
        if number:
            argument = self._number(number.group())
        else:
            argument = self._sum_until(")") if self._take("(") else self._argument()
        if self.peek() not in _AFTER_CALL:
            raise NoValueError
        name = f"{match[1]}_{base}({argument.canonical()})"
        self._work.spend(len(name))
        return Value.symbol(name)

    def _repeating(self, match: re.Match[str]) -> Value:
        whole, fixed, period = match.groups()
        self._at = match.end()
        value = int((whole or "0") + fixed) + Fraction(int(period), 10 ** len(period) - 1)
        return Value.number(value / 10 ** len(fixed))

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
            subscript = _SUBSCRIPT.match(self._text, self._at + 1)
            self._at = subscript.end() if subscript else self._at + 1
            return Value.symbol(f"{character}_{subscript[1]}" if subscript else character)
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
