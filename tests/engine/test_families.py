"""Every family of docs/models.md against transformers, and the models that are refused before a run is created."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grailnode.demo import genesis
from grailnode.engine.model_check import check_model
from grailnode.engine.policy import Policy, PolicyError
from protocol.quantization import is_matrix
from tests.support.builders.families import FAMILIES, Family, difference, write_family
from tests.support.builders.policies import write_policy
from tests.support.processes.command_line import run_command

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LARGEST_DIFFERENCE = 2e-5
"""Of logits of a few units, by the order of float32 additions; measured: 4e-6."""

TABLES = re.compile(r"embed|wte|wpe|lm_head|\.gate\.weight$")
"""What a quantized run leaves in BF16: embeddings, output projections, routers."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exact_and_accepted(name: str, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    assert {way: difference(family, way) < LARGEST_DIFFERENCE for way in ("full", "padded", "cached")} == {
        "full": True,
        "padded": True,
        "cached": True,
    }
    check_model(family.policy)
    tables = [name for name, shape in family.model.shapes.items() if len(shape) == 2 and not is_matrix(name, shape)]
    assert [name for name in tables if not TABLES.search(name)] == []
    assert any(is_matrix(name, shape) for name, shape in family.model.shapes.items())


def test_the_page_lists_the_families() -> None:
    listed = re.findall(r"^\| (\w+) \| \d", MODELS_PAGE.read_text(), flags=re.MULTILINE)
    assert listed == sorted(FAMILIES)


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
        prefix = "model.layers.0.mlp.experts."
        fused = parameters[prefix + "gate_up_proj"].grad
        gates = "model.layers.0.mlp.experts.2.gate_proj.weight"
        own = weights.get(gates, weights.get("model.layers.0.block_sparse_moe.experts.2.w1.weight"))
        assert own is not None
        assert own.grad is not None
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


def _change_config(directory: Path, **changes: Any) -> Policy:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Policy.load(directory)


class TestRefusals:
    """What cannot work is refused with a reason."""

    def test_tensors_that_are_not_the_model_s(self, tmp_path: Path) -> None:
        policy = write_policy(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.layers.0.self_attn.q_bias"] = weights.pop("model.layers.0.self_attn.q_proj.weight")
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(PolicyError, match=r"1 missing: model\.layers\.0\.self_attn\.q_proj\.weight; 1 unknown"):
            check_model(policy)

    def test_a_shape_that_is_not_the_config_s(self, tmp_path: Path) -> None:
        write_policy(tmp_path)
        with pytest.raises(PolicyError, match=r"has shape \[32, 48\], and config\.json says \[32, 50\]"):
            check_model(_change_config(tmp_path, intermediate_size=50))

    def test_an_unknown_architecture(self, tmp_path: Path) -> None:
        write_policy(tmp_path)
        with pytest.raises(PolicyError, match="transformers cannot build this model"):
            check_model(_change_config(tmp_path, model_type="unheard_of"))

    def test_a_mixture_whose_files_this_program_does_not_know(self, tmp_path: Path) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

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
        with pytest.raises(PolicyError, match=r"missing: .*docs/models\.md"):
            check_model(Policy.load(tmp_path))

    def test_init_refuses_and_writes_nothing(self, tmp_path: Path) -> None:
        policy = tmp_path / "policy"
        write_policy(policy)
        _change_config(policy, intermediate_size=50)
        result = run_command("init", str(tmp_path / "run"), "--policy", str(policy))
        assert result.returncode == 1
        assert "config.json says [32, 50]" in result.stderr
        assert not (tmp_path / "run").exists()
