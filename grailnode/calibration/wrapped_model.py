"""A model that computes another one in a slightly different way."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from roles.policy.causal_model import CausalModel


class WrappedModel:
    """A CausalModel (roles/policy/causal_model.py) that computes another one. Subclasses override what differs.

    Args:
        model: the model that is computed.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._model.shapes

    @property
    def exact(self) -> bool:
        return self._model.exact

    @property
    def layers(self) -> tuple[str, ...]:
        return self._model.layers

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    def cache(self) -> Any:
        return self._model.cache()

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        return self._model.hidden(weights, ids, mask, cache)

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return self._model.logits(weights, hidden)
