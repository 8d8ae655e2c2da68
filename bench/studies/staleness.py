"""How old rollouts change what is learned, and how many values a step changes.

Each step trains on rollouts that the policy of so many steps before has sampled: an asynchronous run with a constant
delay. Without a delay it is a synchronous run. Two policies learn: the packaged one, and that of the simulated networks
with 13,440 weights, which takes a quarter of the time.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.studies.figures import Labels, Line, linear_axis, log_axis, write_figure
from bench.studies.records import DISTANCES
from bench.studies.views import DTYPES, ShareByDistance
from bench.studies.workloads import LearningPolicy, Recipe
from bench.tables import interval, percent, print_table
from grailnode.engine.policy import PACKAGED_POLICY
from tests.support.simulation import small_policy

DELAYS: Final = (0, 2, 4, 8, 16)
STEPS: Final = 80
WARM_UP: Final = 10
GROUPS: Final = 16
AGES: Final = (1, 8, 32)  # steps between the versions whose changed values are counted
POLICIES: Final = {"packaged": (PACKAGED_POLICY, 7e-6), "small": (small_policy.DIRECTORY, 1e-4)}
"""The directory and the learning rate of each policy."""
_EVERY: Final = 16
_LAST: Final = 2  # values of pass@1 whose mean is the end value


@dataclass(frozen=True)
class Outcome:
    """A trial: its policy, delay and seed, pass@1 every sixteen steps, and the mean share of changed values by
    distance.
    """

    policy: str
    delay: int
    seed: int
    curve: list[float] = field(default_factory=list)
    changed: dict[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """pass@1, mean of the last two values."""
        return fmean(self.curve[-_LAST:])

    @property
    def area(self) -> float:
        """Mean pass@1 over the run."""
        return fmean(self.curve[1:])


def run_trial(name: str, delay: int, seed: int) -> Outcome:
    """Train one policy with one delay."""
    directory, rate = POLICIES[name]
    policy = LearningPolicy(Recipe(rate, WARM_UP), directory, groups=GROUPS, seed=seed, delay=delay, held_out=512)
    shares, curve = None, []
    for state in policy.states(STEPS):
        if shares is None:
            shares = ShareByDistance(DTYPES["bfloat16"], state.weights, DISTANCES)
        shares.add(state.weights)
        if state.step % _EVERY == 0:
            curve.append(policy.newest_pass_at_1())
    assert shares is not None
    return Outcome(name, delay, seed, curve, {str(k): fmean(shares.shares[k][WARM_UP:]) for k in DISTANCES})


def study_staleness(name: str, figures: Path, results: Path | None, seeds: int) -> None:
    """Print and draw learning and changed values by delay. Trials that are in `results` are not run again."""
    outcomes = {(item.delay, item.seed): item for item in _read(results) if item.policy == name}
    for seed in range(seeds):
        for delay in DELAYS:
            if (delay, seed) in outcomes:
                continue
            outcome = outcomes[delay, seed] = run_trial(name, delay, seed)
            print(f"{name}, delay {delay}, seed {seed}: end {outcome.end:.3f}, area {outcome.area:.3f}", flush=True)
            if results is not None:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    by_delay = {delay: [outcomes[delay, seed] for seed in range(seeds)] for delay in DELAYS}
    synchronous = [item.end for item in by_delay[0]]
    rows = []
    for delay, trials in by_delay.items():
        differences = [item.end - base for item, base in zip(trials, synchronous, strict=True)]
        rows.append([
            str(delay), interval([item.end for item in trials]), interval(differences) if delay else "-",
            interval([item.area for item in trials]), *(percent(_changed(trials, k)) for k in AGES),
        ])  # fmt: skip
    header = ["delay, steps", "pass@1 at the end", "less synchronous", "mean pass@1", *(f"k = {k}" for k in AGES)]
    print_table(f"{name}, {seeds} seeds, 95% intervals; the last columns are BF16 values that differ", header, rows)
    _draw(figures, name, by_delay)


def _draw(figures: Path, name: str, by_delay: dict[int, list[Outcome]]) -> None:
    x = linear_axis(0, DELAYS[-1], 4)
    lines = [Line(f"k = {k}", [(delay, _changed(trials, k)) for delay, trials in by_delay.items()]) for k in DISTANCES]
    labels = Labels(
        f"BF16 values of the {name} policy that differ between versions k steps apart, by the age of the rollouts",
        "Means over seeds.", "steps by which rollouts are old", "share that differs",
    )  # fmt: skip
    write_figure(figures / f"staleness-{name}.svg", labels, lines, x, log_axis(0.01, 1))
    x = linear_axis(0, STEPS, 16)
    lines = []
    for delay, trials in by_delay.items():
        means = [fmean(values) for values in zip(*(item.curve for item in trials), strict=True)]
        lines.append(Line(f"delay {delay}", [(_EVERY * index, mean) for index, mean in enumerate(means)]))
    labels = Labels(
        f"Held-out pass@1 of the {name} policy by the age of the rollouts",
        "Means over seeds.",
        "optimizer step",
        "pass@1",
    )
    write_figure(figures / f"learning-{name}.svg", labels, lines, x, linear_axis(0.2, 1, 0.2))


def _changed(trials: list[Outcome], distance: int) -> float:
    return fmean(item.changed[str(distance)] for item in trials)


def _read(results: Path | None) -> list[Outcome]:
    if results is None or not results.exists():
        return []
    return [Outcome(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]
