"""A model computed under other padding than the engine's own: what an engine with static shapes, or of another kind,
does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from grailnode.engine.causal_model import Cache, CausalModel

Side = Literal["left", "right"]


@dataclass
class _PaddedCache:
    """A model's cache, and the mask of its columns, pads included: bool [B, P]."""

    inner: Cache
    mask: Tensor | None = None

    def select(self, rows: Tensor) -> "_PaddedCache":
        """One that goes on with these rows."""
        return _PaddedCache(self.inner.select(rows), None if self.mask is None else self.mask[rows])


class Padded:
    """A CausalModel (grailnode/engine/causal_model.py) that computes another's values with its pads elsewhere.

    Args:
        model: what is computed.
        side: where the pads stand, but for those of prompts that something follows: they are on the left.
        multiple: the width of what is computed at a time is rounded up to a multiple of this, but for single tokens.
    """

    def __init__(self, model: CausalModel, side: Side, multiple: int = 1) -> None:
        self._model = model
        self._side = side
        self._multiple = multiple

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor by name."""
        return self._model.shapes

    @property
    def vocabulary(self) -> int:
        """V."""
        return self._model.vocabulary

    def cache(self) -> _PaddedCache:
        """An empty cache."""
        return _PaddedCache(self._model.cache())

    def hidden(
        self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: _PaddedCache | None = None
    ) -> Tensor:
        """Final hidden states [B, S, D]; rows at pads mean nothing."""
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

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Output projection: float32 [..., V]."""
        return self._model.logits(weights, hidden)
