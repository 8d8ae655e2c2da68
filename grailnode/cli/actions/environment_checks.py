"""`grailnode environments`: list, try and check environments."""

from pathlib import Path

import click

from grailnode.environments import contract, registry
from grailnode.environments.wheels import PluginError
from grailnode.sandbox.plugin_sandbox import CallError
from grailnode.ui.formatting import terminal_text
from protocol import environments
from protocol.environments import Environment
from protocol.environments.base import SandboxError
from protocol.errors import ProtocolError

_SHOWN_CHARACTERS = 60


def list_() -> None:
    for name, distribution in registry.distributions().items():
        try:
            example = _line(_open(name, "{}", None).held_out_problem(0).prompt)
        except (PluginError, SandboxError) as error:
            example = f"no example: {error}"
        click.echo(f"{name:<16} {distribution:<24} {example}")
    for name, advice in registry.ADVICE.items():
        click.echo(f"{name:<16} {advice}")


def try_(name: str, config: str, data: Path | None, seed: int, answers: tuple[str, ...], policy: Path | None) -> None:
    if answers and policy is not None:
        raise click.UsageError("give either --answer or --policy")
    _check_options(name, config, data)
    environment = _open(name, config, data, strict=True)
    most = contract.turns(environment)
    if len(answers) > most:
        raise click.UsageError(f"{len(answers)} answers, and an episode of {name!r} has {most} turns at most")
    problem = environment.problem(seed.to_bytes(32, "little"))
    _show(problem.prompt)
    if not answers and policy is None:
        _show(f"reference: {problem.reference}")
        return
    writer = None
    if policy is not None:
        from grailnode.cli.actions.turn_writer import TurnWriter  # noqa: PLC0415 - it imports torch

        writer = TurnWriter(policy, problem.prompt, registry.requirements(name, config).tokens)
    episode = contract.begin(environment, problem, bytes(32))
    try:
        for place in range(len(answers) or most):
            text = answers[place] if writer is None else writer.turn()
            if writer is not None:
                _show(f"the policy continues: {text}")
            reply = episode.step(text)
            if reply is None:
                break
            _show(f"reply: {reply}")
            if writer is not None:
                writer.read(reply)
        click.echo(f"reward: {episode.reward():g}")
    except CallError as error:
        raise PluginError(f"environment {name!r}: {error}; a run pays nothing for this answer") from error


def check(name: str, config: str, data: Path | None) -> None:
    _check_options(name, config, data)
    first, second = (contract.observe_by_hash_seed(name, config, data, hash_seed) for hash_seed in (1, 2))
    count = 0
    for text, failure in contract.failures(first, second):
        click.echo(f"FAILED  {text}: {failure}" if failure else f"ok      {text}")
        count += bool(failure)
    if count:
        raise click.ClickException(f"environment {name!r} does not keep its contract")


def _check_options(name: str, config: str, data: Path | None) -> None:
    """Raise PluginError for options that an environment of this machine does not take."""
    is_built_in = registry.is_built_in(name)
    takes_data = is_built_in and environments.requirements(name).data
    if data is not None and not takes_data and name in registry.distributions():
        raise PluginError(f"environment {name!r} takes no data file: drop --data")
    if is_built_in and registry.parse_config(config) != b"{}":
        raise PluginError(f"environment {name!r} takes no configuration: drop --environment-config")


def _open(name: str, config: str, data: Path | None, *, strict: bool = False) -> Environment:
    """Return an environment of this machine; a PluginError says why there is none."""
    if not registry.is_built_in(name):
        return registry.open_plugin(name, config, strict=strict).environment
    try:
        return contract.open_built_in(name, data)
    except ProtocolError as error:
        raise PluginError(f"{data}: {error}") from error


def _show(text: str) -> None:
    click.echo(terminal_text(text))


def _line(prompt: str) -> str:
    text = terminal_text(" ".join(prompt.split()))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
