"""What `grailnode engine verify` does."""

from typing import Unpack

import click
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions, check_name
from grailnode.engine.vllm.verify_requests import NoAnswerError, request_verification
from grailnode.node.node_makers import engine_directory, state_directory
from grailnode.run.joining import open_config


def verify(name: str, **run_options: Unpack[RunOptions]) -> None:
    """Ask a node of this machine to read its engine's tensors back, and say in one line what came of it."""
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
