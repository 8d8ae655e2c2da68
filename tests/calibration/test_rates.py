"""Binomial tails and confidence bounds, compared with exact rational arithmetic."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grailnode.calibration.rates import binomial_tail, rate_bound


def exact_tail(events: int, trials: int, rate: Fraction) -> Fraction:
    return sum(
        (comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(events, trials + 1)), start=Fraction(0)
    )


@given(st.data())
def test_the_tail_is_the_sum_of_its_terms(data: st.DataObject):
    trials = data.draw(st.integers(0, 60))
    events = data.draw(st.integers(0, trials))
    rate = Fraction(data.draw(st.integers(0, 1000)), 1000)
    assert binomial_tail(events, trials, float(rate)) == pytest.approx(
        float(exact_tail(events, trials, rate)), rel=1e-9
    )


def test_far_tails_are_accurate():
    assert binomial_tail(4, 4, 1e-3) == pytest.approx(1e-12, rel=1e-12)
    assert binomial_tail(1, 1_000_000, 1e-9) == pytest.approx(0.0009995001666, rel=1e-9)
    assert binomial_tail(50_000, 50_000, 0.5) == 0.0  # below the smallest float


@given(st.integers(1, 5000), st.floats(0.5, 0.9999), st.data())
def test_so_few_events_have_the_complementary_probability_at_the_bound(
    trials: int, confidence: float, data: st.DataObject
):
    events = data.draw(st.integers(0, trials - 1))
    bound = rate_bound(events, trials, confidence)
    assert events / trials <= bound <= 1
    assert 1 - binomial_tail(events + 1, trials, bound) == pytest.approx(1 - confidence, rel=1e-3, abs=1e-9)


def test_rule_of_three():
    assert rate_bound(0, 1_000_000, 0.95) == pytest.approx(3e-6, rel=0.01)


@pytest.mark.parametrize(("events", "trials", "rate"), [(-1, 3, 0.5), (4, 3, 0.5), (1, 3, 1.5), (1, 3, -0.1)])
def test_invalid_arguments_are_refused(events: int, trials: int, rate: float):
    with pytest.raises(ValueError, match="no probability"):
        binomial_tail(events, trials, rate)
