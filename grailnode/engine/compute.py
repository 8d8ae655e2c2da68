"""The device and the dtype of a node, and the engine that uses them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch

from grailnode.engine.causal_model import CausalModel
from grailnode.engine.torch_engine import TorchEngine


@dataclass(frozen=True)
class Compute:
    """The settings with which a node computes.

    Attributes:
        model: the policy's architecture.
        device: of torch; dtype: the BF16 weights are widened to this for computing.
        max_batch_tokens: padded tokens of one batch.
    """

    model: CausalModel
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 8192


def make_engine(compute: Compute, run_sync: Callable[..., Awaitable[Any]]) -> TorchEngine:
    """Return the engine that samples completions and checks them.

    Args:
        run_sync: runs a function that computes for long, off the event loop's thread.
    """
    return TorchEngine(
        compute.model,
        device=compute.device,
        dtype=compute.dtype,
        max_batch_tokens=compute.max_batch_tokens,
        run_sync=run_sync,
    )
