"""The challenge: seeds, sketch projections and audits, derived from public randomness (docs/spec/window.md).

Every value is derived by BLAKE3 in key-derivation mode, with a context of its own, over length-prefixed parts. So no
two uses can be confused, and the miner can choose nothing.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from blake3 import blake3

from protocol.rollout.sampling import SEED_BYTES

_PPM: Final = 1_000_000
_CONTINUED_TOKENS: Final = 1024  # up to so many tokens, each rollout with a miss is continued


def _derive(context: str, parts: Sequence[bytes | int], length: int) -> bytes:
    hasher = blake3(derive_key_context=f"grailnode/1 {context}")
    for part in parts:
        data = part.to_bytes(8, "little") if isinstance(part, int) else part
        hasher.update(len(data).to_bytes(4, "little") + data)
    return hasher.digest(length=length)


def group_seed(run: bytes, window: int, randomness: bytes, miner: bytes, group: int) -> bytes:
    """Derive the 32-byte seed of a group, which determines its problem and the noise of its rollouts."""
    return _derive("group", (run, window, randomness, miner, group), 32)


def rollout_seed(group: bytes, index: int) -> bytes:
    """Derive the 16-byte noise seed of one rollout from the group's seed."""
    return _derive("rollout", (group, index), SEED_BYTES)


def episode_seed(group: bytes, index: int) -> bytes:
    """Derive the 32-byte seed of an environment's randomness in a rollout; for evaluations, from seed and index 0."""
    return _derive("episode", (group, index), 32)


def sketch_seed(run: bytes, window: int, randomness: bytes) -> bytes:
    """Derive the 32-byte seed of a window's sketches."""
    return _derive("sketch", (run, window, randomness), 32)


def evaluation_seed(run: bytes, version: int, problem: int, sample: int) -> bytes:
    """Derive the 16-byte noise seed of a completion in an evaluation: all validators draw the same completions."""
    return _derive("evaluation", (run, version, problem, sample), SEED_BYTES)


def stream(seed: bytes, context: str, length: int) -> bytes:
    """Expand a seed into `length` pseudorandom bytes."""
    return _derive(context, (seed,), length)


def audit_indices(
    run: bytes,
    window: int,
    randomness: bytes,
    miner: bytes,
    *,
    groups: int,
    share_ppm: int,
    dealt: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Select the groups of a miner's batch that a validator audits by the randomness of round R1; return their indices
    in ascending order. At least one of the groups that are `dealt` to it is selected; None for all.
    """
    count = max(1, -(-groups * share_ppm // _PPM))
    ranks = sorted(
        range(groups), key=lambda group: (_derive("audit", (run, window, randomness, miner, group), 16), group)
    )
    own = [(place, group) for place, group in enumerate(ranks) if dealt is None or group in dealt]
    return tuple(sorted(group for number, (place, group) in enumerate(own) if place < count or number == 0))


def continued_rollouts(
    run: bytes, window: int, randomness: bytes, miner: bytes, group: int, *, size: int, max_tokens: int
) -> tuple[int, ...]:
    """Select the rollouts of a group that a validator continues if they miss, by R1's randomness; return their indices
    in ascending order. They are all of `size` up to 1,024 tokens, and of longer ones as many as have these tokens, or
    one. A selection of misses instead would let a miner hide misses that gain among misses that do not.
    """
    ranks = sorted(range(size), key=lambda index: _derive("luck", (run, window, randomness, miner, group, index), 16))
    return tuple(sorted(ranks[: max(1, size * _CONTINUED_TOKENS // max_tokens)]))


def continues_all(max_tokens: int) -> bool:
    """Return whether `continued_rollouts` selects all rollouts of at most so many tokens, by any randomness."""
    return max_tokens <= _CONTINUED_TOKENS


def deal_order(
    run: bytes, window: int, randomness: bytes, miner: bytes, group: int, validators: Iterable[bytes]
) -> tuple[bytes, ...]:
    """Return validators in the order in which a group is dealt to them by R1's randomness: the first ones judge it.
    Each place follows from a hash of its own (Thaler, Ravishankar 1998, rendezvous hashing). So if one is left out, the
    next ones take its groups over, and no other group changes hands.
    """
    return tuple(
        sorted(
            validators,
            key=lambda validator: (_derive("deal", (run, window, randomness, miner, group, validator), 16), validator),
        )
    )
