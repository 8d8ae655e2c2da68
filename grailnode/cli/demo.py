"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from grailnode.demo.demo_network import DemoSettings, run_demo
from grailnode.node.supervisor import run_until_interrupted
from grailnode.run.creation import Choices
from grailnode.run.workspace import Pace, WorkspaceError
from grailnode.ui.terminal import render_summary

DEFAULT_WINDOWS: Final = 72


@dataclass(frozen=True)
class Options:
    """The options of the demo."""

    windows: int
    seed: int
    out: Path
    keep: bool


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
def demo(**parameters: Any) -> None:
    """The whole network on this machine: 1 trainer, 2 miners, 1 validator and 1 cheat, as processes of their own."""
    options = Options(**parameters)
    network = options.out / "network"
    if network.exists():
        raise WorkspaceError(f"{network}: a run was kept there; choose another --out, or remove it")
    command = shlex.join(["grailnode", *sys.argv[1:]])
    settings = DemoSettings(options.windows, options.seed, options.out, options.keep, command)
    report = run_until_interrupted(partial(run_demo, settings, Choices(), Pace()))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {options.out / 'report.html'}  {options.out / 'report.json'}")
