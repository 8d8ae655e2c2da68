"""Which of its contributions a site keeps in storage: those of the newest rounds.

The trainer has a copy of each payload that counts for as long as a site may need it, so old ones may go from the site's
own space.
"""

from typing import Final

from protocol import paths
from protocol.errors import ProtocolError
from protocol.outer.round_records import RoundContribution
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import fetch_record

KEPT_ROUNDS: Final = 8


async def delete_old_contributions(node: Node, newest: int) -> None:
    """Delete the records and payloads of this site's contributions to old rounds.

    A store that refuses causes an event and no failure: what is left costs only space, and is deleted later.

    Args:
        newest: the round that was closed last.
    """
    key = node.key.public
    try:
        prefix = paths.kind_prefix(key, "contributions")
        for path in [item.path async for item in node.store.list(prefix)]:
            number = path.removeprefix(prefix)
            if not number.isdigit() or int(number) > newest - KEPT_ROUNDS:
                continue
            try:
                record = (await fetch_record(node, RoundContribution, path)).record
            except (NotFoundError, TooLargeError, ProtocolError):
                pass  # somebody changed it; its payload is found by nobody
            else:
                await node.store.delete(paths.payload(key, record.payload.digest))
            await node.store.delete(path)
    except StoreError as error:
        node.telemetry.event("deletion-failed", error=str(error))
