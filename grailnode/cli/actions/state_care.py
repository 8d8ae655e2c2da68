"""What `grailnode backup`, `restore` and `repair` do."""

from pathlib import Path
from typing import Any

import click

from grailnode.cli.actions.open_run import RunOptions
from grailnode.cli.options import check_name
from grailnode.node import state_copies, state_repair


def backup(directory: Path, name: str, **parameters: Any) -> None:
    """Copy the state of a stopped node into a directory."""
    check_name(name)
    state_copies.back_up(RunOptions(**parameters).open_config(), name, directory, click.echo)


def restore(directory: Path, name: str, **parameters: Any) -> None:
    """Copy the state of a node back from a backup."""
    check_name(name)
    state_copies.restore(RunOptions(**parameters).open_config(), name, directory, click.echo)


def repair(name: str, **parameters: Any) -> None:
    """Rebuild what the state of a stopped node has lost."""
    check_name(name)
    state_repair.repair_node(RunOptions(**parameters).open_config(), name, click.echo)
