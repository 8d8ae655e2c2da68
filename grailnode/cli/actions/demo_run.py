"""`grailnode demo`: the whole network on this machine, and a summary of what it did."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from grailnode import UserError
from grailnode.demo.demo_network import DemoSettings, run_demo
from grailnode.demo.smollm2 import checkpoint
from grailnode.engine.vllm.installation import environment_of, find_python
from grailnode.node.early_fork import start_fork_server
from grailnode.node.supervisor import run_until_interrupted
from grailnode.ui.terminal.pages import render_summary

_WINDOWS: Final = 72
_SMOLLM2_WINDOWS: Final = 20


def demo(
    windows: int | None,
    policy: str,
    seed: int,
    out: Path,
    keep: bool,
    trainers: int,
    environment: str,
    engine: str,
    engine_python: Path | None,
) -> None:
    network = out / "network"
    if network.exists():
        raise UserError(f"{network}: a run was kept there; choose another --out, or remove it")
    if policy == "smollm2" and (trainers > 1 or environment != "addition"):
        raise click.UsageError("--policy smollm2 has a task of its own and one trainer: drop the other options")
    if engine != "vllm" and engine_python is not None:
        raise click.UsageError("--engine-python belongs to --engine vllm")
    if engine == "vllm" and environment == "calculator":
        raise click.UsageError("--engine vllm: on a CPU it has no attention for the heads of calculator's policy")
    vllm = None
    if engine == "vllm":
        vllm = environment_of(engine_python.absolute() if engine_python else find_python("--engine-python"))
    command = shlex.join(["grailnode", *sys.argv[1:]])
    start_fork_server()  # before anything computes, or leaves a thread
    smollm2 = checkpoint(partial(click.echo, err=True)) if policy == "smollm2" else None
    windows = windows or (_SMOLLM2_WINDOWS if smollm2 else _WINDOWS)
    settings = DemoSettings(windows, seed, out, keep, command, vllm, trainers, environment, smollm2)
    report = run_until_interrupted(partial(run_demo, settings))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {out / 'report.html'}  {out / 'report.json'}")
