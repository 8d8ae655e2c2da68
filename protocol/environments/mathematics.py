"""Mathematical problems with one final answer, from MATH or GSM8K data files (docs/spec/environments.md).

A line has one of two forms; in the first, an 'answer' field takes precedence over the solution's box:
    {"problem": ..., "solution": "... \\boxed{answer} ..."}        MATH
    {"question": ..., "answer": "... #### answer"}                 GSM8K

Reward (PULSE, appendix F.5): 0.7 correct + 0.15 format + 0.1 thinking + 0.05 nothing behind the answer.
"""

from fractions import Fraction
from typing import Final

from protocol.environments import answers
from protocol.environments.base import Problem
from protocol.environments.completion import INSTRUCTION, Completion
from protocol.environments.dataset import Dataset, Fields, text_field
from protocol.errors import MalformedError

LABEL: Final = "math"

_CORRECT: Final = Fraction(70, 100)
_FORMAT: Final = Fraction(15, 100)
_THINKING: Final = Fraction(10, 100)
_NO_TRAILING: Final = Fraction(5, 100)


def read(fields: Fields) -> Problem:
    """Build the problem of a line; MalformedError for fields that have neither form, or no final answer."""
    if "problem" in fields:
        question = text_field(fields, "problem")
        solution = text_field(fields, "solution", default="")
        gold = text_field(fields, "answer", default=answers.last_boxed(solution) or "")
    else:
        question = text_field(fields, "question")
        _, mark, gold = text_field(fields, "answer").rpartition("####")
        if not mark:
            raise MalformedError("no '####' in 'answer'")
    if not answers.has_answer(gold):
        raise MalformedError("no final answer")
    prompt = f"{question.strip()}\n\n{INSTRUCTION} The solution is the final answer alone.\n"
    return Problem(prompt, gold.strip())


class Mathematics(Dataset):
    """The mathematics environment, with the problems of a data file (hostile bytes, see `Dataset`)."""

    name = "math"
    exact = True

    def __init__(self, data: bytes) -> None:
        super().__init__(LABEL, data, read)

    def reward(self, problem: Problem, completion: str) -> float:
        # The answer is the last solution block, or else the last box.
        parts = Completion.read(completion)
        answer = parts.solution if parts.solution is not None else answers.last_boxed(completion)
        correct = answer is not None and answers.equivalent(problem.reference, _bare(answer))
        return float(
            _CORRECT * correct + _FORMAT * parts.formatted + _THINKING * parts.thinks + _NO_TRAILING * parts.brevity
        )


def _bare(answer: str) -> str:
    """Remove the box around an answer, if there is one."""
    boxed = answers.last_boxed(answer) if len(answer) <= answers.MAX_ANSWER_CHARS else None
    return (answer if boxed is None else boxed).strip()
