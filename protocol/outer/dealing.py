"""Which site trains on which verified group in a round (docs/spec/outer-round.md)."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

_DOMAIN: Final = b"grailnode/1 deal"


def owner(run: bytes, number: int, group: bytes, workers: Sequence[bytes]) -> bytes:
    """Return the key of the worker to which a group belongs in a round.

    The worker with the lowest hash owns it, so a worker that joins or leaves moves only its own share.

    Args:
        run: the run's id; number: of the round; group: digest of the group.
        workers: of the manifest that opened the round; at least one.
    """
    prefix = sha256(_DOMAIN + run + number.to_bytes(8, "little") + group)

    def rank(worker: bytes) -> bytes:
        hasher = prefix.copy()
        hasher.update(worker)
        return hasher.digest()

    return min(workers, key=rank)
