"""What `grailnode engine` does."""

import shlex
from pathlib import Path
from typing import Any

import click

from grailnode.engine.vllm import installation
from grailnode.engine.vllm.vllm_server import server_environment, server_flags, write_modules
from grailnode.engine.vllm.vllm_settings import VllmSettings


def install(directory: Path | None, device: installation.Device | None) -> None:
    """Make an environment with vLLM, and say what it took and how to use it."""
    if device is None:
        device, reason = installation.detect_device()
        click.echo(f"for {device}, because {reason}; --device chooses otherwise")
    target = directory or installation.default_directory()
    environment = installation.install(target, device)
    size, seconds = f"{environment.nbytes / 1e9:.1f} GB", f"{environment.seconds:.0f} s"
    click.echo(f"{target}: vLLM {environment.vllm} with torch {environment.torch}, {seconds}, {size}")
    if directory is None:
        click.echo('used by [engine] kind = "vllm" in run.toml, `grailnode demo --engine vllm` and `calibrate`')
    else:
        click.echo(f'use it with [engine] kind = "vllm", python = "{environment.python}" in run.toml')


def flags(policy: Path, **choices: Any) -> None:
    """Print the command that starts a server for a policy."""
    settings = VllmSettings(**choices)
    modules = write_modules(Path.cwd() / "grailnode-vllm")
    variables = {"PYTHONPATH": str(modules), **server_environment(settings)}
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", *server_flags(settings, policy)]
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    click.echo(f"{assignments} {shlex.join([*words, '--host', '127.0.0.1'])}")
