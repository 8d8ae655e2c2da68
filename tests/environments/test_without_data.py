"""The environments without a data file: addition, Countdown with its grammar, and 3-SAT."""

import itertools

import pytest

from protocol.environments import Environment
from protocol.environments.addition import Addition, Sums
from protocol.environments.base import Problem
from protocol.environments.countdown import MAX_COMPLETION_CHARS, Countdown
from protocol.environments.sat import Sat

ADDITION, SUMS, COUNTDOWN, SAT = Addition(), Sums(), Countdown(), Sat()
SUM = Problem(prompt="57+68=", reference="125")
NUMBERS = Problem(prompt="3 7 25>46=", reference="3 7 25>46")
FORMULA = Problem("(-1+3+4)(+1-2+4)(+1+2+3)=", "(-1+3+4)(+1-2+4)(+1+2+3)")
REWARDS_OF_NUMBERS = [
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
    *((text, 0.0) for text in ("(" * 10_000, "9" * 10_000, "1+" * 10_000, "(" * MAX_COMPLETION_CHARS)),
]
REWARDS_OF_FORMULA = [
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
]
RIGHT_SUMS = ("125", " 125\n", "125<eos>", "57+68=125", "57 + 68 = 125.", "The sum is **125**!", "**Answer:** $125$")
WRONG_SUMS = (
    *("", "115", "0125", "+125", "-125", "57-125", "1 25", "١٢٥", "125.0", "1,125", "1.125"),
    *("125 or 126", "123, 124, 125, 126", "124,125", "57+68=125=57+68", " ".join(map(str, range(20, 199)))),
)


@pytest.mark.parametrize(
    ("environment", "problem", "completion", "reward"),
    [
        *((ADDITION, SUM, completion, 1.0) for completion in RIGHT_SUMS),
        *((ADDITION, SUM, completion, 0.0) for completion in WRONG_SUMS),
        (SUMS, Problem("What is 3+9?", "12"), "3 + 9 = 12.<|im_end|>", 1.0),
        (SUMS, Problem("What is 3+9?", "12"), "The sum of 3 and 9", 0.0),
        *((COUNTDOWN, NUMBERS, *row) for row in REWARDS_OF_NUMBERS),
        (COUNTDOWN, Problem("1 3 9>3=", "1 3 9>3"), "1/3*9", 1.0),  # division is exact
        (COUNTDOWN, Problem("1 3 9>3=", "1 3 9>3"), "9/(3/1)", 1.0),
        (COUNTDOWN, Problem("3 3 5>5=", "3 3 5>5"), "5/(3-3)", 0.0),
        *((SAT, FORMULA, *row) for row in REWARDS_OF_FORMULA),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else getattr(value, "name", ""),
)
def test_reward(environment: Environment, problem: Problem, completion: str, reward: float) -> None:
    assert environment.reward(problem, completion) == reward


def test_problems_are_pinned() -> None:
    """The problems of a seed must never change, in any release."""
    assert [ADDITION.problem(bytes([i]) * 16).prompt for i in range(3)] == ["24+43=", "34+87=", "40+30="]
    assert [ADDITION.held_out_problem(i).prompt for i in range(3)] == ["97+38=", "27+34=", "30+74="]
    assert [SUMS.problem(bytes([i]) * 16).prompt for i in range(3)] == ["What is 3+9?", "What is 6+4?", "What is 2+9?"]
    references = [SUMS.held_out_problem(i).reference for i in range(SUMS.held_out_size)]
    assert " ".join(references) == "2 11 7 8 8 11 11 7 11"
    assert ADDITION.problem(bytes(16)) == Problem("24+43=", "67")
    assert SAT.problem(bytes(16)).prompt == PINNED
    assert SAT.held_out_problem(0).prompt == PINNED_HELD_OUT


def test_a_pair_and_its_exchange_are_on_the_same_side() -> None:
    held_out = {ADDITION.held_out_problem(index).prompt for index in range(1000)}
    for prompt in held_out:
        first, second = prompt.removesuffix("=").split("+")
        assert f"{second}+{first}=" in held_out


@pytest.mark.parametrize("index", range(40))
def test_every_problem_of_countdown_has_a_solution(index: int) -> None:
    problem = COUNTDOWN.held_out_problem(index)
    numbers, _, target = problem.reference.partition(">")
    assert any(
        COUNTDOWN.reward(problem, f"(({a}){x}({b})){y}({c})") == 1.0
        for a, b, c in itertools.permutations(numbers.split(" "))
        for x, y in itertools.product("+-*/", repeat=2)
    ), target


@pytest.mark.parametrize("index", range(60))
def test_every_formula_has_a_solution_and_most_assignments_are_none(index: int) -> None:
    problem = SAT.held_out_problem(index)
    variables = max(int(digit) for digit in problem.reference if digit.isdigit())
    assert 4 <= variables <= 8
    rewards = [SAT.reward(problem, "".join(values)) for values in itertools.product("01", repeat=variables)]
    assert set(rewards) == {0.1, 1.0}
    assert rewards.count(1.0) < len(rewards) / 3


PINNED = (
    "(-2-3-4)(-2-3+4)(-2+3-4)(-1-3+4)(-1-2-4)(-1-2+3)(-1-2+4)(-1+"
    "2-3)(-1+2+4)(-1+3-4)(-1+3+4)(+1-3+4)(+1-2-4)(+1-2-3)(+1-2+3)(+1+2+3)="
)
PINNED_HELD_OUT = "(-2-3-4)(-2+3+4)(-1-2-4)(-1-2+3)(-1-2+4)(-1+2+3)(-1+3-4)(+1-3+4)(+1-2-4)(+1-2-3)(+1-2+3)(+1-2+4)="
