"""Charts and bars made of characters."""

from hypothesis import given
from hypothesis import strategies as st

from grailnode.ui.terminal.glyphs import bar, columns

finite = st.floats(-1e6, 1e6)


@given(st.lists(st.none() | finite, max_size=200), st.integers(0, 80), st.integers(1, 5), st.integers(0, 100))
def test_charts_have_the_requested_size(values: list[float | None], width: int, height: int, planned: int):
    lines = columns(values, width, height, planned)
    assert [len(line) for line in lines] == [width] * height


def test_sparkline_rises_and_fills_up():
    assert columns([0.0, 0.5, 1.0], 3) == ["▁▅█"]
    assert columns([0.0, 1.0], 8, planned=4) == ["▁▁██    "]
    assert columns([0.3, 0.3], 2) == ["▄▄"]


def test_any_share_above_zero_is_visible_in_a_bar():
    assert bar(0.0, 4) == "    "
    assert bar(0.001, 4) == "▏   "
    assert bar(1.0, 4) == "████"
