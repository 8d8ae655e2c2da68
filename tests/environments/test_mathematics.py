"""Mathematics: the equivalence of answers, and rewards."""

import importlib
import json

import math_verify
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.environments.answers import equivalent, last_boxed
from protocol.environments.base import Problem
from protocol.environments.expressions import MAX_DIGITS
from protocol.environments.mathematics import Mathematics
from protocol.errors import MalformedError
from tests.support.builders.tasks import MATH

ENVIRONMENT = Mathematics(MATH)
PROBLEM = Problem("?", r"\frac{3}{4}")

SAME = [
    (r"\frac{3}{4}", r"\dfrac34"),
    (r"\frac{3}{4}", "0.75"),
    (r"\frac{3}{4}", "3/4"),
    (r"\frac{3}{4}", r"$\frac{6}{8}$"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("1,227", "1227"),
    ("1227", "1{,}227"),
    ("1000000", "1,000,000"),
    ("50", r"50\%"),
    ("18", r"\$18"),
    ("18", "18 dollars"),
    ("18.00", "18"),
    ("90", r"90^\circ"),
    (r"12\text{ cm}^2", "12"),
    (r"12\pi\text{ cm}", r"12\pi"),
    (r"7\text{ m}", "7"),
    (r"\text{Wednesday}", "wednesday"),
    (r"\text{(B)}", "B"),
    ("5", "x = 5"),
    ("5", r"\boxed{5}"),
    ("5", r"\(5\)"),
    ("5", "5."),
    (r"5\sqrt{2}", r"\sqrt{50}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"3\frac{1}{2}", "3.5"),
    ("a^2-2a-15", "(a+3)(a-5)"),
    ("2x+1", "1 + 2x"),
    (r"2^{10}", "1024"),
    (r"1.5\times10^{3}", "1500"),
    ("(3,0)", r"\left( 3, 0 \right)"),
    ("[-2,2]", r"x \in [-2, 2]"),
    ("-2, 7", "7,-2"),
    (r"\{1,2\}", r"\left\{2, 1\right\}"),
    ("(1/2,0.25)", r"(0.5,\frac14)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]

OTHER = [
    ("5", "-5"),
    ("5", "55"),
    ("5", ""),
    ("0.5", r"50\%"),
    ("0.333", r"\frac{1}{3}"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "1,2"),
    ("[-2,2)", "[-2,2]"),
    ("1,2", "1,2,2"),
    ("1,2,2", "1,1,2"),
    ("x", "X"),
    ("3m", "3"),
    ("1,234", "1,23,4"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\frac{1}{0}", "0"),
    ("1", "1=1"),
    ("5", "5 or 6"),
    ("5", "٥"),
    ("9", "9^{9^{9}}"),
    ("1", r"\sqrt{" * 200 + "1" + "}" * 200),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equivalent_answers(gold: str, answer: str) -> None:
    assert equivalent(gold, answer)
    assert equivalent(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), OTHER)
def test_different_answers(gold: str, answer: str) -> None:
    assert not equivalent(gold, answer)
    assert not equivalent(answer, gold)


def is_read_otherwise(gold: str, answer: str) -> bool:
    """Return whether math-verify reads one of two answers in another way, so that it cannot confirm that they agree."""
    return (
        gold in ("50", "1227", r"\text{(B)}", r"\text{Wednesday}", r"\{1,2\}", "-2, 7")
        or "pmatrix" in gold
        or answer in ("5.", "18 dollars")
    )


@pytest.mark.parametrize(("gold", "answer"), [pair for pair in SAME if not is_read_otherwise(*pair)])
def test_a_computer_algebra_system_agrees(gold: str, answer: str) -> None:
    first, second = (math_verify.parse(f"\\boxed{{{text.strip('$')}}}") for text in (gold, answer))
    assert math_verify.verify(first, second)


@given(st.text(r"0123456789+-*/^(){}[],.\ xπ") | st.text(), st.text(r"0123456789+-*/^(){}[],.\ xπ"))
def test_equivalence_is_reflexive_and_symmetric(first: str, second: str) -> None:
    assert equivalent(first, first)
    assert equivalent(first, second) == equivalent(second, first)


@given(st.fractions(), st.integers(1, 50))
def test_a_fraction_equals_its_expanded_form(value: object, factor: int) -> None:
    from fractions import Fraction

    assert isinstance(value, Fraction)
    top, bottom = value.numerator * factor, value.denominator * factor
    if max(len(str(abs(top) + 1)), len(str(bottom))) <= MAX_DIGITS:  # longer numbers have no value
        assert equivalent(f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"{top}/{bottom}")
        assert not equivalent(f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"{top + 1}/{bottom}")


@pytest.mark.parametrize(
    "costly",
    [
        "(a+b+c+d+e+f)^{32}" * 20,
        "(x+1)^{15}" * 40,
        "((((9^{32})^{32})^{32})^{32})",
        r"\sqrt{99999989}" * 30,
        r"\frac{1}{" * 60 + "3" + "}" * 60,
        "-" * 500,
        "1" * 511,
        "{" * 511,
        "1," * 255,
        r"\text{" * 80,
    ],
)
def test_costly_answers_have_no_value(costly: str) -> None:
    """Unbounded work on one of these would exceed the suite's time limit."""
    assert not equivalent("7", costly)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{5", None),
        ("5", None),
        (r"\boxed 5", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>easy</think><solution>3/4</solution>", 1.0),
        ("<think>easy</think>\n<solution> $0.75$ </solution>\n", 1.0),
        (r"<think>easy</think><solution>\boxed{\frac34}</solution>", 1.0),
        ("<think>easy</think><solution>4/3</solution>", 0.3),
        ("<solution>3/4</solution>", 0.9),
        ("<think> </think><solution>3/4</solution>", 0.9),
        ("<solution>3/4</solution><think>late</think>", 0.7 + 0.15 + 0.05 * (1 - 19 / 200)),
        ("<solution>3/4</solution>" + "x" * 50, 0.7 + 0.05 * 0.75),
        ("<solution>3/4</solution>" + "x" * 500, 0.7),
        ("<solution>1</solution><solution>3/4</solution>", 0.75),  # guesses: the last one counts, the form does not
        ("<solution>3/4</solution><solution>1</solution>", 0.05),
        (r"so it is \boxed{\frac{3}{4}}", 0.7),
        ("<think>3/4</think>", 0.1),
        ("<solution></solution>", 0.05),
        ("<solution>3/4", 0.0),
        ("3/4", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion: str, reward: float) -> None:
    assert ENVIRONMENT.reward(PROBLEM, completion) == pytest.approx(reward, abs=1e-12)


def test_the_solutions_of_the_data_file_earn_the_full_reward() -> None:
    for line in MATH.decode().splitlines():
        fields = json.loads(line)
        gold = last_boxed(fields["solution"]) if "solution" in fields else fields["answer"].rpartition("####")[2]
        problem = next(
            problem
            for problem in ENVIRONMENT.problems
            if problem.prompt.startswith(fields.get("problem") or fields["question"])
        )
        assert ENVIRONMENT.reward(problem, f"<think>x</think><solution>{gold}</solution>") == 1.0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"[]", "line 2: no JSON object"),
        (b"{", "line 2: not JSON in UTF-8"),
        (b"\xff", "line 2: not JSON in UTF-8"),
        (b"[" * 100_000, "line 2: JSON nested deeper than 32"),
        (b"{}", "line 2: no 'question'"),
        (b'{"question": 1}', "line 2: 'question' is no text"),
        (b'{"question": "a", "answer": "5"}', "line 2: no '####' in 'answer'"),
        (b'{"problem": "a", "solution": "5"}', "line 2: no final answer"),
        (b'{"problem": "\\ud800", "answer": "5"}', "line 2: 'problem' holds a lone surrogate"),
        (b'{"problem": "' + b"a" * 300_000 + b'"}', "line 2: 300015 bytes, more than 262144"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(line: bytes, what: str) -> None:
    with pytest.raises(MalformedError) as error_info:
        Mathematics(MATH.splitlines()[0] + b"\n" + line)
    assert str(error_info.value) == what


def test_both_sets_need_a_problem() -> None:
    with pytest.raises(MalformedError, match="no held-out problem among 1"):
        Mathematics(MATH.splitlines()[0])
    with pytest.raises(MalformedError, match="no training problem among 0"):
        Mathematics(b"")


@given(st.binary())
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Mathematics(data)


def test_another_spelling_of_a_problem_stays_on_its_side() -> None:
    lines = [json.loads(line) for line in MATH.splitlines()]
    spaced = [
        line | {name: line[name].replace(" ", "  ").upper() for name in ("problem", "question") if name in line}
        for line in lines
    ]
    both = Mathematics(b"\n".join(json.dumps(line).encode() for line in lines + spaced))
    assert both.problems == ENVIRONMENT.problems


def test_rewards_use_no_computer_algebra_library() -> None:
    """The installed libraries must not change rewards (docs/adr/0301)."""
    for name in ("answers", "expressions", "polynomials", "mathematics"):
        module = importlib.import_module(f"protocol.environments.{name}")
        assert not {"sympy", "math_verify", "latex2sympy2_extended"} & set(vars(module))
