"""The Qwen3 of this repository equals transformers' Qwen3."""

from pathlib import Path

import pytest
import torch

from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from tests.support.builders.policies import RECIPE, random_weights, write_policy


def _pair(directory: Path, **changes: object) -> tuple[Qwen3, TransformersModel]:
    own = build(write_policy(directory, **changes))
    assert isinstance(own, Qwen3)
    return own, TransformersModel(directory)


@pytest.mark.parametrize("tied", [True, False])
def test_equal_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    own, theirs = _pair(tmp_path, tie_word_embeddings=tied)
    assert own.shapes == theirs.shapes
    assert own.vocabulary == theirs.vocabulary
    weights = {name: tensor.to(torch.float32) for name, tensor in random_weights(own).items()}
    ids = torch.randint(0, own.vocabulary, (6, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:3, :4] = False  # left padding
    with torch.inference_mode():
        states = own.hidden(weights, ids, mask), theirs.hidden(weights, ids, mask)
        assert torch.equal(states[0][mask], states[1][mask])
        logits = own.logits(weights, states[0]), theirs.logits(weights, states[1])
        assert torch.equal(logits[0][mask], logits[1][mask])


def test_equal_with_a_cache(tmp_path: Path) -> None:
    own, theirs = _pair(tmp_path)
    weights = {name: tensor.to(torch.float32) for name, tensor in random_weights(own).items()}
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
    own, theirs = _pair(tmp_path)
    ids = torch.randint(0, own.vocabulary, (4, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(4, 7, dtype=torch.bool)
    gradients = []
    for model in (own, theirs):
        weights = {n: t.to(torch.float32).requires_grad_() for n, t in random_weights(own).items()}
        loss = model.logits(weights, model.hidden(weights, ids, mask)).logsumexp(-1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append({name: weight.grad for name, weight in weights.items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_transformers_reads_the_directory(tmp_path: Path) -> None:
    """A policy directory is a Hugging Face checkpoint: transformers' own loader gives the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = build(write_policy(tmp_path))
    weights = {name: tensor.to(torch.float32) for name, tensor in load_weights(tmp_path).items()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    prompt = Policy.load(tmp_path).tokenizer.encode("57+68=")
    assert tuple(tokenizer.encode("57+68=")) == prompt
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        states = own.hidden(weights, ids, torch.ones_like(ids, dtype=torch.bool))
        assert torch.equal(module(ids).logits, own.logits(weights, states))


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


def test_another_architecture_is_computed_by_transformers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model = build(write_policy(tmp_path, **config))
    assert isinstance(model, TransformersModel)
    assert "model.layers.0.self_attn.q_proj.weight" in model.shapes
