"""Keeping up with the authority: load stored revisions, look for new ones everywhere, pass them on
(docs/spec/authority.md).

A revision is signed by roots, so any place may serve it: the meeting point, and the spaces of all current trainers and
validators. One honest place is enough. A new revision is verified, written to this node's own state, and only then
obeyed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import trio

from protocol import limits, paths
from protocol.errors import ForkError, ProtocolError
from protocol.identity.authority import Revision
from protocol.identity.signing import Signed
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_envelope

POLL_SECONDS: Final = 5.0
_LOOKS: Final = 4  # in a window: each asks a quarter of the places
_RECHECKS: Final = 5  # looks, of which one asks for the newest revision again; no multiple of 2, so each place is asked
_LONGEST_SECONDS: Final = 60.0  # until a revoked key is refused, if no place hangs
_PATIENCE_SECONDS: Final = 30.0  # for all places where a revision may be
_GRACE_SECONDS: Final = 2.0  # for the others, after one has answered with it
AUTHORITY: Final = "authority/"


def _state_path(number: int) -> str:
    return f"{AUTHORITY}{number:010d}"


async def stored_revision(node: Node, number: int) -> bytes:
    """Return the signed bytes of a revision from a node's own state; NotFoundError if it has none of this number."""
    return await node.state.get(_state_path(number), Revision.max_bytes + limits.MAX_ENVELOPE_BYTES)


async def load_authority(node: Node) -> None:
    """Obey the revisions that are stored in this node's own state."""
    while True:
        number = node.revisions.number + 1
        try:
            data = await stored_revision(node, number)
        except NotFoundError:
            return
        node.revisions.adopt(node.revisions.check(number, data))


async def refresh_authority(node: Node, look: int | None = None) -> int:
    """Look for new revisions in all places, or in those whose turn is at a look; obey the valid ones, pass them on, and
    return their number. A place that fails, or answers with an invalid revision, is reported and passed over.
    """
    before = node.revisions.number
    await load_authority(node)  # another process of this node may have stored some
    while (signed := await _next_revision(node, look)) is not None:
        await node.state.put(_state_path(signed.record.number), signed.data)
        node.revisions.adopt(signed)
        node.telemetry.event("revision", number=signed.record.number, note=signed.record.note)
        await _pass_on(node, signed)
    if node.revisions.number == before > 0 and (look is None or look % _RECHECKS == 0):
        await _fetch_revisions(node, before, look)  # if the roots have signed another, this raises an alarm
    return node.revisions.number - before


async def poll_authority(node: Node) -> None:
    """Keep up with the authority for ever."""
    for look in count():
        await trio.sleep(min(_LONGEST_SECONDS / _LOOKS, node.pace(POLL_SECONDS, looks=_LOOKS)))
        await refresh_authority(node, look)


@asynccontextmanager
async def under_authority(node: Node) -> AsyncIterator[None]:
    """Refresh the authority once, and keep up with it while a node does its work in this block."""
    await refresh_authority(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll_authority, node)
        yield
        nursery.cancel_scope.cancel()


async def _fetch_revisions(node: Node, number: int, look: int | None) -> list[Signed[Revision]]:
    """Return the valid revisions of a number from the places that answer in time, each digest once. A place that hangs
    may be that of the participant that is revoked: after the first valid answer the others get a short grace period.
    """
    revisions: dict[bytes, Signed[Revision]] = {}

    async def fetch(path: str) -> None:
        try:
            signed = node.revisions.check(number, await fetch_envelope(node, Revision, path))
        except NotFoundError:
            return
        except ForkError as error:
            node.alarm(f"the roots signed two histories of the authority: {error}")
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("revision-refused", path=path, error=str(error))
        else:
            revisions[signed.digest] = signed
            patience.deadline = min(patience.deadline, trio.current_time() + _GRACE_SECONDS)

    writers = sorted({*node.authority.trainers, *node.authority.validators})
    places = [paths.revision(node.run_id, number), *(paths.revision_copy(writer, number) for writer in writers)]
    if look is not None:
        places = places[look % _LOOKS :: _LOOKS]
    with trio.move_on_after(_PATIENCE_SECONDS) as patience:
        await gather(fetch, places, at_once=len(places))
    return list(revisions.values())


async def _next_revision(node: Node, look: int | None) -> Signed[Revision] | None:
    """Return the next revision; None if there is none yet, or if the roots signed two."""
    number = node.revisions.number + 1
    if number > limits.MAX_REVISIONS:
        return None
    revisions = await _fetch_revisions(node, number, look)
    if revisions and look is not None:
        revisions = await _fetch_revisions(node, number, None)  # another place may have a second one
    if len(revisions) > 1:
        node.alarm(f"the roots signed {len(revisions)} revisions {number} of the authority; none is obeyed")
        return None
    return revisions[0] if revisions else None


async def _pass_on(node: Node, signed: Signed[Revision]) -> None:
    """Put a revision into this node's own space, if others look there. A failure is reported; others pass it on too."""
    key, authority = node.key.public, node.authority
    if key not in authority.trainers and key not in authority.validators:
        return
    try:
        await node.store.put(paths.revision_copy(key, signed.record.number), signed.data)
    except StoreError as error:
        node.telemetry.event("revision-not-passed-on", number=signed.record.number, error=str(error))
