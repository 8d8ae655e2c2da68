"""SparseLoCo's quantizer with other than 2 bits a value, which the format does not have."""

from collections.abc import Mapping

import torch
from torch import Tensor

from protocol import pseudogradient
from protocol.pseudogradient import Contribution


def requantized(
    base: Mapping[str, Tensor], contribution: Contribution, digest: bytes, bits: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a contribution would have sent, and what would remain, had its values so many bits.

    Args:
        base: the weights that it starts from.
        contribution: the contribution with 2 bits a value; its entries are kept.
        bits: 32 for values as they are.
    """
    values: dict[str, Tensor] = {}
    for part, floats in pseudogradient.decode(contribution.payload, base, digest):
        values |= part.scatter(floats)
    residual = {}
    for name, sent in values.items():
        update = sent + contribution.residual[name]
        chosen = sent != 0
        quantized = _levels(update, chosen, bits) if bits < 32 and chosen.sum() > 1 else update
        values[name] = torch.where(chosen, quantized, 0.0).contiguous()
        residual[name] = (update - values[name]).contiguous()
    return values, residual


def _levels(update: Tensor, chosen: Tensor, bits: int) -> Tensor:
    """Return each value as the mean of its level (docs/spec/pseudogradient.md, section 6, with 2^bits levels).

    With 1 bit the formula would put most negative values into the upper level; there, the mean divides the levels.
    """
    values, count = update[chosen], 1 << bits
    level = torch.round(count * (update - values.mean()) / (6 * values.std() + 1e-30)) + count // 2
    if bits == 1:
        level = (update > values.mean()).to(update.dtype)
    level = level.clamp(0, count - 1).to(torch.int64)
    sums = torch.zeros(count).scatter_add_(0, level[chosen], values)
    numbers = torch.zeros(count).scatter_add_(0, level[chosen], torch.ones_like(values))
    return (sums / numbers.clamp(min=1))[level]
