"""Which copies thresholds refuse, and which thresholds are refused."""

import pytest

from grailnode.calibration.separation import REQUIRED_BITS, TooWideError, check, power
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from tests.calibration.synthetic import COPY, groups
from tests.support.builders.proofs import FLOAT32

DEMANDS = ThresholdDemands()


def test_a_copy_that_differs_clearly_is_always_refused() -> None:
    honest = {"pair": groups(100, miss=0.01)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEMANDS)
    result = power(REQUIRED_BITS, "pair", COPY, spec, 16)
    assert (result.rollouts, result.groups, result.windows) == (1.0, 1.0, 1.0)
    assert result.tokens == sum(sum(group.lengths) for group in COPY)
    check([result], honest, spec, 16)


def test_honest_work_is_never_refused() -> None:
    spec = choose_thresholds({"pair": groups(100, miss=0.01)}, [COPY], FLOAT32, DEMANDS)
    result = power(16, "pair", groups(100, miss=0.01, seed=7), spec, 16)
    assert (result.rollouts, result.groups, result.windows) == (0.0, 0.0, 0.0)


def test_a_window_refuses_a_copy_that_no_group_refuses() -> None:
    spec = choose_thresholds({"pair": groups(400, miss=1e-3)}, [COPY], FLOAT32, DEMANDS)
    faint = groups(100, miss=0.05, seed=8)
    result = power(8, "pair", faint, spec, 64)
    assert result.groups < 0.1
    assert result.windows > 0.9


def test_a_distribution_that_hides_the_copy_is_refused_in_one_line() -> None:
    honest = {"quiet": groups(60), "noisy": groups(60, miss=0.8, distance=20, tip=0.01, seed=3)}
    copy = groups(60, miss=0.82, distance=20, tip=0.01, seed=4)
    spec = choose_thresholds(honest, [copy], FLOAT32, DEMANDS)
    weak = power(REQUIRED_BITS, "quiet", copy, spec, 16)
    with pytest.raises(TooWideError) as error_info:
        check([weak, power(REQUIRED_BITS, "noisy", COPY, spec, 16)], honest, spec, 16)
    line = str(error_info.value)
    assert "\n" not in line
    for part in ("too wide", "4-bit copy's windows of 16 groups (pair quiet)", "noisy in sketches", "noisy in margins"):
        assert part in line


def test_only_copies_of_the_required_bits_have_to_be_refused() -> None:
    honest = {"pair": groups(100)}
    spec = choose_thresholds(honest, [COPY], FLOAT32, DEMANDS)
    check([power(8, "pair", groups(50), spec, 4), power(REQUIRED_BITS, "pair", COPY, spec, 4)], honest, spec, 4)
