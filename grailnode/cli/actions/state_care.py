"""What `grailnode backup`, `restore` and `repair` do."""

from pathlib import Path
from typing import Unpack

import click

from grailnode.cli.options import RunOptions, check_name
from grailnode.node import state_copies, state_repair
from grailnode.run.joining import open_config


def backup(directory: Path, name: str, **run_options: Unpack[RunOptions]) -> None:
    """Copy the state of a stopped node into a directory."""
    check_name(name)
    state_copies.back_up(open_config(**run_options), name, directory, click.echo)


def restore(directory: Path, name: str, **run_options: Unpack[RunOptions]) -> None:
    """Copy the state of a node back from a backup."""
    check_name(name)
    state_copies.restore(open_config(**run_options), name, directory, click.echo)


def repair(name: str, **run_options: Unpack[RunOptions]) -> None:
    """Rebuild what the state of a stopped node has lost."""
    check_name(name)
    state_repair.repair_node(open_config(**run_options), name, click.echo)
