"""The small data files that ship with the program, and a sandbox that runs nothing."""

from pathlib import Path
from typing import Final

import grailnode
from protocol.environments.base import ProgramResult, ProgramTests

_DATA: Final = Path(grailnode.__file__).parent / "data" / "environments"
MATH: Final = (_DATA / "math.jsonl").read_bytes()
CODE: Final = (_DATA / "code.jsonl").read_bytes()


class AcceptingSandbox:
    """A sandbox that reports a number of passed tests for each program, and records the programs."""

    def __init__(self, python: str = "3.11", *, passes: int = 99, compiles: bool = True) -> None:
        self.python = python
        self.programs: list[str] = []
        self._passes = passes
        self._compiles = compiles

    def attempt(self, tests: ProgramTests, solution: str) -> ProgramResult:
        self.programs.append(solution)
        return ProgramResult(self._compiles, tuple(place < self._passes for place in range(len(tests.tests))))
