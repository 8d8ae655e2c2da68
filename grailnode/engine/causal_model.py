"""The interface between a model and its users (the torch engine, the trainer): pure functions of its weights.

Two implementations: `qwen3.Qwen3` (in this repository, without importing transformers) and `hf.TransformersModel` (any
causal language model that transformers supports). docs/log.md has the measurements.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from grailnode.engine.policy import Policy, PolicyError
from protocol.lora import LoraSpec
from roles.ports import EngineError


class Cache(Protocol):
    """Keys and values of the tokens computed so far, one row for each sequence."""

    def select(self, rows: Tensor) -> "Cache":
        """Return a cache of these rows: int64 [B'], indices into the rows of this one; an index may occur more than
        once.
        """


class CausalModel(Protocol):
    """A causal language model whose weights are an argument: a new policy version needs no new model."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors of the weights, by name. A tied tensor occurs once."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The prefixes of the weights that `hidden` reads in parts (roles/policy/layer_weights.py)."""

    @property
    def exact(self) -> bool:
        """Whether it computes in exact arithmetic (docs/spec/numerics.md)."""

    @property
    def vocabulary(self) -> int:
        """V, the number of rows of the output projection."""

    def cache(self) -> Cache:
        """Return an empty cache."""

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Compute the final hidden states, after the last norm.

        Args:
            weights: tensors of `shapes`, one dtype, one device; gradients flow to them.
            ids: int64 [B, S], tokens that follow those in the cache.
            mask: bool [B, P + S], False at pads; P tokens are in the cache. A token's position counts real tokens only.
            cache: from `cache()`; this call appends S tokens to it. None: no later call needs these tokens.

        Returns:
            [B, S, D] in the weights' dtype; rows at pads are meaningless.
        """

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Compute the output projection: float32 [..., V] from [..., D]."""


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
    from grailnode.engine.qwen3 import Qwen3, Qwen3Config  # noqa: PLC0415

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
    from grailnode.engine.qwen3 import Qwen3Config  # noqa: PLC0415

    config = Qwen3Config.of(policy.config)
    if config is None:
        raise PolicyError(
            f"{policy.directory}: exact numerics cover plain Qwen3, and this is {policy.config.get('model_type')!r}; "
            "create the run with --numerics calibrated"
        )
    from grailnode.engine.exact_qwen3 import ExactQwen3  # noqa: PLC0415 - numba takes half a second to import

    return ExactQwen3(config)
