"""The environments (tasks) that this program has. A new one is a module with a class and an entry here."""

from dataclasses import dataclass
from typing import Final

from protocol.environments import mathematics, programming
from protocol.environments.addition import Addition
from protocol.environments.base import Environment, Problem, Sandbox
from protocol.environments.countdown import Countdown
from protocol.environments.dataset import Dataset
from protocol.environments.mathematics import Mathematics
from protocol.environments.programming import Programming
from protocol.environments.sat import Sat

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
    environment.name: environment for environment in (Addition(), Countdown(), Sat())
}
_PYTHON_VERSIONS: Final = {f"code-{python}": python for python in ("3.11", "3.12", "3.13", "3.14")}
_SHORT_ANSWER_TOKENS: Final = 8  # enough for the answers of generated problems
_PROSE_TOKENS: Final = 512

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
        tokens: default for the maximum number of tokens of a completion.
    """

    data: bool = False
    python: str = ""
    tokens: int = _PROSE_TOKENS


def requirements(name: str) -> Requirements:
    """Return what `get` needs for an environment; a ValueError for an unknown name lists all names."""
    if name not in names + data_names:
        raise ValueError(f"unknown environment {name!r}; there are: {', '.join(names + data_names)}")
    tokens = _SHORT_ANSWER_TOKENS if name in _GENERATED else _PROSE_TOKENS
    return Requirements(name not in _GENERATED, _PYTHON_VERSIONS.get(name, ""), tokens)


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
