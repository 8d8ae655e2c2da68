"""Writes the difficulty table for the next versions into the spool, from the sealed summaries of a window."""

from collections.abc import Mapping

from protocol.difficulty import Counts, DifficultyTable
from roles.node.identity import Node
from roles.trainer.spool import DIFFICULTY


class TableWriter:
    """Makes the table of the newest window of which enough summaries have come."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._window = -1

    async def write(self, window: int, ledgers: Mapping[bytes, tuple[bytes, Counts]], *, is_complete: bool) -> None:
        """Write the table of a window, if it is newer than the last one."""
        node, rule = self._node, self._node.run.difficulty
        if rule is None or window <= self._window or not is_complete:
            return
        counting = {
            validator: item
            for validator, item in ledgers.items()
            if validator in node.authority.validators and len(item[1]) == len(rule.strata)
        }
        if len(counting) >= node.authority.quorum:
            table = DifficultyTable.of(rule, window, counting)
            await node.state.put(DIFFICULTY, table.to_bytes())
            self._window = window
            shares = ",".join(f"{item.name}={share}" for item, share in zip(rule.strata, table.shares, strict=True))
            node.telemetry.event("difficulty", window=window, validators=len(counting), shares=shares)
