"""Axes contain their values and have round tick marks."""

from hypothesis import given
from hypothesis import strategies as st

from grailnode.ui.report.axes import byte_axis, count_axis, share_axis

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, max_size=20))
def test_share_axis_contains_its_values(values: list[float]):
    axis = share_axis(values, 0, 100)
    assert axis.low < axis.high
    slack = 1e-5 * (axis.high - axis.low)  # values this little beyond an end are drawn at the end
    assert all(axis.low - slack <= value <= axis.high + slack for value in values)
    assert 2 <= len(axis.ticks) <= 12


@given(st.lists(st.integers(0, 10**15), max_size=20))
def test_byte_axis_contains_its_values(values: list[int]):
    axis = byte_axis(values, 0, 100)
    assert all(axis.low <= value <= axis.high for value in values if value)
    assert axis.ticks
    assert all(0 <= axis.at(value) <= 100 for value, _ in axis.ticks)


@given(st.lists(st.integers(0, 10**9), max_size=20))
def test_count_axis_is_marked_at_whole_numbers(values: list[int]):
    axis = count_axis(values, 0, 100)
    assert axis.ticks
    assert all(value == int(value) for value, _ in axis.ticks)
