"""Who takes part: the announcements in storage that the authority admits (docs/spec/authority.md).

Junk is cheap to refuse. What a key alone decides is decided before anything is fetched; what was refused is not fetched
again for a while, longer each time, so that where there are too many the others have their turn.
"""

from contextlib import suppress

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.admission import AdmissionGate, lottery
from protocol.identity.participant import Announcement, Role
from protocol.identity.signing import claimed_signers, open_announced
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError


async def participants(node: Node, role: Role) -> list[Announcement]:
    """The announcements of a role that the authority admits now, in order of key. Refused ones are passed over and
    told.

    Raises:
        StoreError: the storage cannot be listed, or nothing that it lists can be read.
    """
    gate = AdmissionGate(node.run_id, node.authority)
    refusals = node.backoff
    now = node.clock.now()
    named = gate.named(role)
    candidates = await listed(node) if named is None else named
    keys = [key for key in candidates if gate.may_fetch(key, role) and not refusals.resting(key, now)]
    keys.sort(key=lambda key: lottery(node.run_id, key))

    failures: list[StoreError] = []

    async def read(key: bytes) -> Announcement | None:
        path = paths.participant(key)
        try:
            data = await node.store.get(path, limits.MAX_ANNOUNCEMENT_BYTES + limits.MAX_ENVELOPE_BYTES)
            record = node.announcements.get(key, data) or _signed(data, key)
            gate.admit(record, now * 1000.0)
        except NotFoundError:
            return None
        except (ProtocolError, TooLargeError) as error:
            refusals.add(key, now)
            node.telemetry.event("announcement-refused", path=path, error=str(error))
            return None
        except StoreError as error:
            failures.append(error)
            node.telemetry.event("announcement-unread", path=path, error=str(error))
            return None
        refusals.forget(key)
        node.announcements.add(key, data, record)
        return record

    keys = keys[: limits.MAX_PARTICIPANTS]
    found = await gather(read, keys)
    if failures and len(failures) == len(keys):
        raise failures[0]
    admitted = [record for record in found if record is not None and record.role == role]
    return sorted(admitted, key=lambda record: record.key)


async def listed(node: Node) -> list[bytes]:
    """The keys that have announced themselves, as the storage says; paths of no key are passed over.

    Of more than a few thousand the first are not all that is looked at: junk may have been put before everybody else.
    Another part of them follows, each time from another key on.
    """
    keys, seen = await _listed_after(node, "")
    if seen >= limits.MAX_PARTICIPANTS:  # there may be more: stores cut long listings
        start = content_digest(node.run_id + node.key.public + int(node.clock.now()).to_bytes(8, "big", signed=True))
        keys = (await _listed_after(node, paths.participant(start)))[0] + keys
    return list(dict.fromkeys(keys))


async def _listed_after(node: Node, after: str) -> tuple[list[bytes], int]:
    """The keys of one listing, and how many paths it had."""
    keys: list[bytes] = []
    seen = 0
    async for item in node.store.list(paths.participants(), after=after):
        seen += 1
        with suppress(MalformedError):
            key = paths.key_at_end(item.path)
            if item.path == paths.participant(key):
                keys.append(key)
        if seen >= limits.MAX_LISTED_PARTICIPANTS:
            break
    return keys, seen


def _signed(data: bytes, key: bytes) -> Announcement:
    """An announcement that its own key signed.

    Raises:
        ProtocolError: it is not such a one.
    """
    if claimed_signers(data, Announcement) != (key,):
        raise MalformedError("not signed by the key that its path names, or not by it alone", "announcement")
    record = open_announced(data, Announcement).record
    if record.key != key:
        raise MalformedError("speaks for another key than the one that signed it", "announcement")
    return record
