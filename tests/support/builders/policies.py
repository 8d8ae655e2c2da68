"""Small policies with random weights: no answer is certain, so that a rounding error may change a token."""

import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grailnode.demo import genesis
from grailnode.engine import policy
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.torch_engine import TorchEngine
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Request

RECIPE = genesis.Recipe(width=32, layers=2, heads=4, key_value_heads=2, head_size=8, feed_forward=48)
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, stops=(1,))
NOISE = 1e-4
"""Bound on the differences that the order of float32 additions causes here; measured: under 1e-5."""


def random_weights(model: CausalModel, seed: int = 0) -> dict[str, Tensor]:
    """Return BF16 weights with which logits vary by a few units."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in model.shapes.items()
    }


def write_policy(directory: Path, **changes: Any) -> Policy:
    """Write a policy directory with random weights; `changes` are keys of config.json."""
    config = RECIPE.config() | changes
    directory.mkdir(parents=True, exist_ok=True)
    policy.save(directory, config, genesis.tokenizer(), {})
    weights = random_weights(build(Policy.load(directory)))
    policy.save(directory, config, genesis.tokenizer(), weights)
    return Policy.load(directory)


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result, computed in this task, so that a mock clock does not wait for it."""
    return function(*arguments)


async def engine_of(model: CausalModel, weights: dict[str, Tensor], **options: Any) -> TorchEngine:
    """Return an engine that serves these weights as version 0."""
    engine = TorchEngine(model, run_sync=inline, **options)
    await engine.stage(0, weights)
    await engine.commit()
    return engine


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def requests_of_many_lengths(count: int = 24) -> list[Request]:
    """Return requests whose prompts have 1 to 11 tokens."""
    generator = random.Random(5)
    return [
        Request(tuple(generator.randrange(2, 22) for _ in range(generator.randrange(1, 12))), generator.randbytes(16))
        for _ in range(count)
    ]
