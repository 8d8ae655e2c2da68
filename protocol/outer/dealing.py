"""Which site trains on which verified group in a round (docs/spec/outer-round.md)."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

_DOMAIN: Final = b"grailnode/1 deal"

DELAYED_TURN: Final = 4
"""Rounds with a delay that deal groups alike."""


def turn_of(number: int, delay: int) -> int:
    """Return the turn in which the groups of a round are dealt: the round itself, or with a delay some rounds together.

    Args:
        number: of the round; delay: of its rules.
    """
    return number // DELAYED_TURN if delay else number


def owner(run: bytes, turn: int, group: bytes, workers: Sequence[bytes]) -> bytes:
    """Return the key of the worker to which a group belongs in a turn.

    The worker with the lowest hash owns it, so a worker that joins or leaves moves only its own share.

    Args:
        run: the run's id; turn: of the round (`turn_of`); group: digest of the group.
        workers: of the manifest that opened the round; at least one.
    """
    prefix = sha256(_DOMAIN + run + turn.to_bytes(8, "little") + group)

    def rank(worker: bytes) -> bytes:
        hasher = prefix.copy()
        hasher.update(worker)
        return hasher.digest()

    return min(workers, key=rank)
