"""Groups for a trainer that nobody mined."""

from roles.trainer.verified_batch import VerifiedBatch, VerifiedGroup

GROUPS = 2


def _packed(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def harvest(number: int, version: int) -> VerifiedBatch:
    """Two groups of two rollouts, one right and one wrong; digests as they would be."""
    groups = tuple(
        VerifiedGroup(
            digest=bytes([number, place]) * 16,
            prompt=_packed(4, 13),
            completions=(_packed(3 + (number + place) % 10, 1), _packed(9, 1)),
            logprobs=b"\0\0\0\xbf" * 4,  # -0.5 each
            rewards=(1.0, 0.0),
        )
        for place in range(GROUPS)
    )
    return VerifiedBatch(window=number, version=version, miner=bytes(32), groups=groups)
