"""`grailnode engine`: the environment of vLLM, and what a server of vLLM needs to be an engine."""

from pathlib import Path
from typing import Any

import click

from grailnode.cli.options import run_action


@click.group()
def engine() -> None:
    """Install vLLM for `[engine] kind = "vllm"`, or print what a server of your own needs."""


@engine.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def install(**parameters: Any) -> None:
    """Make an environment with vLLM in DIRECTORY, a new virtual environment of 2.5 GB or more."""
    run_action("engine_environment", "install", parameters)


@engine.command()
@click.argument("policy", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--runner", type=click.Choice(["v1", "v2"]), default="v1", show_default=True)
def flags(**parameters: Any) -> None:
    """Print the command that starts a server of vLLM for POLICY, to be named by `[engine] url`."""
    run_action("engine_environment", "flags", parameters)
