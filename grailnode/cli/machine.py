"""The verbs of a machine and its nodes: `grailnode doctor`, `demo`, `engine`, `environments`, `backup`, `restore` and
`repair`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from grailnode.cli.options import (
    DIRECTORY,
    EXISTING_DIRECTORY,
    EXISTING_FILE,
    optional_run_options,
    run_action,
    run_options,
    shown_option,
    verb,
)


@verb("examination.doctor")
@optional_run_options
@click.option(
    "--role",
    type=click.Choice(["trainer", "worker", "miner", "validator"]),
    help="The node's role. Default: the first of trainer, validator and miner that has a key here, else miner.",
)
@click.option("--name", help="The node's name. Default: as a node of this role is called.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def doctor() -> None:
    """Say in a line for each check whether this machine can run a node, and what to do where it cannot; exit 1 then.

    With --run, it tries what the node needs of storage, beacon and clock, and for at most a minute whether validators
    would accept rollouts that are computed here. A node's start carries out the quick checks by itself.
    """


@verb("demo_run.demo")
@click.option(
    "--windows",
    type=click.IntRange(1, 10_000),
    help="How many windows. Default: 72 of 2 s, with vllm of 8; with smollm2, also on vllm, 20 of 120 s.",
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
def demo() -> None:
    """The whole network on this machine: a trainer, miners, a validator and a cheat, as processes of their own."""


@click.group()
def engine() -> None:
    """Install vLLM, print what a server of your own needs, or verify the weights in its memory."""


@verb("engine_environment.install", engine)
@click.argument("directory", type=DIRECTORY, required=False)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="What vLLM runs on. Default: cuda if nvidia-smi lists a GPU, else cpu.",
)
def _install() -> None:
    """Make an environment with vLLM in DIRECTORY, a new virtual environment of 2.5 GB or more.

    Without DIRECTORY it is made in the user's data directory ($XDG_DATA_HOME/grailnode/vllm, by default in
    ~/.local/share), where nodes, `demo` and `calibrate` look for it.
    """


@verb("engine_environment.flags", engine)
@click.argument("policy", type=EXISTING_DIRECTORY)
@shown_option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", help="What the server runs on.")
@shown_option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", help="What it computes in.")
@shown_option("--runner", type=click.Choice(["v1", "v2"]), default="v1", help="The version of its model runner.")
def _flags() -> None:
    """Print the command that starts a server of vLLM for POLICY, to be named by `[engine] url`."""


@verb("engine_environment.verify", engine)
@run_options
@click.option("--name", required=True, help="The node's name: miner-1, validator, ...")
def _verify() -> None:
    """Compare the weights in vLLM's memory with those that the trainer signed; exit 1 if they differ.

    The node of this name, which runs on this machine, reads all tensors back while vLLM serves. If some differ, it
    starts vLLM again with the right ones, and this names them.
    """


def _source_options(function: Callable[..., Any]) -> Callable[..., Any]:
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
        run_action("environment_checks", "list_", {})


@verb("environment_checks.list_", environments)
def _list() -> None:
    """List the tasks, as `grailnode environments` alone does."""


@verb("environment_checks.try_", environments)
@_source_options
@shown_option("--seed", type=click.IntRange(0, 0xFFFFFFFF), default=0, help="Of the problem.")
@click.option("--answer", "answers", multiple=True, help="A completion to judge; repeated, the turns of an episode.")
@click.option("--policy", type=EXISTING_DIRECTORY, help="A checkpoint whose most likely completion is judged.")
def _try() -> None:
    """Show a problem of the environment NAME, and judge an answer to it, or play an episode."""


@verb("environment_checks.check", environments)
@_source_options
def _check() -> None:
    """Check whether the environment NAME keeps the contract of environments; exit 1 if it does not."""


def _state_options(function: Callable[..., Any]) -> Callable[..., Any]:
    name = click.option("--name", help="The node's name. Default: that of the only node that has a state there.")
    return run_options(name(function))


@verb("node_start.backup")
@click.argument("directory", type=DIRECTORY)
@_state_options
def backup() -> None:
    """Copy the state of a stopped node into DIRECTORY, and check every object of it.

    Keys, run.toml and credentials are not part of a state: back them up once, apart from it.
    """


@verb("node_start.restore")
@click.argument("directory", type=EXISTING_DIRECTORY)
@_state_options
def restore() -> None:
    """Copy the state of a node back from a backup in DIRECTORY.

    There must be no state of this name. A node refuses a state that is older than what it has published; `grailnode
    repair` brings it up to date.
    """


@verb("node_start.repair")
@_state_options
def repair() -> None:
    """Rebuild what the state of a stopped node has lost, from storage and from what is left.

    It prints a line for each object. What cannot be rebuilt is refused, and then nothing is changed.
    """
