"""`grailnode doctor`: whether this machine can run a node, and whether a run would accept its work."""

from typing import Any

import click

from grailnode.cli.options import run_action, trust_option


@click.command()
@click.option("--run", metavar="FILE-or-URL", help="The run.toml, or the manifest's URL. Default: the machine alone.")
@click.option(
    "--role",
    type=click.Choice(["trainer", "worker", "miner", "validator"]),
    help="The node's role. Default: the first of trainer, validator and miner that has a key here, else miner.",
)
@click.option("--name", help="The node's name. Default: as a node of this role is called.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key.")
@trust_option("Accept the run that a URL's server names.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def doctor(**parameters: Any) -> None:
    """Say in a line for each check whether this machine can run a node, and what to do where it cannot; exit 1 then.

    With --run, it tries what the node needs of storage, beacon and clock, and for at most a minute whether validators
    would accept rollouts that are computed here. A node's start carries out the quick checks by itself.
    """
    run_action("examination", "doctor", parameters)
