"""The training problems of an environment by their kind: levels, members of a mixture, or what a data file says
(docs/spec/difficulty.md).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from protocol.environments.base import Environment, Problem
from protocol.environments.dataset import Dataset
from protocol.environments.mixture import Mixture
from protocol.environments.seeded_rng import SeededRng


@runtime_checkable
class LeveledEnvironment(Environment, Protocol):
    """An environment whose training problems have levels."""

    @property
    def levels(self) -> Mapping[str, int]:
        """How many of the training problems have each level, in any unit; empty for an environment without levels."""

    def problem_of_level(self, level: str, seed: bytes) -> Problem:
        """Return the training problem of a level that a seed gives."""


class Strata:
    """The strata of an environment."""

    def __init__(self, environment: Environment | Dataset) -> None:
        self._problem: Callable[[str, bytes], Problem]
        self.weights: dict[str, int] = {}  # by name, how many of the problems a stratum has, in any unit
        if isinstance(environment, Mixture):
            members = environment.members
            self.weights = dict(zip(members, environment.shares, strict=True))
            self._problem = lambda name, seed: replace(members[name].problem(seed), stratum=name)
        elif isinstance(environment, Dataset):
            problems: defaultdict[str, list[Problem]] = defaultdict(list)
            for problem in environment.training_problems:
                problems[problem.stratum].append(problem)
            self.weights = {name: len(of_stratum) for name, of_stratum in sorted(problems.items())}
            self._problem = lambda name, seed: problems[name][SeededRng("stratum", seed).below(len(problems[name]))]
        elif isinstance(environment, LeveledEnvironment):
            leveled = environment
            self.weights = dict(sorted(environment.levels.items()))
            self._problem = lambda name, seed: replace(leveled.problem_of_level(name, seed), stratum=name)

    def problem(self, name: str, seed: bytes) -> Problem:
        """Return the training problem of a seed in a stratum."""
        return self._problem(name, seed)
