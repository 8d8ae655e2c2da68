"""Predicts hidden states without computing them, for sketches by a miner that has learned from honest ones.

The features of a position are cheap: the embeddings of the last tokens and of the token that is generated, the mean
embedding of all tokens before, and the index of the position. A ridge regression or a small network maps them to the
final hidden state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Predictor = Callable[[Tensor], Tensor]
"""Maps features float32 [T, F] to hidden states float32 [T, D]."""

_LAST_TOKENS = 4
_RIDGE = 1.0
_HIDDEN_UNITS = 256
_STEPS = 300
_BATCH = 256


@dataclass(frozen=True)
class Examples:
    """Features float32 [T, F], and their hidden states float32 [T, D]."""

    features: Tensor
    states: Tensor


def features(embedding: Tensor, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the features float32 [T, F] of the T states from which a completion's tokens were sampled."""
    vectors = embedding[torch.tensor([*prompt, *completion])].to(torch.float32)
    input_vectors, output_vectors = vectors[:-1], vectors[1:]
    delayed_vectors = [
        functional.pad(input_vectors, (0, 0, back, 0))[: len(input_vectors)] for back in range(_LAST_TOKENS)
    ]
    places = torch.arange(1, len(input_vectors) + 1, dtype=torch.float32)[:, None]
    mean = input_vectors.cumsum(0) / places
    waves = torch.cat([torch.sin(places / 4.0**k) for k in range(6)], dim=1)
    return torch.cat([output_vectors, *delayed_vectors, mean, waves, torch.ones_like(places)], dim=1)[len(prompt) - 1 :]


def ridge(examples: Examples) -> Predictor:
    """Fit a linear map by least squares with an L2 penalty, in closed form."""
    x, y = examples.features.double(), examples.states.double()
    gram = x.T @ x + _RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    matrix: Tensor = torch.linalg.solve(gram, x.T @ y).float()
    return lambda rows: rows @ matrix


def network(examples: Examples, seed: int = 0) -> Predictor:
    """Fit a network with one hidden layer to the residuals of the ridge regression."""
    generator = torch.Generator().manual_seed(seed)
    base = ridge(examples)
    residuals = examples.states - base(examples.features)
    count, width = examples.features.shape
    scale = examples.features.std(dim=0).clamp_min(1e-3)
    weights = [
        torch.randn(width, _HIDDEN_UNITS, generator=generator) / width**0.5,
        torch.zeros(_HIDDEN_UNITS),
        torch.zeros(_HIDDEN_UNITS, examples.states.shape[1]),
    ]
    for tensor in weights:
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=2e-3)

    def correction(rows: Tensor) -> Tensor:
        residual: Tensor = functional.gelu((rows / scale) @ weights[0] + weights[1]) @ weights[2]
        return residual

    for _ in range(_STEPS):
        indices = torch.randint(count, (_BATCH,), generator=generator)
        loss = (correction(examples.features[indices]) - residuals[indices]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def predict(rows: Tensor) -> Tensor:
        with torch.inference_mode():
            return base(rows) + correction(rows)

    return predict
