"""Logits are float32 sums of exact products, in whatever dtype states and weights are."""

import pytest
import torch
from torch.nn import functional

from grailnode.engine.output_projection import project

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype: torch.dtype, vocabulary: int = 3000, width: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [2, 3, D] and weights [V, D], whose largest logits are near 28."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, 3, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.3).to(dtype)
    return hidden, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_not_rounded_to_the_dtype(dtype: torch.dtype, with_bias: bool) -> None:
    hidden, weight = tensors(dtype)
    bias = weight[:, 0].contiguous() if with_bias else None
    exact = functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    logits = project(hidden, weight, bias)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 3, 3000)
    assert exact.abs().max() > 20.0
    assert (logits.double() - exact).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_a_plain_product(dtype: torch.dtype) -> None:
    parts = [tensor.requires_grad_() for tensor in tensors(dtype)]
    copies = [tensor.detach().clone().requires_grad_() for tensor in parts]
    project(*parts).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    functional.linear(*copies).to(torch.float32).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    for part, copy in zip(parts, copies, strict=True):
        assert part.grad is not None and copy.grad is not None
        assert part.grad.dtype == dtype
        distance = (part.grad.double() - copy.grad.double()).norm() / copy.grad.double().norm()
        assert distance < {torch.float32: 1e-6, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
