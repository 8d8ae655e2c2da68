"""What `grailnode --role`, `mirror`, `backup`, `restore` and `repair` do."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Final, Unpack

import click
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions, check_name, report_line, usual_name
from grailnode.config import Config
from grailnode.node import state_care
from grailnode.node.early_fork import start_fork_server
from grailnode.node.mapped_tensors import mapped_tensors
from grailnode.node.node_makers import make_auditor
from grailnode.node.process_launch import Role
from grailnode.node.processes import run_role
from grailnode.node.role_checks import check_start
from grailnode.node.stores import Storage
from grailnode.node.supervisor import run_until_interrupted
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import with_repair_command
from grailnode.run.joining import open_config, open_config_to_read
from roles.authority_updates import under_authority
from roles.node.retries import WAIT_REPORT_SECONDS
from roles.policy.mirroring import Mirror
from roles.ports import NotFoundError, StateError

_POLL_SECONDS: Final = 5.0
_MIRROR_POLL_SECONDS: Final = 0.2
_TRIES_PER_REPORT: Final = round(WAIT_REPORT_SECONDS / _POLL_SECONDS)


def run_node(role: Role, name: str | None, **run_options: Unpack[RunOptions]) -> None:
    start_fork_server()
    config = wait_for_run(**run_options)
    name = name or usual_name(role)
    check_name(name)
    try:
        check_start(config, role, name, report_line)
    except StateError as error:
        raise UserError(with_repair_command(str(error), config, name)) from error
    run_role(config, role, name, report_line)


def wait_for_run(**run_options: Unpack[RunOptions]) -> Config:
    """Return the run's configuration, as soon as its founder has published the run."""
    since, tries = time.strftime("%H:%M"), 0
    while True:
        try:
            return open_config(**run_options)
        except NotFoundError as error:
            if tries % _TRIES_PER_REPORT == 0:
                report_line(f"{error}; waiting since {since} (Ctrl-C ends this)")
        tries += 1
        time.sleep(_POLL_SECONDS)


def mirror(to: str, region: str, **run_options: Unpack[RunOptions]) -> None:
    run_until_interrupted(partial(_mirror, open_config_to_read(**run_options), to, region))
    raise click.exceptions.Abort


async def _mirror(config: Config, to: str, region: str) -> None:
    telemetry = NodeTelemetry("mirror", terminal=sys.stderr)
    node = await trio.to_thread.run_sync(partial(make_auditor, config, telemetry))
    new_tensors = partial(mapped_tensors, config.at(config.node.cache) / "mirror")
    copy = Mirror(node, Storage(config, telemetry).copy_target(to, region), new_tensors)
    async with under_authority(node):
        await copy.keep(_MIRROR_POLL_SECONDS)


def backup(directory: Path, name: str | None, **run_options: Unpack[RunOptions]) -> None:
    config = open_config(**run_options)
    state_care.back_up(config, _node_name(name, config.at(config.node.state)), directory, click.echo)


def restore(directory: Path, name: str | None, **run_options: Unpack[RunOptions]) -> None:
    state_care.restore(open_config(**run_options), _node_name(name, directory), directory, click.echo)


def repair(name: str | None, **run_options: Unpack[RunOptions]) -> None:
    config = open_config(**run_options)
    state_care.repair_node(config, _node_name(name, config.at(config.node.state)), click.echo)


def _node_name(name: str | None, states: Path) -> str:
    """Return the name of a node; if none is given, that of the only node with a state in a folder."""
    if name is not None:
        check_name(name)
        return name
    names = state_care.node_names(states)
    if len(names) != 1:
        found = f"the states of {', '.join(names)}" if names else "no state"
        raise click.UsageError(f"give --name: {states} has {found}")
    return names[0]
