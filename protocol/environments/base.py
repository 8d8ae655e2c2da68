"""The interface that every environment implements, and the interface of the sandbox that some of them need."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One task instance."""

    prompt: str  # the text that the policy continues
    reference: str  # the data with which the environment judges a completion, in a form of its own
    stratum: str = ""  # the kind of problem by which evaluations are reported, such as its difficulty; empty for none


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
    """

    cpu_seconds: int = 5  # processor time of all tests of one program together
    wall_seconds: float = 30.0  # elapsed time, which ends programs that wait instead of computing
    memory_bytes: int = 512 << 20  # address space
    file_bytes: int = 1 << 20  # of one file
    scratch_bytes: int = 8 << 20  # of all files together
    files: int = 32  # that are open


@dataclass(frozen=True)
class ProgramTests:
    """The unit tests of a programming problem."""

    reference: str  # a correct solution; a solution must define the same top-level names
    setup: str  # statements that run before the tests
    tests: tuple[str, ...]  # statements; a test passes if it raises nothing


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
        """Run a solution (any text) against the tests, in order, for up to `ProgramLimits.wall_seconds`. If the program
        dies in a test, this and all later ones count as failed. A SandboxError says nothing about the solution.
        """
