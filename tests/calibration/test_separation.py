"""What thresholds do to copies, and when they are refused themselves."""

import pytest
import torch

from grailnode.calibration.copies import quantized
from grailnode.calibration.separation import REQUIRED_BITS, TooWideError, check, power
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from tests.calibration.synthetic import COPY, groups

DEMANDS = ThresholdDemands()


def test_a_copy_that_stands_out_is_refused_everywhere() -> None:
    honest = {"pair": groups(100, miss=0.01)}
    spec = choose_thresholds(honest, [COPY], "projection", DEMANDS)
    found = power(REQUIRED_BITS, "pair", COPY, spec, 16)
    assert (found.rollouts, found.groups, found.windows) == (1.0, 1.0, 1.0)
    assert found.tokens == sum(sum(group.lengths) for group in COPY)
    check([found], honest, spec, 16)


def test_honest_work_is_not() -> None:
    spec = choose_thresholds({"pair": groups(100, miss=0.01)}, [COPY], "projection", DEMANDS)
    found = power(16, "pair", groups(100, miss=0.01, seed=7), spec, 16)
    assert (found.rollouts, found.groups, found.windows) == (0.0, 0.0, 0.0)


def test_a_window_shows_what_no_group_does() -> None:
    spec = choose_thresholds({"pair": groups(400, miss=1e-3)}, [COPY], "projection", DEMANDS)
    faint = groups(100, miss=0.05, seed=8)
    found = power(8, "pair", faint, spec, 64)
    assert found.groups < 0.1
    assert found.windows > 0.9


def test_a_distribution_that_hides_the_copy_is_refused_in_one_line() -> None:
    honest = {"quiet": groups(60), "noisy": groups(60, miss=0.8, distance=20, tip=0.01, seed=3)}
    copy = groups(60, miss=0.82, distance=20, tip=0.01, seed=4)
    spec = choose_thresholds(honest, [copy], "projection", DEMANDS)
    weak = power(REQUIRED_BITS, "quiet", copy, spec, 16)
    with pytest.raises(TooWideError) as caught:
        check([weak, power(REQUIRED_BITS, "noisy", COPY, spec, 16)], honest, spec, 16)
    line = str(caught.value)
    assert "\n" not in line
    for part in ("too wide", "4-bit copy's windows of 16 groups (pair quiet)", "noisy in sketches", "noisy in margins"):
        assert part in line


def test_only_the_due_bits_are_insisted_on() -> None:
    honest = {"pair": groups(100)}
    spec = choose_thresholds(honest, [COPY], "projection", DEMANDS)
    check([power(8, "pair", groups(50), spec, 4), power(REQUIRED_BITS, "pair", COPY, spec, 4)], honest, spec, 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_copy_has_so_many_steps_in_each_group(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 80, generator=generator)  # two whole groups of 32 and a part
    tensors = {"layer.weight": weight, "norm.weight": weight[0], "model.embed_tokens.weight": weight}
    copy = quantized(tensors, bits)
    assert copy["norm.weight"] is tensors["norm.weight"]
    assert copy["model.embed_tokens.weight"] is weight
    for begin in (0, 32, 64):
        part, rounded = weight[:, begin : begin + 32], copy["layer.weight"][:, begin : begin + 32]
        assert all(len(row.unique()) <= 2**bits for row in rounded)
        span = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        assert ((part - rounded).abs() <= span / (2**bits - 1) / 2 * 1.001).all()


def test_a_copy_keeps_what_has_no_range() -> None:
    flat = {"w": torch.full((2, 32), 0.5, dtype=torch.bfloat16)}
    assert torch.equal(quantized(flat, 4)["w"], flat["w"])
