"""Other rounding than this machine's: errors as GPUs have them, an int8 key-value cache, and weights in float8."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grailnode.engine.qwen3 import KeyValueCache, Qwen3
from protocol.digest import Weights
from roles.policy.causal_model import CausalModel
from tests.support.measuring.wrapped_model import WrappedModel


@dataclass(frozen=True)
class RoundingErrors:
    """Independent normal errors of each value that a node computes.

    Attributes:
        hidden: their standard deviation in hidden states, relative to the value.
        logits: their standard deviation in logits, in logits.
    """

    hidden: float = 0.0
    logits: float = 0.0


class Inaccurate(WrappedModel):
    """A model that is computed with errors.

    Args:
        model: the model that is computed.
        errors: the size of the errors.
        seed: of the errors; those of two calls are independent.
    """

    def __init__(self, model: CausalModel, errors: RoundingErrors, seed: int) -> None:
        super().__init__(model)
        self.exact = False
        self._errors = errors
        self._generator = torch.Generator().manual_seed(seed)

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        states = self._model.hidden(weights, ids, mask, cache)
        return (states * (1.0 + self._errors.hidden * self._normal(states))).to(states.dtype)

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        logits = self._model.logits(weights, hidden)
        return logits + self._errors.logits * self._normal(logits)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator)


class _Int8Cache(KeyValueCache):
    """Keys and values rounded to 8 bits, with a scale for each token and head."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().extend(layer, _to_int8(keys), _to_int8(values))

    def select(self, rows: Tensor) -> "_Int8Cache":
        return _Int8Cache({layer: (k[rows], v[rows]) for layer, (k, v) in self._layers.items()})


def _to_int8(values: Tensor) -> Tensor:
    wide = values.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    return ((wide / scale).round() * scale).to(values.dtype)


class Int8CacheQwen3(Qwen3):
    """Qwen3 with a key-value cache of 8 bits."""

    def cache(self) -> KeyValueCache:
        return _Int8Cache()


def to_fp8(weights: Weights) -> dict[str, Tensor]:
    """Return the weights with each matrix but the embedding rounded to float8 (e4m3), with a scale for each row."""
    return {
        name: _rows_to_fp8(tensor) if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name else tensor
        for name, tensor in weights.items()
    }


def _rows_to_fp8(matrix: Tensor) -> Tensor:
    wide = matrix.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 448.0
    return ((wide / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).to(matrix.dtype)
