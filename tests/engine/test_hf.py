"""TransformersModel computes what transformers computes, and refuses architectures that it cannot compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grailnode.engine.hf import TransformersModel
from grailnode.engine.policy import PolicyError

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def write_config(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**SMALL, **config}))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "granite", "logits_scaling": 8.0},
        {"model_type": "cohere", "logit_scale": 0.0625},
        {"model_type": "mistral", "sliding_window": 8},
    ],
    ids=lambda config: config["model_type"],
)
def test_logits_equal_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    model = TransformersModel(write_config(tmp_path, **config))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in model.shapes.items()}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()  # type: ignore[no-untyped-call]
    theirs.load_state_dict(weights, strict=False)
    theirs.tie_weights()
    ids = torch.randint(3, 60, (2, 20), generator=generator)
    with torch.inference_mode():
        own = model.logits(weights, model.hidden(weights, ids, torch.ones_like(ids, dtype=torch.bool)))
        torch.testing.assert_close(own, theirs(ids).logits, rtol=0, atol=1e-4)


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
    with pytest.raises(PolicyError, match=reason):
        TransformersModel(write_config(tmp_path, **config))
