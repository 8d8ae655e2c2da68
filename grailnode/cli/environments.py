"""`grailnode environments`: the tasks that this machine has, their problems, and whether they keep their contract."""

from collections.abc import Callable
from typing import Any

import click

from grailnode.cli.options import EXISTING_DIRECTORY, EXISTING_FILE, run_action, shown_option


def _source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what an environment is made with."""
    for option in (
        click.option("--data", type=EXISTING_FILE, help="Its file of problems. Default: an example of this program."),
        shown_option("--environment-config", "config", default="{}", help="The configuration of a plug-in: JSON."),
        click.argument("name"),
    ):
        function = option(function)
    return function


@click.group(invoke_without_command=True)
@click.pass_context
def environments(context: click.Context) -> None:
    """List the tasks that a run can have here, each with an example: built-in ones, and those of installed plug-ins."""
    if context.invoked_subcommand is None:
        run_action("environment_checks", "show_all", {})


@environments.command("try")
@_source_options
@shown_option("--seed", type=click.IntRange(0), default=0, help="Of the problem.")
@click.option("--answer", "answers", multiple=True, help="A completion to judge; repeated, the turns of an episode.")
@click.option("--policy", type=EXISTING_DIRECTORY, help="A checkpoint whose most likely completion is judged.")
def try_(**parameters: Any) -> None:
    """Show a problem of the environment NAME, and judge an answer to it, or play an episode."""
    run_action("environment_checks", "try_one", parameters)


@environments.command()
@_source_options
def check(**parameters: Any) -> None:
    """Check whether the environment NAME keeps the contract of environments; exit 1 if it does not."""
    run_action("environment_checks", "check", parameters)
