"""`grailnode calibrate`: measure how far honest nodes differ on a policy, and write the thresholds."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.calibration.pairs import CalibrationTask, Prompts, drawn_from, read_prompts
from grailnode.calibration.procedure import ADAPTER_SHARE, CalibrationJob
from grailnode.calibration.procedure import calibrate as run_calibration
from grailnode.calibration.proof_file import PairRow, ProofFile, ProofFileError
from grailnode.calibration.thresholds import ThresholdDemands
from grailnode.calibration.variants import AnyVariant, Variant, VllmVariant, select
from grailnode.chat.chat_template import ChatTemplate
from grailnode.cli.actions.policy_evaluation import PolicyRules
from grailnode.cli.from_model import given
from grailnode.config import validate
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.engine.vllm.installation import InstallationError, find_python, installed_version
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.node.run_model import check_device
from grailnode.run import requirements
from grailnode.run.base_files import start_lora
from grailnode.run.files import write_whole
from grailnode.run.rules import Rules
from grailnode.ui.terminal.verb_tables import pairs_table, threshold_lines
from protocol.environments import Environment
from protocol.environments.record import MixtureSpec
from protocol.proof import Arithmetic
from protocol.rollout.sketch import SketchKind
from protocol.run import ChatSpec, SamplingSpec, verdict_room
from roles.policy.assignment import PolicyTask
from roles.ports import EngineError


@dataclass(frozen=True)
class Options:
    """The options of the command, under the names of its parameters; those that are rules of a run are in `rules`."""

    rules: Rules
    policy: Path | None
    prompts: Path | None
    rollouts: int
    pairs: str
    miner: Arithmetic
    validator: Arithmetic
    device: str
    sketch: SketchKind
    level: float
    headroom: float
    seed: int
    out: Path | None
    adapter_share: float = ADAPTER_SHARE
    python: Path | None = None

    @property
    def uses_vllm(self) -> bool:
        return any(name.startswith("vllm") for name in (self.miner, self.validator))


def calibrate(**parameters: Any) -> None:
    rules = validate(Rules, given(Rules, parameters), "calibrate")
    others = {name: value for name, value in parameters.items() if name not in Rules.model_fields}
    options = Options(rules, **others)
    torch.set_num_threads(1)
    out = options.out or (options.policy or Path()) / proof_file.NAME
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: no such directory to write it to")
    with tempfile.TemporaryDirectory(prefix="grailnode-calibrate-") as directory, _Progress() as progress:
        job = make_job(options, Path(directory))
        _earlier_file(out, job.work.policy.directory)  # an error is reported before anything is measured
        try:
            proof = trio.run(run_calibration, job, progress.show_rollouts, progress.show_pairs)
        except EngineError as error:
            reason = str(error).splitlines()[0].rstrip(":")
            raise UserError(f"{reason}{_copy_logs(Path(directory), out)}") from error
    for line in threshold_lines(proof.table[0]):
        click.echo(line)
    earlier = _earlier_file(out, job.work.policy.directory)  # another calibration may have written it meanwhile
    if earlier is not None and earlier.subject == proof.subject:
        proof = proof.with_rows_of(earlier)
    elif out.is_file():
        click.echo("replaced: thresholds that were measured on another policy, or other prompts or sampling")
    write_whole(out, proof.to_json().encode())
    pairs = (f"{miner} with {validator}" for miner, validator in (row.thresholds.pair for row in proof.table))
    click.echo(f"written: {out}, with thresholds for miners and validators in {', '.join(pairs)}")


def _earlier_file(out: Path, policy: Path) -> ProofFile | None:
    """Return the table to which a row is added: that of the file to write, or else of the policy; None for no table."""
    paths = [path for path in (out, policy / proof_file.NAME) if path.is_file()]
    try:
        return proof_file.read(paths[0]) if paths else None
    except ProofFileError as error:
        raise UserError(f"{error}; move it away, or name another file with --out") from error


def _copy_logs(directory: Path, out: Path) -> str:
    """Copy what the servers of vLLM wrote to a file beside the output; return a text that names it, or an empty one."""
    logs = [path.read_bytes() for path in sorted(directory.rglob(ChildServer.LOG))]
    if not logs:
        return ""
    place = out.with_name(ChildServer.LOG)
    place.write_bytes(b"".join(logs))
    return f"; its log is {place}"


class _Progress(Progress):
    """Shows progress as bars on a terminal, else as lines, on standard error; then the table on standard output."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._ids: dict[str, TaskID] = {}

    def show_rollouts(self, what: str, done: int, total: int) -> None:
        if what not in self._ids:
            self._ids[what] = self.add_task(what, total=total)
        self.update(self._ids[what], completed=done)
        if self.disable and done == total:
            click.echo(f"{what}: {total} rollouts", err=True)

    def show_pairs(self, rows: Sequence[PairRow]) -> None:
        self.stop()
        Console().print(pairs_table(rows))


def make_job(options: Options, directory: Path) -> CalibrationJob:
    """Return the calibration that the options describe; the directory is for files of servers of vLLM."""
    policy = Policy.load(options.policy or PACKAGED_POLICY)
    rules = options.rules
    prompt, chat, environment, members = _prompts(options, policy)
    tokens = requirements.completion_tokens(rules)
    sampling = SamplingSpec(temperature=rules.temperature, max_tokens=tokens, stops=policy.stops)
    lora = start_lora(policy, rules.lora_rank, rules.lora_alpha, rules.lora_targets)
    task, turns = None, requirements.episode(rules)
    if environment is not None:
        policy_rules = PolicyRules(sampling, chat, None if turns is None else turns.rule(sampling))
        task = PolicyTask(bytes(32), policy_rules, environment, policy.tokenizer, policy.vocabulary)
    work = CalibrationTask(
        policy=policy,
        params=sampling.params(),
        group_size=rules.group_size,
        prompt=prompt,
        kind=options.sketch,
        seed=options.seed,
        chat=chat,
        lora=None if lora is None else lora.spec,
        task=task,
    )
    check_device(options.device, "--device")
    if options.python is not None and not options.uses_vllm:
        raise UserError("--python belongs to vLLM: give --miner or --validator vllm-bfloat16 or vllm-float32")
    generating, checking = (_variant(name, options, directory) for name in (options.miner, options.validator))
    audited_groups = min(-(-rules.groups * rules.audit_floor_ppm // 1_000_000), verdict_room(rules.group_size, tokens))
    return CalibrationJob(
        work=work,
        prompts=options.prompts.name if options.prompts else rules.environment,
        arithmetics=(options.miner, options.validator),
        pairs=select(options.pairs, generating, checking),
        rollouts=options.rollouts,
        demands=replace(ThresholdDemands(), level=options.level, headroom=options.headroom, window=audited_groups),
        adapter_share=options.adapter_share,
        replies=proof_file.replies_digest(members) if work.turns > 1 else None,
    )


def _prompts(options: Options, policy: Policy) -> tuple[Prompts, ChatSpec | None, Environment | None, MixtureSpec]:
    """Return the prompts, how they become conversations (None if they do not), and the environment that generates
    them with its record (None if none does).
    """
    rules = options.rules
    if options.prompts is not None:
        texts = read_prompts(options.prompts, policy.tokenizer)
        chat = None if rules.system is None else ChatTemplate.read(policy.directory).chat(rules.system, texts)
        return drawn_from(texts), chat, None, ()
    task = requirements.check(rules, policy)
    return lambda seed: task.problem(seed).prompt, task.chat, task.environment, task.members


def _variant(arithmetic: Arithmetic, options: Options, directory: Path) -> AnyVariant:
    """Return the default way of a node to compute in an arithmetic."""
    engine, _, dtype = arithmetic.partition("-")
    if engine == "torch":
        return Variant(dtype="float32" if dtype == "float32" else "bfloat16", device=options.device)
    try:
        python = options.python or find_python("--python")
    except InstallationError as error:
        raise UserError(f"{arithmetic}: {error}") from error
    if not python.is_file():
        raise UserError(f"--python {python}: no such file")
    return VllmVariant(python, directory, installed_version(python), dtype, options.device)
