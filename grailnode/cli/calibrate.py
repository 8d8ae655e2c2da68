"""`grailnode calibrate` on a terminal: options, progress, tables, and the file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, cast

import click
import torch
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from grailnode.calibration import prompts, proof_file
from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.procedure import CalibrationJob
from grailnode.calibration.procedure import calibrate as run_calibration
from grailnode.calibration.proof_file import PairRow, Proof
from grailnode.calibration.thresholds import WIDEST_MARGIN, CalibrationError, ThresholdDemands
from grailnode.calibration.variants import DType, Pair, Variant, select
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.run import requirements
from grailnode.run.creation import Choices
from grailnode.run.files import write_whole
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKind

_UNKNOWN_TAIL: Final = " (too few tokens to tell how far the noise of the widest pair reaches: measure more --rollouts)"


@dataclass(frozen=True)
class Options:
    """The command's options, by their names."""

    policy: Path | None
    environment: str
    prompts: Path | None
    rollouts: int
    pairs: str
    dtype: str
    device: str
    temperature: float | None
    max_tokens: int | None
    sketch: str
    level: float
    headroom: float
    seed: int
    out: Path | None
    data: Path | None = None


def calibrate_policy(options: Options) -> None:
    """Calibrate, show what was found, and write it.

    Raises:
        CalibrationError, PolicyError, OSError: what could not be done; nothing was written.
    """
    torch.set_num_threads(1)
    out = options.out or (options.policy or Path()) / proof_file.NAME
    if not out.absolute().parent.is_dir():
        raise CalibrationError(f"{out}: no such directory to write it to")
    job = make_job(options)
    with _Progress() as shown:
        proof = trio.run(run_calibration, job, shown.progress, shown.pairs)
    for line in summary(proof):
        click.echo(line)
    write_whole(out, proof.to_json().encode())
    click.echo(f"written: {out}")


class _Progress:
    """Progress as bars on a terminal's standard error, elsewhere as lines; then the table on standard output."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """So many rollouts of a pair are done."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)
        if self._bars.disable and done == total:
            click.echo(f"{what}: {total} rollouts", err=True)

    def pairs(self, rows: Sequence[PairRow]) -> None:
        """The honest distribution."""
        self._bars.stop()
        Console().print(pairs_table(rows))


def make_job(options: Options) -> CalibrationJob:
    """What the options ask for.

    Raises:
        CalibrationError, PolicyError, ProvisionError: they ask for what is not to be had.
    """
    policy = Policy.load(options.policy or PACKAGED_POLICY)
    choices = Choices()
    max_tokens = options.max_tokens or requirements.needed(options.environment).tokens
    work = CalibrationTask(
        policy=policy,
        params=SamplingParams(
            temperature=options.temperature or choices.temperature,
            max_tokens=max_tokens,
            eos=policy.eos,
        ),
        group_size=choices.group_size,
        prompt=_prompts(options, policy, max_tokens),
        kind=cast(SketchKind, options.sketch),
        seed=options.seed,
    )
    _check_device(options.device)
    base = Variant(dtype=cast(DType, options.dtype), device=options.device)
    audited = -(-choices.groups * choices.audit_floor_ppm // 1_000_000)
    return CalibrationJob(
        work=work,
        prompts=options.prompts.name if options.prompts else options.environment,
        pairs=_pairs(options.pairs, base, policy),
        rollouts=options.rollouts,
        demands=replace(ThresholdDemands(), level=options.level, headroom=options.headroom, window=audited),
    )


def _prompts(options: Options, policy: Policy, max_tokens: int) -> prompts.Prompts:
    if options.prompts is not None:
        return prompts.of_file(options.prompts, policy.tokenizer)
    problems = requirements.check(options.environment, options.data, policy, max_tokens)
    return prompts.of_environment(options.environment, problems)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a wrong name; a torch without it
        raise CalibrationError(f"--device {name}: torch cannot use it ({str(error).splitlines()[0]})") from error


def _pairs(wanted: str, base: Variant, policy: Policy) -> tuple[Pair, ...]:
    try:
        return select(wanted, base, policy)
    except ValueError as error:
        raise CalibrationError(f"--pairs: {error}") from error


def pairs_table(rows: Sequence[PairRow]) -> Table:
    """The honest distribution of both statistics, a line for each pair."""
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


def summary(proof: Proof) -> list[str]:
    """The thresholds, and what they refuse, in lines."""
    spec = proof.thresholds
    sure = f"with {spec.confidence:.0%} confidence, were misses {proof.measured.headroom:g} times as frequent"
    lines = [
        f"sketch ({spec.sketch}): a position misses beyond {spec.sketch_tolerance}, at a rate of at most "
        f"{spec.sketch_rate:.2g} ({sure}); median of a group at most {spec.sketch_median}",
        f"sampling: a token misses beyond a margin of {spec.margin:.2g}, at a rate of at most {spec.margin_rate:.2g} "
        f"({sure}); none beyond {spec.margin_limit:.3g}{_UNKNOWN_TAIL if spec.margin_limit == WIDEST_MARGIN else ''}",
        f"one test refuses honest work with probability {spec.level:g}; measured on {spec.positions} positions",
    ]
    lines += [
        f"refused of a {copy.bits}-bit copy ({copy.pair}, {copy.tokens} tokens): {copy.rollouts:.1%} of rollouts, "
        f"{copy.groups:.1%} of groups, {copy.windows:.1%} of windows of {proof.measured.window} groups"
        for copy in proof.measured.copies
    ]
    return lines
