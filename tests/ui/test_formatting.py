"""Numbers, strangers' words, charts, series and tallies are written for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from grailnode.ui.formatting import (
    byte_part_text,
    byte_text,
    clean,
    decimal_text,
    duration_text,
    part_text,
    percent_text,
    share_text,
)
from grailnode.ui.report_data import Change, Tally, last, mean, reasons_text, without_gaps
from grailnode.ui.terminal.sections import Sparkline
from tests.ui import runs


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (19_200, "19.2 KB"),
        (999_700, "1.0 MB"),
        (1_612_800, "1.6 MB"),
        (14 * 10**12, "14.0 TB"),
    ],
)
def test_byte_text(size: int, text: str):
    assert byte_text(size) == text


def test_part_share_percent_and_duration_text():
    assert part_text(19_200, 1_600_000) == "1/83"
    assert part_text(400, 1_600) == "1/4.0"
    assert part_text(2_000, 1_600) == "1.2 times"
    assert part_text(0, 1_600) == "-"
    assert byte_part_text(19_200, 1_600_000) == "19.2 KB = 1/83 of 1.6 MB"
    assert byte_part_text(19_200, 0) == "19.2 KB"
    assert (decimal_text(None), decimal_text(0.5), decimal_text(0.5, 3)) == ("-", "0.50", "0.500")
    assert share_text(0.9996) == "0.9996"
    assert share_text(1.0) == "1.000"
    assert percent_text(0.0001) == "<0.1%"
    assert duration_text(3_725.9) == "1:02:05"


@given(st.text(max_size=300), st.integers(2, 60))
def test_cleaned_words_are_printable_and_fit(text: str, cells: int):
    cleaned = clean(text, cells)
    assert cleaned.isprintable()
    assert cell_len(cleaned) <= cells


# Charts made of characters


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=200), st.integers(0, 80), st.integers(0, 100))
def test_sparklines_fit(values: list[float | None], width: int, planned: int):
    assert len(Sparkline(values, "", planned).draw(width)) <= width


def test_sparkline_rises_and_fills_up():
    assert Sparkline([0.0, 0.5, 1.0], "").draw(3) == "▁▅█"
    assert Sparkline([0.0, 1.0], "", planned=4).draw(8) == "▁▁██"
    assert Sparkline([0.3, 0.3], "").draw(2) == "▄▄"


# Changes, means and last values of series with gaps


VALUES = [None, 0.436, None, 0.7, 0.784, None]


def test_gaps_do_not_count():
    assert without_gaps(VALUES) == [0.436, 0.7, 0.784]
    assert mean(VALUES) == pytest.approx(0.64)
    assert last(VALUES) == 0.784
    assert (mean([None]), last([None]), Change.of([None])) == (None, None, None)


def test_gain_is_the_difference_of_the_printed_ends():
    change = Change.of(VALUES)
    assert change is not None
    assert change.text == "0.44 → 0.78  +0.34"


# Judged groups are added up


def test_tally_adds_up_miners():
    tally = Tally.of(runs.network(windows=12).miners)
    assert (tally.accepted, tally.rejected, tally.judged) == (96, 24, 120)
    assert tally.reasons == {"sampling": 12, "duplicate": 12}
    assert Tally.of([]) == Tally(0, {})


def test_frequent_reasons_come_first():
    assert reasons_text({"b": 1, "a": 1, "c": 5, "none": 0}) == "c 5, a 1, b 1"
    assert reasons_text({"sampling": 9, "sketch": 4, "late": 1}, most=1) == "sampling 9, +2"
