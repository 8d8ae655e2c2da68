"""What validators have promised to reveal, and to whom."""

from contextlib import suppress

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.signing import Signed, claimed_signers, open_signed
from protocol.judging.ledger import Seal, Witness
from roles.node.identity import Node
from roles.ports import NotFoundError


def open_seal(node: Node, window: int, validator: bytes, data: bytes) -> Signed[Seal]:
    """A validator's seal of a window.

    Raises:
        ProtocolError: it is not that.
    """
    seal = open_signed(data, Seal, [validator])
    if (seal.record.run, seal.record.window, seal.record.validator) != (node.run_id, window, validator):
        raise MalformedError("of another run, window or validator", "seal")
    return seal


async def find_seal(node: Node, window: int, validator: bytes) -> Signed[Seal] | None:
    """The seal of a validator for a window; None where storage shows none.

    Raises:
        StoreError: storage did not answer.
        TooLargeError, ProtocolError: it shows something else.
    """
    try:
        data = await node.store.get(paths.seal(validator, window), limits.MAX_SEAL_BYTES)
    except NotFoundError:
        return None
    return open_seal(node, window, validator, data)


async def find_witness(node: Node, window: int, validator: bytes) -> set[tuple[bytes, bytes]]:
    """(validator, digest of its summary) of the seals that a validator saw before it revealed a window.

    An entry that is no seal of a validator of today is passed over: it speaks against nobody.

    Raises:
        NotFoundError, StoreError: storage shows no witness, or did not answer.
        TooLargeError, ProtocolError: it shows something else.
    """
    data = await node.store.get(paths.witness(validator, window), Witness.max_bytes + limits.MAX_ENVELOPE_BYTES)
    seen: set[tuple[bytes, bytes]] = await node.run_sync(_seen, node, window, validator, data)
    return seen


def _seen(node: Node, window: int, validator: bytes, data: bytes) -> set[tuple[bytes, bytes]]:
    record = open_signed(data, Witness, [validator]).record
    if (record.run, record.window, record.validator) != (node.run_id, window, validator):
        raise MalformedError("of another run, window or validator", "witness")
    seen: set[tuple[bytes, bytes]] = set()
    for item in record.seals:
        with suppress(ProtocolError):
            for signer in set(claimed_signers(item, Seal)).intersection(node.authority.validators):
                seen.add((signer, open_seal(node, window, signer, item).record.summary))
    return seen
