"""A mixture of environments: the seed of a group draws one of them by their shares (docs/spec/environments.md). And the
strata of a task: its training problems by their kind, as levels, members of a mixture, or what a data file says
(docs/spec/difficulty.md).
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from protocol.environments.base import Environment, Episode, EpisodeEnvironment, Problem
from protocol.environments.dataset import Dataset
from protocol.environments.record import SHARES
from protocol.environments.seeded_rng import SeededRng


def drawn_member(shares: Sequence[int], seed: bytes) -> int:
    """Return the index of the member that a seed draws, by shares in millionths that add up to a million."""
    return bisect.bisect_right(list(itertools.accumulate(shares)), SeededRng("mixture", seed).below(SHARES))


def mixed(members: Sequence[tuple[int, Environment]]) -> Environment:
    """Return the environment of a task: its only member, or else the mixture of members with shares in millionths."""
    return members[0][1] if len(members) == 1 else Mixture(members)


class Mixture:
    """Several environments as one, each with its share in millionths, ascending by name. The stratum of a problem is
    the name of the member that gave it.
    """

    name = "mixture"

    def __init__(self, members: Sequence[tuple[int, Environment]]) -> None:
        self.shares = [share for share, _ in members]
        self.members = {member.name: member for _, member in members}
        self.exact = all(member.exact for member in self.members.values())

    def problem(self, seed: bytes) -> Problem:
        name = list(self.members)[drawn_member(self.shares, seed)]
        return replace(self.members[name].problem(seed), stratum=name)

    @property
    def held_out_size(self) -> int | None:
        sizes = [member.held_out_size for member in self.members.values()]
        return None if None in sizes else sum(size for size in sizes if size)

    def held_out_problem(self, index: int) -> Problem:
        # The members take turns, and each is passed over when it has no more: turn t has the members of more than t.
        index %= self.held_out_size or index + 1
        turn = bisect.bisect_right(range(index + 1), index, key=lambda turn: self._held_out_before(turn + 1))
        members = [name for name in self.members if self._has_more(name, turn)]
        name = members[index - self._held_out_before(turn)]
        return replace(self.members[name].held_out_problem(turn), stratum=name)

    def _held_out_before(self, turn: int) -> int:
        """Return how many held-out problems come before a turn."""
        sizes = (member.held_out_size for member in self.members.values())
        return sum(turn if size is None else min(turn, size) for size in sizes)

    def _has_more(self, name: str, turn: int) -> bool:
        size = self.members[name].held_out_size
        return size is None or turn < size

    def reward(self, problem: Problem, completion: str) -> float:
        return self.members[problem.stratum].reward(problem, completion)

    @property
    def turns(self) -> int:
        turns = (member.turns for member in self.members.values() if isinstance(member, EpisodeEnvironment))
        return max(turns, default=1)

    def begin(self, problem: Problem, seed: bytes) -> Episode:
        member = self.members[problem.stratum]
        assert isinstance(member, EpisodeEnvironment)  # the manifest says so
        return member.begin(problem, seed)


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
