"""Who takes part: the announcements in storage that the authority admits (docs/spec/authority.md).

An attacker can announce any number of keys, so refusing one must be cheap. What the key alone decides is decided
before anything is fetched. A refused key is not fetched again for a while, longer each time, so that the other keys
are read even where there are too many.

Of keys that were never admitted, a node reads MAX_STRANGERS at once, however many are listed: with junk, nobody makes
it read more. Keys that were admitted before have places of their own, _PER_PLACE for each miner that a window may have.

Where there are more keys than places, a lottery decides. Its salt is the randomness of the newest window's opening, so
nobody can make keys that always win; keys that were listed before that round was out come first, so nobody can make
keys that win this time. Places are kept for keys with a history.
"""

from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.admission import AdmissionGate, draw_places
from protocol.identity.participant import Announcement, Role
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import BeaconError, NotFoundError, StoreError, TooLargeError
from roles.records import open_record

_PER_PLACE: Final = 2
_AT_ONCE: Final = 256  # announcements that are being read


async def find_participants(
    node: Node, role: Role, history_keys: AbstractSet[bytes] = frozenset()
) -> list[Announcement]:
    """Return the announcements of a role that the authority admits now, in order of key; StoreError if storage cannot
    be listed, or shows none of what it lists. Refused ones are reported and passed over. If there are too many, places
    are kept for keys with a history.
    """
    gate = AdmissionGate(node.run_id, node.authority)
    backoff = node.backoff
    now = node.clock.now()
    named_keys = gate.eligible_keys(role)
    candidates = await list_announced_keys(node) if named_keys is None else named_keys
    keys = [key for key in candidates if gate.may_fetch(key, role) and not backoff.is_backing_off(key, now)]
    if named_keys is None:
        known = [key for key in keys if key in node.announcements or key in history_keys]
        known_keys = set(known)
        strangers = [key for key in keys if key not in known_keys]
        keys = await _draw(node, known, history_keys, _PER_PLACE * node.authority.admission.miners)
        keys += await _draw(node, strangers, frozenset(), limits.MAX_STRANGERS)
    node.sightings.add(candidates, node.time.newest_round)

    failures: list[StoreError] = []
    admitted: dict[bytes, Announcement] = {}

    async def fetch(key: bytes) -> None:
        path = paths.participant(key)
        try:
            data = await node.store.get(path, Announcement.max_signed_bytes())
            record = node.announcements.get(key, data) or open_record(node, Announcement, path, data).record
            gate.admit(record, now * 1000.0)
        except NotFoundError:
            return
        except (ProtocolError, TooLargeError) as error:
            backoff.add_refusal(key, now)
            node.announcements.forget(key)
            node.telemetry.event("announcement-refused", path=path, error=str(error))
        except StoreError as error:
            failures.append(error)
            node.telemetry.event("announcement-unread", path=path, error=str(error))
        else:
            backoff.forget(key)
            node.announcements.add(key, data, record)
            admitted[key] = record

    await gather(fetch, keys, at_once=_AT_ONCE)
    if failures and len(failures) == len(keys):
        raise failures[0]
    return [admitted[key] for key in sorted(admitted) if admitted[key].role == role]


async def _draw(node: Node, keys: list[bytes], history_keys: AbstractSet[bytes], places: int) -> list[bytes]:
    """Return so many of the keys: those that were listed before the salt was out, then the others."""
    if len(keys) <= places:
        return keys
    window = node.run.schedule.window_at(node.time.newest_round)
    salt_round = node.run.schedule.opening(window) if window >= 0 else 0
    try:
        salt = await node.time.randomness(salt_round) if salt_round else node.key.derive("lottery", 0)
    except BeaconError:
        salt = node.key.derive("lottery", salt_round)  # nobody else knows it; nodes agree again when the beacon answers
    older = [key for key in keys if key in history_keys or node.sightings.is_older(key, salt_round)]
    winners = draw_places(salt, older, history_keys, places)
    older_keys = set(older)
    newer = [key for key in keys if key not in older_keys]
    return winners + draw_places(salt, newer, frozenset(), places - len(winners))


async def list_announced_keys(node: Node) -> list[bytes]:
    """Return the keys whose announcements the storage lists; a path that names no key is passed over. An attacker may
    put thousands of keys before all others, so of a listing that is cut, another part follows, which starts at another
    key each time.
    """
    keys, listed_paths = await _list_keys_after(node, "")
    if listed_paths >= limits.MAX_LISTED_PARTICIPANTS:  # there may be more: stores cut long listings
        start = content_digest(node.run_id + node.key.public + int(node.clock.now()).to_bytes(8, "big", signed=True))
        keys = (await _list_keys_after(node, paths.participant(start)))[0] + keys
    return list(dict.fromkeys(keys))


async def _list_keys_after(node: Node, after: str) -> tuple[list[bytes], int]:
    """Return the keys of one listing, and how many paths it had."""
    keys: list[bytes] = []
    listed_paths = 0
    async for item in node.store.list(paths.participants(), after=after):
        listed_paths += 1
        with suppress(MalformedError):
            key = paths.key_at_end(item.path)
            if item.path == paths.participant(key):
                keys.append(key)
        if listed_paths >= limits.MAX_LISTED_PARTICIPANTS:
            break
    return keys, listed_paths
