"""Verified groups and batches for a trainer, made without miners and validators."""

from collections.abc import Sequence

from torch import Tensor

from protocol.rollout.batch import pack_tokens
from protocol.rollout.episode import Turn
from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup

GROUPS = 2


def make_group(
    digest: bytes,
    version: int,
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Tensor],
    rewards: Sequence[float],
    turns: Sequence[Sequence[Turn]] = (),
) -> VerifiedGroup:
    """Return a group of these token ids and turns, with log-probabilities float32 [T] for each completion."""
    return VerifiedGroup(
        digest=digest,
        version=version,
        prompt=pack_tokens(prompt),
        completions=tuple(map(pack_tokens, completions)),
        logprobs=b"".join(values.detach().cpu().numpy().astype("<f4").tobytes() for values in logprobs),
        rewards=tuple(rewards),
        turns=tuple(tuple((count, pack_tokens(reply)) for count, reply in own) for own in turns),
    )


def verified_batch(number: int, version: int) -> VerifiedBatch:
    """Return two groups of two rollouts, one right and one wrong, whose digests depend on the number."""
    groups = tuple(
        VerifiedGroup(
            digest=bytes([number, place]) * 16,
            version=version,
            prompt=pack_tokens((4, 13)),
            completions=(pack_tokens((3 + (number + place) % 10, 1)), pack_tokens((9, 1))),
            logprobs=b"\0\0\0\xbf" * 4,  # -0.5 each
            rewards=(1.0, 0.0),
        )
        for place in range(GROUPS)
    )
    return VerifiedBatch(window=number, miner=bytes(32), groups=groups)
