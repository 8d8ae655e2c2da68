"""Runs of the workloads, each of which feeds all tables and figures. They are kept in a file, so none is made twice."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from bench.studies.effects import EffectMeter, Effects, sizes_of
from bench.studies.views import DTYPES, ShareByDistance
from bench.studies.workloads import STEPS, WARM_UP, Layer, LearningPolicy, Recipe, State

Workload = Literal["policy", "layer"]
WORKLOADS: Final[tuple[Workload, ...]] = ("policy", "layer")
DISTANCES: Final = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Record:
    """What a run has shown.

    Attributes:
        shares: of values that differ, by dtype, then by k as a text, then by the step of the earlier state.
        rewards: mean reward by step; none for the layer.
        effects: of the steps after the warm-up.
        sizes: of the first weights.
    """

    shares: dict[str, dict[str, list[float]]]
    rewards: list[float]
    effects: Effects
    sizes: dict[str, float]

    def mean(self, dtype: str, distance: int) -> float:
        """Return the mean share between states so many steps apart, behind the warm-up."""
        return fmean(self.shares[dtype][str(distance)][WARM_UP:])


class Records:
    """The runs that have been made.

    Args:
        path: of the file; None to keep them in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: dict[str, Record] = {}
        self._layers: dict[Recipe, Layer] = {}  # by recipe with a rate of 1: a layer serves all rates
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                effects = Effects(**row["record"].pop("effects"))
                self._records[row["run"]] = Record(**row["record"], effects=effects)

    def of(self, workload: Workload, recipe: Recipe) -> Record:
        """Return the run of a workload with a recipe."""
        name = f"{workload} {asdict(recipe)}"
        if name not in self._records:
            self._records[name] = self._run(workload, recipe)
            print(f"{name}: done", flush=True)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": name, "record": asdict(self._records[name])}) + "\n")
        return self._records[name]

    def _run(self, workload: Workload, recipe: Recipe) -> Record:
        states = LearningPolicy(recipe).states(STEPS) if workload == "policy" else self._layer(recipe)
        first = next(states)
        shares = {name: ShareByDistance(dtype, first.weights, DISTANCES) for name, dtype in DTYPES.items()}
        meter, rewards = EffectMeter(recipe.rate, DISTANCES), []
        for share in shares.values():
            share.add(first.weights)
        for state in states:
            for share in shares.values():
                share.add(state.weights)
            if workload == "policy":
                rewards.append(state.reward)
            if state.step >= WARM_UP:
                meter.add(state)
        by_dtype = {name: {str(k): values for k, values in share.shares.items()} for name, share in shares.items()}
        return Record(by_dtype, rewards, meter.means(), sizes_of(first.weights))

    def _layer(self, recipe: Recipe) -> Iterator[State]:
        unit = replace(recipe, rate=1.0)
        if unit not in self._layers:
            self._layers = {unit: Layer(unit)}  # one at a time: its drifts take 180 MB
        return self._layers[unit].states(recipe.rate)
