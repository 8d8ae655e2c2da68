"""The tasks that a run manifest can name. A new one is a module with a class and a line here."""

from typing import Final

from protocol.environments.addition import Addition
from protocol.environments.base import Environment, Problem
from protocol.environments.countdown import Countdown

__all__ = ["Environment", "Problem", "get", "names"]

_ENVIRONMENTS: Final[dict[str, Environment]] = {
    environment.name: environment for environment in (Addition(), Countdown())
}

names: Final = tuple(sorted(_ENVIRONMENTS))
"""Every environment's name."""


def get(name: str) -> Environment:
    """The environment of a name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    try:
        return _ENVIRONMENTS[name]
    except KeyError:
        raise ValueError(f"unknown environment {name!r}; there are: {', '.join(names)}") from None
