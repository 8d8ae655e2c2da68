"""Two-digit addition."""

from protocol.environments.addition import Addition
from protocol.environments.base import Problem

ENVIRONMENT = Addition()
PROBLEM = Problem(prompt="57+68=", reference="125")


def test_prompt_and_reference() -> None:
    problem = ENVIRONMENT.problem(bytes(16))
    first, second = problem.prompt.removesuffix("=").split("+")
    assert len(first) == len(second) == 2
    assert int(first) + int(second) == int(problem.reference)


def test_problems_are_pinned() -> None:
    """The problems of a seed must never change, in any release."""
    assert [ENVIRONMENT.problem(bytes([i]) * 16).prompt for i in range(3)] == PINNED_TRAINING
    assert [ENVIRONMENT.held_out_problem(i).prompt for i in range(3)] == ["97+38=", "27+34=", "30+74="]


def test_only_the_plain_sum_is_rewarded() -> None:
    assert ENVIRONMENT.reward(PROBLEM, "125") == 1.0
    for wrong in ("", "115", "0125", " 125", "125 ", "+125", "125<eos>", "١٢٥", "1 25", "125\n"):
        assert ENVIRONMENT.reward(PROBLEM, wrong) == 0.0


def test_a_pair_and_its_exchange_are_on_the_same_side() -> None:
    held_out = {ENVIRONMENT.held_out_problem(index).prompt for index in range(1000)}
    for prompt in held_out:
        first, second = prompt.removesuffix("=").split("+")
        assert f"{second}+{first}=" in held_out


PINNED_TRAINING = ["24+43=", "34+87=", "40+30="]
