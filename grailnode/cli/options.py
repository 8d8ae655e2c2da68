"""What the declarations of several verbs share: options, the check of a node's name, and how a verb is run."""

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

FILE: Final = click.Path(path_type=Path, dir_okay=False)

_node_name: Final = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,32}")


def run_action(module: str, verb: str, parameters: Mapping[str, Any]) -> None:
    """Run what a verb does: the function of its name in a module of grailnode/cli/actions.

    The module is imported here and no earlier: most of them import torch, which takes seconds, and neither the help of
    a verb nor an error in its command line should wait for that.
    """
    getattr(importlib.import_module(f"grailnode.cli.actions.{module}"), verb)(**parameters)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `open_run.RunOptions` to a command."""
    for option in (
        click.option("--trust-run", is_flag=True, help="Accept the run that a URL's server names."),
        click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."),
        click.option("--run", required=True, metavar="FILE-or-URL", help="The run.toml, or the manifest's URL."),
    ):
        function = option(function)
    return function


def authority_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that names a run whose authority a command changes."""
    return click.option("--run", required=True, metavar="FILE", help="The run.toml of the run.")(function)


def check_name(name: str) -> None:
    """Refuse a text that cannot be a node's name.

    Raises:
        UsageError: it cannot.
    """
    if not _node_name.fullmatch(name):
        raise click.UsageError(
            f"--name {name}: up to 32 letters, digits, '_', '.' and '-', the first no '.', "
            "which announcements and file names carry"
        )
