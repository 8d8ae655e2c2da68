"""Quantized copies of weights."""

import pytest
import torch

from grailnode.calibration.copies import quantized


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_group_of_a_copy_has_at_most_2_to_the_bits_values(bits: int) -> None:
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


def test_constant_weights_are_not_changed() -> None:
    flat = {"w": torch.full((2, 32), 0.5, dtype=torch.bfloat16)}
    assert torch.equal(quantized(flat, 4)["w"], flat["w"])
