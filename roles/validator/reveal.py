"""Seal, then reveal: a window's findings are promised by their digest before any validator can read another's.

Verdicts lie in this node's own state before the ledger's entry that names them, and until storage has them: a validator
that dies at any moment has either promised nothing or keeps its promise after the restart.
"""

from collections.abc import Sequence
from contextlib import suppress

import trio

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.judging.ledger import Seal, Summary, Witness
from protocol.judging.verdict import Verdict
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.seals import find_seal
from roles.validator.ledger_state import Ledger

_VERDICTS = "sealed/"
_PENDING = "pending/"
_WITNESS = "witness/"
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0


def _number(window: int) -> str:
    return f"{window:010d}"


class Revealer:
    """Publishes what this validator found, window after window."""

    def __init__(self, node: Node, ledger: Ledger) -> None:
        self._node = node
        self._ledger = ledger
        self._send, self._receive = trio.open_memory_channel[Summary](limits.MAX_PARTICIPANTS)

    async def prepare(self, window: int, verdicts: Sequence[Verdict]) -> None:
        """Keep a window's verdicts; nothing is promised before the ledger has its entry.

        Raises:
            StoreError: the state cannot be written.
        """
        for verdict in verdicts:
            path = f"{_VERDICTS}{_number(window)}-{verdict.miner.hex()}"
            await self._node.state.put(path, sign(verdict, self._node.key))
        await self._node.state.put(_PENDING + _number(window), b"")

    async def promise(self, summary: Summary) -> None:
        """Seal a window that the ledger has, and reveal it when it is time."""
        await self._send.send(summary)

    async def run(self) -> None:
        """Seal and reveal for ever; first what a restart left over.

        Raises:
            StoreError: the state cannot be read or written.
        """
        entries = {summary.window: summary for summary in self._ledger.entries()}
        left = [int(item.path.removeprefix(_PENDING)) async for item in self._node.state.list(_PENDING)]
        kept = [item.path async for item in self._node.state.list(_WITNESS)]
        for path in set(kept) - {_WITNESS + _number(window) for window in left}:
            await self._node.state.delete(path)
        async with trio.open_nursery() as nursery:
            for window in left:
                if window in entries:
                    nursery.start_soon(self._reveal, entries[window])
                else:
                    await self._forget(window)
            async for summary in self._receive:
                nursery.start_soon(self._reveal, summary)

    async def _reveal(self, summary: Summary) -> None:
        node, own, window = self._node, self._node.key.public, summary.window
        seal = Seal(run=node.run_id, window=window, validator=own, summary=content_digest(summary.to_bytes()))
        await node.publish(paths.seal(own, window), sign(seal, node.key))
        await node.publish(paths.witness(own, window), await self._testimony(window))
        async for item in node.state.list(f"{_VERDICTS}{_number(window)}-"):
            verdict = await node.state.get(item.path, limits.MAX_VERDICT_BYTES + limits.MAX_ENVELOPE_BYTES)
            await node.publish(paths.verdict(own, window, paths.key_at_end(item.path)), verdict)
        await node.publish(paths.summary(own, window), sign(summary, node.key))
        node.telemetry.event("revealed", window=window, miners=len(summary.rows))
        await self._forget(window)

    async def _testimony(self, window: int) -> bytes:
        """This validator's witness: what it said before a restart, or the others' seals, which are waited for.

        It is not said before it is kept; a disk that does not take it is waited for.

        Raises:
            StoreError: the state cannot be read.
        """
        node, place = self._node, _WITNESS + _number(window)
        with suppress(NotFoundError):
            return await node.state.get(place, Witness.max_bytes + limits.MAX_ENVELOPE_BYTES)
        seen = await self._others(window)
        seals = tuple(seen[validator] for validator in sorted(seen))
        data = sign(Witness(run=node.run_id, window=window, validator=node.key.public, seals=seals), node.key)
        reporter = ChangeReporter(node.telemetry, "witness-not-stored", window=window)
        while True:
            try:
                await node.state.put(place, data)
            except StoreError as error:
                reporter.failure(error)
                await trio.sleep(_RETRY_SECONDS)
            else:
                return data

    async def _forget(self, window: int) -> None:
        """Drop what was revealed. The witness goes last: while a window is pending, it is said again as it was."""
        state = self._node.state
        for path in [item.path async for item in state.list(f"{_VERDICTS}{_number(window)}-")]:
            await state.delete(path)
        await state.delete(_PENDING + _number(window))
        await state.delete(_WITNESS + _number(window))

    async def _others(self, window: int) -> dict[bytes, bytes]:
        """Wait until all other validators have sealed, or no seal counts any more: the seals by validator.

        One whose storage hangs holds up nobody.
        """
        node = self._node
        last = node.run.schedule.seal(window)
        others = set(node.authority.validators) - {node.key.public}
        seen: dict[bytes, bytes] = {}

        async def all_sealed() -> None:
            async with trio.open_nursery() as looking:
                for validator in sorted(others):
                    looking.start_soon(self._sealed, window, validator, seen)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(all_sealed)
            while not await node.time.has_come(last):
                await trio.sleep(_POLL_SECONDS)
            nursery.cancel_scope.cancel()
        return seen

    async def _sealed(self, window: int, validator: bytes, seen: dict[bytes, bytes]) -> None:
        """Wait until a validator has sealed, and add its seal to those that were seen."""
        reporter = ChangeReporter(  # one event: the other validator may choose the text of each error
            self._node.telemetry, "seal-unread", max_reports=1, window=window, validator=validator.hex()
        )
        while True:
            try:
                seal = await find_seal(self._node, window, validator)
                if seal is not None:
                    seen[validator] = seal.data
                    return
            except (StoreError, ProtocolError) as error:
                reporter.failure(error)
            await trio.sleep(_POLL_SECONDS)
