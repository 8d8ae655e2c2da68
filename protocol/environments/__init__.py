"""The tasks that a run manifest can name. A new one is a module with a class and a line here."""

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
    "names",
    "needs",
]

_DRAWN: Final[dict[str, Environment]] = {
    environment.name: environment for environment in (Addition(), Countdown(), Sat())
}
_RUN: Final = {f"code-{python}": python for python in ("3.11", "3.12", "3.13", "3.14")}
_TOKENS: Final = 8  # what drawn problems ask for
_TOKENS_OF_PROSE: Final = 512

names: Final = tuple(sorted(_DRAWN))
"""The environments that need nothing but a seed."""

data_names: Final = tuple(sorted((Mathematics.name, *_RUN)))
"""Those that read their problems from a data file."""


@dataclass(frozen=True)
class Requirements:
    """What an environment cannot be made without.

    Attributes:
        data: whether it reads its problems from a data file.
        python: the version of Python that its sandbox has to have; empty where it runs no programs.
        tokens: tokens that a completion should be allowed, where nobody knows better.
    """

    data: bool = False
    python: str = ""
    tokens: int = _TOKENS_OF_PROSE


def needs(name: str) -> Requirements:
    """What `get` has to be given for an environment.

    Raises:
        ValueError: there is none of this name; the message lists those there are.
    """
    if name not in names + data_names:
        raise ValueError(f"unknown environment {name!r}; there are: {', '.join(names + data_names)}")
    return Requirements(name not in _DRAWN, _RUN.get(name, ""), _TOKENS if name in _DRAWN else _TOKENS_OF_PROSE)


def dataset(name: str, data: bytes) -> Dataset:
    """The problems of an environment's data file, for who judges no completions.

    Raises:
        ValueError: there is no such environment, or it reads no data.
        MalformedError, LimitError: the data is not such a file.
    """
    if not needs(name).data:
        raise ValueError(f"environment {name!r} takes no data file")
    form = programming if needs(name).python else mathematics
    return Dataset(form.LABEL, data, form.read)


def is_exact(name: str) -> bool:
    """Whether all machines compute the same rewards in an environment, as its `exact` says.

    Raises:
        ValueError: there is none of this name.
    """
    return Programming.exact if needs(name).python else True


def get(name: str, data: bytes | None = None, sandbox: Sandbox | None = None) -> Environment:
    """The environment of a name.

    Args:
        name: as a run manifest has it.
        data: the file of problems (JSON Lines), for one that reads it.
        sandbox: for one that runs programs.

    Raises:
        ValueError: there is none of this name, or it needs what it was not given, or has no use for what it was.
        MalformedError, LimitError: the data is not such a file.
    """
    needed = needs(name)
    if (data is not None) != needed.data:
        raise ValueError(f"environment {name!r} {'needs a data file' if needed.data else 'takes no data file'}")
    if data is None:
        return _DRAWN[name]
    if not needed.python:
        return Mathematics(data)
    if sandbox is None or sandbox.python != needed.python:
        raise ValueError(f"environment {name!r} needs a sandbox with Python {needed.python}")
    return Programming(data, sandbox)
