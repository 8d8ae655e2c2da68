"""Countdown: the grammar of completions, and rewards."""

import itertools

import pytest

from protocol.environments.base import Problem
from protocol.environments.countdown import MAX_COMPLETION_CHARS, Countdown

ENVIRONMENT = Countdown()
PROBLEM = Problem(prompt="3 7 25>46=", reference="3 7 25>46")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("25+3*7", 1.0),
        ("3*7+25", 1.0),
        ("(3*7)+25", 1.0),
        ("((25)+(7*3))", 1.0),
        ("25+7-3", 0.1),  # another value from the right numbers
        ("25/7/3", 0.1),
        ("46", 0.0),
        ("25+21", 0.0),
        ("25+3*7+0", 0.0),
        ("25+3*7+3-3", 0.0),
        ("25 + 3*7", 0.0),
        ("25+3*7=", 0.0),
        ("25+3**7", 0.0),
        ("25//3*7", 0.0),
        ("-25+3*7", 0.0),
        ("25/(7-7)", 0.0),
        ("(25+3*7", 0.0),
        ("25+3*7)", 0.0),
        ("2 5+3*7", 0.0),
        ("２５+3*7", 0.0),  # full-width digits are none
        ("00025+3*7", 0.0),
        ("025+3*7", 0.0),  # a number has one spelling
        ("25+03*7", 0.0),
        ("(((25)))+((3*7))", 1.0),  # brackets that change nothing
        ("", 0.0),
        ("()", 0.0),
        ("__import__('os')", 0.0),
    ],
)
def test_reward(completion: str, reward: float) -> None:
    assert ENVIRONMENT.reward(PROBLEM, completion) == reward


def test_division_is_exact() -> None:
    third = Problem(prompt="1 3 9>3=", reference="1 3 9>3")
    assert ENVIRONMENT.reward(third, "1/3*9") == 1.0
    assert ENVIRONMENT.reward(third, "9/(3/1)") == 1.0


def test_division_by_zero_is_no_expression() -> None:
    assert ENVIRONMENT.reward(Problem("3 3 5>5=", "3 3 5>5"), "5/(3-3)") == 0.0


@pytest.mark.parametrize("completion", ["(" * 10_000, "9" * 10_000, "1+" * 10_000, "(" * MAX_COMPLETION_CHARS])
def test_long_and_deep_texts_are_refused(completion: str) -> None:
    assert ENVIRONMENT.reward(PROBLEM, completion) == 0.0


@pytest.mark.parametrize("index", range(40))
def test_every_problem_has_a_solution(index: int) -> None:
    problem = ENVIRONMENT.held_out_problem(index)
    numbers, _, target = problem.reference.partition(">")
    assert any(
        ENVIRONMENT.reward(problem, f"(({a}){x}({b})){y}({c})") == 1.0
        for a, b, c in itertools.permutations(numbers.split(" "))
        for x, y in itertools.product("+-*/", repeat=2)
    ), target
