"""Base and adapters compute what PEFT computes, and models that have no place for an adapter are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grailnode.engine.lora_model import LoraModel, adapter_files, initial_adapters, merged_weights, read_adapters
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, PolicyError, load_weights
from grailnode.run.base_files import lora_spec
from protocol.digest import digest_weights
from protocol.lora import DOWN, PREFIX, UP, LoraSpec
from tests.support.builders.families import write_family
from tests.support.builders.policies import write_policy

RANK, ALPHA = 4, 10.0
TARGETS = {"phi3": ("down_proj", "qkv_proj"), "gpt_neox": ("dense_4h_to_h", "query_key_value")}
IDS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
REAL = torch.ones_like(IDS, dtype=torch.bool)


def spec_of(policy: Policy, *targets: str, rank: int = RANK) -> LoraSpec:
    return lora_spec(load_weights(policy.directory), rank, ALPHA, targets)


def adapted(
    policy: Policy, *targets: str, dtype: torch.dtype = torch.float32, recompute: bool = False
) -> tuple[LoraSpec, LoraModel, dict[str, Tensor]]:
    """Return the specification of adapters of some modules, the policy's model with them, and random adapters."""
    base, generator, lora = load_weights(policy.directory), torch.Generator().manual_seed(3), spec_of(policy, *targets)
    model = LoraModel(build(policy, lora=lora, recompute=recompute), base, dtype=dtype)
    adapters = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in model.shapes.items()}
    return lora, model, {name: tensor.to(torch.bfloat16) for name, tensor in adapters.items()}


def wide(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in adapters.items()}


@contextmanager
def hooked(reference: torch.nn.Module, adapters: dict[str, Tensor], scale: float) -> Iterator[None]:
    """Add adapters to transformers' own model, in the textbook's words: h = W x + (alpha / r) B A x."""
    hooks = []
    for name in (name for name in adapters if name.endswith(DOWN)):
        down, up = adapters[name].to(torch.float32), adapters[name.removesuffix(DOWN) + UP].to(torch.float32)

        def add(_: object, inputs: tuple[Tensor], output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
            return output + (inputs[0] @ down.T) @ up.T * scale

        module = reference.get_submodule(name.removeprefix(PREFIX).removesuffix(DOWN))
        hooks.append(module.register_forward_hook(add))
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "phi3", "gpt_neox", "mixtral"])
def test_adapters_compute_what_hooks_in_transformers_compute(name: str, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    lora, model, adapters = adapted(family.policy, *TARGETS.get(name, ("o_proj", "q_proj")))
    with torch.inference_mode(), hooked(family.reference, adapters, lora.scale):
        expected = family.reference(IDS).logits
        own = model.logits(wide(adapters), model.hidden(wide(adapters), IDS, REAL))
        bare = family.model.logits(family.weights, family.model.hidden(family.weights, IDS, REAL))
        cache, states = model.cache(), []
        for begin, end in ((0, 12), *((at, at + 1) for at in range(12, 20))):
            states.append(model.hidden(wide(adapters), IDS[:, begin:end], REAL[:, :end], cache))
    assert float((own - expected).abs().max()) < 2e-5
    assert float((bare - expected).abs().max()) > 0.1
    cached = model.logits(wide(adapters), torch.cat(states, dim=1))
    assert float((cached - expected).abs().max()) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peft_reads_the_files_and_computes_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    family = write_family(tmp_path / "base", name)
    lora, model, adapters = adapted(family.policy, "q_proj", "down_proj", dtype=dtype)
    (tmp_path / "adapters").mkdir()
    for file, data in adapter_files(lora, adapters).items():
        (tmp_path / "adapters" / file).write_bytes(data)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype, local_files_only=True)
    reference = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"), autocast_adapter_dtype=False)
    for adapter in (value for key, value in reference.named_parameters() if "lora_" in key):
        adapter.data = adapter.data.to(dtype)
    with torch.inference_mode():
        expected = reference.eval().base_model.model.model(IDS).last_hidden_state
        own = model.hidden({name: tensor.to(dtype) for name, tensor in adapters.items()}, IDS, REAL)
    assert torch.equal(own, expected)


def test_the_first_adapters_change_nothing(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    _, model, _ = adapted(policy, "q_proj", "up_proj")
    adapters = initial_adapters(model.shapes)
    bare = build(policy).hidden(wide(load_weights(tmp_path)), IDS % 20, REAL)
    assert torch.equal(model.hidden(wide(adapters), IDS % 20, REAL), bare)
    assert digest_weights(adapters) == digest_weights(initial_adapters(model.shapes))
    assert all(bool((tensor != 0).any()) == name.endswith(DOWN) for name, tensor in adapters.items())


def test_files_come_back(tmp_path: Path) -> None:
    lora, _, adapters = adapted(write_policy(tmp_path), "v_proj")
    for file, data in adapter_files(lora, adapters).items():
        (tmp_path / file).write_bytes(data)
    assert digest_weights(read_adapters(tmp_path)) == digest_weights(adapters)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(PolicyError, match="cannot be read as safetensors"):
        read_adapters(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_flow_to_adapters_and_not_to_the_base(name: str, recompute: bool, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    lora, model, adapters = adapted(family.policy, "q_proj", "down_proj", recompute=recompute)
    leaves = {name: tensor.requires_grad_() for name, tensor in wide(adapters).items()}
    model.logits(leaves, model.hidden(leaves, IDS, REAL)).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    parameters = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    with hooked(family.reference, parameters, lora.scale):
        for parameter in family.reference.parameters():
            parameter.requires_grad_(False)
        family.reference(IDS).logits.logsumexp(-1).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert parameters[name].grad is not None
        torch.testing.assert_close(leaf.grad, parameters[name].grad, rtol=1e-3, atol=1e-4)


def test_merged_weights_are_nearly_the_same_function(tmp_path: Path) -> None:
    family = write_family(tmp_path, "qwen2")
    lora, model, adapters = adapted(family.policy, "q_proj", "down_proj")
    apart = model.hidden(wide(adapters), IDS, REAL)
    weights = merged_weights(family.weights, adapters, lora.scale)
    torch.testing.assert_close(family.model.hidden(weights, IDS, REAL), apart, rtol=1e-4, atol=1e-5)
    rounded = wide(merged_weights(load_weights(tmp_path), adapters, lora.scale))
    difference = float((family.model.hidden(rounded, IDS, REAL) - apart).abs().max())
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("qwen3", "lm_head", "target 'lm_head' is no linear module"),
        ("qwen2", "lm_head", "target 'lm_head' is no linear module"),
        ("qwen2", "embed_tokens", "they are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ("qwen3", "proj", "target 'proj' is no linear module"),
        ("qwen3_moe", "down_proj", "target 'down_proj' is no linear module"),
        ("gpt2", "c_attn", "they are: none"),
    ],
)
def test_targets_without_a_place_are_refused(family: str, target: str, message: str, tmp_path: Path) -> None:
    policy = write_family(tmp_path, family).policy
    with pytest.raises(PolicyError, match=message):
        build(policy, lora=spec_of(policy, target))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_rank_above_a_dimension_is_refused(family: str, tmp_path: Path) -> None:
    policy = write_family(tmp_path, family).policy
    build(policy, lora=spec_of(policy, "k_proj", rank=16))
    with pytest.raises(PolicyError, match=r"rank 17 is more than model.layers.0.self_attn.k_proj has \(16 x 32\)"):
        build(policy, lora=spec_of(policy, "k_proj", rank=17))


def test_a_base_with_other_tensors_is_refused(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    model, base = build(policy, lora=spec_of(policy, "q_proj")), load_weights(tmp_path)
    missing = {name: tensor for name, tensor in base.items() if name != "model.norm.weight"}
    for other in (missing, base | {"extra": torch.zeros(1)}, base | {"model.norm.weight": torch.zeros(3)}):
        with pytest.raises(PolicyError, match=r"the base's (extra|model\.norm\.weight) has shape"):
            LoraModel(model, other)
