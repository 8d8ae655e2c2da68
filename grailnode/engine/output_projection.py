"""The output projection with float32 logits, whatever the dtype of the states and the weights.

A product in BF16 is rounded to 8 bits: at a logit of 28 to a multiple of 0.125. Two honest nodes whose states differ in
the last bit would differ by that much in the score of a token, and a cheat could hide in it. The states and the weights
are exact in float32, so that only the order of the sum is left (docs/adr/0630-logits-in-float32.md).
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from grailnode.engine.int8_copy import Int8Matrix
from roles.policy.layer_weights import TableWeights

_CHUNK_ELEMENTS: Final = 1 << 20
"""Weights that are converted to float32 at a time: 4 MiB, which stay in the processor's cache for the product."""


def project_by(weights: Mapping[str, Tensor], name: str, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits as `project`, with a weight by its name."""
    if isinstance(weights, TableWeights):
        logits = weights.product(name, hidden)
        return logits if bias is None else logits + bias
    return project(hidden, weights[name], bias)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits: float32 [..., V] from states [..., D], weight [V, D] and bias [V], all of one dtype and device.

    Gradients flow to the states and to the weights, in their dtype.
    """
    # Weights in float32 need no wider product, and 8-bit copies compute a float32 one.
    if isinstance(weight, Int8Matrix) or weight.dtype == torch.float32:
        return functional.linear(hidden.to(torch.float32), weight, bias)
    logits: Tensor = _Float32Product.apply(hidden.reshape(-1, hidden.shape[-1]), weight)  # type: ignore[no-untyped-call]
    logits = logits.view(*hidden.shape[:-1], len(weight))
    return logits if bias is None else logits + bias.to(torch.float32)


class _Float32Product(torch.autograd.Function):
    """`hidden @ weight.T`: float32 [N, V] from [N, D] and [V, D]. No float32 copy of the weight is ever kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        # The GPU's kernel takes BF16 factors and adds in float32.
        if weight.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        # A CPU has no such product, so a piece of the weight at a time is widened.
        logits = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
        wide, rows = hidden.to(torch.float32), max(1, _CHUNK_ELEMENTS // weight.shape[1])
        for begin in range(0, len(weight), rows):
            part = weight[begin : begin + rows].to(torch.float32)
            logits[:, begin : begin + rows] = wide @ part.t()
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of the states and of the weight if it is trained, with products in their dtype."""
        hidden, weight = ctx.saved_tensors
        # The gradient is rounded to the dtype of the weights, as that of any other linear layer.
        gradient = gradients[0].to(weight.dtype)
        return gradient @ weight, gradient.t() @ hidden if ctx.needs_input_grad[1] else None
