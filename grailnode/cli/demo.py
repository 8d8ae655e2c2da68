"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

from pathlib import Path
from typing import Any

import click

from grailnode.cli.options import DIRECTORY, EXISTING_FILE, run_action, shown_option


@click.command()
@click.option(
    "--windows",
    type=click.IntRange(1, 10_000),
    help="How many windows. Default: 72 of 2 s, with vllm of 8; with smollm2 22 of 120 s.",
)
@shown_option(
    "--policy",
    type=click.Choice(["genesis", "smollm2"]),
    default="genesis",
    help="The packaged policy, or SmolLM2-135M-Instruct.",
)
@shown_option("--seed", type=int, default=0, help="Seed of all keys, and so of prompts and noise.")
@shown_option("--out", type=DIRECTORY, default=Path("grailnode-demo"), help="Where report.json and report.html go.")
@click.option("--keep", is_flag=True, help="Keep the run's directory (store, keys, logs) in --out.")
@shown_option(
    "--trainers", type=click.IntRange(1, 8), default=1, help="Sites that train together, each in a process of its own."
)
@shown_option(
    "--environment",
    type=click.Choice(["addition", "wordle", "calculator"]),
    default="addition",
    help="The task; those behind the first have several turns. calculator has a packaged policy of its own.",
)
@shown_option(
    "--engine", type=click.Choice(["torch", "vllm"]), default="torch", help="What the honest miners generate with."
)
@click.option(
    "--engine-python",
    type=EXISTING_FILE,
    help="The interpreter of vLLM's environment. Default: that of `grailnode engine install`.",
)
def demo(**parameters: Any) -> None:
    """The whole network on this machine: 1 trainer, 2 miners, 1 validator and 1 cheat, as processes of their own."""
    run_action("demo_run", "demo", parameters)
