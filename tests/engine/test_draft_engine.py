"""Engines made of engines: the torch engine with a draft, whose output is the policy's own, and replicas that serve one
version, of which some fail.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from grailnode.config import EngineSection
from grailnode.engine import draft_engine
from grailnode.engine.compute import Compute, Replicas, make_engine, open_engine
from grailnode.engine.draft_engine import DraftEngine
from grailnode.engine.int8_copy import Int8Matrix, int8_copy
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.output_projection import project
from grailnode.engine.policy import Policy, PolicyError, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from grailnode.run.base_files import lora_spec
from protocol.digest import Weights
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams, batch_margins, log_probabilities, token_places
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError, Generation, Request
from tests.engine.engine_contract import EngineContract, NewEngine, changed, check_tokens, serve
from tests.engine.vllm_site import refuse_restarts, vllm_python
from tests.support.builders.families import FAMILIES, write_family
from tests.support.builders.policies import NOISE, PARAMS, engine_of, inline, random_weights, requests_of_many_lengths
from tests.support.measuring.wrapped_model import WrappedModel
from tests.support.pytest_options.few_daily import few_daily

REQUESTS = requests_of_many_lengths(12)
LONG = SamplingParams(temperature=1.0, max_tokens=28, stops=(1,))
WAYS = {
    "long": LONG,
    "many stops": SamplingParams(temperature=20.0, max_tokens=28, stops=(1, 5, 9)),
    "one token": SamplingParams(temperature=1.0, max_tokens=1, stops=(1,)),
    "two tokens": SamplingParams(temperature=1.0, max_tokens=2, stops=(1,)),
    "filters": SamplingParams(temperature=2.0, max_tokens=20, stops=(1,), filters=Filters(top_k=3)),
}


class TestDraftEngine(EngineContract):
    @pytest.fixture
    def new_engine(self, model: CausalModel) -> NewEngine:
        return lambda: DraftEngine(model, run_sync=inline)


@pytest.fixture(params=[True, False], ids=["good draft", "bad draft"])
def has_good_draft(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the copy of a policy drafts for it, or another policy does."""

    def other(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(9)
        return {name: tensor[torch.randperm(len(tensor), generator=generator)] for name, tensor in weights.items()}

    if not request.param:
        monkeypatch.setattr(draft_engine, "int8_copy", other)
    return bool(request.param)


class PolicyPasses(WrappedModel):
    """A model that counts the passes of the policy itself over a batch."""

    policy: Weights | None = None
    count = 0

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.policy = self.policy or weights  # a batch begins with the policy
        self.count += weights is self.policy
        return super().hidden(weights, ids, mask, cache)


async def drafted(model: CausalModel, weights: Weights, params: SamplingParams = LONG) -> list[Generation]:
    engine = DraftEngine(model, run_sync=inline)
    await serve(engine, weights)
    return await engine.generate(REQUESTS, params)


async def check(model: CausalModel, weights: dict[str, Tensor], params: SamplingParams) -> None:
    """Check that drafted completions are those of the torch engine, and what its prefill of them gives."""
    engine = await engine_of(model, weights)
    expected, generations = await engine.generate(REQUESTS, params), await drafted(model, weights, params)
    checked = await engine.forward([r.prompt for r in REQUESTS], [g.tokens for g in generations])
    for request, plain, generation, forward in zip(REQUESTS, expected, generations, checked, strict=True):
        tokens, length = torch.tensor(generation.tokens), len(generation.tokens)
        assert generation.tokens == plain.tokens
        margins = batch_margins(
            forward.logits, tokens, *token_places([request.seed], [length]), params.temperature, params.filters
        )
        assert margins.max() == 0
        torch.testing.assert_close(generation.hidden, forward.hidden, rtol=0, atol=NOISE)
        likely = log_probabilities(forward.logits, tokens, params.temperature, params.filters)
        torch.testing.assert_close(torch.tensor(generation.logprobs), likely, rtol=0, atol=NOISE)


@pytest.mark.usefixtures("has_good_draft")
@pytest.mark.parametrize("way", WAYS)
async def test_every_token_is_the_policys_choice(model: CausalModel, way: str) -> None:
    await check(model, random_weights(model), WAYS[way])


async def test_a_good_draft_saves_most_passes_of_the_policy_and_a_bad_one_few(
    model: CausalModel, has_good_draft: bool
) -> None:
    counting = PolicyPasses(model)
    longest = max(len(item.tokens) for item in await drafted(counting, random_weights(model)))
    assert counting.count < longest / 2 if has_good_draft else longest / 2 < counting.count <= longest


@pytest.mark.parametrize("name", few_daily(FAMILIES, 3))
async def test_each_family_drafts_or_is_refused(name: str, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    windowed = "sliding_attention" in (family.policy.config.get("layer_types") or ())
    mixture = any(".experts." in tensor for tensor in family.model.shapes)
    weights = {n: t.to(torch.bfloat16) for n, t in family.weights.items()}
    if windowed or mixture or family.policy.config.get("sliding_window"):
        with pytest.raises(PolicyError, match=r"drop engine\.draft$"):
            DraftEngine(family.model)
    else:
        await check(family.model, weights, LONG)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
async def test_adapters_are_drafted_on_a_copy_of_their_base(name: str, tmp_path: Path) -> None:
    policy = write_family(tmp_path, name).policy
    base = load_weights(policy.directory)
    model = LoraModel(build(policy, lora=lora_spec(base, 4, 8.0, ("q_proj",))), base)
    await check(model, random_weights(model), LONG)
    copied = model.with_int8_base()
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool)
    weights = {n: t.to(torch.float32) for n, t in random_weights(model).items()}
    states, others = model.hidden(weights, ids, mask), copied.hidden(weights, ids, mask)
    assert 0 < (states - others).norm() / states.norm() < 0.2


def test_a_node_drafts_if_its_settings_say_so(policy: Policy) -> None:
    model = build(policy)
    assert isinstance(make_engine(Compute(model, drafts=True), inline), DraftEngine)
    assert not isinstance(make_engine(Compute(model), inline), DraftEngine)
    with pytest.raises(ValidationError, match='drafts are for kind "torch"'):
        EngineSection(kind="vllm", url="http://127.0.0.1:1", draft="int8")


# Copies of matrices


def states_and_matrix(dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    yield torch.randn(2, 5, 64, generator=generator).to(dtype)
    yield (torch.randn(48, 64, generator=generator) * 0.1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_computes_nearly_the_product_in_a_quarter_of_the_bytes(dtype: torch.dtype) -> None:
    states, matrix = states_and_matrix(dtype)
    copy = Int8Matrix.of(matrix)
    expected = functional.linear(states.double(), matrix.double())
    product = functional.linear(states, copy, matrix[:, 0])
    assert product.dtype == dtype
    assert ((product.double() - matrix[:, 0].double() - expected).norm() / expected.norm()) < 0.02
    assert copy.codes.nbytes + copy.scales.nbytes < matrix.nbytes / matrix.itemsize * 1.1
    alone = functional.linear(states[1, 2], copy, matrix[:, 0])
    assert torch.equal(alone, product[1, 2])
    assert not functional.linear(torch.zeros_like(states), copy).any()


def test_other_functions_get_the_weights() -> None:
    _, matrix = states_and_matrix(torch.bfloat16)
    wide: Any = Int8Matrix.of(matrix) + 0
    assert type(wide) is Tensor
    assert wide.dtype == torch.bfloat16
    assert ((wide - matrix).norm() / matrix.norm()) < 0.01
    ids = torch.tensor([[3, 0], [5, 5]])
    torch.testing.assert_close(functional.embedding(ids, Int8Matrix.of(matrix)), wide[ids])
    logits = project(matrix[:2], Int8Matrix.of(matrix))
    assert logits.dtype == torch.float32
    assert (logits - project(matrix[:2], matrix)).norm() / logits.norm() < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_matrices_without_kernels_or_scales_are_shared(value: float) -> None:
    weights = {"matrix": torch.randn(8, 16), "odd": torch.randn(7, 16), "gain": torch.randn(16)}
    copy = int8_copy(weights | {"broken": torch.full((8, 16), value)})
    assert isinstance(copy["matrix"], Int8Matrix)
    assert [name for name, tensor in copy.items() if isinstance(tensor, Int8Matrix)] == ["matrix"]
    assert copy["odd"] is weights["odd"]
    assert copy["gain"] is weights["gain"]


# Several engines that serve one version


class CountingEngine(TorchEngine):
    """A torch engine that counts its requests, and whose next commit can be made to fail."""

    requests = 0
    fails = False

    async def commit(self) -> None:
        if self.fails:
            self.fails = False
            raise EngineError("the device is out of memory")
        await super().commit()

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        self.requests += len(requests)
        return await super().generate(requests, params)


@pytest.fixture
def new_engine(model: CausalModel) -> NewEngine:
    return lambda: Replicas([TorchEngine(model, run_sync=inline) for _ in range(3)])


class TestReplicas(EngineContract):
    """The contract of Engine."""


async def test_every_replica_computes_its_part(model: CausalModel) -> None:
    engines = [CountingEngine(model, run_sync=inline) for _ in range(3)]
    replicas, weights = Replicas(engines), random_weights(model)
    await serve(replicas, weights)
    await check_tokens(replicas, model, weights, count=25)
    assert sorted(engine.requests for engine in engines) == [8, 8, 9]
    await replicas.generate(requests_of_many_lengths(1), PARAMS)
    assert sum(engine.requests for engine in engines) == 26


async def test_nothing_is_served_while_replicas_have_different_versions(model: CausalModel) -> None:
    engines = [CountingEngine(model, run_sync=inline) for _ in range(3)]
    replicas, weights = Replicas(engines), random_weights(model)
    target: Weights = changed(weights, 1)
    await serve(replicas, weights)
    await replicas.stage(1, target)
    engines[1].fails = True
    with pytest.raises(EngineError, match="out of memory"):
        await replicas.commit()
    assert (replicas.version, [engine.version for engine in engines]) == (None, [1, 0, 1])
    with pytest.raises(EngineError, match="different versions"):
        await replicas.generate(requests_of_many_lengths(), PARAMS)
    await replicas.stage(1, target)
    await replicas.commit()
    assert replicas.version == 1
    await check_tokens(replicas, model, target)


def test_each_replica_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(python=tmp_path / "python", device="cuda", ranks=2, replicas=3)

    def gpus(number: int) -> str | None:
        return ChildServer(settings.replica(number), tmp_path, tmp_path).environment().get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus(number) for number in range(3)] == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    assert [gpus(number) for number in range(3)] == ["7,6", "5,4", "3,2"]
    with pytest.raises(ValueError, match=r"engine\.url"):
        VllmSettings(url="http://127.0.0.1:1", replicas=2)


@pytest.mark.vllm
async def test_two_servers_of_vllm_serve_one_version(policy: Policy, model: CausalModel, tmp_path: Path) -> None:
    settings = VllmSettings(python=vllm_python(), replicas=2, sequences=8)
    compute = Compute(model, vllm=settings, policy=policy.directory, directory=tmp_path)
    weights = random_weights(model)
    target: Weights = changed(weights, 1)
    async with open_engine(compute, inline, refuse_restarts) as engine:
        await serve(engine, weights, target)
        await check_tokens(engine, model, target)
        assert engine.version == 1
    assert (tmp_path / "replica-1" / ChildServer.LOG).exists()


async def test_a_copy_that_cannot_be_made_is_made_by_the_next_call(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Weights) -> Weights:
        raise RuntimeError("out of memory")

    engine = DraftEngine(model, run_sync=inline)
    await serve(engine, random_weights(model))
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="out of memory"):
        patch.setattr(draft_engine, "int8_copy", refuse)
        await engine.generate(REQUESTS, LONG)
    generations = await engine.generate(REQUESTS, LONG)
    assert [g.tokens for g in generations] == [g.tokens for g in await drafted(model, random_weights(model))]
