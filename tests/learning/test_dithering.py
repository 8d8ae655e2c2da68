"""Masters that begin anywhere within what is rounded to their BF16 weights."""

import torch

from protocol.outer.dithering import dither


def _every_bf16_number() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_every_bf16_number_stays_the_rounding_of_its_master() -> None:
    weights = _every_bf16_number()
    masters = dither("weight", weights.to(torch.float32))
    numbers = ~weights.isnan()
    assert torch.equal(masters.to(torch.bfloat16)[numbers].view(torch.int16), weights[numbers].view(torch.int16))
    assert masters[~numbers].isnan().all()


def test_masters_are_spread_evenly_over_what_is_rounded_to_their_weight() -> None:
    """1 is the rounding of 1 - 2**-9 to 1 + 2**-8: below a power of two the numbers are twice as close."""
    masters = dither("weight", torch.ones(1 << 16))
    above = (masters - 1)[masters > 1] * 2**8
    below = (1 - masters)[masters < 1] * 2**9
    for part in (above, below):
        assert 0.49 < part.numel() / masters.numel() < 0.51
        assert part.max() < 1
        assert abs(float(part.mean()) - 0.5) < 0.01


def test_what_is_no_bf16_number_stays_and_so_do_zeros_and_infinities() -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 1.0 + 2.0**-20, 0.1])
    before = values.clone()
    assert torch.equal(dither("weight", values).view(torch.int32), before.view(torch.int32))


def test_the_moves_are_a_function_of_the_name_and_the_sizes_of_blocks_do_not_show() -> None:
    size = (1 << 20) + 5
    one, again, other = (dither(name, torch.ones(size)) for name in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert (one != other).float().mean() > 0.99
    assert torch.equal(dither("a", torch.ones(5, size // 5)).view(-1)[: 1 << 20], one[: 1 << 20])


def test_small_steps_show_in_the_rounding_by_as_much_as_in_the_masters() -> None:
    """A step of 1% of a unit in the last place moves no master out of the middle, and 1% of those that are spread."""
    step = 2.0**-7 / 100
    middle, spread = torch.full((1 << 18,), 1.5), dither("weight", torch.full((1 << 18,), 1.5))
    assert torch.equal((middle + step).to(torch.bfloat16), middle.to(torch.bfloat16))
    moved = (spread + step).to(torch.bfloat16).to(torch.float32).mean() - 1.5
    assert abs(float(moved) / step - 1) < 0.1
