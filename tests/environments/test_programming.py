"""Programming: the program in a completion, and rewards. These tests run no programs; tests/sandbox/ does."""

import json

import pytest

from protocol.environments.programming import MAX_PROGRAM_CHARS, Programming, program, program_tests
from protocol.errors import MalformedError
from tests.support.builders.tasks import CODE, AcceptingSandbox

GOOD = "<think>easy</think><solution>x = 1</solution>"


ONE, NONE = ["x = 1"], list[str]()


@pytest.mark.parametrize(
    ("completion", "passes", "compiles", "reward", "programs"),
    [
        (GOOD, 3, True, 1.0, ONE),
        (GOOD, 1, True, 0.7 / 3 + 0.3, ONE),
        (GOOD, 0, True, 0.3, ONE),
        (GOOD, 0, False, 0.2, ONE),
        ("<solution>x = 1</solution>", 3, True, 0.9, ONE),
        ("<solution>x = 1</solution>" + "a" * 50, 3, True, 0.8, ONE),
        ("<solution>y</solution><solution>x = 1</solution>", 3, True, 0.8, ONE),
        ("", 3, True, 0.0, NONE),
        ("x = 1", 3, True, 0.0, NONE),
        ("<think>a</think>", 3, True, 0.1, NONE),
        ("<solution> \n</solution>", 3, True, 0.0, NONE),
        ("<solution>```python\n```</solution>", 3, True, 0.1, NONE),
        (f"<solution>{'x' * (MAX_PROGRAM_CHARS + 1)}</solution>", 3, True, 0.1, NONE),
    ],
)
def test_reward(completion: str, passes: int, compiles: bool, reward: float, programs: list[str]) -> None:
    sandbox = AcceptingSandbox(passes=passes, compiles=compiles)
    environment = Programming(CODE, sandbox)
    assert environment.reward(environment.held_out_problem(0), completion) == pytest.approx(reward, abs=1e-12)
    assert sandbox.programs == programs


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
    more = {"test_imports": ["import re"], "test_setup_code": "x = 1"}
    lines = [json.loads(line) | more for line in CODE.splitlines()]
    environment = Programming("\n".join(map(json.dumps, lines)).encode(), AcceptingSandbox())
    assert program_tests(environment.held_out_problem(0)).setup == "import re\nx = 1"
