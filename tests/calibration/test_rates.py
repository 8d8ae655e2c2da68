"""Confidence bounds on rates, compared with exact sums of binomial terms."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grailnode.calibration.rates import rate_bounds


@given(st.integers(1, 60), st.floats(0.8, 0.9999), st.data())
def test_so_few_events_are_no_likelier_at_the_bound_than_the_confidence_leaves(
    trials: int, confidence: float, data: st.DataObject
) -> None:
    events = data.draw(st.integers(0, trials))
    bound = float(rate_bounds(np.array([events]), trials, confidence)[0])
    assert events / trials <= bound <= 1
    probability = sum(comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(events + 1))
    assert bound == 1 or probability <= (1 - confidence) * (1 + 1e-9)


def test_the_bounds_of_rare_events_are_close() -> None:
    rule_of_three, hundred = rate_bounds(np.array([0, 100]), 1_000_000, 0.95)
    assert rule_of_three == pytest.approx(3e-6, rel=0.01)
    assert hundred == pytest.approx(118e-6, rel=0.01)


@pytest.mark.parametrize(("trials", "confidence"), [(0, 0.9), (3, 0.0), (3, 1.0)])
def test_invalid_arguments_are_refused(trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="a bound needs"):
        rate_bounds(np.array([0]), trials, confidence)
