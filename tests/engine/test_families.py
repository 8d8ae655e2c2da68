"""Models against transformers: every family of docs/guide/models.md, our Qwen3, and the models that are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build, check_model, check_packing
from grailnode.engine.policy import Policy, PolicyError
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.layout_check import PARAMS, check_layout, probes
from protocol.digest import Weights
from protocol.quantization import is_matrix
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.support.builders import genesis
from tests.support.builders.families import FAMILIES, Family, difference, write_family
from tests.support.builders.policies import RECIPE, inline, random_weights, write_policy
from tests.support.processes.command_line import fail
from tests.support.pytest_options.few_daily import few_daily

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
LARGEST_DIFFERENCE = 2e-5
"""Of logits of a few units, by the order of float32 additions; measured: 4e-6."""

TABLES = re.compile(r"embed|wte|wpe|lm_head|\.gate\.weight$")
"""What a quantized run leaves in BF16: embeddings, output projections, routers."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exact_and_accepted(name: str, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    differences = {way: difference(family, way) for way in ("full", "padded", "packed", "cached")}
    assert max(differences.values()) < LARGEST_DIFFERENCE, differences
    check_model(family.policy)
    tables = [name for name, shape in family.model.shapes.items() if len(shape) == 2 and not is_matrix(name, shape)]
    assert [name for name in tables if not TABLES.search(name)] == []
    assert any(is_matrix(name, shape) for name, shape in family.model.shapes.items())


def test_rows_with_several_sequences_are_refused_where_not_only_attention_mixes_tokens(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "lfm2").policy.directory
    policy = _change_config(directory, layer_types=["conv", "full_attention"])
    with pytest.raises(PolicyError, match="not only attention mixes the tokens"):
        check_packing(policy)


def test_the_page_lists_the_families() -> None:
    (line,) = re.findall(r"^`\w+`, .+?\.$", MODELS_PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", line) == sorted(FAMILIES)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return write_family(tmp_path_factory.mktemp("mixture"), request.param)


class TestMixtures:
    """Experts have one tensor each in the files, and one for all in transformers' modules."""

    def test_the_weights_have_the_names_of_the_files(self, mixture: Family) -> None:
        files = load_file(mixture.policy.directory / "model.safetensors")
        assert mixture.model.shapes == {name: tuple(tensor.shape) for name, tensor in files.items()}
        assert any(".experts.3." in name for name in mixture.model.shapes)

    def test_gradients_are_those_of_transformers(self, mixture: Family) -> None:
        ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
        weights = {name: tensor.clone().requires_grad_() for name, tensor in mixture.weights.items()}
        states = mixture.model.hidden(weights, ids, torch.ones_like(ids, dtype=torch.bool))
        mixture.model.logits(weights, states).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
        mixture.reference.zero_grad()
        mixture.reference(ids).logits.logsumexp(-1).sum().backward()
        parameters = dict(mixture.reference.named_parameters())
        fused = parameters["model.layers.0.mlp.experts.gate_up_proj"].grad
        gates = "model.layers.0.mlp.experts.2.gate_proj.weight"
        own = weights.get(gates, weights.get("model.layers.0.block_sparse_moe.experts.2.w1.weight"))
        assert own is not None and own.grad is not None
        torch.testing.assert_close(own.grad, fused[2, : own.shape[0]], rtol=1e-4, atol=1e-5)

    def test_new_weights_replace_the_fused_copies(self, mixture: Family) -> None:
        ids = torch.tensor([[5, 6, 7]])
        mask = torch.ones_like(ids, dtype=torch.bool)
        with torch.inference_mode():
            before = mixture.model.hidden(mixture.weights, ids, mask)
            doubled = {n: t * 2 if ".experts." in n else t for n, t in mixture.weights.items()}
            after = mixture.model.hidden(doubled, ids, mask)
            again = mixture.model.hidden(mixture.weights, ids, mask)
        assert not torch.equal(before, after)
        assert torch.equal(before, again)

    async def test_an_engine_has_the_experts_in_memory_once(self, mixture: Family) -> None:
        """So has its follower, whose tensors an engine in their own dtype replaces by its own, equal ones."""
        published = {name: tensor.to(torch.bfloat16) for name, tensor in mixture.weights.items()}
        followed, ids = dict(published), torch.tensor([[5, 6]])
        engine = TorchEngine(mixture.model, dtype=torch.bfloat16, run_sync=inline)
        await engine.stage(0, followed)
        await engine.commit()
        experts = {name: tensor for name, tensor in followed.items() if ".experts." in name}
        assert all(torch.equal(tensor, published[name]) for name, tensor in experts.items())
        tensors = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in experts.values()}
        assert len(tensors) == 2 * 2  # of each layer
        assert sum(map(len, tensors.values())) == sum(tensor.nbytes for tensor in experts.values())
        own = await engine.forward([(5, 6)], [(7, 8)])
        with torch.inference_mode():
            copied = mixture.model.hidden(published, ids, torch.ones_like(ids, dtype=torch.bool))
        assert torch.equal(own[0].hidden[0], copied[0, -1].to(torch.float32))


def _change_config(directory: Path, **changes: Any) -> Policy:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Policy.load(directory)


class TestRefusals:
    def test_tensors_that_are_not_the_model_s(self, tmp_path: Path) -> None:
        policy = write_policy(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.layers.0.self_attn.q_bias"] = weights.pop("model.layers.0.self_attn.q_proj.weight")
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(PolicyError, match=r"1 missing: model\.layers\.0\.self_attn\.q_proj\.weight; 1 unknown"):
            check_model(policy)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"intermediate_size": 50}, r"has shape \[32, 48\], and config\.json says \[32, 50\]"),
            ({"model_type": "unheard_of"}, "transformers cannot build this model"),
        ],
        ids=["another shape", "unknown architecture"],
    )
    def test_a_config_that_is_not_the_model_s(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        write_policy(tmp_path)
        with pytest.raises(PolicyError, match=message):
            check_model(_change_config(tmp_path, **change))

    def test_a_mixture_whose_files_this_program_does_not_know(self, tmp_path: Path) -> None:
        config_class: Any = CONFIG_MAPPING["granitemoe"]
        config = config_class(
            vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, eos_token_id=2,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
        (tmp_path / "tokenizer.json").write_text(genesis.tokenizer())
        weights = load_file(tmp_path / "model.safetensors")
        renamed = {name.replace("block_sparse_moe", "experts_of_another_name"): t for name, t in weights.items()}
        save_file(renamed, tmp_path / "model.safetensors")
        with pytest.raises(PolicyError, match=r"missing: .*docs/guide/models\.md"):
            check_model(Policy.load(tmp_path))

    def test_init_refuses_and_writes_nothing(self, tmp_path: Path) -> None:
        policy = write_policy(tmp_path / "policy").directory
        _change_config(policy, intermediate_size=50)
        assert "config.json says [32, 50]" in fail("init", str(tmp_path / "run"), "--policy", str(policy))
        assert not (tmp_path / "run").exists()


# The Qwen3 of this repository equals transformers' Qwen3


def _pair(directory: Path, **changes: object) -> tuple[Qwen3, TransformersModel, dict[str, torch.Tensor]]:
    """Return a policy in both implementations, and weights in float32."""
    own = build(write_policy(directory, **changes))
    assert isinstance(own, Qwen3)
    weights = {name: tensor.to(torch.float32) for name, tensor in random_weights(own).items()}
    return own, TransformersModel(directory), weights


@pytest.mark.parametrize("tied", [True, False])
def test_equal_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    own, theirs, weights = _pair(tmp_path, tie_word_embeddings=tied)
    assert own.shapes == theirs.shapes
    assert own.vocabulary == theirs.vocabulary
    ids = torch.randint(0, own.vocabulary, (6, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:3, :4] = False  # left padding
    with torch.inference_mode():
        states = own.hidden(weights, ids, mask), theirs.hidden(weights, ids, mask)
        assert torch.equal(states[0][mask], states[1][mask])
        logits = own.logits(weights, states[0]), theirs.logits(weights, states[1])
        assert torch.equal(logits[0][mask], logits[1][mask])


def test_equal_with_a_cache(tmp_path: Path) -> None:
    own, theirs, weights = _pair(tmp_path)
    ids = torch.randint(0, own.vocabulary, (6, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[4:, :2] = False
    rows = torch.tensor([1, 2, 5])
    caches = own.cache(), theirs.cache()
    with torch.inference_mode():
        own.hidden(weights, ids[:, :6], mask[:, :6], caches[0])
        theirs.hidden(weights, ids[:, :6], mask[:, :6], caches[1])
        caches = caches[0].select(rows), caches[1].select(rows)
        for end in (7, 8, 9):
            step = ids[rows, end - 1 : end], mask[rows, :end]
            ours = own.hidden(weights, *step, caches[0])
            assert torch.equal(ours, theirs.hidden(weights, *step, caches[1]))
        whole = own.hidden(weights, ids, mask)
        torch.testing.assert_close(ours, whole[rows, 8:], rtol=0, atol=1e-4)


def test_gradients_are_equal(tmp_path: Path) -> None:
    own, theirs, weights = _pair(tmp_path)
    ids = torch.randint(0, own.vocabulary, (4, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(4, 7, dtype=torch.bool)
    gradients = []
    for model in (own, theirs):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        model.logits(leaves, model.hidden(leaves, ids, mask)).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"use_sliding_window": True},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_act": "gelu"},
        {"head_dim": None},
    ],
)
def test_other_configs_are_not_covered(change: dict[str, object]) -> None:
    assert Qwen3Config.of(RECIPE.config()) is not None
    assert Qwen3Config.of(RECIPE.config() | change) is None


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 16}, "longrope"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 0}, "not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_models_on_which_nodes_would_disagree_are_refused(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=reason):
        TransformersModel(tmp_path)


# The check of what vLLM computes from a checkpoint, beside engines of torch that compute right or wrong


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return write_family(tmp_path_factory.mktemp("family"), request.param)


async def check(model: CausalModel, weights: Weights, served: Weights, dtype: torch.dtype, directory: Path) -> None:
    """Check an engine that computes with `served` in place of the weights of a checkpoint."""
    engine = TorchEngine(model, dtype=dtype)
    await engine.stage(0, served)
    await engine.commit()
    requests = probes(model.vocabulary)
    results = await engine.generate(requests, PARAMS)
    save_file(dict(weights), directory / "weights")
    check_layout(model, directory / "weights", [request.prompt for request in requests], results)


@pytest.mark.parametrize("dtype", few_daily([torch.bfloat16, torch.float32], 2), ids=str)
async def test_right_computations_pass(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(family.model)
    await check(family.model, weights, weights, dtype, tmp_path)


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "heads": ("q_proj.weight", lambda rows: rows.flip(0)),
    "input of the feed-forward": ("up_proj.weight", lambda rows: rows.roll(1, dims=1)),
    "output of the feed-forward": ("down_proj.weight", lambda rows: rows.roll(1, dims=0)),
    "output projection": ("lm_head.weight", lambda rows: rows.roll(1, dims=0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mistral", "olmoe"])
async def test_weights_that_are_read_in_another_order_are_refused(name: str, fault: str, tmp_path: Path) -> None:
    family, (part, change) = write_family(tmp_path, name), FAULTS[fault]
    weights = random_weights(family.model)
    served = {name: change(tensor) if name.endswith(part) else tensor for name, tensor in weights.items()}
    what = "log-probabilities" if fault == "output projection" else "hidden states"
    with pytest.raises(EngineError, match=rf"its {what}.* in another layout"):
        await check(family.model, weights, served, torch.bfloat16, tmp_path)
