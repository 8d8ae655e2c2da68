"""The embedding of a transformers model, whose table a trainer's weights look up themselves: never rounded as a whole,
and without a gradient of the whole table (roles/policy/layer_weights.py).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from roles.policy.layer_weights import TableWeights


class TableLookup(nn.Module):
    """An embedding that reads its table from `weights` where there are some; the parameter keeps its name.

    Args:
        embedding: whose parameter it takes over.
        name: of the table in the files.

    Attributes:
        weights: set while a model computes with weights that look up a table themselves; None for the parameter.
    """

    def __init__(self, embedding: nn.Embedding, name: str) -> None:
        super().__init__()
        self.weight = embedding.weight
        object.__setattr__(self, "_embedding", embedding)  # not registered as a child
        self._name = name
        self.weights: TableWeights | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the embedding that is none of this wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_embedding"), name)

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table, as the embedding does: [..., D] for ids int64 [...]."""
        embedding = object.__getattribute__(self, "_embedding")
        if self.weights is None:
            result: Tensor = functional_call(embedding, {"weight": self.weight}, (ids,))
            return result
        rows = self.weights.rows(self._name, ids)
        if embedding.padding_idx is not None:  # that row has no gradient
            rows = torch.where((ids == embedding.padding_idx)[..., None], rows.detach(), rows)
        scale = getattr(embedding, "embed_scale", None)
        return rows if scale is None else rows * scale.to(rows.dtype)


def insert_lookup(module: Any, name: str) -> TableLookup | None:
    """Replace a model's embedding by a lookup; None if it computes something else.

    Args:
        name: of the table in the files.
    """
    embedding = module.get_input_embeddings()
    is_scaled = isinstance(getattr(embedding, "embed_scale", None), Tensor)  # Gemma's
    if not (is_scaled or type(embedding) is nn.Embedding):
        return None
    path = next(path for path, child in module.named_modules() if child is embedding)
    lookup = TableLookup(embedding, name)
    module.set_submodule(path, lookup)
    return lookup
