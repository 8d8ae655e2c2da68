"""Rebuilds a validator's ledger from the summaries that it has published (docs/guide/operate.md).

A window that was judged here and is not published yet is kept if everything that its reveal needs is there or in
storage, which shows no other seal of it. Otherwise it is given up, with the windows after it: they are never sealed
again.
"""

import itertools
from collections.abc import Set
from contextlib import suppress

from protocol import paths
from protocol.encoding import content_digest
from protocol.judging.ledger import Seal, Summary, Witness
from protocol.judging.verdict import Verdict
from roles.node.identity import Node
from roles.ports import LineReporter, NotFoundError, RepairError, TooLargeError
from roles.records import FOREIGN, fetch_record, open_record
from roles.validator.ledger_state import FLOOR_PATH, LEDGER, ledger_path
from roles.validator.reveal import PENDING, SEALED_VERDICTS, WITNESS


class LedgerRepair:
    """The repair of the ledger of a node whose state has lost some objects, or is older than what it published."""

    def __init__(self, node: Node, lost_paths: Set[str], say: LineReporter) -> None:
        self._node = node
        self._lost_paths = lost_paths
        self._say = say
        self._local: dict[int, Summary] = {}
        self._published: dict[int, Summary] = {}

    async def run(self) -> None:
        """Rebuild ledger, sealed windows and floor in the node's state."""
        await self._read()
        entries = self._local | self._published
        cut = await self._first_lost_window(entries)
        valid_entries = {window: entry for window, entry in entries.items() if window < cut}
        newest = max(valid_entries, default=-1)
        oldest = newest - self._node.run.scoring.windows + 1
        counting_windows = {window for window in valid_entries if window >= oldest}
        for window in sorted(self._local.keys() - counting_windows):
            await self._node.state.delete(ledger_path(window))
        for window in sorted(counting_windows):
            if self._local.get(window) != valid_entries[window]:
                await self._node.state.put(ledger_path(window), valid_entries[window].to_bytes())
                self._say(f"{ledger_path(window)}: as this validator has published it")
        await self._write_floor(newest, max(entries, default=-1))
        await self._repair_sealed_windows(valid_entries)

    async def _read(self) -> None:
        """Read the summaries of the state and those in storage, the windows that count for scores."""
        node, key = self._node, self._node.key.public
        async for item in node.state.list(LEDGER):
            entry = Summary.from_bytes(await node.state.get(item.path, Summary.max_bytes))
            self._local[entry.window] = entry
        prefix = paths.kind_prefix(key, "summaries")
        windows = [paths.window_of(item.path) async for item in node.store.list(prefix)]
        newest = max([*windows, *self._local], default=-1)
        for window in windows:
            if window > newest - 2 * node.run.scoring.windows:
                with suppress(*FOREIGN):
                    self._published[window] = (await fetch_record(node, Summary, paths.summary(key, window))).record

    async def _first_lost_window(self, entries: dict[int, Summary]) -> int:
        """Return the first window from which on the ledger cannot be kept; one more than all if all can."""
        newest_published = max(self._published, default=-1)
        for before, after in itertools.pairwise(sorted(entries)):
            if entries[after].previous != content_digest(entries[before].to_bytes()):
                if after <= newest_published:
                    raise RepairError(
                        f"{LEDGER}: the published summary of window {after} follows one that is neither here nor in "
                        "storage, so nobody can check this ledger any more; give this validator another key "
                        "(docs/guide/operate.md)"
                    )
                return after
        for window in sorted(entries):
            if window > newest_published and not await self._can_be_revealed(entries[window]):
                return window
        return max(entries, default=-1) + 1

    async def _can_be_revealed(self, entry: Summary) -> bool:
        node = self._node
        with suppress(*FOREIGN):  # another validator with this key may have sealed the window
            seal = await fetch_record(node, Seal, paths.seal(node.key.public, entry.window))
            if seal.record.summary != content_digest(entry.to_bytes()):
                return False
        for row in entry.rows:
            if row.verdict and await self._verdict(entry.window, row.miner, row.verdict) is None:
                return False
        return True

    async def _verdict(self, window: int, miner: bytes, digest: bytes) -> bytes | None:
        """Return the signed verdict of a row, from the state or from storage; None if neither has it."""
        node, own_path = self._node, _verdict_path(window, miner)
        public_path = paths.verdict(node.key.public, window, miner)
        for store, path in ((node.state, own_path), (node.store, public_path)):
            with suppress(*FOREIGN):
                data = await store.get(path, Verdict.max_signed_bytes())
                if open_record(node, Verdict, public_path, data).digest == digest:
                    return data
        return None

    async def _write_floor(self, newest: int, newest_entry: int) -> None:
        """Remember the windows that may be sealed although the ledger does not have them."""
        node = self._node
        sealed = [newest_entry]
        async for item in node.store.list(paths.kind_prefix(node.key.public, "seals")):
            window = paths.window_of(item.path)
            if window > newest:
                with suppress(*FOREIGN):
                    await fetch_record(node, Seal, item.path)
                    sealed.append(window)
        floor = max(sealed)
        if floor > newest:
            await node.state.put(FLOOR_PATH, str(floor).encode())
            self._say(
                f"{LEDGER}: windows {newest + 1} to {floor} are lost: they are not revealed, and never sealed again"
            )

    async def _repair_sealed_windows(self, valid_entries: dict[int, Summary]) -> None:
        """Keep what the reveal of each unpublished window needs, and drop what belongs to other windows."""
        state = self._node.state
        newest_published = max(self._published, default=-1)
        unpublished = {window for window in valid_entries if window > newest_published}
        for prefix in (SEALED_VERDICTS, PENDING, WITNESS):
            async for item in state.list(prefix):
                if paths.window_of(item.path) not in unpublished:
                    await state.delete(item.path)
        for window in sorted(unpublished):
            for row in valid_entries[window].rows:
                path = _verdict_path(window, row.miner)
                if row.verdict and path in self._lost_paths:
                    data = await self._verdict(window, row.miner, row.verdict)
                    assert data is not None  # see _first_lost_window
                    await state.put(path, data)
                    self._say(f"{path}: as it is in storage")
            await state.put(f"{PENDING}{window:010d}", b"")
            await self._repair_witness(window)

    async def _repair_witness(self, window: int) -> None:
        """Take a lost witness from storage. If it was not published, another one can be made."""
        node, path = self._node, f"{WITNESS}{window:010d}"
        if path in self._lost_paths:
            try:
                data = await node.store.get(paths.witness(node.key.public, window), Witness.max_signed_bytes())
            except (NotFoundError, TooLargeError):
                self._say(f"{path}: was not published; it is made again")
            else:
                await node.state.put(path, data)
                self._say(f"{path}: as it is in storage")


def _verdict_path(window: int, miner: bytes) -> str:
    return f"{SEALED_VERDICTS}{window:010d}-{miner.hex()}"
