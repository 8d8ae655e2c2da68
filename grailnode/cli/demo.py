"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

from pathlib import Path
from typing import Any, Final

import click

from grailnode.cli.options import run_action

DEFAULT_WINDOWS: Final = 72


@click.command()
@click.option(
    "--windows",
    type=click.IntRange(1, 10_000),
    default=DEFAULT_WINDOWS,
    help="How many windows. Default: 3 minutes' worth.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all keys, and so of prompts and noise.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("grailnode-demo"),
    show_default=True,
    help="Where report.json and report.html go.",
)
@click.option("--keep", is_flag=True, help="Keep the run's directory (store, keys, logs) in --out.")
@click.option(
    "--trainers",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Sites that train together, each in a process of its own.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="What the honest miners generate with.",
)
@click.option(
    "--engine-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The interpreter of vLLM's environment, which `grailnode engine install` made.",
)
def demo(**parameters: Any) -> None:
    """The whole network on this machine: 1 trainer, 2 miners, 1 validator and 1 cheat, as processes of their own."""
    run_action("demo_run", "demo", parameters)
