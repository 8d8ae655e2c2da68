"""Training groups for tests."""

import hashlib
from collections.abc import Sequence

import torch

from roles.trainer.learn.replay_buffer import TrainingGroup


def group(
    name: object,
    version: int = 0,
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    completions: Sequence[tuple[int, ...]] = ((3, 1), (4, 1)),
    rewards: Sequence[float] = (1.0, 0.0),
) -> TrainingGroup:
    """A group whose digest is that of its name."""
    return TrainingGroup(
        digest=hashlib.sha256(str(name).encode()).digest(),
        miner=b"m" * 32,
        window=version,
        version=version,
        prompt=prompt,
        completions=tuple(completions),
        logprobs=tuple(torch.full((len(tokens),), -1.0 - index) for index, tokens in enumerate(completions)),
        rewards=tuple(rewards),
    )
