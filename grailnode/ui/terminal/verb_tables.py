"""The tables that `grailnode calibrate`, `inspect` and `verify --rollout` print."""

from collections.abc import Sequence

from rich.table import Table

from grailnode.calibration.proof_file import MeasuredRow, PairRow
from grailnode.convert.inspect_patch import InspectedPatch
from grailnode.observe.recheck import GroupReference, RecheckedGroup
from protocol.proof import RATE_UNIT
from protocol.proof import Table as Steps
from protocol.rollout.sampling import NOISE_UNIT


def pairs_table(rows: Sequence[PairRow]) -> Table:
    """Return the honest distribution of both statistics, a row for each pair."""
    caption = "distances in sketch units; margins and shifts in logits / temperature"
    table = Table(title="Honest distribution", caption=caption, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("pair", no_wrap=True)
    for title in (
        "tokens",
        "states",
        "distance\n99.9%",
        "\nmax",
        "margin\nmax",
        "\nmissed",
        "stops\nmissed",
        "shift\nmax",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(row.tokens),
            str(row.positions),
            *(f"{value:g}" for value in row.distances[2:]),
            f"{row.margins[2]:.2g}",
            f"{row.margin_misses:.3%}",
            f"{row.stop_misses:.3%}",
            f"{row.largest_shift:.2g}",
        )
    return table


def threshold_lines(row: MeasuredRow) -> list[str]:
    """Return the thresholds of a row and what they refuse, in lines."""
    spec, measured = row.thresholds, row.measured
    units = {"sketch": 1.0, "margin": NOISE_UNIT, "stop": NOISE_UNIT}
    lines = [f"miners in {spec.miner}, validators in {spec.validator}"]
    for name, unit in units.items():
        table: Steps = getattr(spec, name)
        steps = zip(table.beyond, table.rates, strict=True)
        text = ", ".join(f"{step * unit:.2g}: {rate / RATE_UNIT:.2g}" for step, rate in steps)
        lines.append(f"{name}: beyond each step, honest work at most: {text}")
    lines += [
        f"with {spec.confidence_ppm / 1e6:.0%} confidence and a headroom of {measured.headroom:g}; "
        f"N honest groups are refused with a probability of at most N * {measured.level:g}; measured on "
        f"{spec.positions} positions"
    ]
    return lines + [
        f"refused of a {copy.bits}-bit copy ({copy.pair}, {copy.tokens} tokens): {copy.groups:.1%} of groups, "
        f"{copy.windows:.1%} of windows of {measured.window} groups"
        for copy in measured.copies
    ]


def patch_table(patch: InspectedPatch, *, unchanged: bool = False) -> Table:
    """Return a table for a terminal of 80 columns, in bits for each change; with `unchanged`, of all tensors. Without
    the base of the patch there are only title and caption.
    """
    of, bound, ratio = "", "", ""
    if patch.weight_bytes is not None and patch.bound is not None:
        ratio = f", {patch.weight_bytes / max(1, patch.nbytes):.1f}x smaller than the weights"
        of, bound = f" of {patch.elements:,}", f", the bound is {patch.bound:.2f}"
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
        title=f"{patch.profile} patch, {patch.nbytes:,} bytes{ratio}",
        caption=f"{patch.changed:,}{of} elements change, {patch.bits_per_change:.2f} bits each{bound}"
        f"\nfrom {patch.base[:16]} to {patch.result[:16]}",
    )
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    for heading in ("changed", "density", "codec", "bytes", "bits", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in patch.tensors:
        if row.changed or unchanged:
            other = "" if row.dtype == "BF16" else f" {row.dtype}"
            table.add_row(
                row.name,
                ("x".join(map(str, row.shape)) or "scalar") + other,
                f"{row.changed:,}",
                f"{row.density:.2%}",
                row.codec,
                f"{row.nbytes:,}",
                f"{row.bits_per_change:.1f}",
                f"{row.bound:.1f}",
            )
    return table


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
