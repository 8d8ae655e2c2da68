"""Exact values of answers: sums of rational multiples of square roots and symbols such as pi
(docs/spec/environments.md).

1/sqrt(2) and sqrt(2)/2 are the same value, and so are (x+1)^2 and 1+2x+x^2. There is no floating-point arithmetic and
no search, and every size is bounded, so that all nodes agree and the time is bounded. An expression that exceeds a
bound has no value.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

MAX_TERMS: Final = 16
MAX_BITS: Final = 512
MAX_RADICAND: Final = 10**8  # largest number under a root; finding its square factors takes 10**4 steps
MAX_EXPONENT: Final = 32

Powers = tuple[tuple[str, int], ...]
Monomial = tuple[int, Powers]
"""A squarefree radicand (1 for none), and the symbols with their exponents, which are sorted and not 0."""

_ONE: Final[Monomial] = (1, ())


class NoValueError(Exception):
    """The text has no value that this module can represent."""


class Value:
    """A sum of monomials with rational coefficients. Equal values compare equal.

    Raises:
        NoValueError: a bound is exceeded; every operation raises it too.
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
        """Return a rational number."""
        return cls({_ONE: Fraction(value)})

    @classmethod
    def symbol(cls, name: str) -> "Value":
        """Return a variable, or a constant such as pi."""
        return cls({(1, ((name, 1),)): Fraction(1)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(frozenset(self._terms.items()))

    def __len__(self) -> int:
        """Return the number of its terms."""
        return len(self._terms)

    def canonical(self) -> str:
        """Return a text that equal values share and different ones do not."""
        terms = sorted((powers, root, str(factor)) for (root, powers), factor in self._terms.items())
        return ";".join(f"{factor}*r{root}*{powers}" for powers, root, factor in terms)

    def root_steps(self) -> int:
        """Return the steps that finding the square root takes; 0 if it has none."""
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
                common = math.gcd(root, other_root)  # both are squarefree, so no other factor leaves the root
                monomial = (root * other_root // common**2, _join(powers, other_powers))
                terms[monomial] = terms.get(monomial, Fraction(0)) + factor * other_factor * common
        return Value(terms)

    def __truediv__(self, other: "Value") -> "Value":
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
        """Return the value as a rational number.

        Raises:
            NoValueError: the value is not rational.
        """
        if set(self._terms) <= {_ONE}:
            return self._terms.get(_ONE, Fraction(0))
        raise NoValueError

    def root(self) -> "Value":
        """Return the square root of a rational number.

        Raises:
            NoValueError: the value is negative or not rational, or exceeds a bound.
        """
        value = self.rational()
        if value < 0:
            raise NoValueError
        outside, inside = _squarefree(value.numerator * value.denominator)
        return Value({(inside, ()): Fraction(outside, value.denominator)})


def _squarefree(number: int) -> tuple[int, int]:
    """Return (a, b) with number = a * a * b and b squarefree."""
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
    powers = dict(first)
    for name, exponent in second:
        powers[name] = powers.get(name, 0) + exponent
    if any(abs(exponent) > MAX_EXPONENT for exponent in powers.values()):
        raise NoValueError
    return tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent))
