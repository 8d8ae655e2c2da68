"""Tiny checkpoints of each family with random weights, written by transformers, so that the names in their files are
those of a real checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from roles.policy.causal_model import CausalModel
from tests.support.builders import genesis

_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING: Final = {"sliding_window": 8}
_MIXTURE: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {  # `model_type`, and what its config needs beside _SMALL
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "mixtral": _MIXTURE,
    "olmoe": _MIXTURE,
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": _SLIDING,
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 5.0, **_SLIDING},
    "gemma3_text": _SLIDING,
    "phi": {},
    "phi3": _SLIDING,
    "olmo2": {},
    "olmo3": _SLIDING,
    "granite": {"logits_scaling": 8.0},
    "smollm3": {},
    "gpt_neox": {},
    "gpt2": {},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625, **_SLIDING},
    "glm4": {},
    "lfm2": {},
}


@dataclass(frozen=True)
class Family:
    """A checkpoint: this program's model of it, its weights in float32, and transformers' own model."""

    policy: Policy
    model: CausalModel
    weights: dict[str, Tensor]
    reference: Any


def write_family(directory: Path, family: str) -> Family:
    """Write a tiny checkpoint of a family into a directory, and load it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_SMALL, **FAMILIES[family]})
    reference = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            parameter.copy_(parameter.to(torch.bfloat16))  # rounding the whole model would round its rotations too
    reference.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(genesis.tokenizer())
    policy = Policy.load(directory)
    weights = {name: tensor.to(torch.float32) for name, tensor in load_weights(directory).items()}
    return Family(policy, build(policy), weights, reference)


@torch.inference_mode()
def difference(family: Family, way: str) -> float:
    """Return the largest difference of a logit from transformers' own, computed without padding or cache.

    Args:
        way: "full", "padded" (four pads before the tokens of each row), "packed" (all rows as one) or "cached" (token
            by token after the first 12).
    """
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = family.reference(ids).logits
    model, weights = family.model, family.weights
    real = torch.ones_like(ids, dtype=torch.bool)
    if way == "full":
        own = model.logits(weights, model.hidden(weights, ids, real))
    elif way == "padded":
        padded = torch.cat([torch.zeros(2, 4, dtype=torch.int64), ids], dim=1)
        mask = torch.cat([torch.zeros(2, 4, dtype=torch.bool), real], dim=1)
        own = model.logits(weights, model.hidden(weights, padded, mask)[:, 4:])
    elif way == "packed":
        row = model.hidden(weights, ids.view(1, -1), torch.tensor([1, 2]).repeat_interleave(20)[None])
        own = model.logits(weights, row).view_as(expected)
    else:
        cache = model.cache()
        states = [model.hidden(weights, ids[:, :12], real[:, :12], cache)]
        states += [model.hidden(weights, ids[:, at : at + 1], real[:, : at + 1], cache) for at in range(12, 20)]
        own = model.logits(weights, torch.cat(states, dim=1))
    return float((own - expected).abs().max())
