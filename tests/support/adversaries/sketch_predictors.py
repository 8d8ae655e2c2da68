"""Guessing hidden states without computing them: what a sketch is worth against somebody who learned from honest ones.

Features of a position are what costs nothing: the embeddings of the last tokens and of the one that was drawn, the mean
embedding of all before, and the place. A ridge regression, or a small network, maps them to the final hidden state; the
real projection makes the sketch of that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Predictor = Callable[[Tensor], Tensor]
"""float32 [T, D] hidden states of float32 [T, F] features."""

_LAST = 4
_RIDGE = 1.0
_HIDDEN = 256
_STEPS = 300
_BATCH = 256


@dataclass(frozen=True)
class Examples:
    """Features float32 [T, F] with the hidden states float32 [T, D] that belong to them."""

    features: Tensor
    states: Tensor


def features(embedding: Tensor, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """float32 [T, F] for the T states from which a completion's tokens were drawn."""
    vectors = embedding[torch.tensor([*prompt, *completion])].to(torch.float32)
    seen, drawn = vectors[:-1], vectors[1:]
    shifted = [functional.pad(seen, (0, 0, back, 0))[: len(seen)] for back in range(_LAST)]
    places = torch.arange(1, len(seen) + 1, dtype=torch.float32)[:, None]
    mean = seen.cumsum(0) / places
    waves = torch.cat([torch.sin(places / 4.0**k) for k in range(6)], dim=1)
    return torch.cat([drawn, *shifted, mean, waves, torch.ones_like(places)], dim=1)[len(prompt) - 1 :]


def ridge(examples: Examples) -> Predictor:
    """Least squares with a penalty, in closed form."""
    x, y = examples.features.double(), examples.states.double()
    gram = x.T @ x + _RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    map_: Tensor = torch.linalg.solve(gram, x.T @ y).float()
    return lambda given: given @ map_


def network(examples: Examples, seed: int = 0) -> Predictor:
    """A network with one hidden layer on top of the ridge regression."""
    generator = torch.Generator().manual_seed(seed)
    base = ridge(examples)
    left = examples.states - base(examples.features)
    count, width = examples.features.shape
    scale = examples.features.std(dim=0).clamp_min(1e-3)
    weights = [
        torch.randn(width, _HIDDEN, generator=generator) / width**0.5,
        torch.zeros(_HIDDEN),
        torch.zeros(_HIDDEN, examples.states.shape[1]),
    ]
    for tensor in weights:
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=2e-3)

    def correction(given: Tensor) -> Tensor:
        learned: Tensor = functional.gelu((given / scale) @ weights[0] + weights[1]) @ weights[2]
        return learned

    for _ in range(_STEPS):
        rows = torch.randint(count, (_BATCH,), generator=generator)
        loss = (correction(examples.features[rows]) - left[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def predict(given: Tensor) -> Tensor:
        with torch.inference_mode():
            return base(given) + correction(given)

    return predict
