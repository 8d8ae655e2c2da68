"""Commit and reveal: a validator seals a window by the digest of its summary before it can read any other's verdicts.

Verdicts lie in this node's own state before the ledger entry that names them, and stay there until storage has them.
So a validator that dies at any moment has either sealed nothing, or reveals after the restart what it has sealed.

Of two validators that work with one key, the one that comes to a window's seal later stops before it seals. If both
seal it at the same moment, storage keeps one of the seals, and the other validator stops before it reveals anything.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import trio

from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.judging.ledger import Seal, Summary, Witness
from protocol.judging.verdict import Verdict
from roles.gather import gather
from roles.node.identity import Node
from roles.node.retries import ChangeReporter
from roles.ports import FencedError, NotFoundError, StoreError, TooLargeError
from roles.rosters import find_seal
from roles.validator.ledger_state import Ledger, wait_and_check

SEALED_VERDICTS = "sealed/"
PENDING = "pending/"
WITNESS = "witness/"
_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 2.0  # or a round, in which another validator that saw no seal either has put its own
_AT_ONCE = 64  # verdicts that are being stored or published


class Revealer:
    """Seals and reveals this validator's summaries and verdicts, several windows at a time."""

    def __init__(self, node: Node, ledger: Ledger) -> None:
        self._node = node
        self._ledger = ledger
        self._send, self._receive = trio.open_memory_channel[Summary](64)

    async def store_verdicts(self, window: int, verdicts: Sequence[Verdict]) -> None:
        """Store a window's verdicts. A restart drops them unless the ledger has the window's entry by then."""

        async def store(verdict: Verdict) -> None:
            path = f"{SEALED_VERDICTS}{window:010d}-{verdict.miner.hex()}"
            await self._node.state.put(path, sign(verdict, self._node.key))

        await self._node.state.put(f"{PENDING}{window:010d}", b"")  # first: a restart drops what has been stored
        await gather(store, verdicts, at_once=_AT_ONCE)

    async def add_window(self, summary: Summary) -> None:
        """Have `run` seal a window that is in the ledger, and reveal it later."""
        await self._send.send(summary)

    async def run(self) -> None:
        """Seal and reveal for ever; first the windows that were pending before a restart."""
        pending = [paths.window_of(item.path) async for item in self._node.state.list(PENDING)]
        witnesses = [item.path async for item in self._node.state.list(WITNESS)]
        for path in set(witnesses) - {f"{WITNESS}{window:010d}" for window in pending}:
            await self._node.state.delete(path)
        async with trio.open_nursery() as nursery:
            for window in pending:
                if window in self._ledger.windows:
                    nursery.start_soon(self._seal_and_reveal, await self._ledger.entry(window))
                else:
                    await self._forget(window)
            async for summary in self._receive:
                nursery.start_soon(self._seal_and_reveal, summary)

    async def _seal_and_reveal(self, summary: Summary) -> None:
        node, own_key, window = self._node, self._node.key.public, summary.window
        seal = Seal(run=node.run_id, window=window, validator=own_key, summary=content_digest(summary.to_bytes()))
        check_seal = partial(self._check_seal, seal)
        await wait_and_check(node, check_seal)
        await node.publish(paths.seal(own_key, window), sign(seal, node.key))
        settled = trio.current_time() + min(_SETTLE_SECONDS, node.run.beacon.period_ms / 1000)
        witness = await self._make_witness(window)
        await trio.sleep_until(settled)
        await wait_and_check(node, check_seal)
        await node.publish(paths.witness(own_key, window), witness)

        async def publish(path: str) -> None:
            verdict = await node.state.get(path, limits.MAX_VERDICT_BYTES + limits.MAX_ENVELOPE_BYTES)
            await node.publish(paths.verdict(own_key, window, paths.key_at_end(path)), verdict)

        sealed_paths = [item.path async for item in node.state.list(f"{SEALED_VERDICTS}{window:010d}-")]
        await gather(publish, sealed_paths, at_once=_AT_ONCE)
        await node.publish(paths.summary(own_key, window), sign(summary, node.key))
        node.telemetry.event("revealed", window=window, miners=len(summary.rows))
        await self._forget(window)

    async def _check_seal(self, seal: Seal) -> None:
        """Raise FencedError if storage shows another seal of this window that this validator's key signed."""
        try:
            shown = await find_seal(self._node, seal.window, seal.validator)
        except (ProtocolError, TooLargeError):
            return  # another's bytes in this validator's space: they are written over
        if shown is not None and shown.record != seal:
            raise FencedError(
                f"another validator with this key has sealed window {seal.window}: only one may run, end the other; "
                "start this one again from the other's state, or after `grailnode repair`"
            )

    async def _make_witness(self, window: int) -> bytes:
        """Return this validator's signed witness, which is stored: after a restart the same, else of the seals that it
        waits for.
        """
        node, path = self._node, f"{WITNESS}{window:010d}"
        with suppress(NotFoundError):
            return await node.state.get(path, Witness.max_signed_bytes())
        seals = await self._wait_for_seals(window)
        ordered = tuple(seals[validator] for validator in sorted(seals))
        data = sign(Witness(run=node.run_id, window=window, validator=node.key.public, seals=ordered), node.key)
        await node.state.put(path, data)
        return data

    async def _forget(self, window: int) -> None:
        """Drop the state of a window that was revealed. The witness goes last: while the window is pending, a restart
        publishes the same witness again.
        """
        state = self._node.state
        for path in [item.path async for item in state.list(f"{SEALED_VERDICTS}{window:010d}-")]:
            await state.delete(path)
        await state.delete(f"{PENDING}{window:010d}")
        await state.delete(f"{WITNESS}{window:010d}")

    async def _wait_for_seals(self, window: int) -> dict[bytes, bytes]:
        """Wait until all other validators have sealed, or no seal counts any more; return the seals by validator. A
        validator whose storage hangs delays no other.
        """
        node = self._node
        last_round = node.run.schedule.seal(window)
        seals: dict[bytes, bytes] = {}

        async def wait_for_all() -> None:
            async with trio.open_nursery() as waits:
                for validator in sorted({*node.authority.validators} - {node.key.public}):
                    waits.start_soon(self._wait_for_seal, window, validator, seals)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_all)
            while not await node.time.has_come(last_round):
                await trio.sleep(_POLL_SECONDS)
            nursery.cancel_scope.cancel()
        return seals

    async def _wait_for_seal(self, window: int, validator: bytes, seals: dict[bytes, bytes]) -> None:
        """Wait until a validator has sealed, and add its seal."""
        reporter = ChangeReporter(  # once only: the other validator may choose the text of each error
            self._node.telemetry, "seal-unread", max_reports=1, window=window, validator=validator.hex()
        )
        while True:
            try:
                if (seal := await find_seal(self._node, window, validator)) is not None:
                    seals[validator] = seal.data
                    return
            except (StoreError, ProtocolError) as error:
                reporter.failure(error)
            await trio.sleep(_POLL_SECONDS)
