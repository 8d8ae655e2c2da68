"""Programming: the program in a completion, and rewards. These tests run no programs; tests/sandbox/ does."""

import json

import pytest

from protocol.environments.programming import MAX_PROGRAM_CHARS, Programming, program, program_tests
from protocol.errors import MalformedError
from tests.support.builders.tasks import CODE, AcceptingSandbox

GOOD = "<think>easy</think><solution>x = 1</solution>"


@pytest.mark.parametrize(
    ("completion", "passes", "compiles", "reward"),
    [
        (GOOD, 3, True, 1.0),
        (GOOD, 1, True, 0.7 / 3 + 0.3),
        (GOOD, 0, True, 0.3),
        (GOOD, 0, False, 0.2),
        ("<solution>x = 1</solution>", 3, True, 0.9),
        ("<solution>x = 1</solution>" + "a" * 50, 3, True, 0.8),
        ("<solution>y</solution><solution>x = 1</solution>", 3, True, 0.8),
    ],
)
def test_reward(completion: str, passes: int, compiles: bool, reward: float) -> None:
    sandbox = AcceptingSandbox(passes=passes, compiles=compiles)
    environment = Programming(CODE, sandbox)
    assert environment.reward(environment.held_out_problem(0), completion) == pytest.approx(reward, abs=1e-12)
    assert sandbox.programs == ["x = 1"]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("", 0.0),
        ("x = 1", 0.0),
        ("<think>a</think>", 0.1),
        ("<solution> \n</solution>", 0.0),
        ("<solution>```python\n```</solution>", 0.1),
        (f"<solution>{'x' * (MAX_PROGRAM_CHARS + 1)}</solution>", 0.1),
    ],
)
def test_a_completion_without_a_program_runs_nothing(completion: str, reward: float) -> None:
    sandbox = AcceptingSandbox()
    environment = Programming(CODE, sandbox)
    assert environment.reward(environment.held_out_problem(0), completion) == reward
    assert not sandbox.programs


@pytest.mark.parametrize(
    "solution", ["x = 1", "\nx = 1\n", "```python\nx = 1\n```", "```\nx = 1```", "  ```py\nx = 1\n```\n"]
)
def test_program(solution: str) -> None:
    assert program(solution) == "x = 1"


def test_the_prompt_shows_one_test_and_no_solution() -> None:
    for problem in Programming(CODE, AcceptingSandbox()).problems:
        task = program_tests(problem)
        assert [test in problem.prompt for test in task.tests] == [True, False, False]
        assert task.reference not in problem.prompt


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"code": "", "test_list": ["1"]}, "no 'text' or 'prompt'"),
        ({"text": "a", "test_list": ["1"]}, "no 'code'"),
        ({"text": "a", "code": ""}, "0 tests, not 1 to 64"),
        ({"text": "a", "code": "", "test_list": "1"}, "'test_list' is no list"),
        ({"text": "a", "code": "", "test_list": [1]}, "'test_list' is no text"),
        ({"prompt": "a", "code": "", "test_list": ["1"] * 65}, "65 tests, not 1 to 64"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(fields: dict[str, object], what: str) -> None:
    with pytest.raises(MalformedError) as error_info:
        Programming(json.dumps(fields).encode(), AcceptingSandbox())
    assert str(error_info.value) == f"line 1: {what}"


def test_setup_and_imports_go_before_the_tests() -> None:
    lines = [
        json.loads(line) | {"test_imports": ["import re"], "test_setup_code": "x = 1"} for line in CODE.splitlines()
    ]
    environment = Programming("\n".join(map(json.dumps, lines)).encode(), AcceptingSandbox())
    assert program_tests(environment.held_out_problem(0)).setup == "import re\nx = 1"
