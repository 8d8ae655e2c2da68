"""3-SAT: problems and rewards."""

import itertools

import pytest

from protocol.environments.base import Problem
from protocol.environments.sat import Sat

ENVIRONMENT = Sat()
FORMULA = "(-1+3+4)(+1-2+4)(+1+2+3)"
PROBLEM = Problem(f"{FORMULA}=", FORMULA)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("0010", 1.0),
        ("1111", 1.0),
        ("1100", 0.1),  # the first clause is false
        ("0100", 0.1),  # the second
        ("0000", 0.1),  # the third
        ("001", 0.0),
        ("00100", 0.0),
        (" 0010", 0.0),
        ("0010\n", 0.0),
        ("0020", 0.0),
        ("００１０", 0.0),  # full-width digits are none
        ("", 0.0),
    ],
)
def test_reward(completion: str, reward: float) -> None:
    assert ENVIRONMENT.reward(PROBLEM, completion) == reward


def test_problems_are_pinned() -> None:
    """The problems of a seed must never change, in any release."""
    assert ENVIRONMENT.problem(bytes(16)).prompt == PINNED
    assert ENVIRONMENT.held_out_problem(0).prompt == PINNED_HELD_OUT


@pytest.mark.parametrize("index", range(60))
def test_every_problem_has_a_solution_and_most_assignments_are_none(index: int) -> None:
    problem = ENVIRONMENT.held_out_problem(index)
    variables = max(int(digit) for digit in problem.reference if digit.isdigit())
    assert 4 <= variables <= 8
    rewards = [ENVIRONMENT.reward(problem, "".join(values)) for values in itertools.product("01", repeat=variables)]
    assert set(rewards) == {0.1, 1.0}
    assert rewards.count(1.0) < len(rewards) / 3


PINNED = (
    "(-2-3-4)(-2-3+4)(-2+3-4)(-1-3+4)(-1-2-4)(-1-2+3)(-1-2+4)(-1+"
    "2-3)(-1+2+4)(-1+3-4)(-1+3+4)(+1-3+4)(+1-2-4)(+1-2-3)(+1-2+3)(+1+2+3)="
)
PINNED_HELD_OUT = "(-2-3-4)(-2+3+4)(-1-2-4)(-1-2+3)(-1-2+4)(-1+2+3)(-1+3-4)(+1-3+4)(+1-2-4)(+1-2-3)(+1-2+3)(+1-2+4)="
