"""What validators have promised to reveal."""

from protocol import limits, paths
from protocol.errors import ProtocolError
from protocol.ledger import Seal
from protocol.signing import open_signed
from roles.node import Node
from roles.ports import NotFoundError, TooLargeError


async def sealed_digest(node: Node, window: int, validator: bytes) -> bytes | None:
    """The digest that a validator has sealed for a window; None where storage shows no seal of it.

    Raises:
        StoreError: storage did not answer.
    """
    try:
        path = paths.seal(validator, window)
        data = await node.store.get(path, 2 * limits.MAX_ENVELOPE_BYTES)
        seal = open_signed(data, Seal, [validator]).record
    except NotFoundError:
        return None
    except (TooLargeError, ProtocolError) as error:
        node.telemetry.event("seal-unread", window=window, validator=validator.hex(), error=str(error))
        return None
    return seal.summary if (seal.run, seal.window, seal.validator) == (node.run_id, window, validator) else None
