"""`grailnode evaluate` and `chat`: they ask a policy that an engine of this machine serves.

It is a checkpoint, or the newest version of a run, verified.
"""

import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Final, Unpack, cast

import click
import torch
import trio

from grailnode.chat.chat_template import ChatTemplate, ChatTemplateError
from grailnode.cli.from_model import given
from grailnode.cli.options import PolicyOptions, report_line
from grailnode.config import Config, validate, without_file
from grailnode.engine import models
from grailnode.engine.compute import open_engine
from grailnode.engine.policy import Policy, load_weights
from grailnode.node.bodies import fetch_task, make_compute
from grailnode.node.node_makers import make_spectator
from grailnode.node.wiring import make_environment
from grailnode.observe.chain_check import fetch_first_head
from grailnode.run import requirements
from grailnode.run.joining import open_config_to_read
from grailnode.run.rules import Rules
from grailnode.sandbox import BubblewrapSandbox
from grailnode.ui.formatting import clean, terminal_text
from protocol.errors import ProtocolError
from protocol.judging.ledger import Evaluation, pass_at_k
from protocol.rollout.batch import EpisodeRule
from protocol.rollout.sampling import SEED_BYTES, SamplingParams
from protocol.run import ChatSpec, EvaluationSpec, SamplingSpec
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.assignment import PolicyTask, Task, encode_prompt
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import Engine, Request, StoreError
from roles.validator.evaluation import evaluate as solve


def _no_report(event: str, **fields: object) -> None:
    """Take an event of the engine; a command prints none."""


@dataclass(frozen=True)
class ServedPolicy:
    """An engine that serves a policy."""

    source: str  # the directory, or the run's name
    policy: Policy  # without weights
    engine: Engine
    node: Node | None = None
    task: Task | None = None  # the run's; None for a checkpoint
    follower: Follower | None = None  # of the run's versions; None for a checkpoint

    @property
    def label(self) -> str:
        """What is served, for people."""
        if self.follower is None or self.follower.newest is None:
            return self.source
        newest = self.follower.newest
        return f"{clean(self.source)} version {newest.version} (weights {newest.digest.hex()[:16]})"

    async def update(self) -> None:
        """Serve the run's newest version; a checkpoint stays as it is."""
        if self.node is None or self.follower is None:
            return
        await refresh_authority(self.node)
        await self.follower.refresh()
        assert self.follower.chain.head is not None  # or the refresh would have raised
        await serve(self.node, self.engine, await self.follower.rebuild(self.follower.chain.head.version))


@asynccontextmanager
async def open_policy(**options: Unpack[PolicyOptions]) -> AsyncIterator[ServedPolicy]:
    """Serve the checkpoint of a directory, or a run's newest version, with the engine that the options set."""
    directory, run, overrides = options["directory"], options["run"], options["overrides"]
    if (directory is None) == (run is None):
        raise click.UsageError("give a DIRECTORY with a checkpoint, or --run FILE-or-URL")
    with tempfile.TemporaryDirectory(prefix="grailnode-policy-") as files:
        if directory is not None:
            opened = _serve_checkpoint(directory, without_file({}, overrides, Path()), Path(files))
        elif run is not None:
            config = open_config_to_read(run, overrides, trust=options["trust"])
            opened = serve_newest(make_spectator(config), config, Path(files))
        async with opened as served:
            yield served


@asynccontextmanager
async def _serve_checkpoint(directory: Path, config: Config, files: Path) -> AsyncIterator[ServedPolicy]:
    torch.set_num_threads(config.engine.threads)
    policy = Policy.load(directory)
    device = torch.device(config.engine.device if config.engine.kind == "torch" else "cpu")
    compute = make_compute(config, models.build(policy, device), policy, files)
    async with open_engine(compute, trio.to_thread.run_sync, _no_report) as engine:
        await engine.stage(0, load_weights(directory))
        await engine.commit()
        yield ServedPolicy(str(directory), policy, engine)


@asynccontextmanager
async def serve_newest(node: Node, config: Config, files: Path) -> AsyncIterator[ServedPolicy]:
    """Serve a run's newest version; the run's files go to a directory."""
    torch.set_num_threads(config.engine.threads)
    await refresh_authority(node)
    await fetch_first_head(node)
    task, compute = await fetch_task(node, config, files)
    follower = await Follower(node, allow_expired=True).open()
    async with open_engine(compute, node.run_sync, _no_report) as engine:
        served = ServedPolicy(node.run.name, Policy.load(files / "model"), engine, node, task, follower)
        await served.update()
        yield served


_SAMPLING: Final = {"temperature", "max_tokens"}
"""Rules of a run that the command line may replace without naming another environment."""

_NO_PROBLEMS: Final = EvaluationSpec(problems=0, samples=0, pass_at=1)


_Z: Final = 1.959964  # standard deviations of a normal distribution on both sides of 95%


@dataclass(frozen=True)
class PassRate:
    """pass@k with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}  (95%: {self.low:.3f} to {self.high:.3f})"


def pass_rate(right: Sequence[int], k: int) -> PassRate:
    """Return pass@k of some problems, and the interval in which that of all such problems is.

    It is Wilson's interval (1927), with the number of independent tries that the problems are worth: as many as there
    are problems if all completions of a problem end alike, and more if they do not (the effective sample size of Korn
    and Graubard, 1998).
    """
    problems, completions = sum(right), len(right) - 1
    mean = pass_at_k(right, k)
    by_count = [pass_at_k([int(count == place) for place in range(completions + 1)], k) for count in range(len(right))]
    squares = sum(number * (value - mean) ** 2 for number, value in zip(right, by_count, strict=True))
    tries = float(problems)
    if 0.0 < mean < 1.0:
        most = problems * (completions // k)  # if completions of a problem were as independent as problems are
        tries = min(max(tries, problems**2 * mean * (1 - mean) / squares if squares else most), most)
    middle = (mean + _Z**2 / (2 * tries)) / (1 + _Z**2 / tries)
    half = _Z * sqrt(mean * (1 - mean) / tries + _Z**2 / (4 * tries**2)) / (1 + _Z**2 / tries)
    return PassRate(mean, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class PolicyRules:
    """How the policy is asked. Implements PolicyRules."""

    sampling: SamplingSpec
    chat: ChatSpec | None = None
    episode_rule: EpisodeRule | None = None
    evaluation: EvaluationSpec = _NO_PROBLEMS


def evaluate(attempts: Sequence[int], problems: int, samples: int | None, as_json: bool, **parameters: Any) -> None:
    largest = attempts[-1]
    samples = (0 if largest == 1 else largest) if samples is None else samples
    if largest > max(1, samples):
        raise click.UsageError(f"--k {largest}: needs at least as many --samples")
    rule = EvaluationSpec(problems=problems, samples=samples, pass_at=largest)
    values = given(Rules, parameters)
    options = cast(PolicyOptions, {name: parameters[name] for name in PolicyOptions.__annotations__})
    if "environment" not in values:
        if options["run"] is None:
            raise click.UsageError("--environment NAME is missing: a checkpoint does not say what it is asked")
        for name in values.keys() - _SAMPLING:
            raise click.UsageError(f"--{name.replace('_', '-')}: the run has its own; give --environment as well")
    label, evaluation = trio.run(_evaluate, options, rule, values)
    rates = _rates(evaluation, attempts)
    if as_json:
        rows = [{"kind": kind, "k": k, **asdict(rate)} for (kind, k), rate in rates.items()]
        click.echo(json.dumps({"policy": label, "problems": evaluation.problems, "samples": samples, "rates": rows}))
        return
    how = f"{samples} completions each" if samples else "the most likely completion of each"
    click.echo(f"{label}: {evaluation.problems} held-out problems, {how}")
    for (kind, k), rate in rates.items():
        click.echo(f"pass@{k:<3} {rate}  {kind}".rstrip())


async def _evaluate(options: PolicyOptions, rule: EvaluationSpec, values: dict[str, Any]) -> tuple[str, Evaluation]:
    async with open_policy(**options) as served:
        task = await trio.to_thread.run_sync(asked_task, served, rule, values)
        assert served.engine.version is not None
        return served.label, await solve(task, served.engine, served.engine.version)


def asked_task(served: ServedPolicy, rule: EvaluationSpec, values: dict[str, Any]) -> PolicyTask:
    """Return what the policy is asked: the run's own task, or the environment that the command line names."""
    if served.task is not None and "environment" not in values:
        run = served.task.run
        sampling = run.sampling.model_copy(update=values)
        turns = None if run.episode is None else run.episode.rule(sampling)
        policy_rules, own = PolicyRules(sampling, run.chat, turns, rule), served.task
        return PolicyTask(
            own.run_id, policy_rules, own.environment, own.tokenizer, own.vocabulary, own.run_sync, own.at_once
        )
    return _other_task(served, rule, validate(Rules, values, "the command line"))


def _other_task(served: ServedPolicy, rule: EvaluationSpec, rules: Rules) -> PolicyTask:
    """Return the task that rules describe; in a run, its chat template and the other rules of sampling stay."""
    policy, run = served.policy, None if served.task is None else served.task.run
    checked, episode = requirements.check(rules, policy), requirements.episode(rules)
    tokens = requirements.completion_tokens(rules)
    sampling = SamplingSpec(temperature=rules.temperature, max_tokens=tokens, stops=policy.stops)
    chat = checked.chat
    if run is not None:
        changes: dict[str, Any] = {"max_tokens": tokens}
        if "temperature" in rules.model_fields_set:
            changes["temperature"] = rules.temperature
        sampling = run.sampling.model_copy(update=changes)
        chat = chat if rules.chat else run.chat
    python = max(share.environment.python for share in checked.members)
    sandbox = BubblewrapSandbox.open(python) if python else None
    data = None if rules.data is None else rules.data.read_bytes()
    environment = make_environment(checked.members, data, sandbox, checked.generated)
    policy_rules = PolicyRules(sampling, chat, None if episode is None else episode.rule(sampling), rule)
    return PolicyTask(bytes(32), policy_rules, environment, policy.tokenizer, policy.vocabulary)


def _rates(evaluation: Evaluation, attempts: Sequence[int]) -> dict[tuple[str, int], PassRate]:
    """Return pass@k by the kind of problem and k; that of all problems has an empty name."""
    columns = zip(*(stratum.right for stratum in evaluation.strata), strict=True)
    rights: dict[str, Sequence[int]] = {"": [sum(column) for column in columns]}
    if len(evaluation.strata) > 1:
        rights |= {clean(stratum.name) or "other": stratum.right for stratum in evaluation.strata}
    return {(kind, k): pass_rate(right, k) for kind, right in rights.items() for k in attempts}


_TOKENS: Final = 512  # of an answer of a checkpoint


def chat(message: str | None, max_tokens: int | None, greedy: bool, **options: Unpack[PolicyOptions]) -> None:
    if message is not None and not message.strip():
        raise click.UsageError("--message: there is nothing to answer")
    trio.run(_chat, message, max_tokens, greedy, options)


async def _chat(message: str | None, max_tokens: int | None, greedy: bool, options: PolicyOptions) -> None:
    async with open_policy(**options) as served:
        template, params = _manner(served)
        params = replace(params, max_tokens=max_tokens or params.max_tokens)
        if message is not None:
            click.echo(await _answer(served, template, params, message, greedy=greedy))
            return
        is_terminal = sys.stdin.isatty()
        report_line(f"{served.label}: write a line; Ctrl-D ends")
        while line := await _read_line("> " if is_terminal else ""):
            if not line.strip():
                continue
            await _update(served)
            click.echo(await _answer(served, template, params, line.rstrip("\r\n"), greedy=greedy))
        if is_terminal:
            click.echo()


async def _read_line(mark: str) -> str:
    """Return the next line of standard input; empty at its end. Ctrl-C abandons the thread that reads."""
    click.echo(mark, nl=False)
    # Python ends badly while a thread reads through the buffer of standard input, whose lock it holds.
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        line = await trio.to_thread.run_sync(unbuffered.readline, abandon_on_cancel=True)
    return line.decode(errors="replace")


async def _update(served: ServedPolicy) -> None:
    """Serve a newer version, if there is one that can be fetched and verified; else the last one goes on."""
    before = served.label
    try:
        await served.update()
    except (StoreError, ProtocolError) as error:
        report_line(f"cannot follow now: {error}")
    if served.label != before:
        report_line(f"now {served.label}")


def _manner(served: ServedPolicy) -> tuple[ChatSpec | None, SamplingParams]:
    """Return the chat template and the sampling: of the run, or of the checkpoint as far as it has any."""
    if served.task is not None:
        return served.task.run.chat, served.task.run.sampling.params()
    chat = None
    with suppress(ChatTemplateError):  # a tokenizer without a template
        chat = ChatTemplate.read(served.policy.directory).chat("", [])
    return chat, SamplingParams(1.0, _TOKENS, served.policy.stops)


async def _answer(
    served: ServedPolicy, template: ChatSpec | None, params: SamplingParams, text: str, *, greedy: bool
) -> str:
    """Return the policy's answer to a text, without characters that act on a terminal."""
    prompt = encode_prompt(served.policy.tokenizer, template, text.encode(errors="replace").decode())
    seed = b"" if greedy else secrets.token_bytes(SEED_BYTES)
    (generation,) = await served.engine.generate([Request(prompt, seed)], params)
    return terminal_text(served.policy.tokenizer.decode(params.without_stop(generation.tokens)))
