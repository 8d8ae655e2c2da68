"""The simulation of learning, by which the demo's settings were chosen, runs and learns."""

from tests.support.simulation.learning import Setup, run


def test_two_windows() -> None:
    setup = Setup(windows=2, groups=4, group_size=4, groups_per_step=1, held_out=16, lag=1, learning_rate=1e-5)
    summary = run(setup, print)
    assert summary["versions"] > 0
    assert 0.0 <= summary["last"] <= 1.0
    assert 0.5 < summary["sparsity_mean"] <= 1.0
    assert summary["outcomes"]["stored"] > 0
