"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

import shlex
import sys
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from grailnode.demo.demo_network import DemoSettings, run_demo
from grailnode.engine.vllm.installation import environment_of, find_python
from grailnode.node.supervisor import run_until_interrupted
from grailnode.run.workspace import WorkspaceError
from grailnode.ui.terminal import render_summary


def demo(
    windows: int,
    seed: int,
    out: Path,
    keep: bool,
    trainers: int,
    environment: str,
    engine: str,
    engine_python: Path | None,
) -> None:
    """Run `grailnode demo`."""
    network = out / "network"
    if network.exists():
        raise WorkspaceError(f"{network}: a run was kept there; choose another --out, or remove it")
    if engine != "vllm" and engine_python is not None:
        raise click.UsageError("--engine-python belongs to --engine vllm")
    if engine == "vllm" and environment != "addition":
        raise click.UsageError("--engine vllm: the packaged thresholds of vLLM are for --environment addition")
    vllm = None
    if engine == "vllm":
        vllm = environment_of(engine_python.absolute() if engine_python else find_python("--engine-python"))
    command = shlex.join(["grailnode", *sys.argv[1:]])
    settings = DemoSettings(windows, seed, out, keep, command, vllm, trainers, environment)
    report = run_until_interrupted(partial(run_demo, settings))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {out / 'report.html'}  {out / 'report.json'}")
