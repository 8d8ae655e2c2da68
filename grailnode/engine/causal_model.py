"""What the torch engine and the trainer ask of a model: pure functions of its weights.

Two implementations: `qwen3.Qwen3` (in this tree, no transformers import) and `hf.TransformersModel` (any causal
language model that transformers knows). docs/log.md says what was measured.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from grailnode.engine.policy import Policy


class Cache(Protocol):
    """Keys and values of the tokens seen so far, one row for each sequence."""

    def select(self, rows: Tensor) -> "Cache":
        """One that goes on with these rows, each as often as it is named: int64 [B'], indices into the rows held here."""


class CausalModel(Protocol):
    """A causal language model whose weights are an argument, so that a new policy is a new mapping and nothing is
    loaded.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that the weights have to hold, by name. A tied tensor is named once."""

    @property
    def vocabulary(self) -> int:
        """V: rows of the output projection."""

    def cache(self) -> Cache:
        """An empty cache."""

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Final hidden states, after the last norm.

        Args:
            weights: tensors of `shapes`, one dtype, one device; gradients flow to them.
            ids: int64 [B, S], tokens that follow those in the cache.
            mask: bool [B, P + S], False at pads; P tokens are in the cache. A token's position counts real tokens only.
            cache: from `cache()`, grown by S tokens; None where nothing comes after.

        Returns:
            [B, S, D] in the weights' dtype; rows at pads mean nothing.
        """

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Output projection: float32 [..., V] from [..., D]."""


def build(policy: Policy, device: torch.device | None = None) -> CausalModel:
    """The model of a policy's config.json. No weights are read.

    transformers is imported only where the in-tree Qwen3 does not cover the config: it costs seconds of every start.

    Raises:
        PolicyError: transformers does not know the architecture, or the config does not fit it.
    """
    from grailnode.engine.qwen3 import Qwen3, Qwen3Config  # noqa: PLC0415

    config = Qwen3Config.of(policy.config)
    if config is not None:
        return Qwen3(config, device)
    from grailnode.engine.hf import TransformersModel  # noqa: PLC0415

    return TransformersModel(policy.directory, device)
