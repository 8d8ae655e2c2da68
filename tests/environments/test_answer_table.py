"""The table of answers (answer_table.txt): every verdict that is due, both ways round."""

import pytest

from protocol.environments.answers import equivalent
from tests.environments.answer_table import TABLE, Row, library_verdict, rows

ROWS = rows(TABLE.read_text())


def test_the_table_has_at_least_400_answers_and_no_pair_twice() -> None:
    pairs = [(row.gold, row.answer) for row in ROWS]
    assert len(pairs) >= 400
    assert sorted(set(pairs)) == sorted(pairs)


@pytest.mark.parametrize("section", sorted({row.section for row in ROWS}), ids=lambda text: text.partition(":")[0])
def test_every_answer_gets_the_verdict_that_is_due(section: str) -> None:
    false = [
        (row.gold, row.answer)
        for row in ROWS
        if row.section == section
        and not (equivalent(row.gold, row.answer) == equivalent(row.answer, row.gold) == row.same)
    ]
    assert not false


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
