"""Verified groups for tests of learning."""

import hashlib
from collections.abc import Sequence

import torch

from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders.verified_batches import make_group


def group(
    name: object,
    version: int = 0,
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    completions: Sequence[tuple[int, ...]] = ((3, 1), (4, 1)),
    rewards: Sequence[float] = (1.0, 0.0),
) -> VerifiedGroup:
    """Return a group whose digest is that of its name."""
    logprobs = [torch.full((len(tokens),), -1.0 - index) for index, tokens in enumerate(completions)]
    return make_group(hashlib.sha256(str(name).encode()).digest(), version, prompt, completions, logprobs, rewards)
