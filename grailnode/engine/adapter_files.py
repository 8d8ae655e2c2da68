"""Adapters as a directory in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

The tensors are those of the chain, under the same names.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grailnode.engine.policy import PolicyError
from protocol.chain import safetensors
from protocol.digest import Weights
from protocol.lora import LoraSpec

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"


def adapter_files(lora: LoraSpec, adapters: Weights) -> dict[str, bytes]:
    """Return the files of a run's adapters by name. PEFT needs no more in the config than is here."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode(), WEIGHTS: safetensors.write(adapters)}


def read_adapters(directory: Path) -> dict[str, Tensor]:
    """Return the adapters of a directory: BF16, by PEFT's names.

    Raises:
        PolicyError: the file is missing, broken or of another dtype.
    """
    path = directory / WEIGHTS
    try:
        adapters = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path}: cannot be read as safetensors ({error}); `grailnode init` wrote it") from error
    for name, tensor in adapters.items():
        if tensor.dtype != torch.bfloat16:
            raise PolicyError(f"{path}: {name} has dtype {tensor.dtype}, and adapters of a run are BF16")
    return {name: adapters[name] for name in sorted(adapters)}
