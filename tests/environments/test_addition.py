"""Two-digit addition."""

from protocol.environments.addition import Addition
from protocol.environments.base import Problem

ENVIRONMENT = Addition()
PROBLEM = Problem(prompt="57+68=", reference="125")


def test_prompt_and_reference() -> None:
    problem = ENVIRONMENT.problem(bytes(16))
    left, right = problem.prompt.removesuffix("=").split("+")
    assert len(left) == len(right) == 2
    assert int(left) + int(right) == int(problem.reference)


def test_same_problems_for_ever() -> None:
    """Every node of every release has to see these."""
    assert [ENVIRONMENT.problem(bytes([i]) * 16).prompt for i in range(3)] == PINNED_TRAINING
    assert [ENVIRONMENT.held_out_problem(i).prompt for i in range(3)] == ["97+38=", "27+34=", "30+74="]


def test_only_the_plain_sum_is_paid() -> None:
    assert ENVIRONMENT.reward(PROBLEM, "125") == 1.0
    for wrong in ("", "115", "0125", " 125", "125 ", "+125", "125<eos>", "١٢٥", "1 25", "125\n"):
        assert ENVIRONMENT.reward(PROBLEM, wrong) == 0.0


def test_exchanged_operands_do_not_leak() -> None:
    held_out = {ENVIRONMENT.held_out_problem(index).prompt for index in range(1000)}
    for prompt in held_out:
        left, right = prompt.removesuffix("=").split("+")
        assert f"{right}+{left}=" in held_out


PINNED_TRAINING = ["24+43=", "34+87=", "40+30="]
