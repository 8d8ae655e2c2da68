"""Keeping up with the authority: load stored revisions, look for new ones everywhere, pass them on
(docs/spec/authority.md).

A revision is signed by roots, so any place may serve it: the meeting point, and the spaces of all current trainers and
validators. One honest place is enough. A new revision is verified, written to this node's own state, and only then
obeyed.

A place may belong to the very participant that a revision revokes: it may show nothing, or hang. What holds then:

- The first look waits for all places, at most half a minute: a node does not begin under an authority that the honest
  places know to be replaced. Every later look waits two seconds at most for places that hang.
- A request outlives the look that made it, and its answer counts at the next look: what only a slow place shows is not
  lost. A place is asked again when its request has ended, which takes at most `_REQUEST_SECONDS`.
- One valid answer is enough: two seconds later the revision is obeyed, whoever hangs. Only a second revision of the
  same number that the roots signed prevents that, and it is an alarm, however late it comes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Final

import trio

from protocol import limits, paths
from protocol.errors import ForkError, ProtocolError
from protocol.identity.authority import Revision
from protocol.identity.signing import Signed
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_envelope

POLL_SECONDS: Final = 5.0
_LOOKS: Final = 4  # in a window: each asks a quarter of the places
_RECHECKS: Final = 5  # looks, of which one asks for the newest revision again; no multiple of 2, so each place is asked
_LONGEST_SECONDS: Final = 60.0  # between two looks in the same place
_FIRST_SECONDS: Final = 30.0  # that a node's first look waits for all places
_GRACE_SECONDS: Final = 2.0  # that a later look waits, and any look after one place has answered with a revision
_REQUEST_SECONDS: Final = 90.0  # the largest revision takes 52 s at the least rate that stores accept
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
        # if the roots have signed another, this raises an alarm
        await _fetch_revisions(node, before, look, _GRACE_SECONDS)
    node.revision_requests.is_first_look = False
    return node.revisions.number - before


async def poll_authority(node: Node) -> None:
    """Keep up with the authority for ever."""
    next_look = trio.current_time()
    for look in count():
        next_look += min(_LONGEST_SECONDS / _LOOKS, node.pace(POLL_SECONDS, looks=_LOOKS))
        next_look = max(next_look, trio.current_time())
        await trio.sleep_until(next_look)
        await refresh_authority(node, look)


@asynccontextmanager
async def under_authority(node: Node) -> AsyncIterator[None]:
    """Refresh the authority once, and keep up with it while a node does its work in this block."""
    await refresh_authority(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll_authority, node)
        yield
        nursery.cancel_scope.cancel()


async def _next_revision(node: Node, look: int | None) -> Signed[Revision] | None:
    """Return the next revision; None if there is none yet, or if the roots signed two."""
    number, requests = node.revisions.number + 1, node.revision_requests
    if number > limits.MAX_REVISIONS:
        return None
    seconds = _FIRST_SECONDS if requests.is_first_look and look is None else _GRACE_SECONDS
    await _fetch_revisions(node, number, look, seconds)
    if requests.valid and look is not None:  # another place may have a second one
        await _fetch_revisions(node, number, None, _GRACE_SECONDS)
    valid, requests.valid = requests.valid, {}
    revisions = [signed for signed in valid.values() if signed.record.number == number]
    if len(revisions) > 1:
        node.alarm(f"the roots signed {len(revisions)} revisions {number} of the authority; none is obeyed")
        return None
    return revisions[0] if revisions else None


async def _fetch_revisions(node: Node, number: int, look: int | None, seconds: float) -> None:
    """Ask all places, or those whose turn is at a look, for a revision, and wait some seconds for their answers. The
    valid ones are in the node's `revision_requests`; those of later numbers, too, may come meanwhile.
    """
    requests = node.revision_requests
    writers = sorted({*node.authority.trainers, *node.authority.validators})
    places = [paths.revision(node.run_id, number), *(paths.revision_copy(writer, number) for writer in writers)]
    if look is not None:
        places = places[look % _LOOKS :: _LOOKS]
    idle_places = [path for path in places if path not in requests.ends]
    for path in idle_places:
        requests.ends[path] = trio.Event()
        trio.lowlevel.spawn_system_task(partial(_request, node, number, path))
    with trio.move_on_after(_GRACE_SECONDS if requests.valid else seconds) as requests.patience:
        for end in [requests.ends[path] for path in idle_places]:
            await end.wait()
    if requests.failure is not None:
        failure, requests.failure = requests.failure, None
        raise failure


async def _request(node: Node, number: int, path: str) -> None:
    """Ask a place for a revision; if it is a new one, whoever looks waits only a little longer for the others."""
    requests = node.revision_requests
    try:
        try:
            with trio.move_on_after(_REQUEST_SECONDS):
                signed = node.revisions.check(number, await fetch_envelope(node, Revision, path))
                if number > node.revisions.number:
                    requests.valid[signed.digest] = signed
                    requests.patience.deadline = min(requests.patience.deadline, trio.current_time() + _GRACE_SECONDS)
        except NotFoundError:
            pass
        except ForkError as error:
            node.alarm(f"the roots signed two histories of the authority: {error}")
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("revision-refused", path=path, error=str(error))
    except Exception as error:  # noqa: BLE001 - the next look raises it: here it would end the event loop
        requests.failure = error
    finally:
        requests.ends.pop(path).set()


async def _pass_on(node: Node, signed: Signed[Revision]) -> None:
    """Put a revision into this node's own space, if others look there. A failure is reported; others pass it on too."""
    key, authority = node.key.public, node.authority
    if key not in authority.trainers and key not in authority.validators:
        return
    try:
        await node.store.put(paths.revision_copy(key, signed.record.number), signed.data)
    except StoreError as error:
        node.telemetry.event("revision-not-passed-on", number=signed.record.number, error=str(error))
