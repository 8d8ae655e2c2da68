"""Chooses the model of a policy: `qwen3.Qwen3`, which does not need transformers; `hf.TransformersModel`, any other
causal language model of transformers; or `exact_qwen3.ExactQwen3` in exact arithmetic.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from grailnode.engine.policy import Policy, PolicyError
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.lora import LoraSpec
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError


def check_fit(model: CausalModel, weights: Mapping[str, Tensor]) -> None:
    """Check that weights are those of a model.

    Raises:
        EngineError: a tensor is missing, unknown or of another shape.
    """
    shapes = model.shapes
    if weights.keys() != shapes.keys():
        name = min(weights.keys() ^ shapes.keys())
        raise EngineError(f"{name}: {'unknown to the model' if name in weights else 'missing from the weights'}")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != shapes[name]:
            raise EngineError(f"{name}: shape {tuple(tensor.shape)} where the model has {shapes[name]}")


def build(
    policy: Policy, device: torch.device | None = None, *, recompute: bool = False, lora: LoraSpec | None = None
) -> CausalModel:
    """Return the model of a policy's config.json. No weights are read.

    Args:
        recompute: whether a backward pass computes each layer once more instead of keeping its activations.
        lora: where the weights have adapters beside a base (lora_model.py makes the base a part of the model).

    transformers is imported only if the Qwen3 of this repository does not cover the config: the import takes seconds.
    """
    config = Qwen3Config.of(policy.config)
    if config is not None:
        return Qwen3(config, device, recompute=recompute, lora=lora)
    from grailnode.engine.hf import TransformersModel  # noqa: PLC0415

    return TransformersModel(policy.directory, device, recompute=recompute, lora=lora)


def build_exact(policy: Policy) -> CausalModel:
    """Return the model of a policy's config.json in exact arithmetic, for a CPU (docs/spec/numerics.md).

    Raises:
        PolicyError: exact arithmetic does not cover the architecture.
    """
    config = Qwen3Config.of(policy.config)
    if config is None:
        raise PolicyError(
            f"{policy.directory}: exact numerics cover plain Qwen3, and this is {policy.config.get('model_type')!r}; "
            "create the run with --numerics calibrated"
        )
    from grailnode.engine.exact_qwen3 import ExactQwen3  # noqa: PLC0415 - numba takes half a second to import

    return ExactQwen3(config)
