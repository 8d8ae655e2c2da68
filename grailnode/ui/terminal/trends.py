"""The four figures by which a running network is followed, each as a series with its present state in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from grailnode.observe.state import NetworkState
from grailnode.ui.formatting import byte_part_text, byte_text, decimal_text, share_text
from grailnode.ui.series import Change, last, mean


@dataclass(frozen=True)
class Trend:
    """One figure over time.

    Attributes:
        label: its name; style: its colour.
        values: in order; planned: how many there will be at the end, 0 if nobody knows.
        words: its present state in words; short: the same for narrow places.
    """

    label: str
    style: str
    values: Sequence[float | None]
    planned: int
    words: str
    short: str


def learning(state: NetworkState) -> tuple[Trend, Trend]:
    """Return the trends of held-out pass@1 and reward, over windows."""
    pass_at_1 = _learning_trend(state, "held-out pass@1", "cyan", [row.pass_at_1 for row in state.windows])
    return pass_at_1, _learning_trend(state, "reward", "magenta", [row.reward for row in state.windows])


def publication(state: NetworkState) -> tuple[Trend, Trend]:
    """Return the trends of sparsity and patch bytes, over the versions that are patches."""
    rows = [row for row in state.versions if row.patch_bytes is not None]
    sparsity = [row.sparsity for row in rows]
    sizes = [row.patch_bytes for row in rows]
    planned, style = state.windows_planned or 0, "bright_blue"
    words, short = _sparsity_words(sparsity)
    patch_words, patch_short = _patch_words(sizes, state.full_bytes)
    return (
        Trend("sparsity", style, sparsity, planned, words, short),
        Trend("patch", style, sizes, planned, patch_words, patch_short),
    )


def _learning_trend(state: NetworkState, label: str, style: str, values: Sequence[float | None]) -> Trend:
    change = Change.of(values)
    words = change.text if change else "not measured yet"
    return Trend(label, style, values, state.windows_planned or 0, words, decimal_text(last(values)))


def _sparsity_words(values: Sequence[float | None]) -> tuple[str, str]:
    newest, average = last(values), mean(values)
    if newest is None or average is None:
        return "no patch yet", "-"
    return f"{share_text(newest)}  mean {share_text(average)}", share_text(newest)


def _patch_words(sizes: Sequence[int | None], full: int) -> tuple[str, str]:
    newest = last(sizes)
    if newest is None:
        return (f"full checkpoint {byte_text(full)}" if full else "-"), "-"
    return byte_part_text(round(newest), full), byte_text(round(newest))
