"""Changes, means and last values of series with gaps."""

import pytest

from grailnode.ui.series import Change, last, mean, without_gaps

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
