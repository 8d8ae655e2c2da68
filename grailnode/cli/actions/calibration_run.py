"""`grailnode calibrate`: measure how far honest nodes differ on a policy, and write the thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import click
import torch
import trio
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grailnode.calibration import prompts, proof_file
from grailnode.calibration.adapters import ADAPTER_SHARE
from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.procedure import CalibrationJob
from grailnode.calibration.procedure import calibrate as run_calibration
from grailnode.calibration.proof_file import PairRow
from grailnode.calibration.thresholds import CalibrationError, ThresholdDemands
from grailnode.calibration.variants import DType, Pair, Variant, select
from grailnode.chat.chat_template import ChatTemplate
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.run import requirements
from grailnode.run.base_files import start_lora
from grailnode.run.creation import Choices
from grailnode.run.files import write_whole
from grailnode.ui.terminal import pairs_table, threshold_lines
from protocol.lora import LoraSpec
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKind
from protocol.run import ChatSpec


@dataclass(frozen=True)
class Options:
    """The options of the command, under the names of its parameters."""

    policy: Path | None
    environment: str
    prompts: Path | None
    rollouts: int
    pairs: str
    dtype: DType
    device: str
    temperature: float | None
    max_tokens: int | None
    sketch: SketchKind
    level: float
    headroom: float
    seed: int
    out: Path | None
    data: Path | None = None
    chat: bool | None = None
    system_prompt: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: str | None = None
    adapter_share: float = ADAPTER_SHARE


def calibrate(**parameters: Any) -> None:
    """Run `grailnode calibrate`."""
    options = Options(**parameters)
    torch.set_num_threads(1)
    out = options.out or (options.policy or Path()) / proof_file.NAME
    if not out.absolute().parent.is_dir():
        raise CalibrationError(f"{out}: no such directory to write it to")
    job = make_job(options)
    with _Progress() as progress:
        proof = trio.run(run_calibration, job, progress.show_rollouts, progress.show_pairs)
    for line in threshold_lines(proof):
        click.echo(line)
    write_whole(out, proof.to_json().encode())
    click.echo(f"written: {out}")


class _Progress:
    """Shows progress as bars on a terminal, else as lines, on standard error; then the table on standard output."""

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

    def show_rollouts(self, what: str, done: int, total: int) -> None:
        """Show how many rollouts of a pair are done."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)
        if self._bars.disable and done == total:
            click.echo(f"{what}: {total} rollouts", err=True)

    def show_pairs(self, rows: Sequence[PairRow]) -> None:
        """Print the honest distribution."""
        self._bars.stop()
        Console().print(pairs_table(rows))


def make_job(options: Options) -> CalibrationJob:
    """Return the calibration that the options describe.

    Raises:
        CalibrationError, PolicyError, RequirementError, ChatTemplateError: an option cannot be used.
    """
    policy = Policy.load(options.policy or PACKAGED_POLICY)
    choices = Choices()
    max_tokens = options.max_tokens or requirements.find(options.environment).tokens
    prompt, chat = _prompts(options, policy, max_tokens)
    work = CalibrationTask(
        policy=policy,
        params=SamplingParams(
            temperature=options.temperature or choices.temperature,
            max_tokens=max_tokens,
            stops=policy.stops,
        ),
        group_size=choices.group_size,
        prompt=prompt,
        kind=options.sketch,
        seed=options.seed,
        chat=chat,
        lora=_lora(options, policy),
    )
    _check_device(options.device)
    base = Variant(dtype=options.dtype, device=options.device)
    audited_groups = -(-choices.groups * choices.audit_floor_ppm // 1_000_000)
    return CalibrationJob(
        work=work,
        prompts=options.prompts.name if options.prompts else options.environment,
        pairs=_pairs(options.pairs, base, policy),
        rollouts=options.rollouts,
        demands=replace(ThresholdDemands(), level=options.level, headroom=options.headroom, window=audited_groups),
        adapter_share=options.adapter_share,
    )


def _prompts(options: Options, policy: Policy, max_tokens: int) -> tuple[prompts.Prompts, ChatSpec | None]:
    """Return the prompts, and how they become conversations; None if they do not."""
    if options.system_prompt and not options.chat:
        raise CalibrationError("--system-prompt belongs to a conversation: give --chat as well")
    system = (options.system_prompt or "") if options.chat else None
    if options.prompts is not None:
        texts = prompts.read_file(options.prompts, policy.tokenizer)
        chat = None if system is None else ChatTemplate.read(policy.directory).chat(system, texts)
        return prompts.drawn_from(texts), chat
    task = requirements.check(options.environment, options.data, policy, max_tokens, system)
    return prompts.of_environment(options.environment, task.problems), task.chat


def _lora(options: Options, policy: Policy) -> LoraSpec | None:
    """Return the adapters that the options describe; None for a run that trains all weights."""
    if bool(options.lora_rank) != bool(options.lora_targets):
        raise CalibrationError("--lora-rank and --lora-targets go together")
    if options.lora_alpha and not options.lora_rank:
        raise CalibrationError("--lora-alpha belongs to adapters: give --lora-rank as well")
    targets = (options.lora_targets or "").split(",")
    try:
        start = start_lora(policy, options.lora_rank or 0, options.lora_alpha or 0.0, targets)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CalibrationError(f"--lora-{first['loc'][0]}: {first['msg']}") from error
    return None if start is None else start.spec


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without the device
        raise CalibrationError(f"--device {name}: torch cannot use it ({str(error).splitlines()[0]})") from error


def _pairs(names: str, base: Variant, policy: Policy) -> tuple[Pair, ...]:
    try:
        return select(names, base, policy)
    except ValueError as error:
        raise CalibrationError(f"--pairs: {error}") from error
