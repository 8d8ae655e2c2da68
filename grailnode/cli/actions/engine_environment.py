"""What `grailnode engine` does."""

import shlex
from pathlib import Path
from typing import Any, Unpack

import click
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions, check_name
from grailnode.engine.vllm import installation
from grailnode.engine.vllm.verify_requests import NoAnswerError, request_verification
from grailnode.engine.vllm.vllm_server import server_environment, server_flags, write_modules
from grailnode.engine.vllm.vllm_settings import VllmSettings
from grailnode.node.node_makers import engine_directory, state_directory
from grailnode.run.joining import open_config


def install(directory: Path | None, device: installation.Device | None) -> None:
    if device is None:
        device, reason = installation.detect_device()
        click.echo(f"for {device}, because {reason}; --device chooses otherwise")
    target = directory or installation.default_directory()
    environment = installation.install(target, device)
    click.echo(f"{target}: vLLM {environment.vllm} with torch {environment.torch}")
    if directory is None:
        click.echo('used by [engine] kind = "vllm" in run.toml, `grailnode demo --engine vllm` and `calibrate`')
    else:
        click.echo(f'use it with [engine] kind = "vllm", python = "{environment.python}" in run.toml')


def flags(policy: Path, **choices: Any) -> None:
    settings = VllmSettings(**choices)
    modules = write_modules(Path.cwd() / "grailnode-vllm")
    variables = {"PYTHONPATH": str(modules), **server_environment(settings)}
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", *server_flags(settings, policy)]
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    click.echo(f"{assignments} {shlex.join([*words, '--host', '127.0.0.1'])}")


def verify(name: str, **run_options: Unpack[RunOptions]) -> None:
    check_name(name)
    config = open_config(**run_options)
    directory = engine_directory(state_directory(config, name))
    try:
        result = trio.run(request_verification, directory)
    except NoAnswerError as error:
        raise UserError(
            f"{name}: no node of this name answers on this machine ({error}); it must be running with "
            'engine.kind = "vllm", under the same user'
        ) from error
    try:
        click.echo(f"{name}: {result.finding()}")
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
