"""Keeping up with the authority: remember its revisions, look for new ones everywhere, pass them on
(docs/spec/authority.md).

A revision is signed by roots, so any place may serve it: the meeting point, and the spaces of all current trainers and
validators. One honest place is enough. What is found is verified, written durably, and only then obeyed.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol import limits, paths
from protocol.errors import ForkError, ProtocolError
from protocol.identity.authority import Revision
from protocol.identity.signing import Signed
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError

POLL_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 30.0  # for all places where a revision may be
_GRACE_SECONDS: Final = 2.0  # for the others, once one has it
_MOST_BYTES: Final = limits.MAX_RUN_BYTES + limits.MAX_ENVELOPE_BYTES
_STATE: Final = "authority/"


def _kept(number: int) -> str:
    return f"{_STATE}{number:010d}"


async def load_authority(node: Node) -> None:
    """Obey the revisions that this node remembers.

    Raises:
        ProtocolError: one of them is damaged; StoreError: one cannot be read. Neither is safe to ignore.
    """
    while True:
        number = node.revisions.number + 1
        try:
            data = await node.state.get(_kept(number), _MOST_BYTES)
        except NotFoundError:
            return
        node.revisions.adopt(node.revisions.check(number, data))


async def refresh_authority(node: Node) -> int:
    """Look for revisions in all places, obey those that hold, pass them on; how many were new.

    What does not answer or does not hold is told and passed over: another place may do better.

    Raises:
        StoreError: this node's own state cannot be written; nothing that was not written is obeyed.
    """
    before = node.revisions.number
    await load_authority(node)  # what another process of this node has found
    while (signed := await _next_revision(node)) is not None:
        await node.state.put(_kept(signed.record.number), signed.data)
        node.revisions.adopt(signed)
        node.telemetry.event("revision", number=signed.record.number, note=signed.record.note)
        await _pass_on(node, signed)
    if node.revisions.number == before:
        await _look_for_forks(node)
    return node.revisions.number - before


async def keep_authority(node: Node, poll_seconds: float = POLL_SECONDS) -> None:
    """Keep up with the authority for ever."""
    while True:
        await trio.sleep(poll_seconds)
        await refresh_authority(node)


async def under_authority(node: Node, work: Callable[[], Awaitable[None]], poll_seconds: float = POLL_SECONDS) -> None:
    """Do a node's work while keeping up with the authority, which is looked for before the work begins.

    Raises:
        ProtocolError, StoreError: as `load_authority` and `refresh_authority`; and what the work raises.
    """
    await refresh_authority(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_authority, node, poll_seconds)
        await work()
        nursery.cancel_scope.cancel()


def _places(node: Node, number: int) -> list[str]:
    authority = node.authority
    writers = dict.fromkeys((*authority.trainers, *authority.validators))
    return [paths.revision(node.run_id, number), *(paths.revision_copy(writer, number) for writer in writers)]


async def _read(node: Node, number: int) -> list[Signed[Revision]]:
    """The valid revisions of a number, from all places that answer in time; those of one digest once.

    A place that hangs may be that of whoever is revoked: with a revision at hand the others are not waited for much
    longer.
    """
    found: dict[bytes, Signed[Revision]] = {}

    async def read(path: str) -> None:
        try:
            signed = node.revisions.check(number, await node.store.get(path, _MOST_BYTES))
        except NotFoundError:
            return
        except ForkError as error:
            node.alarm(f"the roots signed two histories of the authority: {error}")
        except (StoreError, ProtocolError) as error:
            node.telemetry.event("revision-refused", path=path, error=str(error))
        else:
            found[signed.digest] = signed
            patience.deadline = min(patience.deadline, trio.current_time() + _GRACE_SECONDS)

    places = _places(node, number)
    with trio.move_on_after(_PATIENCE_SECONDS) as patience:
        await gather(read, places, at_once=len(places))
    return list(found.values())


async def _look_for_forks(node: Node) -> None:
    if node.revisions.number > 0:
        await _read(node, node.revisions.number)


async def _next_revision(node: Node) -> Signed[Revision] | None:
    """The next revision; None where there is none, or where there are two."""
    number = node.revisions.number + 1
    if number > limits.MAX_REVISIONS:
        return None
    found = await _read(node, number)
    if len(found) > 1:
        node.alarm(f"the roots signed {len(found)} revisions {number} of the authority; none is obeyed")
        return None
    return found[0] if found else None


async def _pass_on(node: Node, signed: Signed[Revision]) -> None:
    """Put a revision into this node's own space, if others look there. A failure is told; others pass it on too."""
    key, authority = node.key.public, node.authority
    if key not in authority.trainers and key not in authority.validators:
        return
    try:
        await node.store.put(paths.revision_copy(key, signed.record.number), signed.data)
    except StoreError as error:
        node.telemetry.event("revision-not-passed-on", number=signed.record.number, error=str(error))
