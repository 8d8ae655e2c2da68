"""What a completion is made of: thinking, then a solution (docs/spec/environments.md).

    <think>any text</think> <solution>the answer</solution>

The tags are read by search, never by a regular expression over the whole text, so any text takes linear time.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

INSTRUCTION: Final = "Think between <think> and </think>, then answer between <solution> and </solution>."

_MOST_TRAILING: Final = 200
_LITTLE_TRAILING: Final = 50


@dataclass(frozen=True)
class Completion:
    """A completion, taken apart.

    Attributes:
        thinks: whether something other than space stands between thinking tags, in front of the solution.
        solution: what stands in the last solution block; None where there is none.
        blocks: how many solution blocks there are.
        trailing: characters behind the last solution block, spaces at the end not counted; 0 where there is no block.
    """

    thinks: bool
    solution: str | None
    blocks: int
    trailing: int

    @classmethod
    def read(cls, text: str) -> "Completion":
        """Take any text apart."""
        front, solution, behind = _last_block(text)
        opened = front.find("<think>")
        closed = front.find("</think>", opened + 1) if opened >= 0 else -1
        thinks = closed >= 0 and bool(front[opened + len("<think>") : closed].strip())
        if solution is None:
            return cls(thinks, None, 0, 0)
        return cls(thinks, solution, text.count("<solution>"), len(behind.rstrip()))

    @property
    def formatted(self) -> bool:
        """Whether there is one solution block that says something, with little behind it."""
        return self.blocks == 1 and bool((self.solution or "").strip()) and self.trailing < _LITTLE_TRAILING

    @property
    def brevity(self) -> Fraction:
        """1 where nothing stands behind the solution, 0 from 200 characters on or without a solution."""
        if self.solution is None:
            return Fraction(0)
        return Fraction(max(0, _MOST_TRAILING - self.trailing), _MOST_TRAILING)


def _last_block(text: str) -> tuple[str, str | None, str]:
    """What stands before, in and behind the last closed solution block."""
    closed = text.rfind("</solution>")
    opened = text.rfind("<solution>", 0, closed) if closed >= 0 else -1
    if opened < 0:
        return text, None, ""
    return text[:opened], text[opened + len("<solution>") : closed], text[closed + len("</solution>") :]
