"""Python programs that must pass unit tests, from MBPP data files (docs/spec/environments.md).

A line: {"text" or "prompt": ..., "code": ..., "test_list": [...], "test_setup_code"?: ..., "test_imports"?: [...]}.
Reward (PULSE, appendix F.5): 0.7 share of tests passed + 0.1 compiles + 0.1 format + 0.1 thinking.

The prompt shows only the first test, which gives the function's name and form. So a program that just returns the
answers of the tests in the prompt earns little. Programs run behind the `Sandbox` interface, never in this process.
"""

import json
from fractions import Fraction
from typing import Final

from protocol.environments.base import Problem, ProgramTests, Sandbox
from protocol.environments.completion import INSTRUCTION, Completion
from protocol.environments.dataset import Dataset, Fields, check_text, text_field
from protocol.errors import MalformedError

LABEL: Final = "code"

MAX_PROGRAM_CHARS: Final = 1 << 14
"""A longer program is not run and counts as one that does not compile."""

MAX_TESTS: Final = 64

_TESTS: Final = Fraction(70, 100)
_COMPILES: Final = Fraction(10, 100)
_FORMAT: Final = Fraction(10, 100)
_THINKING: Final = Fraction(10, 100)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    values = fields.get(name, [])
    if not isinstance(values, list):
        raise MalformedError(f"{name!r} is no list")
    return tuple(check_text(value, name) for value in values)


def read(fields: Fields) -> Problem:
    """Build the problem of a line; MalformedError for a missing field, a wrong type, and for no tests or too many."""
    task = text_field(fields, "text", "prompt").strip()
    code = text_field(fields, "code")
    setup = "\n".join((*_texts(fields, "test_imports"), text_field(fields, "test_setup_code", default="")))
    tests = _texts(fields, "test_list")
    if not 1 <= len(tests) <= MAX_TESTS:
        raise MalformedError(f"{len(tests)} tests, not 1 to {MAX_TESTS}")
    instruction = f"{INSTRUCTION} The solution is Python code alone."
    prompt = f"{task}\nYour code should pass tests such as:\n{tests[0]}\n\n{instruction}\n"
    return Problem(prompt, json.dumps([code, setup.strip(), tests]))


def program_tests(problem: Problem) -> ProgramTests:
    """Return the unit tests of a problem."""
    code, setup, tests = json.loads(problem.reference)
    return ProgramTests(code, setup, tuple(tests))


def program(solution: str | None) -> str:
    """Return the program in a solution block without the Markdown fence around it, or '' if there is no program."""
    code = (solution or "").strip()
    if code.startswith("```") and code.endswith("```") and "\n" in code:
        code = code[code.index("\n") + 1 : -3]
    return code.strip("\n") if code.strip() else ""


class Programming(Dataset):
    """The programming environment, with the problems of a data file (hostile bytes, see `Dataset`). A sandbox runs the
    programs; its version of Python is part of the environment's name.
    """

    exact = False  # a program may exceed the limits of time and memory on one machine and not on another

    def __init__(self, data: bytes, sandbox: Sandbox) -> None:
        super().__init__(LABEL, data, read)
        self.name = f"code-{sandbox.python}"
        self._sandbox = sandbox

    def reward(self, problem: Problem, completion: str) -> float:
        parts = Completion.read(completion)
        code = program(parts.solution)
        share, compiles = Fraction(0), False
        if 0 < len(code) <= MAX_PROGRAM_CHARS:
            result = self._sandbox.attempt(program_tests(problem), code)
            share, compiles = Fraction(sum(result.passes), len(result.passes)), result.compiles
        return float(_TESTS * share + _COMPILES * compiles + _FORMAT * parts.formatted + _THINKING * parts.thinks)
