"""Parse a completion that consists of thinking and a solution (docs/spec/environments.md).

    <think>any text</think> <solution>the answer</solution>

The parser searches for the tags and never applies a regular expression to the whole text, so it takes linear time for
any text.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

INSTRUCTION: Final = "Think between <think> and </think>, then answer between <solution> and </solution>."

_MAX_TRAILING: Final = 200
_SHORT_TRAILING: Final = 50


@dataclass(frozen=True)
class Completion:
    """A parsed completion."""

    thinks: bool  # whether there is text between thinking tags, before the solution
    solution: str | None  # the text in the last solution block; None if there is no block
    blocks: int  # number of solution blocks
    trailing: int  # characters behind the last block, without spaces at the end; 0 if there is no block

    @classmethod
    def read(cls, text: str) -> "Completion":
        """Parse any text."""
        before, solution, after = _split_at_solution(text)
        opening = before.find("<think>")
        closing = before.find("</think>", opening + 1) if opening >= 0 else -1
        thinks = closing >= 0 and bool(before[opening + len("<think>") : closing].strip())
        if solution is None:
            return cls(thinks, None, 0, 0)
        return cls(thinks, solution, text.count("<solution>"), len(after.rstrip()))

    @property
    def formatted(self) -> bool:
        """Whether there is exactly one solution block, it is not blank, and little text follows it."""
        return self.blocks == 1 and bool((self.solution or "").strip()) and self.trailing < _SHORT_TRAILING

    @property
    def brevity(self) -> Fraction:
        """1 if nothing follows the solution, 0 if 200 characters or more follow it or there is no solution."""
        if self.solution is None:
            return Fraction(0)
        return Fraction(max(0, _MAX_TRAILING - self.trailing), _MAX_TRAILING)


def _split_at_solution(text: str) -> tuple[str, str | None, str]:
    """Return the text before, in and after the last complete solution block; (text, None, "") if there is none."""
    closing = text.rfind("</solution>")
    opening = text.rfind("<solution>", 0, closing) if closing >= 0 else -1
    if opening < 0:
        return text, None, ""
    return text[:opening], text[opening + len("<solution>") : closing], text[closing + len("</solution>") :]
