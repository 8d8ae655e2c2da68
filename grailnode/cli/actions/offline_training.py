"""`grailnode train --offline`: the learner of a run's trainer on groups that storage still has, step by step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

import click
import torch
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions
from grailnode.config import Config
from grailnode.node.node_makers import make_spectator
from grailnode.node.run_model import genesis_reader, learner_settings, policy_directory, trainer_model
from grailnode.observe.observer import RECENT_WINDOWS, newest_summarized
from grailnode.observe.rollout_reader import read_verified_groups
from grailnode.run.joining import open_config_to_read
from protocol.run import RunManifest
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.trainer.learn.learner import Learner, StepReport
from roles.trainer.verified_batch import VerifiedGroup


def train(
    offline: bool,
    policy: Path | None,
    first_window: int | None,
    last_window: int | None,
    steps: int,
    as_json: bool,
    **run_options: Unpack[RunOptions],
) -> None:
    if not offline:
        raise click.UsageError("give --offline; a trainer that publishes is `grailnode --role trainer --run FILE`")
    config = open_config_to_read(**run_options)
    torch.set_num_threads(config.engine.threads)
    node = make_spectator(config)
    groups = trio.run(_read, node, first_window, last_window)
    usable = [group for group in groups if group.informative or not config.trainer.filters_groups]
    click.echo(f"{len(groups)} verified groups, {len(usable)} to learn from", err=True)
    learner = make_learner(config, node.run, policy or policy_directory(config))
    reports = take_steps(learner, usable, config.trainer.groups_per_step)
    for report in reports:
        click.echo(json.dumps(asdict(report)) if as_json else _text(report))
        if report.step == steps:
            break


async def _read(node: Node, first: int | None, last: int | None) -> list[VerifiedGroup]:
    await refresh_authority(node)
    last = await newest_summarized(node) if last is None else last
    if last is None:
        raise UserError("no validator has summarized a window yet; name some with --first and --last")
    first = max(0, last - RECENT_WINDOWS) if first is None else first
    return [group for window in range(first, last + 1) for group in await read_verified_groups(node, window)]


def make_learner(config: Config, run: RunManifest, directory: Path) -> Learner:
    """Return the learner that a trainer with this configuration has, with the weights of a policy directory."""
    settings = learner_settings(config, run)
    device, dtype = torch.device(config.engine.device), getattr(torch, config.engine.dtype)
    model, genesis = trainer_model(config, run, directory), genesis_reader(config, run, directory)
    return Learner(model, genesis(), settings, device=device, dtype=dtype, precision=run.precision)


def take_steps(learner: Learner, groups: Sequence[VerifiedGroup], groups_per_step: int) -> Iterator[StepReport]:
    """Take steps with the groups in order, and yield a report of each; UserError if one cannot be taken."""
    if len(groups) < groups_per_step:
        raise UserError(
            f"{len(groups)} groups, and a step needs {groups_per_step}; read more windows (--first), or --set "
            "trainer.groups_per_step"
        )
    for begin in range(0, len(groups) - groups_per_step + 1, groups_per_step):
        try:
            yield learner.step(groups[begin : begin + groups_per_step])
        except ValueError as error:
            raise UserError(f"the step after {learner.steps}: {error}") from error


def _text(report: StepReport) -> str:
    return (
        f"step {report.step}  loss {report.loss:.4g}  reward {report.reward:.3f}  entropy {report.entropy:.3f}  "
        f"clipped {report.clipped:.3f}  gradient {report.grad_norm:.3g}  tokens {report.tokens}  "
        f"rate {report.learning_rate:.2g}"
    )
