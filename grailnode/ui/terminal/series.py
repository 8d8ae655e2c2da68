"""The four figures that a run is followed by, each as a series with the words beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grailnode.observe.state import NetworkState
from grailnode.ui.figures import byte_text, known, part_text, share_text


@dataclass(frozen=True)
class Trend:
    """One figure over time.

    Attributes:
        label: its name; style: its colour.
        values: in order; expected: how many there will be at the end, 0 where nobody knows.
        words: its present state in words; short: the same for narrow places.
    """

    label: str
    style: str
    values: Sequence[float | None]
    expected: int
    words: str
    short: str


def learning(state: NetworkState) -> tuple[Trend, Trend]:
    """Held-out pass@1 and reward, over windows."""
    planned = state.windows_planned or 0
    passed = [row.pass_at_1 for row in state.windows]
    reward = [row.reward for row in state.windows]
    return (
        Trend("held-out pass@1", "cyan", passed, planned, change_text(passed), _last(passed)),
        Trend("reward", "magenta", reward, planned, change_text(reward), _last(reward)),
    )


def publication(state: NetworkState) -> tuple[Trend, Trend]:
    """Sparsity and patch bytes, over the versions that are patches."""
    rows = [row for row in state.versions if row.patch_bytes is not None]
    sparsity: list[float | None] = [row.sparsity for row in rows]
    sizes: list[float | None] = [row.patch_bytes for row in rows]
    planned = state.windows_planned or 0
    return (
        Trend(
            "sparsity", "bright_blue", sparsity, planned, _sparsity_text(sparsity), _sparsity_text(sparsity, short=True)
        ),
        Trend("patch", "bright_blue", sizes, planned, _patch_text(sizes, state.full_bytes), _patch_text(sizes, 0)),
    )


def change_text(values: Sequence[float | None]) -> str:
    """'0.43 → 0.79  +0.36', from the first known value to the last."""
    measured = known(values)
    if not measured:
        return "not measured yet"
    first, last = round(measured[0], 2), round(measured[-1], 2)
    return f"{first:.2f} → {last:.2f}  {last - first:+.2f}"


def _last(values: Sequence[float | None]) -> str:
    measured = known(values)
    return f"{measured[-1]:.2f}" if measured else "-"


def _sparsity_text(values: Sequence[float | None], short: bool = False) -> str:
    measured = known(values)
    if not measured:
        return "-" if short else "no patch yet"
    last = share_text(measured[-1])
    return last if short else f"{last}  mean {share_text(fmean(measured))}"


def _patch_text(sizes: Sequence[float | None], full: int) -> str:
    measured = known(sizes)
    if not measured:
        return f"full checkpoint {byte_text(full)}" if full else "-"
    last = round(measured[-1])
    return f"{byte_text(last)} = {part_text(last, full)} of {byte_text(full)}" if full else byte_text(last)
