"""What a step changes in a model that people know, what its patch weighs, and how old rollouts may be.

SmolLM2-135M-Instruct learns the demo's sums in one process, as in `grailnode demo --policy smollm2`: 8 problems with 8
rollouts each in a step, a version after each step. A step takes about a minute of CPU time.

- Patches of each version, beside PULSE's format and the bound.
- Locality (SparseRL-Sync, figure 8): of the values that a version changes, the share that an earlier version of the run
  has changed; quartiles over the tensors.
- Utilization (PULSE, figure 1): the share of time in which a miner computes that waits for each version.
- Rewards by the age of the rollouts, in steps.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.measures import Update
from bench.published_formats import FORMATS
from bench.studies.figures import Labels, Line, linear_axis, write_figure
from bench.studies.workloads import LearningPolicy, Recipe
from bench.tables import percent, print_table, rate_text
from grailnode.node.processes import TRAINER_BLOCK, return_large_blocks
from protocol import patch
from protocol.patch.values import bits_of

RUNS: Final = ((3e-6, 0, 16), (1e-6, 0, 6), (1e-5, 0, 6), (3e-6, 8, 16))
"""The learning rate, the age of the rollouts, and the steps of each run."""
_LINKS: Final = (10, 100, 400, 1000, 10_000)  # Mbit/s
_OFTEN: Final = 4  # steps whose mean reward is a figure


@dataclass(frozen=True)
class Step:
    """A step of a run: what changed, the bits of its patch by way, locality over tensors, and what it took."""

    rate: float
    delay: int
    step: int
    reward: float
    values: int
    changes: int
    compact: int  # bits, as the two below
    pulse: int
    bound: float
    locality: tuple[float, float, float]
    seconds: float


def _run(directory: Path, rate: float, delay: int, steps: int) -> Iterator[Step]:
    policy = LearningPolicy(
        Recipe(rate, warm_up=0), directory, delay=delay, held_out=0, environment="sums", chat=1, max_tokens=24
    )
    changed = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in policy.versions[0].items()}
    begin = time.process_time()
    for step, reward in enumerate(policy.rewards(steps), 1):
        seconds = time.process_time() - begin
        old, new = policy.versions[step - 1], policy.versions[step]
        yield _measure(rate, delay, step, reward, old, new, changed, seconds)
        policy.forget(step - delay - 1)
        begin = time.process_time()


def _measure(
    rate: float,
    delay: int,
    step: int,
    reward: float,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    changed: dict[str, Tensor],
    seconds: float,
) -> Step:
    shares, changes = [], 0
    for name, tensor in new.items():
        own = tensor.view(torch.int16) != old[name].view(torch.int16)
        count = int(own.sum())
        changes += count
        if count:
            shares.append(int((own & changed[name]).sum()) / count)
        changed[name] |= own
    before, after = ([bits_of(tensor) for tensor in one.values()] for one in (old, new))
    pulse = FORMATS[0].encode(before, after, [tensor.shape[-1] for tensor in new.values()])
    low, median, high = np.quantile(shares, (0.25, 0.5, 0.9)).tolist()
    return Step(
        rate, delay, step, reward, sum(tensor.numel() for tensor in new.values()), changes,
        8 * len(patch.encode(old, new)), 8 * len(pulse), Update(dict(old), dict(new)).bound,
        (low, median, high), seconds,
    )  # fmt: skip


def study_real_policy(directory: Path, results: Path, figures: Path) -> None:
    """Print the tables, and draw the rewards. Steps are written to `results`; a run that is there is not made again."""
    return_large_blocks(TRAINER_BLOCK)
    known = [Step(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    runs = []
    for rate, delay, steps in RUNS:
        run = [step for step in known if (step.rate, step.delay) == (rate, delay)][-steps:]
        if [step.step for step in run] != list(range(1, steps + 1)):
            run = []
            for step in _run(directory, rate, delay, steps):
                run.append(step)
                print(f"{rate_text(rate)}, {delay} steps old: {step}", flush=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(step)) + "\n")
        runs.append(run)
    _print_patches(runs)
    _print_locality(runs[0])
    _print_utilization(runs[0])
    _print_rewards(runs)
    _draw_rewards(figures / "learning-smollm2.svg", runs)


def _print_patches(runs: Sequence[Sequence[Step]]) -> None:
    rows = []
    for run in runs:
        changes = sum(step.changes for step in run)
        costs = [sum(getattr(step, way) for step in run) for way in ("compact", "pulse", "bound")]
        rows.append([
            rate_text(run[0].rate), str(run[0].delay), str(len(run)),
            percent(changes / sum(step.values for step in run)), f"{costs[0] / len(run) / 8e6:.2f} MB",
            f"{costs[0] / changes:.2f}", f"{costs[1] / changes:.2f}", f"{costs[0] / costs[2]:.3f}",
        ])  # fmt: skip
    header = ["rate", "age", "steps", "changed a step", "patch", "bits a change", "of PULSE", "patch / bound"]
    print_table("SmolLM2-135M: patches of versions one step apart", header, rows)


def _print_locality(run: Sequence[Step]) -> None:
    rows = [[str(step.step), *map(percent, step.locality)] for step in run if step.step > 1]
    title = f"values that an earlier version has changed, {rate_text(run[0].rate)}: quantiles over tensors"
    print_table(title, ["version", "25%", "50%", "90%"], rows)


def _print_utilization(run: Sequence[Step]) -> None:
    seconds = fmean(step.seconds for step in run)
    bits = {
        "whole": 16 * run[0].values,
        "PULSE": fmean(step.pulse for step in run),
        "patch": fmean(step.compact for step in run),
    }
    for compute in (seconds, 10.0):  # a GPU takes far less than these two cores
        rows = [
            [name, *(percent(compute / (compute + size / (1e6 * link))) for link in _LINKS)]
            for name, size in bits.items()
        ]
        title = f"utilization of a node that computes {compute:.0f} s between versions, by Mbit/s"
        print_table(title, ["sent", *map(str, _LINKS)], rows)


def _print_rewards(runs: Sequence[Sequence[Step]]) -> None:
    rows = [
        [rate_text(run[0].rate), str(run[0].delay),
         *(f"{fmean(step.reward for step in run[at : at + _OFTEN]):.3f}" for at in range(0, len(run), _OFTEN))]
        for run in runs
    ]  # fmt: skip
    columns = [f"{at + 1} to {at + _OFTEN}" for at in range(0, max(map(len, runs)), _OFTEN)]
    rows = [row + ["-"] * (len(columns) + 2 - len(row)) for row in rows]
    print_table("mean reward of the rollouts of steps", ["rate", "age", *columns], rows)


def _draw_rewards(path: Path, runs: Sequence[Sequence[Step]]) -> None:
    lines = []
    for run in runs:
        ends = range(_OFTEN, len(run) + 1)
        points = [(float(end), fmean(step.reward for step in run[end - _OFTEN : end])) for end in ends]
        lines.append(Line(f"{rate_text(run[0].rate)}, {run[0].delay} steps old", points))
    labels = Labels(
        "Mean reward of the last 4 steps' rollouts, SmolLM2-135M",
        "Line chart: rewards grow with the steps, faster with a larger learning rate.",
        "optimizer steps",
        "mean reward",
    )
    steps = max(map(len, runs))
    write_figure(path, labels, lines, linear_axis(0, steps, 4), linear_axis(0, 0.5, 0.1))
