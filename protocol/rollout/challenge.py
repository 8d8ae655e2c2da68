"""What public randomness decides: seeds, projections, audits (docs/spec/window.md).

Everything is BLAKE3 in key-derivation mode with a context of its own, over length-prefixed parts, so that no two uses
can be confused and the miner chooses nothing.
"""

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from protocol.rollout.sampling import SEED_BYTES

_PPM: Final = 1_000_000


def _derive(context: str, parts: Sequence[bytes | int], length: int) -> bytes:
    hasher = blake3(derive_key_context=f"grailnode/1 {context}")
    for part in parts:
        data = part.to_bytes(8, "little") if isinstance(part, int) else part
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.digest(length=length)


def group_seed(run: bytes, window: int, randomness: bytes, miner: bytes, group: int) -> bytes:
    """The 32-byte seed of a group: names its problem, and its rollouts' noise."""
    return _derive("group", (run, window, randomness, miner, group), 32)


def rollout_seed(group: bytes, index: int) -> bytes:
    """The 16-byte noise seed of one rollout of a group."""
    return _derive("rollout", (group, index), SEED_BYTES)


def sketch_seed(run: bytes, window: int, randomness: bytes) -> bytes:
    """The 32-byte seed of a window's sketch projections."""
    return _derive("sketch", (run, window, randomness), 32)


def stream(seed: bytes, context: str, length: int) -> bytes:
    """`length` pseudorandom bytes of a seed."""
    return _derive(context, (seed,), length)


def audited(
    run: bytes, window: int, randomness: bytes, miner: bytes, *, groups: int, share_ppm: int
) -> tuple[int, ...]:
    """The group indices that a window's second round picks from a miner's batch, in ascending order.

    Args:
        randomness: of round R1.
        groups: how many the miner committed to.
        share_ppm: audited share in millionths; at least one group is picked where there is any.
    """
    return first_audited(run, window, randomness, miner, groups=groups, count=max(1, -(-groups * share_ppm // _PPM)))


def first_audited(
    run: bytes, window: int, randomness: bytes, miner: bytes, *, groups: int, count: int
) -> tuple[int, ...]:
    """The `count` groups (all, if there are fewer) that the second round would pick first, in ascending order."""
    ranks = sorted(
        range(groups), key=lambda group: (_derive("audit", (run, window, randomness, miner, group), 16), group)
    )
    return tuple(sorted(ranks[:count]))
