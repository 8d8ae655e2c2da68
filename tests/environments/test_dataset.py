"""Data files: their problems, the held-out lines, and errors with line numbers (docs/spec/environments.md); and what
programs earn, of which tests/sandbox runs some.
"""

import hashlib
import json

import pytest

from protocol import environments, limits
from protocol.environments.programming import MAX_PROGRAM_CHARS, Programming, program, program_tests
from protocol.errors import LimitError, MalformedError
from tests.support.builders.tasks import CODE, MATH, AcceptingSandbox


def line(question: str) -> bytes:
    return json.dumps({"question": question, "answer": "so #### 4"}).encode() + b"\n"


MANY = b"".join(line(f"What is {number} and 1?") for number in range(40))


@pytest.mark.parametrize(("name", "data"), [("math", MATH), ("code-3.11", CODE), ("math", MANY)])
def test_the_side_of_a_line_depends_on_its_text_alone(name: str, data: bytes) -> None:
    whole = environments.dataset(name, data)
    lines = [text for text in data.split(b"\n") if text]
    assert len(whole.training_problems) + len(whole.held_out_problems) == len(lines)
    for number, problem in zip(whole.held_out_lines, whole.held_out_problems, strict=True):
        words = " ".join(problem.prompt.lower().split())
        assert hashlib.sha256(f"held-out\0{name[:4]} {words}".encode()).digest()[0] < 26
        fields = json.loads(lines[number - 1])
        assert next(fields[form] for form in ("problem", "question", "text") if form in fields) in problem.prompt
    reverse = environments.dataset(name, b"\n".join(reversed(lines)))
    held_out_prompts = {problem.prompt for problem in whole.held_out_problems}
    assert {problem.prompt for problem in reverse.held_out_problems} == held_out_prompts
    assert {len(lines) + 1 - number for number in reverse.held_out_lines} == set(whole.held_out_lines)


def test_empty_lines_and_repeated_problems_are_ignored_and_lines_keep_their_numbers() -> None:
    plain = environments.dataset("math", MANY)
    spaced = environments.dataset("math", b"\n \n" + MANY.replace(b"\n", b"\r\n\n") + MANY)
    assert spaced.problems == plain.problems
    assert spaced.held_out_lines == tuple(2 * number + 1 for number in plain.held_out_lines)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"{", "line 43: not JSON in UTF-8"),
        (b"\xff", "line 43: not JSON in UTF-8"),
        (b"[1]", "line 43: no JSON object"),
        (b"{}", "line 43: no 'question'"),
        (b'{"question": "a", "answer": 4}', "line 43: 'answer' is no text"),
        (b'{"question": "a", "answer": "4"}', "line 43: no '####' in 'answer'"),
        (b'{"question": "a", "answer": "#### "}', "line 43: no final answer"),
        (b'{"question": "\\ud800", "answer": "#### 4"}', "line 43: 'question' holds a lone surrogate"),
        (b"[" * 100_000, "line 43: JSON nested deeper than 32"),
        (b'{"question": 1}', "line 43: 'question' is no text"),
        (b'{"problem": "a", "solution": "5"}', "line 43: no final answer"),
        (b'{"problem": "\\ud800", "answer": "5"}', "line 43: 'problem' holds a lone surrogate"),
        (b'{"problem": "' + b"a" * 300_000 + b'"}', "line 43: 300015 bytes, more than 262144"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tail: bytes, message: str) -> None:
    with pytest.raises(MalformedError) as error_info:
        environments.dataset("math", MANY + b"\n \n" + tail + b"\n" + MANY)
    assert str(error_info.value) == message


def test_limits() -> None:
    long = line("x" * limits.MAX_DATA_LINE_BYTES)
    with pytest.raises(MalformedError, match=r"^line 2: \d+ bytes, more than 262144"):
        environments.dataset("math", line("short") + long)
    with pytest.raises(LimitError, match="lines"):
        environments.dataset("math", b"\n" * (limits.MAX_DATA_LINES + 1))
    with pytest.raises(LimitError, match="bytes"):
        environments.dataset("math", bytes(limits.MAX_DATA_BYTES + 1))


@pytest.mark.parametrize("data", [b"", b"\n\n", line("one alone")])
def test_both_sets_need_a_problem(data: bytes) -> None:
    with pytest.raises(MalformedError, match=r"data: no (training|held-out) problem among [01]: add some"):
        environments.dataset("math", data)


def test_every_beginning_of_the_held_out_problems_has_the_proportions_of_the_whole() -> None:
    levels = ["easy", "easy", "easy", "hard"] * 500
    questions = [{"question": f"number {i}", "answer": "#### 1", "difficulty": level} for i, level in enumerate(levels)]
    lines = map(json.dumps, questions)
    problems = environments.dataset("math", "\n".join(lines).encode()).held_out_problems
    share = sum(problem.stratum == "hard" for problem in problems) / len(problems)
    assert 0.15 < share < 0.35
    for count in range(1, len(problems) + 1):
        assert abs(sum(problem.stratum == "hard" for problem in problems[:count]) - share * count) <= 1.0


@pytest.mark.parametrize(
    ("fields", "stratum"),
    [
        ({"level": "Level 5"}, "Level 5"),
        ({"difficulty": 3, "level": "x"}, "3"),
        ({"difficulty": None, "level": "x"}, "x"),
        ({"level": "a" * 65}, ""),
        ({"level": "\u00e9"}, ""),
        ({"level": "a\n"}, ""),
        ({"level": True}, ""),
        ({"level": 1.5}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_the_kind_of_a_problem_is_its_difficulty_or_level(fields: dict[str, object], stratum: str) -> None:
    fields = {"question": "What?", "answer": "#### 1", **fields}
    data = MANY + b"\n" + json.dumps(fields).encode()
    problem = next(problem for problem in environments.dataset("math", data).problems if "What?" in problem.prompt)
    assert problem.stratum == stratum


@pytest.mark.parametrize("name", environments.names)
def test_an_environment_without_data_has_no_dataset(name: str) -> None:
    with pytest.raises(ValueError, match="takes no data file"):
        environments.dataset(name, MANY)


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
def test_reward_of_a_program(completion: str, passes: int, compiles: bool, reward: float, programs: list[str]) -> None:
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
def test_an_invalid_task_is_refused_with_its_line(fields: dict[str, object], what: str) -> None:
    with pytest.raises(MalformedError) as error_info:
        Programming(json.dumps(fields).encode(), AcceptingSandbox())
    assert str(error_info.value) == f"line 1: {what}"


def test_setup_and_imports_go_before_the_tests() -> None:
    more = {"test_imports": ["import re"], "test_setup_code": "x = 1"}
    lines = [json.loads(line) | more for line in CODE.splitlines()]
    environment = Programming("\n".join(map(json.dumps, lines)).encode(), AcceptingSandbox())
    assert program_tests(environment.held_out_problem(0)).setup == "import re\nx = 1"
