"""Refuses a server of vLLM that does not fit, before it gets a weight."""

from typing import Any, Final

import torch

from protocol.rollout import sampling
from roles.ports import EngineError

SUPPORTED: Final = ((0, 29), (0, 33))
"""The versions of vLLM that fit: from the first, and below the second."""

INVARIANT_CAPABILITY: Final = (8, 0)
"""The least compute capability of a GPU that vLLM's batch-invariant mode is for. On a CPU a server starts with it, and
fails at the first request."""


def check_description(description: dict[str, Any], dtype: torch.dtype) -> None:
    """Check what a worker of a server says of itself.

    Raises:
        EngineError: its version, dtype, quantization, logits processor, or the bits of its noise do not fit.
    """
    numbers = str(description["vllm"]).split(".")
    version = tuple(int(number) if number.isdigit() else 0 for number in numbers[:2])
    low, high = SUPPORTED
    expected = str(dtype).removeprefix("torch.")
    logits = torch.arange(4096, dtype=torch.float32).remainder(7.0).expand(4, -1)
    words = sampling.seed_words([bytes(range(16))] * 4)
    probe = sampling.choose(logits, words, torch.arange(4), 1.0).tolist()
    fault = ""
    if not low <= version < high:
        fault = f"vLLM {description['vllm']}; versions from {low[0]}.{low[1]} to below {high[0]}.{high[1]} fit"
    elif description["dtype"] != expected:
        fault = f"it computes in {description['dtype']}, and engine.dtype is {expected}"
    elif description["head"] != "float32":
        fault = (
            f"it computes logits in {description['head']}, and margins need float32: start it with "
            """--hf-overrides '{"head_dtype": "float32"}'"""
        )
    elif description["quantization"]:
        fault = f"it serves {description['quantization']}-quantized weights, which cannot be patched in place"
    elif not description["processor"]:
        fault = "it has not loaded our logits processor; start it as `grailnode engine flags` prints"
    elif description["speculative"]:
        fault = "speculative decoding gives a request several rows a step, which is not supported"
    elif description["batch_invariant"] and tuple(description["capability"] or ()) < INVARIANT_CAPABILITY:
        fault = (
            f"VLLM_BATCH_INVARIANT is set, and it computes on {description['device']}: vLLM has that mode for GPUs of "
            f"compute capability {INVARIANT_CAPABILITY[0]}.{INVARIANT_CAPABILITY[1]} and more"
        )
    elif description["probe"] != probe:
        fault = f"its noise has other bits: it drew {description['probe']} where {probe} is right"
    if fault:
        raise EngineError(f"this server of vLLM does not fit: {fault}")
