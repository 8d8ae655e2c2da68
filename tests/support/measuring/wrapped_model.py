"""A model that computes another one, for tests and benches that change a part of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roles.policy.causal_model import CausalModel


class WrappedModel:
    """A CausalModel (roles/policy/causal_model.py) that computes another one. Subclasses override what differs."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.shapes, self.layers = model.shapes, model.layers
        self.vocabulary, self.exact = model.vocabulary, model.exact

    def cache(self) -> Any:
        return self._model.cache()

    def places(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return self._model.places(dtype, device)

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        return self._model.hidden(weights, ids, mask, cache)

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return self._model.logits(weights, hidden)
