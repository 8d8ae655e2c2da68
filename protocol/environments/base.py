"""What an environment is: the interface that every task implements."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One task instance.

    Attributes:
        prompt: the text that the policy continues.
        reference: what the environment needs to judge a completion; its meaning is the environment's own.
    """

    prompt: str
    reference: str


class Environment(Protocol):
    """A task whose rewards anybody can recompute. The same seed gives the same problem on every machine."""

    @property
    def name(self) -> str:
        """The name that a run manifest gives."""

    @property
    def exact(self) -> bool:
        """Whether every machine computes the same rewards. Where not, a miner's own are no evidence of anything."""

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed (16 bytes or more); never one of the held-out problems."""

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index (0, 1, 2, ...); never a training problem."""

    @property
    def held_out_size(self) -> int | None:
        """How many held-out problems differ; behind the last they repeat. None where there is no end of them."""

    def reward(self, problem: Problem, completion: str) -> float:
        """What a completion (text, end-of-sequence token removed) earns: in [0, 1]."""


class SandboxError(Exception):
    """Foreign code cannot be run safely here: nothing was judged. The node must not go on without it."""


@dataclass(frozen=True)
class ProgramLimits:
    """What foreign code may use. They bear on rewards, so all nodes of a run have the same (docs/spec/environments.md).

    Attributes:
        cpu_seconds: processor time of all tests of one trial together.
        wall_seconds: a far end for code that waits instead of computing.
        memory_bytes: address space; file_bytes: one file; scratch_bytes: all files together.
        files: open files.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    files: int = 32


@dataclass(frozen=True)
class ProgramTests:
    """What a program is tried against.

    Attributes:
        reference: a solution that is known to be right; its top-level names are those that a solution defines.
        setup: statements that run before the tests.
        tests: statements; each passes where it raises nothing.
    """

    reference: str
    setup: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program: whether it compiles, and whether it passes each test."""

    compiled: bool
    passed: tuple[bool, ...]


class Sandbox(Protocol):
    """Runs foreign Python where it can reach nothing. Blocks for up to `ProgramLimits.wall_seconds`; safe to use from
    threads.
    """

    @property
    def python(self) -> str:
        """The language's version, such as '3.11'."""

    def attempt(self, exercise: ProgramTests, solution: str) -> ProgramResult:
        """Try a solution (any text) against the tests, in order; after a test that it does not survive, all count as
        failed.

        Raises:
            SandboxError: the sandbox broke, which says nothing about the solution.
        """
