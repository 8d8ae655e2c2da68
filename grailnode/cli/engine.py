"""`grailnode engine`: the environment of vLLM, what a server needs to be an engine, and whether it has its weights."""

from typing import Any

import click

from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, run_action, run_options, shown_option


@click.group()
def engine() -> None:
    """Install vLLM, print what a server of your own needs, or verify the weights in its memory."""


@engine.command()
@click.argument("directory", type=DIRECTORY, required=False)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="What vLLM runs on. Default: cuda if nvidia-smi lists a GPU, else cpu.",
)
def install(**parameters: Any) -> None:
    """Make an environment with vLLM in DIRECTORY, a new virtual environment of 2.5 GB or more.

    Without DIRECTORY it is made in the user's data directory ($XDG_DATA_HOME/grailnode/vllm, by default in
    ~/.local/share), where nodes, `demo` and `calibrate` look for it.
    """
    run_action("engine_environment", "install", parameters)


@engine.command()
@click.argument("policy", type=EXISTING_DIRECTORY)
@shown_option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", help="What the server runs on.")
@shown_option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", help="What it computes in.")
@shown_option("--runner", type=click.Choice(["v1", "v2"]), default="v1", help="The version of its model runner.")
def flags(**parameters: Any) -> None:
    """Print the command that starts a server of vLLM for POLICY, to be named by `[engine] url`."""
    run_action("engine_environment", "flags", parameters)


@engine.command()
@run_options
@click.option("--name", required=True, help="The node's name: miner-1, validator, ...")
def verify(**parameters: Any) -> None:
    """Compare the weights in vLLM's memory with those that the trainer signed; exit 1 if they differ.

    The node of this name, which runs on this machine, reads all tensors back while vLLM serves. If some differ, it
    starts vLLM again with the right ones, and this names them.
    """
    run_action("engine_environment", "verify", parameters)
