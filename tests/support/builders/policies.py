"""Small policies for tests: random weights, so that no answer is certain and every rounding error could show."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grailnode.demo import genesis
from grailnode.engine import policy
from grailnode.engine.causal_model import CausalModel, build
from grailnode.engine.policy import Policy
from grailnode.engine.torch_engine import TorchEngine
from protocol.rollout.sampling import SamplingParams

RECIPE = genesis.Recipe(width=32, layers=2, heads=4, key_value_heads=2, head_size=8, feed_forward=48)
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, eos=1)


def random_weights(model: CausalModel, seed: int = 0) -> dict[str, Tensor]:
    """BF16 weights of about the size at which logits vary by a few units."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in model.shapes.items()
    }


def write_policy(directory: Path, **changes: Any) -> Policy:
    """A policy directory with random weights; `changes` are keys of config.json."""
    config = RECIPE.config() | changes
    directory.mkdir(parents=True, exist_ok=True)
    policy.save(directory, config, genesis.tokenizer(), {})
    weights = random_weights(build(Policy.load(directory)))
    policy.save(directory, config, genesis.tokenizer(), weights)
    return Policy.load(directory)


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in place, so that trio's mock clock has nothing to wait for."""
    return function(*arguments)


async def engine_of(model: CausalModel, weights: dict[str, Tensor], **options: Any) -> TorchEngine:
    """An engine that serves these weights as version 0."""
    engine = TorchEngine(model, run_sync=inline, **options)
    await engine.stage(0, weights)
    await engine.commit()
    return engine


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")
