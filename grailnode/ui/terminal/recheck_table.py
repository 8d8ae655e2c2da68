"""The table that `grailnode verify --rollout` prints."""

from rich.table import Table

from grailnode.observe.recheck import GroupReference, RecheckedGroup


def recheck_table(reference: GroupReference, group: RecheckedGroup) -> Table:
    """Return the statistics of a group that was judged again, with every validator's result below."""
    table = Table(
        title=f"group {reference.index} of miner {group.miner.hex()[:16]} in window {reference.window}, "
        f"version {group.version}",
        caption="\n".join(f"validator {result.key[:16]}: {result.text}" for result in group.validators),
    )
    for heading in ("statistic", "value", "limit", ""):
        table.add_column(heading, overflow="fold")
    for line in group.statistics:
        table.add_row(line.name, line.value, line.limit, "" if line.holds else "fails")
    return table
