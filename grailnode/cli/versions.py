"""`grailnode publish` and `grailnode follow`: a model's versions from one machine to many, with or without miners."""

from typing import Any

import click

from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, FILE, run_action, shown_option


@click.command()
@click.argument("directory", type=EXISTING_DIRECTORY)
@click.option("--run", required=True, type=FILE, metavar="FILE", help="The run.toml of the run.")
@shown_option("--name", default="trainer", help="The trainer's name, whose key is in the run's keys/.")
@click.option("--step", required=True, type=click.IntRange(0), help="Optimizer steps up to this version.")
def publish(**parameters: Any) -> None:
    """Publish the checkpoint in DIRECTORY as the run's next version, and wait until it is in storage."""
    run_action("version_exchange", "publish", parameters)


@click.command()
@click.argument("run", metavar="FILE-or-URL")
@click.argument("directory", type=DIRECTORY)
@shown_option("--keep", type=click.IntRange(1), default=2, help="So many of the newest versions stay.")
@click.option("--once", is_flag=True, help="End after the first version.")
def follow(**parameters: Any) -> None:
    """Write each new version of a run to DIRECTORY, as VERSION.safetensors, verified, until Ctrl-C."""
    run_action("version_exchange", "follow", parameters)
