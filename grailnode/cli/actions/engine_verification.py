"""What `grailnode engine verify` does."""

from typing import Final, Unpack

import click
import trio

from grailnode import UserError
from grailnode.cli.options import RunOptions, check_name
from grailnode.engine.vllm.verify_requests import NoAnswerError, Verification, request_verification
from grailnode.node.node_makers import engine_directory, state_directory
from grailnode.run.joining import open_config

_MAX_NAMES: Final = 20  # of tensors in the line


def verify(name: str, **run_options: Unpack[RunOptions]) -> None:
    """Ask a node of this machine to read its engine's tensors back, and say in one line what came of it.

    Raises:
        UserError: they differed, nothing was verified, or no node answers.
    """
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
    if result.error:
        raise UserError(f"{name}: nothing was verified: {result.error}")
    if result.failure:
        raise UserError(f"{name}: {_difference(result)}; vLLM was started again and equals the signed weights now")
    click.echo(
        f"{name}: version {result.version} equals its signed weights: {result.tensors} tensors read back from vLLM in "
        f"{result.seconds:.1f} s, digest {result.digest}"
    )


def _difference(result: Verification) -> str:
    if result.different:
        names = ", ".join(result.different[:_MAX_NAMES]) + (", ..." if len(result.different) > _MAX_NAMES else "")
        count = f"{len(result.different)} of {result.tensors} tensors"
        return f"version {result.version} differed from its signed weights in {count}: {names}"
    return f"version {result.version} was not in vLLM ({result.failure})"
