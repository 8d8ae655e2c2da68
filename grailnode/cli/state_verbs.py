"""`grailnode backup`, `restore` and `repair`: the state of a stopped node."""

from collections.abc import Callable
from typing import Any

import click

from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, run_action, run_options


def _state_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name the state of a node of a run."""
    name = click.option("--name", required=True, help="The node's name: trainer, validator, miner-1, ...")
    return run_options(name(function))


@click.command()
@click.argument("directory", type=DIRECTORY)
@_state_options
def backup(**parameters: Any) -> None:
    """Copy the state of a stopped node into DIRECTORY, and check every object of it.

    Keys, run.toml and credentials are not part of a state: back them up once, apart from it.
    """
    run_action("state_care", "backup", parameters)


@click.command()
@click.argument("directory", type=EXISTING_DIRECTORY)
@_state_options
def restore(**parameters: Any) -> None:
    """Copy the state of a node back from a backup in DIRECTORY.

    There must be no state of this name. A node refuses a state that is older than what it has published; `grailnode
    repair` brings it up to date.
    """
    run_action("state_care", "restore", parameters)


@click.command()
@_state_options
def repair(**parameters: Any) -> None:
    """Rebuild what the state of a stopped node has lost, from storage and from what is left.

    It prints a line for each object. What cannot be rebuilt is refused, and then nothing is changed.
    """
    run_action("state_care", "repair", parameters)
