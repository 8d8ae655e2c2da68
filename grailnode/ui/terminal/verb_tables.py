"""The tables that `grailnode calibrate`, `inspect` and `verify --rollout` print."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from grailnode.calibration.proof_file import MeasuredRow, PairRow
from grailnode.calibration.thresholds import WIDEST_MARGIN
from grailnode.convert.inspect_patch import InspectedPatch
from grailnode.observe.recheck import GroupReference, RecheckedGroup
from protocol.proof import Step

_UNKNOWN_TAIL: Final = " (too few tokens to tell how far the noise of the widest pair reaches: measure more --rollouts)"


def pairs_table(rows: Sequence[PairRow]) -> Table:
    """Return the honest distribution of both statistics, a row for each pair."""
    caption = "distances in sketch units; margins and shifts in logits / temperature"
    table = Table(title="Honest distribution", caption=caption, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("pair", no_wrap=True)
    for title in ("tokens", "states", "distance\n99.9%", "\nmax", "\nmissed", "margin\nmax", "\nmissed", "shift\nmax"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(row.tokens),
            str(row.positions),
            *(f"{value:g}" for value in row.distances[2:]),
            f"{row.sketch_misses:.3%}",
            f"{row.margins[2]:.2g}",
            f"{row.margin_misses:.3%}",
            f"{row.largest_shift:.2g}",
        )
    return table


def _steps(steps: Sequence[Step]) -> str:
    return ", ".join(f"{step.points} beyond {step.beyond:.3g} ({step.rate:.2g})" for step in steps)


def threshold_lines(row: MeasuredRow) -> list[str]:
    """Return the thresholds of a row and what they refuse, in lines."""
    spec = row.thresholds
    certainty = f"with {spec.confidence:.0%} confidence, were misses {row.measured.headroom:g} times as frequent"
    tail = _UNKNOWN_TAIL if spec.margin_limit == WIDEST_MARGIN else ""
    lines = [
        f"miners in {spec.miner}, validators in {spec.validator}",
        f"sketch: a position misses beyond {spec.sketch_tolerance}, at a rate of at most "
        f"{spec.sketch_rate:.2g} ({certainty}); median of a group at most {spec.sketch_median}",
        f"sampling: a token misses beyond a margin of {spec.margin:.2g}, at a rate of at most {spec.margin_rate:.2g} "
        f"({certainty}); beyond {spec.far_margin:.3g} at a rate of at most {spec.far_rate:.2g} (extrapolated); none "
        f"beyond {spec.margin_limit:.3g}{tail}",
        f"points of a position, with the honest rate beyond each step: {_steps(spec.sketch_steps)}",
        f"points of a token: {_steps(spec.margin_steps)}",
        f"one test refuses honest work with probability {spec.level:g}; measured on {spec.positions} positions",
    ]
    lines += [
        f"refused of a {copy.bits}-bit copy ({copy.pair}, {copy.tokens} tokens): {copy.rollouts:.1%} of rollouts, "
        f"{copy.groups:.1%} of groups, {copy.windows:.1%} of windows of {row.measured.window} groups"
        for copy in row.measured.copies
    ]
    return lines


def patch_table(patch: InspectedPatch, *, unchanged: bool = False) -> Table:
    """Return a table for a terminal of 80 columns, in bits for each change; with `unchanged`, of all tensors."""
    ratio = patch.weight_bytes / max(1, patch.nbytes)
    bound = "" if patch.bound is None else f", the bound is {patch.bound:.2f}"
    note = "" if patch.invertible else "\nnot invertible: value_planes do not hold the older values"
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
        title=f"{patch.profile} patch, {patch.nbytes:,} bytes, {ratio:.1f}x smaller than the weights",
        caption=f"{patch.changed:,} of {patch.elements:,} elements change, {patch.bits_per_change:.2f} bits each{bound}"
        f"\nfrom {patch.base[:16]} to {patch.result[:16]}{note}",
    )
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    numbers = ("changed", "density", "codec", "bytes", "bits", *(() if patch.bound is None else ("bound",)))
    for heading in numbers:
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
                *([] if row.bound is None else [f"{row.bound:.1f}"]),
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
