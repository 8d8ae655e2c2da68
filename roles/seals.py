"""Read the seals of validators, and the witnesses that say which seals a validator has seen."""

from contextlib import suppress

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, claimed_signers
from protocol.judging.ledger import Seal, Witness
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.records import fetch_record, open_record


async def find_seal(node: Node, window: int, validator: bytes) -> Signed[Seal] | None:
    """Return the seal of a validator for a window; None if storage shows none."""
    try:
        return await fetch_record(node, Seal, paths.seal(validator, window))
    except NotFoundError:
        return None


async def fetch_witnessed_seals(node: Node, window: int, validator: bytes) -> set[tuple[bytes, bytes]]:
    """Return (validator, digest of its summary) of the seals of current validators that a validator saw before it
    revealed a window. Entries that are none are passed over: they incriminate nobody.
    """
    witness = await fetch_record(node, Witness, paths.witness(validator, window))
    summaries: set[tuple[bytes, bytes]] = await node.run_sync(_open_seals, node, witness.record)
    return summaries


def _open_seals(node: Node, witness: Witness) -> set[tuple[bytes, bytes]]:
    summaries: set[tuple[bytes, bytes]] = set()
    for item in witness.seals:
        with suppress(ProtocolError):
            for signer in set(claimed_signers(item, Seal)).intersection(node.authority.validators):
                seal = open_record(node, Seal, paths.seal(signer, witness.window), item)
                summaries.add((signer, seal.record.summary))
    return summaries
