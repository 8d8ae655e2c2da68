"""The interface between a model and its users (engines, the trainer, calibration): pure functions of its weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Cache(Protocol):
    """Keys and values of the tokens computed so far, one row for each sequence."""

    @property
    def is_complete(self) -> bool:
        """Whether each token has a column, so that `take` and `join` work: not if attention forgets tokens."""

    def select(self, rows: Tensor) -> Self:
        """Return a cache of these rows of this one: int64 [B'], an index may occur more than once."""

    def take(self, columns: Tensor) -> Self:
        """Return a cache of these columns of each row: int64 [B, P']."""

    def join(self, others: Sequence[Self]) -> Self:
        """Return a cache of all rows of this one and of others, with pads on the left up to the longest."""


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

    def places(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Return tensors for those weights that it would copy in each call if they lay elsewhere, by name, with any
        elements. A caller who keeps weights fills them, and adds the others to this very mapping.
        """

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Compute the final hidden states, after the last norm.

        Args:
            weights: tensors of `shapes`, one dtype, one device; gradients flow to them.
            ids: int64 [B, S], tokens that follow those in the cache.
            mask: bool [B, P + S], False at pads; P tokens are in the cache. A token's position counts real tokens only.
                Or int64 [1, S], without pads and cache: the number of each token's sequence, where several are packed
                into the row, one after another. No token sees another sequence.
            cache: from `cache()`; this call appends S tokens to it. None: no later call needs these tokens.

        Returns:
            [B, S, D] in the weights' dtype; rows at pads are meaningless.
        """

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Compute the output projection: float32 [..., V] from [..., D]."""
