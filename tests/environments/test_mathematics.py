"""Mathematics: the equivalence of answers, and rewards."""

import importlib
import json
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

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

_SIGNS = r"0123456789+-*/^(){}[],.\ xyπ=<%$cmand"


@given(st.text(_SIGNS) | st.text(), st.text(_SIGNS))
def test_equivalence_is_reflexive_and_symmetric(first: str, second: str) -> None:
    assert equivalent(first, first)
    assert equivalent(first, second) == equivalent(second, first)


@given(st.fractions(), st.integers(1, 50))
def test_a_fraction_equals_its_expanded_form(value: Fraction, factor: int) -> None:
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
        "(x+1)^{15}," * 40,
        r"\sqrt{99999989}," * 30,
        ",".join(f"{number}/7" for number in range(100, 200)),
        "x=1 or " * 70,
        "1±" * 250,
        "3 cm " * 100,
        "(a+b)^{9}(a-b)^{9}," * 20,
    ],
)
def test_costly_answers_have_no_value(costly: str) -> None:
    """Unbounded work on one of these would exceed the suite's time limit."""
    assert not equivalent("7", costly)


def test_the_work_on_one_answer_is_limited_whatever_it_lists() -> None:
    item = "(x+1)^{15}"
    few, many = ",".join([item] * 2), ",".join([item] * 40)
    assert equivalent(few, few.replace("x+1", "1+x"))
    assert not equivalent(many, many.replace("x+1", "1+x"))  # the last ones have no value any more
    assert equivalent(many, many.replace(",", ", "))


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


@given(st.binary())
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Mathematics(data)


def test_another_spelling_of_a_problem_stays_on_its_side() -> None:
    lines = [json.loads(line) for line in MATH.splitlines()]
    names = ("problem", "question")
    spaced = [line | {name: line[name].replace(" ", "  ").upper() for name in names if name in line} for line in lines]
    both = Mathematics(b"\n".join(json.dumps(line).encode() for line in lines + spaced))
    assert both.problems == ENVIRONMENT.problems


def test_rewards_use_no_computer_algebra_library() -> None:
    """The installed libraries must not change rewards (docs/adr/0301)."""
    for name in ("answers", "expressions", "polynomials", "mathematics"):
        module = importlib.import_module(f"protocol.environments.{name}")
        assert not {"sympy", "math_verify", "latex2sympy2_extended"} & set(vars(module))


# The table of answers (answer_table.txt): every verdict that is due, both ways round


TABLE: Final = Path(__file__).with_name("answer_table.txt")
_ROW: Final = re.compile(r"^    ([=!])(~?) (.*)$")


@dataclass(frozen=True)
class Row:
    """One pair of answers.

    Attributes:
        section: the rule that decides, and why math-verify may differ.
        same: the verdict that is due.
        library_agrees: whether math-verify says so too.
    """

    section: str
    gold: str
    answer: str
    same: bool
    library_agrees: bool


def rows(text: str) -> list[Row]:
    result, section, gold = [], "", ""
    for line in text.splitlines():
        match = _ROW.match(line)
        if match:
            result.append(Row(section, gold, match[3], match[1] == "=", not match[2]))
        elif line.startswith("## "):
            section = line[3:]
        elif line and not line.startswith("#"):
            gold = line
    return result


def library_verdict(gold: str, answer: str) -> bool:
    """Return what math-verify says, without a limit of time."""
    import math_verify

    first, second = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return bool(math_verify.verify(first, second, timeout_seconds=None))


ROWS = rows(TABLE.read_text())


def test_the_table_has_at_least_400_answers_and_no_pair_twice() -> None:
    pairs = [(row.gold, row.answer) for row in ROWS]
    assert len(pairs) >= 400
    assert sorted(set(pairs)) == sorted(pairs)


@pytest.mark.parametrize("section", sorted({row.section for row in ROWS}), ids=lambda text: text.partition(":")[0])
def test_every_answer_gets_the_verdict_that_is_due(section: str) -> None:
    for row in (row for row in ROWS if row.section == section):
        assert equivalent(row.gold, row.answer) == equivalent(row.answer, row.gold) == row.same, row


def test_where_math_verify_differs_the_section_says_why() -> None:
    assert {"hours", "km"} <= {row.answer.split()[-1] for row in ROWS if not row.library_agrees and not row.same}
    assert all(": " in row.section for row in ROWS if not row.library_agrees)


# The verdicts on hostile answers depend on how far math-verify comes before its alarm.
@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in ROWS if not row.section.startswith("hostile")], ids=lambda row: f"{row.gold} | {row.answer}"
)
def test_the_table_has_what_math_verify_says(row: Row) -> None:
    assert (library_verdict(row.gold, row.answer) == row.same) == row.library_agrees
