"""Judged groups are added up, and their reasons are written into as many cells as there are."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from grailnode.ui.tallies import Tally, reasons_text
from tests.ui import runs


def test_tally_adds_up_miners():
    tally = Tally.of(runs.network(windows=12).miners)
    assert (tally.accepted, tally.rejected, tally.judged) == (96, 24, 120)
    assert tally.reasons == {"sampling": 12, "duplicate": 12}
    assert Tally.of([]) == Tally(0, {})


@given(st.dictionaries(st.text(max_size=12), st.integers(0, 999), max_size=6), st.integers(1, 60))
def test_reasons_fit_into_their_cells(reasons: dict[str, int], cells: int):
    assert cell_len(reasons_text(reasons, cells)) <= max(cells, 4)


def test_frequent_reasons_come_first():
    assert reasons_text({"b": 1, "a": 1, "c": 5, "none": 0}, 40) == "c 5, a 1, b 1"
    assert reasons_text({"sampling": 9, "sketch": 4, "late": 1}, 16) == "sampling 9, +2"
