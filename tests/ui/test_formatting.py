"""Numbers and strangers' words are written for people."""

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
