"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from grailnode.demo.demo_network import DemoSettings, run_demo
from grailnode.node.supervisor import run_until_interrupted
from grailnode.run.workspace import WorkspaceError
from grailnode.ui.terminal import render_summary


@dataclass(frozen=True)
class Options:
    """The options of the demo."""

    windows: int
    seed: int
    out: Path
    keep: bool
    trainers: int
    engine: str
    engine_python: Path | None


def demo(**parameters: Any) -> None:
    """Run `grailnode demo`."""
    options = Options(**parameters)
    network = options.out / "network"
    if network.exists():
        raise WorkspaceError(f"{network}: a run was kept there; choose another --out, or remove it")
    if (options.engine == "vllm") != (options.engine_python is not None):
        raise click.UsageError("--engine vllm and --engine-python belong together: `grailnode engine install DIR`")
    python = None if options.engine_python is None else options.engine_python.absolute()
    command = shlex.join(["grailnode", *sys.argv[1:]])
    settings = DemoSettings(options.windows, options.seed, options.out, options.keep, command, python, options.trainers)
    report = run_until_interrupted(partial(run_demo, settings))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {options.out / 'report.html'}  {options.out / 'report.json'}")
