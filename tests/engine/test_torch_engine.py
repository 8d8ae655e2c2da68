"""The torch engine fulfils the contract of Engine with both implementations of the model, and computes little."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.engine.engine_contract import EngineContract, NewEngine
from tests.support.builders.policies import NOISE, PARAMS, engine_of, inline, random_weights, requests_of_many_lengths


class TestTorchEngine(EngineContract):
    """The contract."""

    @pytest.fixture
    def new_engine(self, model: CausalModel) -> NewEngine:
        """Make engines of the model."""
        return lambda: TorchEngine(model, run_sync=inline)


class CountingModel:
    """A model that counts the tokens that it computes, pads included, and the largest mask (cached tokens included)."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.tokens = 0
        self.largest_mask = 0

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.tokens += ids.numel()
        self.largest_mask = max(self.largest_mask, mask.numel())
        return self._model.hidden(weights, ids, mask, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


async def test_a_prompt_is_computed_once_for_all_its_completions(model: CausalModel) -> None:
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model))
    generator = random.Random(3)
    first, second = (tuple(generator.randrange(2, 22) for _ in range(length)) for length in (50, 31))
    prompts = [first, first, second, first, second, first]
    completions = [tuple(generator.randrange(2, 22) for _ in range(length)) for length in (9, 1, 9, 2, 7, 0)]
    counting.tokens = 0
    together = await engine.forward(prompts, completions)
    assert counting.tokens <= 2 * 50 + 6 * 8
    for prompt, tokens, result in zip(prompts, completions, together, strict=True):
        (alone,) = await engine.forward([prompt], [tokens])
        assert result.logits.shape == (len(tokens), model.vocabulary)
        torch.testing.assert_close(alone.logits, result.logits, rtol=0, atol=NOISE)
        torch.testing.assert_close(alone.hidden, result.hidden, rtol=0, atol=NOISE)


@pytest.mark.parametrize(
    "lengths", [(60,), (60, 5, 5, 5, 5, 5, 5, 5, 5, 5)], ids=["one prompt", "a long one, short ones"]
)
async def test_short_completions_after_long_prompts_need_no_more_than_a_batch(
    model: CausalModel, lengths: tuple[int, ...]
) -> None:
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model), max_batch_tokens=256)
    prompts = [(2 + number,) * length for number, length in enumerate(lengths) for _ in range(24)]
    results = await engine.forward(prompts, [(5, 6, 1)] * len(prompts))
    assert [len(result.logits) for result in results] == [3] * len(prompts)
    assert counting.largest_mask <= 256


async def test_little_is_computed_after_the_end_of_a_completion(model: CausalModel) -> None:
    """Short completions beside long ones, as reasoning gives them: padded to the longest they would be 3 times as many
    tokens.
    """
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model))
    generator = random.Random(4)
    lengths = (900, 120, 80, 700, 1, 33, 0, 400)
    completions = [tuple(generator.randrange(2, 22) for _ in range(length)) for length in lengths]
    prompt = (5, 6, 7)
    counting.tokens = 0
    together = await engine.forward([prompt] * len(lengths), completions)
    assert counting.tokens < 1.2 * sum(lengths)
    for tokens, result in zip(completions, together, strict=True):
        (alone,) = await engine.forward([prompt], [tokens])
        torch.testing.assert_close(alone.hidden, result.hidden, rtol=0, atol=NOISE)


@pytest.mark.parametrize("max_batch_tokens", [1, 40])
async def test_splitting_keeps_the_order(model: CausalModel, max_batch_tokens: int) -> None:
    weights = random_weights(model)
    whole, parts = await engine_of(model, weights), await engine_of(model, weights, max_batch_tokens=max_batch_tokens)
    requests = requests_of_many_lengths(8)
    completions = [g.tokens for g in await whole.generate(requests, PARAMS)]
    assert [g.tokens for g in await parts.generate(requests, PARAMS)] == completions
    prompts = [r.prompt for r in requests]
    for one, other in zip(
        await whole.forward(prompts, completions), await parts.forward(prompts, completions), strict=True
    ):
        torch.testing.assert_close(one.hidden, other.hidden, rtol=0, atol=NOISE)


async def test_an_error_of_torch_becomes_an_engine_error(model: CausalModel) -> None:
    async def fail(function: Any, *arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    engine = TorchEngine(model, run_sync=fail)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.stage(0, random_weights(model))
