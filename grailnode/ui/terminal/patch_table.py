"""The table that `grailnode inspect` prints."""

from rich.table import Table

from grailnode.convert.inspect_patch import InspectedPatch


def patch_table(patch: InspectedPatch, *, unchanged: bool = False) -> Table:
    """Return a table for a terminal of 80 columns, in bits for each change.

    Args:
        unchanged: include the tensors that do not change.
    """
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
