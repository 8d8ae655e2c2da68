"""What all measurements of engines share: sizes of policies, requests, and lines of output."""

import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grailnode.chat.chat_template import ChatTemplate
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from roles.policy.assignment import encode_prompt
from roles.policy.causal_model import CausalModel
from roles.ports import Request
from tests.support.builders.policies import write_policy

SIZES: dict[str, dict[str, int]] = {
    "32k": {"vocab_size": 32_000, "hidden_size": 128, "head_dim": 32},
    "152k": {"vocab_size": 151_936, "hidden_size": 128, "head_dim": 32},
    "68M": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    **{
        f"{width}x8": {  # width and layers, for drafts
            "vocab_size": 8192,
            "hidden_size": width,
            "head_dim": 64,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 8,
            "num_attention_heads": width // 64,
            "num_key_value_heads": width // 128,
        }
        for width in (512, 1024)
    },
    "7B": {  # the shapes of Qwen2.5-7B
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "head_dim": 128,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "0.5B": {  # the shapes of Qwen2.5-0.5B
        "vocab_size": 151_936,
        "hidden_size": 896,
        "head_dim": 64,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def cache_flags(device: str) -> tuple[str, ...]:
    """Return flags for servers beside each other on one GPU: each reserves the same memory for keys and values.

    Without them, vLLM takes what other servers reserve or release while it starts for its own, and ends.
    """
    return () if device == "cpu" else ("--kv-cache-memory-bytes", str(4 << 30))


reported: list[dict[str, Any]] = []
"""The results so far."""


def report(**fields: Any) -> None:
    """Print one result."""
    reported.append(fields)
    print(json.dumps(fields), flush=True)


def requests_of(count: int, vocabulary: int, length: int = 32, seed: int = 0) -> list[Request]:
    """Return requests with random prompts."""
    generator = random.Random(seed)
    return [
        Request(tuple(generator.randrange(2, vocabulary) for _ in range(length)), generator.randbytes(16))
        for _ in range(count)
    ]


@contextmanager
def directory() -> Iterator[Path]:
    """Yield a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="grailnode-bench-") as path:
        yield Path(path)


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Return the seconds that some work takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def problems_of(policy: Policy, count: int, seed: int = 0, *, chat: bool = False) -> list[Request]:
    """Return requests with the prompts that the packaged policy has learned, or with those of the demo of SmolLM2."""
    environment = environments.get("sums" if chat else "addition")
    seeds = [number.to_bytes(32, "little") for number in range(seed * count, (seed + 1) * count)]
    prompts = [environment.problem(seed).prompt for seed in seeds]
    template = ChatTemplate.read(policy.directory).chat("", prompts) if chat else None
    encoded = [encode_prompt(policy.tokenizer, template, prompt) for prompt in prompts]
    return [Request(prompt, seed[:16]) for prompt, seed in zip(encoded, seeds, strict=True)]


def policy_of(size: str, place: Path, device: str) -> tuple[Policy, dict[str, torch.Tensor]]:
    """Return a policy and its weights: genesis is the packaged one, a size has random weights in a directory below
    `place`, and any other name is the directory of a policy.
    """
    if size in SIZES:
        policy = write_policy(place / "policy", eos_token_id=1, max_position_embeddings=512, **SIZES[size])
        return policy, weights_of(build(policy), device)
    source = PACKAGED_POLICY if size == "genesis" else Path(size)
    return Policy.load(source), load_weights(source)


def weights_of(model: CausalModel, device: str) -> dict[str, torch.Tensor]:
    """Return random BF16 weights, drawn on the device, because a CPU takes a minute for 7B."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator, device=device) * 0.3 + (len(shape) == 1)).bfloat16().cpu()
        for name, shape in model.shapes.items()
    }


def with_changes(
    weights: dict[str, torch.Tensor], share: float, seed: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return weights of which a share of the elements is one unit in the last place larger or smaller."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: (
            tensor.view(torch.int16) ^ (torch.rand(tensor.shape, generator=generator, device=device) < share).cpu()
        ).view(torch.bfloat16)
        for name, tensor in weights.items()
    }
