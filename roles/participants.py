"""Who takes part: the announcements in storage, checked."""

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.participant import Announcement, Role
from protocol.signing import open_announced
from roles.gather import gather
from roles.node import Node
from roles.ports import NotFoundError


async def participants(node: Node, role: Role) -> list[Announcement]:
    """The announcements of a role that hold now, in order of key. Broken ones are passed over and counted.

    Raises:
        StoreError: the storage cannot be listed.
    """
    found = [item.path async for item in node.store.list(paths.participants())]

    async def read(path: str) -> Announcement | None:
        try:
            data = await node.store.get(path, limits.MAX_ANNOUNCEMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
            return _checked(node, path, data)
        except NotFoundError:
            return None
        except ProtocolError as error:
            node.telemetry.event("announcement-refused", path=path, error=str(error))
            return None

    announcements = await gather(read, found[: limits.MAX_PARTICIPANTS])
    return [item for item in announcements if item is not None and item.role == role]


def _checked(node: Node, path: str, data: bytes) -> Announcement | None:
    """An announcement that stands at its own key's path, of this run; None where it has expired.

    Raises:
        ProtocolError: it is not such a one.
    """
    signed = open_announced(data, Announcement)
    record = signed.record
    if signed.signers != (record.key,) or paths.key_at_end(path) != record.key or record.run != node.run_id:
        raise MalformedError("not of this key or run", path)
    return record if record.expires_ms > node.clock.now() * 1000 else None
