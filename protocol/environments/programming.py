"""Python programs that have to pass unit tests, from MBPP data files (docs/spec/environments.md).

A line: {"text" or "prompt": ..., "code": ..., "test_list": [...], "test_setup_code"?: ..., "test_imports"?: [...]}.
Reward (PULSE, appendix F.5): 0.7 share of tests passed + 0.1 compiles + 0.1 format + 0.1 thinking.

The prompt shows the first test alone, for the function's name and form: a program that only knows the answers of the
tests it has seen earns little. Programs run behind the `Sandbox` port, never in this process.
"""

import json
from fractions import Fraction
from typing import Final

from protocol.environments.base import Problem, ProgramTests, Sandbox
from protocol.environments.completion import INSTRUCTION, Completion
from protocol.environments.dataset import Dataset, Fields, checked, text
from protocol.errors import MalformedError

LABEL: Final = "code"

MAX_PROGRAM_CHARS: Final = 1 << 14
"""A longer program is not run: it counts as one that does not compile."""

MAX_TESTS: Final = 64

_PASSED: Final = Fraction(70, 100)
_COMPILES: Final = Fraction(10, 100)
_FORMAT: Final = Fraction(10, 100)
_THINKING: Final = Fraction(10, 100)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    values = fields.get(name, [])
    if not isinstance(values, list):
        raise MalformedError(f"{name!r} is no list")
    return tuple(checked(value, name) for value in values)


def read(fields: Fields) -> Problem:
    """The problem of a line.

    Raises:
        MalformedError: it is none.
    """
    task = text(fields, "text", "prompt").strip()
    code = text(fields, "code")
    setup = "\n".join((*_texts(fields, "test_imports"), text(fields, "test_setup_code", default="")))
    tests = _texts(fields, "test_list")
    if not 1 <= len(tests) <= MAX_TESTS:
        raise MalformedError(f"{len(tests)} tests, not 1 to {MAX_TESTS}")
    prompt = f"{task}\nYour code should pass tests such as:\n{tests[0]}\n\n{INSTRUCTION} The solution is Python code alone.\n"
    return Problem(prompt, json.dumps([code, setup.strip(), tests]))


def exercise(problem: Problem) -> ProgramTests:
    """What a problem's programs are tried against."""
    code, setup, tests = json.loads(problem.reference)
    return ProgramTests(code, setup, tuple(tests))


def program(solution: str | None) -> str:
    """The program in a solution block, with or without a Markdown fence around it; '' for none."""
    code = (solution or "").strip()
    if code.startswith("```") and code.endswith("```") and "\n" in code:
        code = code[code.index("\n") + 1 : -3]
    return code.strip("\n") if code.strip() else ""


class Programming(Dataset):
    """Tasks of a data file.

    Args:
        data: JSON Lines.
        sandbox: runs programs; its Python is part of the environment's name.

    Raises:
        MalformedError, LimitError: not such a file; the message gives the line.
    """

    exact = False  # limits of time and memory bind sooner on one machine than on another

    def __init__(self, data: bytes, sandbox: Sandbox) -> None:
        super().__init__(LABEL, data, read)
        self.name = f"code-{sandbox.python}"
        self._sandbox = sandbox

    def reward(self, problem: Problem, completion: str) -> float:
        """Judges any text: runs what stands in its last solution block.

        Raises:
            SandboxError: the sandbox broke; nothing was judged.
        """
        parts = Completion.read(completion)
        code = program(parts.solution)
        share, compiles = Fraction(0), False
        if 0 < len(code) <= MAX_PROGRAM_CHARS:
            trial = self._sandbox.attempt(exercise(problem), code)
            share, compiles = Fraction(sum(trial.passed), len(trial.passed)), trial.compiled
        return float(_PASSED * share + _COMPILES * compiles + _FORMAT * parts.formatted + _THINKING * parts.thinks)
