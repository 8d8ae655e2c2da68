"""The small data files that ship with the program, a sandbox that runs nothing, and real ones on this Python."""

import sys
from pathlib import Path
from typing import Final

import pytest

import grailnode
from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import ProgramLimits, ProgramResult, ProgramTests, SandboxError

_DATA: Final = Path(grailnode.__file__).parent / "data" / "environments"
MATH: Final = (_DATA / "math.jsonl").read_bytes()
CODE: Final = (_DATA / "code.jsonl").read_bytes()
NO_GYM: Final = (
    "GRAILNODE_GYM_PYTHON names no interpreter with `pip install '.[code,reasoning-gym]' "
    "./examples/{gymnasium,textarena}`"
)


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


OWN: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""The version of this Python, as environments of programs name it."""


def open_sandbox(*limits: ProgramLimits) -> BubblewrapSandbox:
    """Return a sandbox, or skip the test that asks where this machine cannot create one."""
    try:
        return BubblewrapSandbox.open(OWN, *limits)
    except SandboxError as error:
        pytest.skip(str(error))
