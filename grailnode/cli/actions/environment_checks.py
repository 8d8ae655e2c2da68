"""`grailnode environments`: list, try and check environments."""

from pathlib import Path

import click
import trio

from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.environments import contract, registry
from grailnode.environments.wheels import PluginError
from protocol.environments import Environment
from protocol.environments.base import SandboxError
from protocol.errors import ProtocolError
from protocol.rollout.sampling import SamplingParams

_SHOWN_CHARACTERS = 60


def show_all() -> None:
    """Run `grailnode environments`."""
    for name, distribution in registry.distributions().items():
        try:
            example = _line(_open(name, "{}", None).held_out_problem(0).prompt)
        except (PluginError, SandboxError) as error:
            example = f"cannot be used here: {error}"
        click.echo(f"{name:<16} {distribution:<24} {example}")
    for data_set in registry.READERS:
        click.echo(f"{data_set:<16} {registry.reader_of(data_set)}")


def try_one(name: str, config: str, data: Path | None, seed: int, answer: str | None, policy: Path | None) -> None:
    """Run `grailnode environments try`."""
    if answer is not None and policy is not None:
        raise click.UsageError("give either --answer or --policy")
    environment = _open(name, config, data)
    problem = environment.problem(seed.to_bytes(32, "little"))
    click.echo(problem.prompt)
    if policy is not None:
        answer = trio.run(_complete, policy, problem.prompt, registry.requirements(name).tokens)
        click.echo(f"the policy continues: {answer}")
    if answer is None:
        click.echo(f"reference: {problem.reference}")
    else:
        click.echo(f"reward: {environment.reward(problem, answer):g}")


def check(name: str, config: str, data: Path | None) -> None:
    """Run `grailnode environments check`."""
    registry.requirements(name)
    first, second = (contract.observe_by_hash_seed(name, config, data, hash_seed) for hash_seed in (1, 2))
    count = 0
    for text, failure in contract.failures(first, second):
        click.echo(f"FAILED  {text}: {failure}" if failure else f"ok      {text}")
        count += bool(failure)
    if count:
        raise click.ClickException(f"environment {name!r} does not keep its contract")


def _open(name: str, config: str, data: Path | None) -> Environment:
    """Return an environment of this machine; a PluginError says why there is none."""
    registry.requirements(name)
    if not registry.is_built_in(name):
        return registry.open_plugin(name, config).environment
    try:
        return contract.open_built_in(name, data)
    except ProtocolError as error:
        raise PluginError(f"{data}: {error}") from error


async def _complete(directory: Path, prompt: str, max_tokens: int) -> str:
    """Return the most likely completion of a prompt by a policy."""
    policy = Policy.load(directory)
    engine = TorchEngine(build(policy))
    await engine.stage(0, load_weights(directory))
    await engine.commit()
    params = SamplingParams(1.0, max_tokens, policy.stops)
    (tokens,) = await engine.greedy([policy.tokenizer.encode(prompt)], params)
    return policy.tokenizer.decode(params.without_stop(tokens))


def _line(prompt: str) -> str:
    text = " ".join(prompt.split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
