"""Compute the difficulty tables of versions again, from the summaries that they name (docs/spec/difficulty.md)."""

from collections.abc import Awaitable, Callable

from protocol import paths
from protocol.difficulty import Counts, DifficultyTable
from protocol.errors import ProtocolError
from protocol.judging.ledger import Summary
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_record


async def table_fault(node: Node, table: DifficultyTable | None) -> str:
    """Return why a version's table does not follow from the summaries that it names; empty if it does, or names none.
    Raise NotFoundError if storage lacks one, StoreError if it cannot be read, ProtocolError if something else is in its
    place.
    """
    rule, revisions = node.run.difficulty, node.revisions
    if rule is None or table is None or not table.summaries:
        return ""
    if len(table.summaries) < revisions.lowest_quorum:
        return f"its difficulty table names {len(table.summaries)} summaries, fewer than any quorum of the run"
    ledgers: dict[bytes, tuple[bytes, Counts]] = {}
    for validator, digest in table.summaries:
        name = f"of validator {validator.hex()[:16]} for window {table.window}"
        if validator not in revisions.all_validators:
            return f"its difficulty table names a summary {name}, which never was a validator"
        try:
            summary = await fetch_record(node, Summary, paths.summary(validator, table.window))
        except NotFoundError as error:
            raise NotFoundError(f"its difficulty table names a summary {name}, which is not in storage") from error
        counts = summary.record.strata
        if summary.digest != digest or counts is None or len(counts) != len(rule.strata):
            return f"its difficulty table names another summary than the one {name}, or one without counts"
        ledgers[validator] = digest, counts
    if table != DifficultyTable.of(rule, table.window, ledgers):
        return f"its difficulty table does not follow from the {len(ledgers)} summaries that it names"
    return ""


async def watch_tables(node: Node, follower: Follower, pause: Callable[[], Awaitable[object]]) -> None:
    """Raise an alarm, for ever, about each new version with a table that does not follow from summaries. The draw stays
    that of the signed table: miners have pledged it, and all nodes must draw alike.
    """
    checked: set[tuple[int, DifficultyTable | None]] = set()
    while node.run.difficulty is not None:
        newest = follower.chain.head.version if follower.chain.head is not None else -1
        oldest = newest - node.run.schedule.max_lag
        tables = {(item.version, item.difficulty) for item in follower.chain.manifests() if item.version >= oldest}
        for version, table in sorted(tables - checked, key=lambda item: item[0]):
            try:
                fault = await table_fault(node, table)
            except NotFoundError as error:
                if table is None or not await node.time.has_come(node.run.schedule.verdict(table.window)):
                    continue  # storage may show the summary until the verdicts of its window are due
                fault = str(error)
            except (StoreError, ProtocolError):
                continue  # storage may show it the next time
            checked.add((version, table))
            if fault:
                node.alarm(f"trainer: version {version}: {fault}")
        checked &= tables
        await pause()
