"""A model computed under other padding than the engine's own: what an engine with static shapes, or of another kind, does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from grailnode.engine.model import Cache, CausalModel

Side = Literal["left", "right"]


@dataclass
class _PaddedCache:
    """A model's cache that begins with `extra` columns of pads."""

    inner: Cache
    extra: int = 0

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.inner.keep(rows)


class Padded:
    """A CausalModel (grailnode/engine/model.py) that computes another's values with its pads elsewhere.

    Args:
        model: what is computed.
        side: where the pads of a prefill stand. Generation has them on the left, where it goes on from the last column.
        multiple: the width of a batch is rounded up to a multiple of this.
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

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Final hidden states [B, S, D]; rows at pads mean nothing."""
        if cache is not None:
            return self._going_on(weights, ids, mask, cache)
        extra = -ids.shape[1] % self._multiple
        ids, mask = torch.nn.functional.pad(ids, (0, extra)), torch.nn.functional.pad(mask, (0, extra))
        order = mask.long().argsort(dim=1, descending=self._side == "right", stable=True)
        states = self._model.hidden(weights, ids.gather(1, order), mask.gather(1, order))
        back = order.argsort(dim=1)[..., None].expand_as(states)
        return states.gather(1, back)[:, : ids.shape[1] - extra]

    def _going_on(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: _PaddedCache) -> Tensor:
        """Generation: the first call brings the prompts, which get the extra pads; they stay in the cache."""
        new = ids.shape[1]
        if mask.shape[1] == new:
            cache.extra = -new % self._multiple
            ids = torch.nn.functional.pad(ids, (cache.extra, 0))
        mask = torch.nn.functional.pad(mask, (cache.extra, 0))
        return self._model.hidden(weights, ids, mask, cache.inner)[:, -new:]

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Output projection: float32 [..., V]."""
        return self._model.logits(weights, hidden)
