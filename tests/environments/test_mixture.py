"""Mixtures of environments: which member a seed draws, whose held-out problems are tried, and who rewards them."""

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import environments
from protocol.environments.base import Environment, EpisodeEnvironment, Problem
from protocol.environments.mixture import Mixture, mixed


class Numbered:
    """An environment of so many held-out problems, which are numbered; None for no limit."""

    exact = True

    def __init__(self, name: str, held_out_size: int | None) -> None:
        self.name, self.held_out_size = name, held_out_size

    def problem(self, seed: bytes) -> Problem:
        return Problem(f"{self.name} {seed.hex()}", "")

    def held_out_problem(self, index: int) -> Problem:
        assert self.held_out_size is None or index < self.held_out_size
        return Problem(f"{self.name} {index}", "")

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == self.name)


def seeds(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def test_one_member_is_itself() -> None:
    member = environments.get("addition")
    assert mixed([(1_000_000, member)]) is member


def test_members_are_drawn_by_their_shares_and_give_the_problem_of_the_seed() -> None:
    members: list[Environment] = [environments.get(name) for name in ("addition", "countdown", "sat")]
    mixture = Mixture(list(zip((700_000, 299_999, 1), members, strict=True)))
    problems = [mixture.problem(seed) for seed in seeds(4000)]
    counts = Counter(problem.stratum for problem in problems)
    assert abs(counts["addition"] - 2800) < 120 and counts["sat"] < 4
    for seed, problem in zip(seeds(50), problems, strict=False):
        assert problem.prompt == environments.get(problem.stratum).problem(seed).prompt
        assert mixture.reward(problem, "") == 0.0
    first = problems[0]
    assert mixture.reward(mixture.held_out_problem(0), mixture.held_out_problem(0).reference) == 1.0
    assert first == mixture.problem(seeds(1)[0])
    assert mixture.turns == 1  # none has episodes
    with pytest.raises(KeyError):
        mixture.reward(Problem("1+1=", "2"), "2")


@given(st.lists(st.none() | st.integers(1, 6), min_size=2, max_size=4))
def test_members_take_turns_at_held_out_problems_until_each_is_through(sizes: list[int | None]) -> None:
    members: list[tuple[int, Environment]] = [(1, Numbered(f"m{place}", size)) for place, size in enumerate(sizes)]
    mixture = Mixture(members)
    count = mixture.held_out_size or 40
    expected = sorted((turn, place) for place, size in enumerate(sizes) for turn in range(40 if size is None else size))
    problems = [mixture.held_out_problem(index) for index in range(count)]
    assert [problem.prompt for problem in problems] == [f"m{place} {turn}" for turn, place in expected[:count]]
    assert [problem.stratum for problem in problems] == [f"m{place}" for _, place in expected[:count]]
    assert (mixture.held_out_size is None) == (None in sizes)
    if mixture.held_out_size:
        assert mixture.held_out_problem(count) == problems[0]


def test_a_mixture_of_episodes_begins_those_of_the_member() -> None:
    mixture = Mixture([(500_000, environments.get("calculator")), (500_000, environments.get("wordle"))])
    assert isinstance(mixture, EpisodeEnvironment) and mixture.turns == 6
    for problem in map(mixture.problem, seeds(20)):
        episode = mixture.begin(problem, bytes(32))
        assert episode.step(problem.reference) is None
        assert episode.reward() == 1.0
