"""The environments (tasks) that this program has. A new one is a module with a class and an entry here."""

from dataclasses import dataclass
from typing import Final

from protocol.environments import mathematics, programming
from protocol.environments.addition import Addition, Sums
from protocol.environments.base import Environment, EpisodeEnvironment, Problem, Sandbox
from protocol.environments.calculator import Calculator
from protocol.environments.countdown import Countdown
from protocol.environments.dataset import Dataset
from protocol.environments.mathematics import Mathematics
from protocol.environments.programming import Programming
from protocol.environments.sat import Sat
from protocol.environments.wordle import Wordle

__all__ = [
    "Environment",
    "Problem",
    "Requirements",
    "Sandbox",
    "data_names",
    "dataset",
    "get",
    "is_exact",
    "module",
    "names",
    "requirements",
]

_GENERATED: Final[dict[str, Environment]] = {
    environment.name: environment for environment in (Addition(), Calculator(), Countdown(), Sat(), Sums(), Wordle())
}
_PYTHON_VERSIONS: Final = {f"code-{python}": python for python in ("3.11", "3.12", "3.13", "3.14")}
_SHORT_ANSWER_TOKENS: Final = 8  # enough for the answers of generated problems
_PROSE_TOKENS: Final = 512
_ANSWER_TOKENS: Final = {Sums.name: 24}  # a chat model repeats the question
_TURN_TOKENS: Final = {Calculator.name: 12, Wordle.name: 3}  # a question; two digits and the end
_SHORT_REPLY_TOKENS: Final = 16  # enough for the replies of built-in episodes, in tokens of a character or more

names: Final = tuple(sorted(_GENERATED))
"""The environments that generate their problems from a seed."""

data_names: Final = tuple(sorted((Mathematics.name, *_PYTHON_VERSIONS)))
"""The environments that read their problems from a data file."""


@dataclass(frozen=True)
class Requirements:
    """What is needed to create an environment.

    Attributes:
        data: whether it reads its problems from a data file.
        python: the version of Python that its sandbox must have; empty for an environment that runs no programs.
        tokens: default for the maximum number of tokens of a completion, or of a turn.
        turns: most turns of an episode; 1 for an environment without episodes.
        reply_tokens: default for the maximum number of tokens of a reply.
    """

    data: bool = False
    python: str = ""
    tokens: int = _PROSE_TOKENS
    turns: int = 1
    reply_tokens: int = 0


def requirements(name: str) -> Requirements:
    """Return what `get` needs for an environment; a ValueError for an unknown name lists all names."""
    if name not in names + data_names:
        raise ValueError(f"unknown environment {name!r}; there are: {', '.join(names + data_names)}")
    environment = _GENERATED.get(name)
    if isinstance(environment, EpisodeEnvironment):
        return Requirements(
            tokens=_TURN_TOKENS.get(name, _SHORT_ANSWER_TOKENS),
            turns=environment.turns,
            reply_tokens=_SHORT_REPLY_TOKENS,
        )
    tokens = _ANSWER_TOKENS.get(name, _SHORT_ANSWER_TOKENS) if environment else _PROSE_TOKENS
    return Requirements(environment is None, _PYTHON_VERSIONS.get(name, ""), tokens)


def dataset(name: str, data: bytes) -> Dataset:
    """Parse an environment's data file, for callers that do not judge completions.

    Args:
        data: hostile bytes (JSON Lines).

    Raises:
        ValueError: there is no environment of this name, or it reads no data file.
    """
    if not requirements(name).data:
        raise ValueError(f"environment {name!r} takes no data file")
    form = programming if requirements(name).python else mathematics
    return Dataset(form.LABEL, data, form.read)


def is_exact(name: str) -> bool:
    """Return the `exact` property of an environment: whether all machines compute the same rewards."""
    return Programming.exact if requirements(name).python else True


def module(name: str) -> str:
    """Return the name of the module with an environment's class."""
    if name in _GENERATED:
        return type(_GENERATED[name]).__module__
    return (programming if requirements(name).python else mathematics).__name__


def get(name: str, data: bytes | None = None, sandbox: Sandbox | None = None) -> Environment:
    """Return the environment of a name.

    Args:
        data: the file of problems (JSON Lines, hostile bytes); None for an environment that reads none.
        sandbox: None for an environment that runs no programs.

    Raises:
        ValueError: there is no environment of this name, or `data` or `sandbox` do not fit its requirements.
    """
    needs = requirements(name)
    if (data is not None) != needs.data:
        raise ValueError(f"environment {name!r} {'needs a data file' if needs.data else 'takes no data file'}")
    if data is None:
        return _GENERATED[name]
    if not needs.python:
        return Mathematics(data)
    if sandbox is None or sandbox.python != needs.python:
        raise ValueError(f"environment {name!r} needs a sandbox with Python {needs.python}")
    return Programming(data, sandbox)
