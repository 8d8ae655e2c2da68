"""`grailnode admit`: let a miner work in a run."""

from typing import Any

import click

from grailnode.cli.options import FILE, authority_option, run_action, shown_option


@click.command()
@click.argument("key")
@authority_option
@shown_option("--days", type=click.IntRange(1, 3650), default=30, help="Days for which an invitation is valid.")
@click.option(
    "--key",
    "inviter",
    type=FILE,
    help="Key file that signs an invitation. Default: a root or inviter key in the run's keys/.",
)
def admit(**parameters: Any) -> None:
    """Let KEY (64 hexadecimal digits) mine: list it, or print an invitation, as the run's admission policy asks."""
    run_action("miner_admission", "admit", parameters)
