"""A rubric: a reward made of weighted parts, in exact fractions (docs/spec/environments.md).

Sources: soft overlong punishment is that of DAPO (arXiv 2503.14476, equation 13); the penalty on repeated n-grams is
that of Yeo et al. (arXiv 2502.03373) as a share of all n-grams, on tokens.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from protocol import limits
from protocol.encoding import REWARD_UNIT, Record
from protocol.environments.completion import Completion

PartName = Literal["score", "format", "thinking", "brevity", "overlong", "repetition"]

MAX_GRAM_TOKENS: Final = 64
_MAX_WEIGHT: Final = 1_000_000
_WITH_TOKENS: Final = ("overlong", "repetition")
_part: Final = re.compile(r"([a-z]+)(?::([1-9][0-9]{0,6}))?=([1-9][0-9]{0,6})(?:/([1-9][0-9]{0,6}))?")


class RubricPart(Record):
    """A part of a reward, with its weight `numerator` / `denominator`."""

    kind: ClassVar[str] = "rubric-part"
    part: PartName
    # of `overlong`, before the longest completion, over which it grows; of `repetition`, of an n-gram; else 0
    tokens: Annotated[int, Field(ge=0, le=limits.MAX_COMPLETION_TOKENS)]
    numerator: Annotated[int, Field(ge=1, le=_MAX_WEIGHT)]
    denominator: Annotated[int, Field(ge=1, le=_MAX_WEIGHT)]

    @model_validator(mode="after")
    def _consistent(self) -> "RubricPart":
        if (self.tokens > 0) != (self.part in _WITH_TOKENS):
            raise ValueError(f"tokens belong to {' and '.join(_WITH_TOKENS)} alone, which need some")
        if self.part == "repetition" and self.tokens > MAX_GRAM_TOKENS:  # the memory of a reward grows with its square
            raise ValueError(f"repetition of at most {MAX_GRAM_TOKENS} tokens")
        return self


def _distinct(parts: tuple[RubricPart, ...]) -> tuple[RubricPart, ...]:
    if len({part.part for part in parts}) < len(parts):
        raise ValueError("a part of a rubric twice")
    return parts


Rubric = Annotated[tuple[RubricPart, ...], Field(max_length=limits.MAX_RUBRIC_PARTS), AfterValidator(_distinct)]
"""The parts of a reward; empty for the environment's own score alone."""


def parse(text: str) -> tuple[RubricPart, ...]:
    """Return the rubric of a text such as 'score=7/10,overlong:512=1'; a ValueError says why it is none."""
    matches = [_part.fullmatch(item) for item in text.split(",")] if text else []
    parts = [
        RubricPart.model_validate(
            {"part": m[1], "tokens": int(m[2] or 0), "numerator": int(m[3]), "denominator": int(m[4] or 1)}
        )
        for m in matches
        if m is not None
    ]
    if None in matches:
        raise ValueError("a rubric is PART=WEIGHT,PART:TOKENS=WEIGHT with fractions as weights")
    return _distinct(tuple(parts))


def reward(parts: Sequence[RubricPart], score: float, text: str, tokens: Sequence[int], max_tokens: int) -> int:
    """Return the reward of a completion in millionths: the weighted sum, bounded by 0 and 1, to the nearest millionth.
    The score is the environment's own; the tokens end with the end-of-sequence token, which the text does not have.
    """
    completion = Completion.read(text)
    values: dict[PartName, Fraction] = {
        "score": Fraction(score),
        "format": Fraction(completion.formatted),
        "thinking": Fraction(completion.thinks),
        "brevity": completion.brevity,
    }
    total = Fraction(0)
    for part in parts:
        value = values.get(part.part)
        if value is None:
            value = _of_tokens(part, tokens, max_tokens)
        total += Fraction(part.numerator, part.denominator) * value
    return round(min(max(total, Fraction(0)), Fraction(1)) * REWARD_UNIT)


def _of_tokens(part: RubricPart, tokens: Sequence[int], max_tokens: int) -> Fraction:
    """Return the punishment of a length or of repeated n-grams, in [-1, 0]."""
    if part.part == "overlong":
        free = max(0, max_tokens - part.tokens)
        return -Fraction(max(0, len(tokens) - free), max_tokens - free)
    grams = [tuple(tokens[start : start + part.tokens]) for start in range(len(tokens) - part.tokens + 1)]
    return Fraction(len(set(grams)), len(grams)) - 1 if grams else Fraction(0)
