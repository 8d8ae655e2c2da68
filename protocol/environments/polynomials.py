"""Exact values of answers, so that an answer counts however it is written (docs/spec/environments.md).

A value is a sum of terms. A term is a rational factor times the square root of a whole number times powers of symbols,
such as pi or x: 3/2 * sqrt(2) * pi^2. Exponents may be negative, so 1/x is a term as well.

Each value has one form: no number under a root has a square factor, and terms with the same root and powers are added
up. So 1/sqrt(2) and sqrt(2)/2 are the same value, and so are (x+1)^2 and 1+2x+x^2.

All nodes must agree on each answer, and a hostile one must not take long. So there is no floating-point arithmetic and
no search, and the size of every value is bounded. An expression that exceeds a bound has no value.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

MAX_TERMS: Final = 16
"""Most terms of a value."""

MAX_BITS: Final = 512
"""Most bits of a number under a root, and of the numerator and the denominator of a factor."""

MAX_RADICAND: Final = 10**8
"""Largest number whose square root is taken: finding its square factors takes at most 10**4 divisions."""

MAX_EXPONENT: Final = 32
"""Largest exponent, positive or negative, of a power and of a symbol in a term."""

Powers = tuple[tuple[str, int], ...]
"""The symbols of a term with their exponents, which are not 0, in the order of the symbols."""

Monomial = tuple[int, Powers]
"""A term without its factor: the number under its root, which has no square factor (1 for no root), and its powers."""

_ONE: Final[Monomial] = (1, ())


class NoValueError(Exception):
    """An expression has no value here: it exceeds a bound, or is no sum of terms."""


class Value:
    """A sum of terms, made of the factor of each monomial. Equal values compare equal. Every operation makes a new
    value, and raises NoValueError if that exceeds a bound, or this one is outside of the operation's domain.
    """

    def __init__(self, terms: Mapping[Monomial, Fraction]) -> None:
        self._terms = {monomial: factor for monomial, factor in terms.items() if factor}
        if len(self._terms) > MAX_TERMS:
            raise NoValueError
        for (root, _), factor in self._terms.items():
            if max(root.bit_length(), factor.numerator.bit_length(), factor.denominator.bit_length()) > MAX_BITS:
                raise NoValueError

    @classmethod
    def number(cls, value: Fraction | int) -> "Value":
        """Return a rational number as a value."""
        return cls({_ONE: Fraction(value)})

    @classmethod
    def symbol(cls, name: str) -> "Value":
        """Return a variable, or a constant such as pi, as a value."""
        return cls({(1, ((name, 1),)): Fraction(1)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(frozenset(self._terms.items()))

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self._terms)

    def canonical(self) -> str:
        """Return a text that is the same for equal values, and another one for different values."""
        terms = sorted((powers, root, str(factor)) for (root, powers), factor in self._terms.items())
        return ";".join(f"{factor}*r{root}*{powers}" for powers, root, factor in terms)

    def root_steps(self) -> int:
        """Return the most divisions that `root` makes for this rational value; 0 if it refuses it without any."""
        value = self.rational()
        radicand = value.numerator * value.denominator
        return math.isqrt(radicand) if 0 <= radicand <= MAX_RADICAND else 0

    def __add__(self, other: "Value") -> "Value":
        terms = dict(self._terms)
        for monomial, factor in other._terms.items():
            terms[monomial] = terms.get(monomial, Fraction(0)) + factor
        return Value(terms)

    def __neg__(self) -> "Value":
        return Value({monomial: -factor for monomial, factor in self._terms.items()})

    def __mul__(self, other: "Value") -> "Value":
        terms: dict[Monomial, Fraction] = {}
        for (root, powers), factor in self._terms.items():
            for (other_root, other_powers), other_factor in other._terms.items():
                # sqrt(a) * sqrt(b) = g * sqrt(ab / g^2) with g = gcd(a, b). Neither a nor b has a square factor, so the
                # new number has none either.
                common = math.gcd(root, other_root)
                monomial = (root * other_root // common**2, _join(powers, other_powers))
                terms[monomial] = terms.get(monomial, Fraction(0)) + factor * other_factor * common
        return Value(terms)

    def __truediv__(self, other: "Value") -> "Value":
        # The inverse of a single term is a term: 1 / (f sqrt(r) x^n) = sqrt(r) x^-n / (f r). That of a sum is none.
        if len(other._terms) != 1:
            raise NoValueError
        (((root, powers), factor),) = other._terms.items()
        inverse = (root, tuple((name, -exponent) for name, exponent in powers))
        return self * Value({inverse: 1 / (factor * root)})

    def __pow__(self, exponent: int) -> "Value":
        if abs(exponent) > MAX_EXPONENT:
            raise NoValueError
        result = Value.number(1)
        for _ in range(abs(exponent)):
            result = result * self
        return result if exponent >= 0 else Value.number(1) / result

    def rational(self) -> Fraction:
        """Return a value without roots and symbols as a fraction."""
        if set(self._terms) <= {_ONE}:
            return self._terms.get(_ONE, Fraction(0))
        raise NoValueError

    def root(self) -> "Value":
        """Return the square root of a value from 0 on without roots and symbols."""
        # sqrt(p / q) = sqrt(p q) / q, with the square factors of p q before the root.
        value = self.rational()
        if value < 0:
            raise NoValueError
        outside, inside = _squarefree(value.numerator * value.denominator)
        return Value({(inside, ()): Fraction(outside, value.denominator)})


def _squarefree(number: int) -> tuple[int, int]:
    """Return (a, b) with number = a * a * b, where b has no square factor."""
    if number > MAX_RADICAND:
        raise NoValueError
    outside, divisor = 1, 2
    while divisor * divisor <= number:
        while number % (divisor * divisor) == 0:
            number //= divisor * divisor
            outside *= divisor
        divisor += 1
    return outside, number


def _join(first: Powers, second: Powers) -> Powers:
    """Return the powers of a product: the exponents of each symbol are added up."""
    powers = dict(first)
    for name, exponent in second:
        powers[name] = powers.get(name, 0) + exponent
    if any(abs(exponent) > MAX_EXPONENT for exponent in powers.values()):
        raise NoValueError
    return tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent))
