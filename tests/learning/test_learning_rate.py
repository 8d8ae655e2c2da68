"""The learning rate of each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.trainer.learn.learning_rate import RateSchedule, ScheduleName


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
)
def test_by_hand(name: ScheduleName, shares: list[float]) -> None:
    """Two steps of warm-up, then four steps down."""
    schedule = RateSchedule(name, warmup_steps=2, training_steps=6)
    assert [schedule.share(step + 1) for step in range(len(shares))] == pytest.approx(shares, abs=1e-6)


@given(st.sampled_from(["cosine", "linear"]), st.integers(0, 50), st.integers(1, 200), st.floats(0, 1))
def test_it_rises_to_the_peak_and_falls_to_its_final_share(
    name: ScheduleName, warmup: int, decay_steps: int, final_share: float
) -> None:
    schedule = RateSchedule(name, warmup, warmup + decay_steps, final_share)
    shares = [schedule.share(step) for step in range(1, warmup + decay_steps + 10)]
    assert shares[:warmup] == sorted(shares[:warmup])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)
    assert shares[-1] == pytest.approx(final_share)
    assert max(shares) <= 1.0
