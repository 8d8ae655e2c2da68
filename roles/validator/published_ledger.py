"""What a validator has published of its ledger, compared with its state.

A state that was restored from an old backup, or that has lost windows, must not be continued: its next summary would
not follow the published one, and a window could be sealed twice.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import PublishedRecord
from protocol.judging.ledger import Seal, Summary
from roles.node.identity import Node
from roles.node.retries import WaitReporter
from roles.ports import StateError, StoreError, TooLargeError
from roles.records import FOREIGN, fetch_record
from roles.seals import find_seal
from roles.validator.ledger_state import LEDGER, Ledger

_RETRY_SECONDS: Final = 1.0
_MAX_FOREIGN: Final = 16  # records of other runs that are read, where a key is used in several


async def wait_and_check(node: Node, check: Callable[[], Awaitable[None]]) -> None:
    """Check what this validator has published, as soon as its own storage answers."""
    with WaitReporter(node.telemetry, "own-space-unread") as reporter:
        while True:
            try:
                return await check()
            except StoreError as error:
                reporter.waiting("storage", error, "this node's own storage answers")
                await trio.sleep(_RETRY_SECONDS)


async def check_published(node: Node, ledger: Ledger) -> None:
    """Compare a ledger with what this validator has published; StateError if it is behind that, or another one."""
    key, newest = node.key.public, ledger.closed_window
    place = f"{LEDGER} of this node's state"
    for record_type, kind, verb in ((Summary, "summaries", "published"), (Seal, "seals", "sealed")):
        window = await _newer_window(node, record_type, paths.kind_prefix(key, kind), newest)
        if window is not None:
            raise StateError(
                place, f"ends with window {newest}, but this validator has {verb} window {window}: an old state?"
            )
    if newest < 0 or newest != ledger.newest:
        return
    try:
        seal = await find_seal(node, newest, key)
    except (TooLargeError, ProtocolError):
        return  # another's bytes in this validator's space: they are written over
    if seal is not None and seal.record.summary != ledger.tip:
        raise StateError(place, f"this validator has sealed another summary of window {newest}")


async def _newer_window(node: Node, record_type: type[PublishedRecord], prefix: str, newest: int) -> int | None:
    """Return a window after `newest` of which this space shows a record of the run; None if there is none."""
    foreign = 0
    async for item in node.store.list(prefix, after=f"{prefix}{newest:010d}" if newest >= 0 else ""):
        try:
            await fetch_record(node, record_type, item.path)
            return paths.window_of(item.path)
        except FOREIGN:
            foreign += 1
            if foreign == _MAX_FOREIGN:
                return None
    return None
