"""Small weights and updates for the tests of this room."""

import numpy as np
import torch

Weights = dict[str, torch.Tensor]

SHAPES = {
    "model.embed.weight": (37, 96),
    "model.layers.0.attention.weight": (96, 130),
    "model.layers.0.norm.weight": (96,),
    "model.layers.1.conv.weight": (8, 3, 5),
    "scale": (),
}


def weights(seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None) -> Weights:
    """Return FP32 weights with some special numbers."""
    random = np.random.default_rng(seed)
    result = {}
    for name, shape in (shapes or SHAPES).items():
        values = np.asarray(random.standard_normal(shape) * 0.015, np.float32)
        flat = values.reshape(-1)
        special = np.array([0.0, -0.0, 1e-40, -1e-40, 1.0, 0.99999994, -2.0, 3e38], np.float32)[: flat.size // 8]
        flat[: special.size] = special
        result[name] = torch.from_numpy(values)
    return result


def updated(base: Weights, rate: float, seed: int = 1) -> Weights:
    """Return the weights after an update of a size."""
    random = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(tensor.numpy() - random.standard_normal(tensor.shape) * rate, np.float32))
        for name, tensor in base.items()
    }
