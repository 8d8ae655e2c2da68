"""Verified groups and batches for a trainer, made without miners and validators."""

from collections.abc import Sequence

from torch import Tensor

from protocol.rollout.batch import Turn, pack_tokens
from roles.ports import ObjectStore
from roles.trainer.spool import INBOX
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


async def put_batch(state: ObjectStore, number: int, version: int = 0) -> VerifiedBatch:
    """Put the batch of a number into a trainer's inbox, as a collector does, and return it."""
    batch = verified_batch(number, version)
    await state.put(f"{INBOX}{number:010d}-x", batch.to_bytes())
    return batch
