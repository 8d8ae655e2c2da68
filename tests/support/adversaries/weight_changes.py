"""Changes of weights: fewer layers, and the share of changed weights.

grailnode/calibration/procedure.py reduces the number of bits.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from protocol.patch.values import bits_of

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def count_layers(weights: Mapping[str, Tensor]) -> int:
    return 1 + max(int(match[1]) for name in weights if (match := _LAYER.match(name)))


def keep_layers(weights: Mapping[str, Tensor], layers: list[int]) -> dict[str, Tensor]:
    """Return the weights of a model with these layers alone, in this order."""
    index_of = {layer: index for index, layer in enumerate(layers)}
    shallow_weights = {}
    for name, tensor in weights.items():
        match = _LAYER.match(name)
        if match is None:
            shallow_weights[name] = tensor
        elif int(match[1]) in index_of:
            shallow_weights[f"model.layers.{index_of[int(match[1])]}.{name[match.end() :]}"] = tensor
    return shallow_weights


def changed_share(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Return the share of elements whose bits differ."""
    differing = sum(int((bits_of(old[name]) != bits_of(new[name])).sum()) for name in old)
    return differing / sum(tensor.numel() for tensor in old.values())
