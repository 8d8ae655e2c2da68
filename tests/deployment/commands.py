"""Checks that a command line is valid for the program, and reads Dockerfiles."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click
import pytest

from grailnode import UserError
from grailnode.cli.main import cli
from grailnode.config import without_file

ParserCall = tuple[str, dict[str, object]]


def parse(arguments: Sequence[str], *, whole: bool = True) -> list[ParserCall]:
    """Parse a command line without running it, and return its commands with their values, the outermost first.

    Args:
        whole: whether required options must be present.

    Raises:
        AssertionError: the program would refuse the command line.
    """
    with pytest.MonkeyPatch.context() as patch:
        # the files are those of other machines
        patch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(str(value)))
        try:
            commands = list(_contexts(list(arguments)))
        except click.exceptions.Exit:
            return []  # --help
        except click.MissingParameter as error:
            assert not whole, f"grailnode {' '.join(arguments)}: {error.format_message()}"
            return []
        except click.ClickException as error:
            raise AssertionError(f"grailnode {' '.join(arguments)}: {error.format_message()}") from None
    for _, values in commands:
        overrides = cast("tuple[str, ...]", values.get("overrides", ()))
        try:
            without_file({}, overrides, Path())
        except UserError as error:
            # a setting may need another one that run.toml has; unknown keys and invalid values are never right
            assert "needs a" in str(error) or "says where they read" in str(error), str(error)
    return commands


def _contexts(arguments: list[str]) -> Iterator[ParserCall]:
    command: click.Command = cli
    parent = None
    while True:
        context = command.make_context(command.name or "grailnode", arguments, parent=parent)
        yield command.name or "", dict(context.params)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        if not rest:
            if not command.invoke_without_command:
                raise click.UsageError("which command?")
            return
        _, below, arguments = command.resolve_command(context, rest)
        assert below is not None
        command, parent = below, context


# Dockerfiles


ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile in order, without comments, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    parts = (line.partition(" ") for line in text.split("\n") if line)
    return [(verb.upper(), rest.strip()) for verb, _, rest in parts]
