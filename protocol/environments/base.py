"""The interface that every environment implements, and the interface of the sandbox that some of them need."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One task instance.

    Attributes:
        prompt: the text that the policy continues.
        reference: the data with which the environment judges a completion, in a form of its own.
        stratum: the kind of problem by which evaluations are reported, such as its difficulty; empty for none.
    """

    prompt: str
    reference: str
    stratum: str = ""


class Environment(Protocol):
    """A task whose rewards anybody can recompute. A seed gives the same problem on every machine."""

    @property
    def name(self) -> str:
        """The name in a run manifest."""

    @property
    def exact(self) -> bool:
        """Whether every machine computes the same rewards. If not, a wrong reward is no evidence against a miner."""

    def problem(self, seed: bytes) -> Problem:
        """Return the training problem of a seed (16 bytes or more); never one of the held-out problems."""

    def held_out_problem(self, index: int) -> Problem:
        """Return the held-out problem of an index (0, 1, 2, ...); never a training problem."""

    @property
    def held_out_size(self) -> int | None:
        """Number of different held-out problems, after which they repeat; None if there is no limit."""

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of a completion (text without the end-of-sequence token), in [0, 1]."""


class Episode(Protocol):
    """One problem played in turns. It is a pure function of problem, seed and the texts so far."""

    def step(self, text: str) -> str | None:
        """Return the reply to a turn of the policy (text without the end-of-sequence token); None at the end."""

    def reward(self) -> float:
        """Return the reward of the turns so far, in [0, 1]."""


@runtime_checkable
class EpisodeEnvironment(Environment, Protocol):
    """An environment that replies to the policy; if it is exact, every machine computes the same replies. Its `reward`
    is that of an episode of one turn.
    """

    @property
    def turns(self) -> int:
        """Most turns of an episode."""

    def begin(self, problem: Problem, seed: bytes) -> Episode:
        """Return a new episode; all randomness of the environment comes from the seed (32 bytes)."""


class SandboxError(Exception):
    """The sandbox cannot run untrusted code safely, so nothing was judged. The node must not continue without it."""


class SandboxLimitError(SandboxError):
    """A call into the sandbox reached a limit that other machines may not reach: of time or memory, or it was ended by
    a signal. This one call says nothing; the sandbox works.
    """


@dataclass(frozen=True)
class ProgramLimits:
    """The resource limits of untrusted programs. They affect rewards, so they are the same on all nodes
    (docs/spec/environments.md).

    Attributes:
        cpu_seconds: processor time of all tests of one program together.
        wall_seconds: elapsed time, which ends programs that wait instead of computing.
        memory_bytes: address space.
        file_bytes: size of one file.
        scratch_bytes: size of all files together.
        files: number of open files.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    files: int = 32


@dataclass(frozen=True)
class ProgramTests:
    """The unit tests of a programming problem.

    Attributes:
        reference: a correct solution; a solution must define the same top-level names.
        setup: statements that run before the tests.
        tests: statements; a test passes if it raises nothing.
    """

    reference: str
    setup: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program compiles, and for each test whether it passes."""

    compiles: bool
    passes: tuple[bool, ...]


class Sandbox(Protocol):
    """An interpreter that isolates untrusted Python programs. It is thread-safe."""

    @property
    def python(self) -> str:
        """The version of Python, such as '3.11'."""

    def attempt(self, tests: ProgramTests, solution: str) -> ProgramResult:
        """Run a solution (any text) against the tests, in order. If the program dies in a test, this test and all later
        ones count as failed.

        The call blocks for up to `ProgramLimits.wall_seconds`.

        Raises:
            SandboxError: the sandbox failed, which says nothing about the solution.
        """
