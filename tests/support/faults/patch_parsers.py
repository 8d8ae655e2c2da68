"""All parsers of patches, and patches for each of their code paths."""

from collections.abc import Callable

import torch

from protocol import patch
from protocol.digest import digest_weights

Weights = dict[str, torch.Tensor]


def corpus() -> dict[str, tuple[Weights, bytes]]:
    """Return weights and a patch for them, for each code path of the parsers."""
    rng = torch.Generator().manual_seed(1)
    masters = torch.randn((40, 64), generator=rng) * 0.0147
    newer = masters + torch.randn((40, 64), generator=rng) * 2e-5
    noise = [torch.randint(-(2**31), 2**31 - 1, (64,), generator=rng, dtype=torch.int64).int() for _ in range(2)]
    old, new = masters.bfloat16(), newer.bfloat16()
    cases: dict[str, tuple[Weights, Weights, str]] = {
        "compact": ({"a": old, "b": old.clone()}, {"a": new, "b": old.clone()}, "compact"),
        "fast": ({"a": old}, {"a": new}, "fast"),
        "raw_step_planes": ({"a": noise[0]}, {"a": noise[1]}, "compact"),
        "values": ({"a": masters}, {"a": torch.zeros_like(masters)}, "compact"),
        "steps": ({"a": masters}, {"a": newer}, "fast"),
        "small_changes": ({"a": old}, {"a": torch.where(torch.arange(64) < 63, old, new)}, "compact"),
        "bytes": ({"a": masters.to(torch.float8_e4m3fn)}, {"a": newer.to(torch.float8_e4m3fn)}, "compact"),
    }
    return {name: (a, patch.encode(a, b, profile=profile)) for name, (a, b, profile) in cases.items()}


def parsers(weights: Weights) -> dict[str, Callable[[bytes], object]]:
    """Return all functions that parse patches, by name, for a node with these weights."""
    return {
        "apply": lambda mutation: digest_weights(patch.apply(weights, mutation)),
        "summary": patch.summary,
        "stream": lambda mutation: patch.StreamingApply(weights).feed(mutation),
    }
