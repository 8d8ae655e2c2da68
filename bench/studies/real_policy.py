"""What a step changes in a model that people know, what its patch weighs, and how old rollouts may be.

SmolLM2-135M-Instruct learns the demo's sums in one process, as in `grailnode demo --policy smollm2`: 8 problems with 8
rollouts each in a step, a version after each step. A step takes about a minute of CPU time.

- Patches of each version, beside PULSE's format and the bound.
- Locality (SparseRL-Sync, figure 8): of the values that a version changes, the share that an earlier version of the run
  has changed; quartiles over the tensors.
- Utilization (PULSE, figure 1): the share of time in which a miner computes that waits for each version.
- Rewards by the age of the rollouts, in steps; of a mixture with products, by its members; of two sites.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.measures import Update
from bench.published_formats import FORMATS
from bench.studies.figures import Labels, Line, linear_axis, write_figure
from bench.studies.workloads import LOCAL_STEPS, SITES, LearningPolicy, Recipe, Sites
from bench.tables import percent, print_table, rate_text
from grailnode.node.processes import TRAINER_BLOCK, return_large_blocks
from protocol import patch
from protocol.environments import Problem
from protocol.environments.addition import Sums
from protocol.environments.mixture import Mixture
from protocol.environments.record import SHARES
from protocol.patch.values import bits_of

TWO_SITES: Final = "sums, two sites"
RUNS: Final = (
    ("sums", 3e-6, 0, 16), ("sums", 1e-6, 0, 6), ("sums", 1e-5, 0, 6), ("sums", 3e-6, 8, 16), ("mixture", 3e-6, 0, 16),
    (TWO_SITES, 3e-6, 0, 8),
)  # fmt: skip
"""The task, the learning rate, the age of the rollouts, and the versions of each run."""
_LINKS: Final = (10, 100, 400, 1000, 10_000)  # Mbit/s
_OFTEN: Final = 4  # steps whose mean reward is a figure


class Products(Sums):
    """One-digit multiplication, asked as 'What is 3*9?'."""

    name = "products"

    def _problem(self, a: int, b: int) -> Problem:
        return Problem(f"What is {a}*{b}?", str(a * b))


MIXTURE: Final = Mixture([(SHARES // 2, Products()), (SHARES // 2, Sums())])


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
    task: str = "sums"
    rewards: dict[str, list[float]] = field(default_factory=dict)  # by kind
    sent: int = 0  # bytes of the contributions of all sites


def _run(directory: Path, task: str, rate: float, delay: int, steps: int) -> Iterator[Step]:
    policy = (Sites if task == TWO_SITES else LearningPolicy)(
        Recipe(rate, warm_up=0), directory, delay=delay, held_out=0, chat=1, max_tokens=24,
        task=MIXTURE if task == "mixture" else Sums(),
    )  # fmt: skip
    changed = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in policy.versions[0].items()}
    begin = time.process_time()
    for step, rewards in enumerate(policy.rewards(steps), 1):
        seconds = time.process_time() - begin
        old, new = policy.versions[step - 1], policy.versions[step]
        measured = _measure(rate, delay, step, fmean(chain(*rewards.values())), old, new, changed, seconds)
        yield replace(measured, task=task, rewards=rewards, sent=policy.sent)
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
    for task, rate, delay, steps in RUNS:
        run = [step for step in known if (step.task, step.rate, step.delay) == (task, rate, delay)][-steps:]
        if [step.step for step in run] != list(range(1, steps + 1)):
            run = []
            for step in _run(directory, task, rate, delay, steps):
                run.append(step)
                print(f"{task}, {rate_text(rate)}, {delay} steps old: {step}", flush=True)
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
            run[0].task, rate_text(run[0].rate), str(run[0].delay), str(len(run)),
            percent(changes / sum(step.values for step in run)), f"{costs[0] / len(run) / 8e6:.2f} MB",
            f"{costs[0] / changes:.2f}", f"{costs[1] / changes:.2f}", f"{costs[0] / costs[2]:.3f}",
            f"{fmean(step.sent for step in run) / SITES / 1e6:.2f} MB" if run[0].sent else "-",
        ])  # fmt: skip
    header = ["task", "rate", "age", "versions", "changed in each", "patch", "bits a change", "of PULSE",
              "patch / bound", "contribution"]  # fmt: skip
    print_table("SmolLM2-135M: patches of versions one step apart, or a round of two", header, rows)


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
        [_title(run, kind), rate_text(run[0].rate), str(run[0].delay), *(f"{mean:.3f}" for mean in means)]
        for run in runs
        for kind in _kinds(run)
        for means in [[_mean(run, end, kind) for end in range(_OFTEN, _steps(run) + _OFTEN, _OFTEN)]]
    ]
    columns = [f"{at + 1} to {at + _OFTEN}" for at in range(0, max(map(_steps, runs)), _OFTEN)]
    rows = [row + ["-"] * (len(columns) + 3 - len(row)) for row in rows]
    print_table("mean reward of the rollouts of steps of each site", ["task", "rate", "age", *columns], rows)


def _draw_rewards(path: Path, runs: Sequence[Sequence[Step]]) -> None:
    lines = [
        Line(
            f"{_title(run, kind)}, {rate_text(run[0].rate)}" + (f", {run[0].delay} steps old" if run[0].delay else ""),
            [(float(end), _mean(run, end, kind)) for end in range(_OFTEN, _steps(run) + 1, _stride(run))],
        )
        for run in runs
        for kind in _kinds(run)
    ]
    labels = Labels(
        "Mean reward of the last 4 steps' rollouts, SmolLM2-135M",
        "Line chart: rewards grow with the steps, faster with a larger learning rate.",
        "optimizer steps of a site",
        "mean reward",
    )
    steps = max(map(_steps, runs))
    write_figure(path, labels, lines, linear_axis(0, steps, 4), linear_axis(0, 0.6, 0.1))


def _kinds(run: Sequence[Step]) -> list[str]:
    """Return the members of a mixture, or an empty text for its only kind of problems."""
    return sorted({kind for step in run for kind in step.rewards}) or [""]


def _title(run: Sequence[Step], kind: str) -> str:
    return f"{run[0].task}, {kind}" if kind else run[0].task


def _stride(run: Sequence[Step]) -> int:
    """Return the optimizer steps of a site from one version to the next."""
    return LOCAL_STEPS if run[0].task == TWO_SITES else 1


def _steps(run: Sequence[Step]) -> int:
    return len(run) * _stride(run)


def _mean(run: Sequence[Step], end: int, kind: str) -> float:
    """Return the mean reward of the rollouts of four steps of a site."""
    own = run[(end - _OFTEN) // _stride(run) : end // _stride(run)]
    return fmean(chain(*(step.rewards.get(kind, ()) if step.rewards else (step.reward,) for step in own)))
