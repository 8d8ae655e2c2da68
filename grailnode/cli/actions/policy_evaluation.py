"""`grailnode evaluate`: pass@k of a policy on held-out problems, with its interval."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, Final, cast

import click
import trio

from grailnode.cli.actions.served_policy import ServedPolicy, open_policy
from grailnode.cli.from_model import given
from grailnode.cli.options import PolicyOptions
from grailnode.config import validate
from grailnode.node.wiring import make_environment
from grailnode.run import requirements
from grailnode.run.rules import Rules
from grailnode.sandbox import BubblewrapSandbox
from grailnode.ui.formatting import clean
from protocol.judging.ledger import Evaluation, pass_at_k
from protocol.rollout.batch import EpisodeRule
from protocol.run import ChatSpec, EvaluationSpec, SamplingSpec
from roles.policy.assignment import PolicyTask
from roles.validator.evaluation import evaluate as solve

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
