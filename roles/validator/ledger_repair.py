"""Rebuilds a validator's ledger from the summaries that it has published (docs/guide/operate.md).

Windows that were judged here and are not published yet are kept if nothing is lost that their reveals need, and storage
shows no other seal of them. Otherwise they are given up, with the windows after them: they are never sealed again.
"""

import itertools
from collections.abc import Set
from contextlib import suppress

from protocol import paths
from protocol.encoding import content_digest
from protocol.judging.ledger import Seal, Summary
from roles.node.identity import Node
from roles.ports import LineReporter, RepairError
from roles.records import FOREIGN, fetch_record
from roles.validator.ledger_state import FLOOR_PATH, LEDGER, ledger_path
from roles.validator.reveal import PENDING, SEALED_VERDICTS, WITNESS

_UNPUBLISHED = (SEALED_VERDICTS, PENDING, WITNESS)


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
        newest_published = max(self._published, default=-1)
        await self._clean_up({window for window in valid_entries if window > newest_published})

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
        lost = [path for path in self._lost_paths if path.startswith((SEALED_VERDICTS, WITNESS))]
        is_lost = any(paths.window_of(path) > newest_published for path in lost)
        for window in sorted(entries):
            if window > newest_published and (is_lost or not await self._is_own(entries[window])):
                return window
        return max(entries, default=-1) + 1

    async def _is_own(self, entry: Summary) -> bool:
        """Return whether storage shows no seal of a window but that of this entry: another validator with this key may
        have sealed it.
        """
        node = self._node
        with suppress(*FOREIGN):
            seal = await fetch_record(node, Seal, paths.seal(node.key.public, entry.window))
            return seal.record.summary == content_digest(entry.to_bytes())
        return True

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

    async def _clean_up(self, windows: Set[int]) -> None:
        """Drop what the reveal of other windows than these would need, and have these revealed."""
        state = self._node.state
        for prefix in _UNPUBLISHED:
            async for item in state.list(prefix):
                if paths.window_of(item.path) not in windows:
                    await state.delete(item.path)
        for window in sorted(windows):
            await state.put(f"{PENDING}{window:010d}", b"")
        for path in sorted(self._lost_paths):
            if path.startswith(_UNPUBLISHED):
                self._say(f"{path}: a window that was not published yet is given up")
