"""A model computed with other padding than the engine's own, as other engines and engines with static shapes do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from roles.policy.causal_model import Cache, CausalModel

Side = Literal["left", "right"]


class WrappedModel:
    """A CausalModel (roles/policy/causal_model.py) that computes another one. Subclasses override what differs."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.shapes, self.layers = model.shapes, model.layers
        self.vocabulary, self.exact = model.vocabulary, model.exact

    def cache(self) -> Any:
        return self._model.cache()

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        return self._model.hidden(weights, ids, mask, cache)

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return self._model.logits(weights, hidden)


@dataclass
class _PaddedCache:
    """A model's cache, and the mask of its columns including pads: bool [B, P]."""

    inner: Cache
    mask: Tensor | None = None

    def select(self, rows: Tensor) -> "_PaddedCache":
        return _PaddedCache(self.inner.select(rows), None if self.mask is None else self.mask[rows])


class Padded(WrappedModel):
    """A model that is computed with pads at other places.

    Args:
        multiple: the width of every call is rounded up to a multiple of this, except for single tokens.
    """

    def __init__(self, model: CausalModel, side: Side, multiple: int = 1) -> None:
        super().__init__(model)
        self._side = side
        self._multiple = multiple

    def cache(self) -> _PaddedCache:
        return _PaddedCache(self._model.cache())

    def hidden(
        self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: _PaddedCache | None = None
    ) -> Tensor:
        new, before = ids.shape[1], None if cache is None else cache.mask
        extra = 0 if new == 1 and before is not None else -new % self._multiple
        side = self._side if cache is None or before is not None else "left"
        ids, own = functional.pad(ids, (0, extra)), functional.pad(mask[:, -new:], (0, extra))
        order = own.long().argsort(dim=1, descending=side == "right", stable=True)
        ids, own = ids.gather(1, order), own.gather(1, order)
        whole = own if before is None else torch.cat([before, own], dim=1)
        if cache is None:
            states = self._model.hidden(weights, ids, whole)
        else:
            states, cache.mask = self._model.hidden(weights, ids, whole, cache.inner), whole
        back = order.argsort(dim=1)[..., None].expand_as(states)
        return states.gather(1, back)[:, :new]
