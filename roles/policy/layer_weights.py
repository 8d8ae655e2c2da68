"""Weights that are complete only while a part of the model is computed with them.

A model computes its parts through `compute_part`. With plain weights that is a call; weights that lie on several
devices are gathered for it, and for its backward pass, and are freed behind it.

It reads the largest weight, the table of the vocabulary, through `look_up` and by `TableWeights.product`. With plain
weights these are torch's own operations; weights of a trainer compute them without a gradient of the whole table
beside the one in which gradients add up.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


class PartialWeights(Mapping[str, Tensor]):
    """Weights by name. Those of a part can be read while `within` computes the part, and not at other times."""

    @abstractmethod
    def within(self, prefix: str, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return `compute(*arguments, **options)`, with the weights of a part at hand, whose names begin with a prefix;
        it is empty for those of no layer, which stay until the backward pass is over.
        """


def compute_part(
    weights: Mapping[str, Tensor], prefix: str, compute: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Return `compute(*arguments, **options)`, which reads the weights that begin with `prefix`, or are at hand."""
    if isinstance(weights, PartialWeights):
        return weights.within(prefix, compute, *arguments, **options)
    return compute(*arguments, **options)


class TableWeights(Mapping[str, Tensor]):
    """Weights by name, that compute what a model needs of the table of its vocabulary."""

    @abstractmethod
    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return rows of a table [V, D]: [..., D] for ids int64 [...]."""

    @abstractmethod
    def product(self, name: str, states: Tensor) -> Tensor:
        """Return the product of states [..., D] with each row of a table [V, D]: float32 [..., V]."""


def look_up(weights: Mapping[str, Tensor], name: str, ids: Tensor) -> Tensor:
    """Return rows of a table [V, D]: [..., D] for ids int64 [...]."""
    return weights.rows(name, ids) if isinstance(weights, TableWeights) else functional.embedding(ids, weights[name])
