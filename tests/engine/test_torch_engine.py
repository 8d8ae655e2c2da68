"""The contract of Engine (roles/ports.py), tested on the torch engine with both implementations of the model."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from grailnode.engine.causal_model import CausalModel
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams, batch_margins, log_probabilities
from roles.ports import EngineError, Request
from tests.support.builders.policies import PARAMS, engine_of, inline, random_weights

pytestmark = pytest.mark.trio

NOISE = 1e-4
"""Bound on the differences that the order of float32 additions causes here; measured: under 1e-5."""


def requests_of_many_lengths(count: int = 24) -> list[Request]:
    generator = random.Random(5)
    return [
        Request(tuple(generator.randrange(2, 22) for _ in range(generator.randrange(1, 12))), generator.randbytes(16))
        for _ in range(count)
    ]


async def test_a_prefill_agrees_with_generation(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    requests = requests_of_many_lengths()
    generations = await engine.generate(requests, PARAMS)
    checked = await engine.forward([r.prompt for r in requests], [g.tokens for g in generations])
    for request, generation, result in zip(requests, generations, checked, strict=True):
        tokens = torch.tensor(generation.tokens)
        margins = batch_margins(result.logits, tokens, [request.seed], [len(tokens)], PARAMS.temperature)
        assert margins.max() < NOISE
        assert result.logits.shape == (len(tokens), model.vocabulary)
        assert result.logits.dtype == result.hidden.dtype == generation.hidden.dtype == torch.float32
        torch.testing.assert_close(generation.hidden, result.hidden, rtol=0, atol=NOISE)
        likely = log_probabilities(result.logits, tokens, PARAMS.temperature)
        torch.testing.assert_close(torch.tensor(generation.logprobs), likely, rtol=0, atol=NOISE)


async def test_results_do_not_depend_on_the_batch(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    requests = requests_of_many_lengths()
    together = await engine.generate(requests, PARAMS)
    for request, generation in zip(requests, together, strict=True):
        (alone,) = await engine.generate([request], PARAMS)
        assert alone.tokens == generation.tokens
        torch.testing.assert_close(alone.hidden, generation.hidden, rtol=0, atol=NOISE)
    whole = await engine.forward([r.prompt for r in requests], [g.tokens for g in together])
    for request, generation, result in zip(requests, together, whole, strict=True):
        (single,) = await engine.forward([request.prompt], [generation.tokens])
        torch.testing.assert_close(single.logits, result.logits, rtol=0, atol=NOISE)


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


async def test_completions_end_at_their_first_eos_or_at_the_limit(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    hot = SamplingParams(temperature=20.0, max_tokens=40, eos=1)  # nearly uniform: eos comes after about 30 tokens
    lengths = set()
    for generation in await engine.generate(requests_of_many_lengths(), hot):
        assert hot.eos not in generation.tokens[:-1]
        assert generation.tokens[-1] == hot.eos or len(generation.tokens) == hot.max_tokens
        assert len(generation.hidden) == len(generation.tokens)
        lengths.add(len(generation.tokens))
    assert len(lengths) > 3


async def test_seeds_determine_the_tokens(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    prompt = (5, 6, 7)
    same = await engine.generate([Request(prompt, b"a" * 16)] * 2, PARAMS)
    assert same[0].tokens == same[1].tokens
    others = await engine.generate([Request(prompt, bytes([i]) * 16) for i in range(16)], PARAMS)
    assert len({generation.tokens for generation in others}) > 8


async def test_sampling_follows_the_softmax(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    one = SamplingParams(temperature=1.5, max_tokens=1, eos=1)
    count = 4000
    seeds = [index.to_bytes(16, "little") for index in range(count)]
    samples = await engine.generate([Request((5, 6, 7), seed) for seed in seeds], one)
    (result,) = await engine.forward([(5, 6, 7)], [(0,)])
    probabilities = torch.softmax(result.logits[0] / one.temperature, dim=-1)
    frequencies = torch.bincount(torch.tensor([g.tokens[0] for g in samples]), minlength=model.vocabulary) / count
    assert (frequencies - probabilities).abs().max() < 0.03  # over four standard deviations


async def test_filtered_tokens_are_never_sampled(model: CausalModel) -> None:
    """Only the two most likely tokens occur, even at a high temperature."""
    engine = await engine_of(model, random_weights(model))
    params = SamplingParams(temperature=20.0, max_tokens=4, eos=1, filters=Filters(top_k=2))
    requests = requests_of_many_lengths()
    generations = await engine.generate(requests, params)
    checked = await engine.forward([r.prompt for r in requests], [g.tokens for g in generations])
    for generation, result in zip(generations, checked, strict=True):
        sampled_logits = result.logits.gather(-1, torch.tensor(generation.tokens)[:, None])
        assert (sampled_logits >= result.logits.topk(2, dim=-1).values[:, -1:] - NOISE).all()


async def test_greedy_takes_the_most_likely(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    prompts = [request.prompt for request in requests_of_many_lengths(8)]
    for prompt, tokens in zip(prompts, await engine.greedy(prompts, PARAMS), strict=True):
        (result,) = await engine.forward([prompt], [tokens])
        best = result.logits.max(dim=-1).values
        greedy_logits = result.logits.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
        assert (best - greedy_logits).max() < NOISE


async def test_no_requests_and_an_empty_completion(model: CausalModel) -> None:
    engine = await engine_of(model, random_weights(model))
    assert await engine.generate([], PARAMS) == []
    assert await engine.forward([], []) == []
    (empty,) = await engine.forward([(5, 6)], [()])
    assert empty.logits.shape == (0, model.vocabulary)


class TestWeights:
    """Staging and committing."""

    async def test_nothing_is_served_before_the_first_commit(self, model: CausalModel) -> None:
        engine = TorchEngine(model, run_sync=inline)
        await engine.stage(3, random_weights(model))
        assert engine.version is None
        with pytest.raises(EngineError, match="no policy"):
            await engine.generate([Request((5,), bytes(16))], PARAMS)
        await engine.commit()
        assert engine.version == 3

    async def test_staging_changes_nothing_until_the_commit(self, model: CausalModel) -> None:
        engine = await engine_of(model, random_weights(model, 0))
        request = Request((5, 6, 7, 8), b"s" * 16)
        (before,) = await engine.generate([request], PARAMS)
        await engine.stage(1, random_weights(model, 1))
        (during,) = await engine.generate([request], PARAMS)
        assert torch.equal(before.hidden, during.hidden)
        assert engine.version == 0
        await engine.commit()
        (after,) = await engine.generate([request], PARAMS)
        assert not torch.equal(before.hidden[0], after.hidden[0])
        assert engine.version == 1

    async def test_staging_copies_the_weights(self, model: CausalModel) -> None:
        weights = random_weights(model)
        engine = await engine_of(model, weights)
        request = Request((5, 6, 7, 8), b"s" * 16)
        (before,) = await engine.generate([request], PARAMS)
        for tensor in weights.values():
            tensor.zero_()
        (after,) = await engine.generate([request], PARAMS)
        assert torch.equal(before.hidden, after.hidden)

    async def test_a_commit_needs_staged_weights(self, model: CausalModel) -> None:
        engine = await engine_of(model, random_weights(model))
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit()
        assert engine.version == 0

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
    async def test_weights_that_do_not_fit_the_model_are_refused(self, model: CausalModel, fault: str) -> None:
        engine = await engine_of(model, random_weights(model))
        weights: dict[str, Tensor] = random_weights(model)
        if fault == "missing":
            del weights["model.norm.weight"]
        elif fault == "unknown":
            weights["model.extra.weight"] = torch.zeros(1, dtype=torch.bfloat16)
        else:
            weights["model.norm.weight"] = torch.zeros(1, dtype=torch.bfloat16)
        with pytest.raises(EngineError, match=r"model\."):
            await engine.stage(1, weights)
        assert engine.version == 0
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit()


@pytest.mark.parametrize("bad", [(), (32,), (-1,)])
async def test_invalid_prompts_are_refused(model: CausalModel, bad: tuple[int, ...]) -> None:
    engine = await engine_of(model, random_weights(model))
    with pytest.raises(ValueError, match=r"token"):
        await engine.generate([Request(bad, bytes(16))], PARAMS)
    with pytest.raises(ValueError, match=r"token"):
        await engine.forward([bad], [(1,)])


async def test_an_error_of_torch_becomes_an_engine_error(model: CausalModel) -> None:
    async def fail(function: Any, *arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    engine = TorchEngine(model, run_sync=fail)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.stage(0, random_weights(model))
