"""The torch engine: its contract, prefill by another engine, versions of codes and scales, and exact logits."""

import random
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import trio
import trio.testing
from torch import Tensor
from torch.nn import functional

from grailnode.engine import compute
from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build, build_exact
from grailnode.engine.output_projection import project
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import KeyValueCache
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from protocol.patch import encode
from protocol.quantization import SCALE, Precision, dequantize, quantize
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError, Request, TurnCache
from tests.engine.engine_contract import EngineContract, NewEngine, manifest, serve
from tests.support.builders.families import write_family
from tests.support.builders.policies import NOISE, PARAMS, engine_of, inline, random_weights, requests_of_many_lengths
from tests.support.measuring.wrapped_model import WrappedModel


@pytest.fixture(scope="module", params=[build, lambda policy: TransformersModel(policy.directory)])
def implementation(request: pytest.FixtureRequest, policy: Policy) -> CausalModel:
    """Return the same policy in each implementation of CausalModel."""
    model: CausalModel = request.param(policy)
    return model


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def model(self, implementation: CausalModel) -> CausalModel:
        return implementation

    @pytest.fixture
    def new_engine(self, model: CausalModel) -> NewEngine:
        return lambda: TorchEngine(model, run_sync=inline)


class CountingModel(WrappedModel):
    """A model that counts the tokens that it computes, pads included, and the largest mask (cached tokens included)."""

    tokens = largest_mask = 0

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.tokens += ids.numel()
        self.largest_mask = max(self.largest_mask, mask.numel())
        return super().hidden(weights, ids, mask, cache)


LONG, SHORT = ((5, 6, 7, 8) * 20)[:50], (9, 10, 11) * 10
LENGTHS = (900, 120, 80, 700, 1, 33, 0, 400)


@pytest.mark.parametrize(
    ("prompts", "lengths", "most"),
    [
        ([LONG, LONG, SHORT, LONG, SHORT, LONG], (9, 1, 9, 2, 7, 0), 2 * 50 + 6 * 8),
        ([SHORT[:3]] * len(LENGTHS), LENGTHS, 1.2 * sum(LENGTHS)),
    ],
    ids=["long prompts", "short completions beside long ones"],
)
async def test_a_prompt_is_computed_once_and_little_after_the_end_of_a_completion(
    model: CausalModel, prompts: list[tuple[int, ...]], lengths: tuple[int, ...], most: float
) -> None:
    """Short completions beside long ones, as reasoning gives them: padded to the longest they would be 3 times as many
    tokens.
    """
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model))
    generator = random.Random(3)
    completions = [tuple(generator.randrange(2, 22) for _ in range(length)) for length in lengths]
    counting.tokens = 0
    together = await engine.forward(prompts, completions)
    assert counting.tokens <= most
    for prompt, tokens, result in zip(prompts, completions, together, strict=True):
        (alone,) = await engine.forward([prompt], [tokens])
        assert result.logits.shape == (len(tokens), model.vocabulary)
        torch.testing.assert_close(alone.logits, result.logits, rtol=0, atol=NOISE)
        torch.testing.assert_close(alone.hidden, result.hidden, rtol=0, atol=NOISE)


@pytest.mark.parametrize("lengths", [(60,), (60, *(5,) * 9)], ids=["one prompt", "a long one, short ones"])
async def test_long_prompts_need_no_more_than_a_batch(model: CausalModel, lengths: tuple[int, ...]) -> None:
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model), max_batch_tokens=256)
    prompts = [(2 + number,) * length for number, length in enumerate(lengths) for _ in range(24)]
    results = await engine.forward(prompts, [(5, 6, 1)] * len(prompts))
    assert [len(result.logits) for result in results] == [3] * len(prompts)
    assert counting.largest_mask <= 256


async def test_an_error_of_torch_becomes_an_engine_error(model: CausalModel) -> None:
    async def fail(function: Any, *arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    engine = TorchEngine(model, run_sync=fail)
    await engine.stage(0, random_weights(model))
    with pytest.raises(EngineError, match="out of memory"):
        await engine.commit()


async def test_a_gpu_on_which_triton_cannot_compile_is_reported(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, object]] = []

    def report(event: str, **fields: object) -> None:
        events.append((event, fields["error"]))

    monkeypatch.setattr(compute, "triton_fault", lambda device: f"not on {device}")
    for device in ("cpu", "cuda:1"):
        async with compute.open_engine(compute.Compute(model, device), inline, report):
            pass
    assert events == [("triton-unusable", "not on cuda:1")]


# What a turn of an episode has computed serves the next one


@pytest.mark.parametrize("case", ["the next turn", "another version", "another context", "attention that forgets"])
async def test_a_turn_costs_its_new_tokens_if_the_engine_has_the_others(
    model: CausalModel, tmp_path: Path, case: str
) -> None:
    if case == "attention that forgets":
        model = write_family(tmp_path, "mistral").model
    counting = CountingModel(model)
    engine = await engine_of(counting, random_weights(model))
    first = Request((5, 6, 7), b"s" * 16, turn_cache=TurnCache())
    (turn,) = await engine.generate([first], PARAMS)
    context = (4 if case == "another context" else 5, 6, 7, *turn.tokens, 8, 9)
    if case == "another version":
        await serve(engine, random_weights(model, 1))
    counting.tokens = 0
    second = replace(first, prompt=context, offset=len(turn.tokens))
    (generation,) = await engine.generate([second], PARAMS)
    # The last token of a turn has been no input yet.
    new = 3 if case == "the next turn" else len(context)
    assert counting.tokens == new + len(generation.tokens) - 1
    (expected,) = await engine.generate([replace(second, turn_cache=None)], PARAMS)
    assert generation.tokens == expected.tokens
    torch.testing.assert_close(generation.hidden, expected.hidden, rtol=0, atol=NOISE)


class WatchedCache(KeyValueCache):
    """A cache that records the threads in which it and its selections are freed."""

    threads: ClassVar[set[int]] = set()

    def select(self, rows: Tensor) -> "WatchedCache":
        return WatchedCache(super().select(rows)._layers)

    def __del__(self) -> None:
        self.threads.add(threading.get_ident())


class WatchedModel(WrappedModel):
    def cache(self) -> Any:
        return WatchedCache()


async def test_what_is_not_kept_of_a_turn_is_not_freed_on_the_event_loop(model: CausalModel) -> None:
    engine = TorchEngine(WatchedModel(model), max_batch_tokens=1)
    await serve(engine, random_weights(model))
    request = Request((5, 6, 7), b"s" * 16, turn_cache=TurnCache())
    await engine.generate([request, replace(request, turn_cache=TurnCache())], PARAMS)
    assert WatchedCache.threads
    assert threading.get_ident() not in WatchedCache.threads


class PausingModel(WrappedModel):
    """A model whose computation begins with a pause."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.paused, self.released = threading.Event(), threading.Event()

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.paused.set()
        assert self.released.wait(60)
        return super().hidden(weights, ids, mask, cache)


async def test_an_old_version_is_freed_after_the_calls_under_way_and_not_on_the_event_loop(model: CausalModel) -> None:
    pausing, threads = PausingModel(model), set[int]()
    engine = TorchEngine(pausing, dtype=torch.bfloat16)
    old = dict(random_weights(model))
    for tensor in old.values():
        weakref.finalize(tensor, lambda: threads.add(threading.get_ident()))
    await serve(engine, old)
    del tensor
    old.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, requests_of_many_lengths(2), PARAMS)
        await trio.to_thread.run_sync(pausing.paused.wait)
        nursery.start_soon(serve, engine, random_weights(model, 1))
        await trio.testing.wait_all_tasks_blocked()
        assert not threads
        assert engine.version == 0
        pausing.released.set()
    assert threads
    assert threading.get_ident() not in threads


class ConvertingEngine(TorchEngine):
    """An engine that counts the versions in its dtype that are in memory when it converts one, itself included."""

    most = 0

    def _convert(self, weights: Weights) -> dict[str, Tensor]:
        converted = super()._convert(weights)
        self.versions = [*getattr(self, "versions", []), weakref.ref(converted["model.norm.weight"])]
        self.most = max(self.most, sum(item() is not None for item in self.versions))
        return converted


async def test_versions_that_a_call_outlasts_are_never_two_in_the_dtype_of_the_engine(model: CausalModel) -> None:
    """A call is computed with its own version, and those that come while a commit waits with the new one."""
    released = trio.Event()

    async def run_sync(function: Any, *arguments: Any) -> Any:
        if function == engine._sample:
            await released.wait()
        return function(*arguments)

    engine = ConvertingEngine(model, run_sync=run_sync)
    await serve(engine, random_weights(model))
    tokens: list[list[tuple[int, ...]]] = []

    async def generate() -> None:
        tokens.append([item.tokens for item in await engine.generate(requests_of_many_lengths(2), PARAMS)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.testing.wait_all_tasks_blocked()
        for seed in (1, 2):
            await engine.stage(seed, random_weights(model, seed))
            nursery.start_soon(engine.commit)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(generate)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.version == 0
        released.set()
    assert engine.version == 2
    assert engine.most == 1
    for seed, own in zip((0, 2), tokens, strict=True):
        alone = await engine_of(model, random_weights(model, seed))
        assert own == [item.tokens for item in await alone.generate(requests_of_many_lengths(2), PARAMS)]


# The torch engine serves versions of codes and scales, and computes what it computes with their BF16 values


MATRIX = "model.layers.0.self_attn.q_proj.weight"
PRECISIONS: tuple[Precision, ...] = ("fp8", "int8")


async def results_of(model: CausalModel, weights: Weights, dtype: torch.dtype = torch.float32) -> list[object]:
    """Return the tokens and hidden states of some completions."""
    engine = await engine_of(model, dict(weights), dtype=dtype)
    return [(g.tokens, g.hidden.tolist()) for g in await engine.generate(requests_of_many_lengths(6), PARAMS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
async def test_codes_are_served_as_the_values_that_they_stand_for(
    model: CausalModel, precision: Precision, dtype: torch.dtype
) -> None:
    published = quantize(random_weights(model), precision)
    served = await results_of(model, published, dtype)
    assert served == await results_of(model, dequantize(published), dtype)
    assert served != await results_of(model, random_weights(model), dtype)


async def test_exact_arithmetic_computes_with_codes(policy: Policy) -> None:
    exact = build_exact(policy)
    published = quantize(random_weights(exact), "fp8")
    assert await results_of(exact, published) == await results_of(exact, dequantize(published))


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_newer_versions_are_staged_whole(model: CausalModel, precision: Precision) -> None:
    old, new = (quantize(random_weights(model, seed), precision) for seed in (0, 1))
    engine = TorchEngine(model, run_sync=inline)
    await serve(engine, old)
    assert not engine.takes_patches
    with pytest.raises(EngineError, match="cannot be patched in"):
        await engine.stage_patch(1, encode(old, new), manifest(1, new))
    await engine.stage(1, new)
    await engine.commit()
    assert engine.version == 1


def damaged(published: dict[str, torch.Tensor], fault: str) -> dict[str, torch.Tensor]:
    codes = published[MATRIX].clone()
    if fault == "no code":
        codes.view(torch.uint8)[3, 5] = 0x7F if codes.dtype == torch.float8_e4m3fn else 0x80
        return published | {MATRIX: codes}
    if fault == "no scales":
        return {name: tensor for name, tensor in published.items() if name != MATRIX + SCALE}
    if fault == "too few scales":
        return published | {MATRIX + SCALE: published[MATRIX + SCALE][1:]}
    return published | {MATRIX: codes[:, 1:].contiguous()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no code", f"{MATRIX}: a bit pattern that is no code"),
        ("no scales", f"{MATRIX}: codes without a scale"),
        ("too few scales", f"{MATRIX}: codes without a scale"),
        ("another shape", f"{MATRIX}: shape"),
    ],
)
async def test_a_damaged_version_is_refused_and_the_old_one_serves(
    model: CausalModel, precision: Precision, fault: str, message: str
) -> None:
    published = quantize(random_weights(model), precision)
    engine = await engine_of(model, published)
    before = await engine.generate(requests_of_many_lengths(2), PARAMS)
    with pytest.raises(EngineError, match=message):
        await engine.stage(1, damaged(published, fault))
    assert engine.version == 0
    assert [g.tokens for g in await engine.generate(requests_of_many_lengths(2), PARAMS)] == [g.tokens for g in before]


# Logits are float32 sums of exact products, in whatever dtype states and weights are


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
