"""What steps move, and how much of it the BF16 view shows."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from bench.studies.views import unit_in_last_place
from bench.studies.workloads import State

BINS: Final = range(-16, 5)
"""Powers of two: the classes of an update's size in units in the last place."""
PERCENTILES: Final = (0.05, 0.5, 0.95)
_SAMPLES: Final = 1 << 18  # elements of which quantiles are computed


@dataclass
class Effects:
    """Means over steps of what they do.

    Attributes:
        figures: by name.
        classes: share of the updates in each class of `BINS`.
        cosines, lengths: by k as a text, of the change of the view over k steps beside the change of the masters: the
            cosine of their angle, and the quotient of their lengths.
    """

    figures: dict[str, float]
    classes: list[float]
    cosines: dict[str, float]
    lengths: dict[str, float]


@dataclass
class EffectMeter:
    """Collects what the steps of a run do.

    Args:
        rate: the learning rate of all steps; distances: k, ascending.
    """

    rate: float
    distances: Sequence[int]
    _figures: dict[str, list[float]] = field(default_factory=dict)
    _classes: list[list[float]] = field(default_factory=list)
    _cosines: dict[str, list[float]] = field(default_factory=dict)
    _lengths: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sample: Tensor | None = None
        self._past: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.distances[-1] + 1)  # masters and views, float32

    def add(self, state: State) -> None:
        """Look at the state after one more step; the first one only begins."""
        self._past.append((state.weights, state.weights.to(torch.bfloat16).to(torch.float32)))
        if len(self._past) > 1:
            self._add_step(self._past[-2], self._past[-1], state.gradient)
        for distance in self.distances:
            if len(self._past) > distance:
                masters, seen = (new - old for new, old in zip(self._past[-1], self._past[-1 - distance], strict=True))
                length = float(masters.norm() * seen.norm())
                self._cosines.setdefault(str(distance), []).append(float(masters @ seen) / length if length else 0.0)
                self._lengths.setdefault(str(distance), []).append(float(seen.norm() / masters.norm()))

    def means(self) -> Effects:
        """Return the means over the steps."""
        return Effects(
            figures={name: fmean(values) for name, values in self._figures.items()},
            classes=[fmean(column) for column in zip(*self._classes, strict=True)],
            cosines={name: fmean(values) for name, values in self._cosines.items()},
            lengths={name: fmean(values) for name, values in self._lengths.items()},
        )

    def _add_step(self, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], gradient: Tensor) -> None:
        update = (after[0] - before[0]).abs()
        changed = after[1] != before[1]
        units = update / unit_in_last_place(before[0])
        self._note("changed", float(changed.float().mean()))
        self._note("expected", float(units.clamp(max=1).mean()))
        self._note("update in changed", float(update[changed].square().sum() / update.square().sum()))
        if len(gradient):
            squares = gradient.square()
            self._note("non-zero", float((gradient != 0).float().mean()))
            self._note("gradient in changed", float(squares[changed].sum() / squares.sum()))
        ratio = update / self.rate
        if self._sample is None:
            self._sample = torch.randperm(len(ratio), generator=torch.Generator().manual_seed(0))[:_SAMPLES]
        sample = ratio[self._sample]
        self._note("mean", float(ratio.mean()))
        self._note("median", float(sample.quantile(0.5)))
        self._note("99%", float(sample.quantile(0.99)))
        self._note("largest", float(ratio.max()))
        powers = torch.log2(units.clamp_min(2.0 ** BINS[0])).floor().clamp(BINS[0], BINS[-1])
        counts = torch.bincount((powers - BINS[0]).to(torch.int64), minlength=len(BINS))
        self._classes.append((counts / len(units)).tolist())

    def _note(self, name: str, value: float) -> None:
        self._figures.setdefault(name, []).append(value)


def sizes_of(weights: Tensor) -> dict[str, float]:
    """Return how large weights are, as in PULSE, Table 2: percentiles, mean, and the share above 256 times 3e-6."""
    sizes = weights.abs()
    percentiles = {f"{q:.0%}": float(sizes.kthvalue(math.ceil(q * len(sizes))).values) for q in PERCENTILES}
    above = float((sizes > 256 * 3e-6).float().mean())
    return {**percentiles, "mean": float(sizes.mean()), "above": above}
