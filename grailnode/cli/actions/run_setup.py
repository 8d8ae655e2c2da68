"""`grailnode init`: make a run, or a directory for a node of somebody else's run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from grailnode.cli.options import check_name
from grailnode.run.buckets import Document
from grailnode.run.new_run import BUCKET_DIRECTORY, COMMANDS_FILE, InitOptions, NewRun, create_run, join_run
from protocol.environments.dataset import Dataset

_LISTED_LINES: Final = 8
_BUCKET_OPTIONS: Final = {"provider", "region", "url", "readers", "days", "join", "meeting", "name"}
"""The options that say something only beside --bucket."""


def init(**parameters: Any) -> None:
    """Run `grailnode init`."""
    options = InitOptions(**parameters)
    if options.bucket is None and (useless := _options_of_this_command_line(_BUCKET_OPTIONS)):
        raise click.UsageError(f"{', '.join(useless)}: also give --bucket, where this run or node writes to")
    if (options.join is None) != (options.meeting is None):
        raise click.UsageError("--join and --meeting go together")
    if options.join is None or options.meeting is None:
        _print_run(options, create_run(options))
        return
    check_name(options.name)
    member = join_run(options, options.join, options.meeting)
    click.echo(f"{options.name} is {member.key.hex()}")
    _print_bucket(options.directory, member.documents, ["s3.credentials", "meeting.credentials"])
    run = shlex.quote(str(options.directory / "run.toml"))
    click.echo("then start it, ROLE being miner, validator or worker:")
    click.echo(f"  grailnode --role ROLE --run {run} --name {options.name}")


def _options_of_this_command_line(names: set[str]) -> list[str]:
    """Return those of the named parameters that the command line has, as it spells them."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def _print_run(options: InitOptions, run: NewRun) -> None:
    workspace, choices = run.workspace, run.choices
    click.echo(f"run {workspace.run_id.hex()[:16]} in {workspace.config}")
    if workspace.problems is not None:
        _print_problems(workspace.problems, choices.max_tokens)
    if choices.roots > 1:
        click.echo(
            f"{choices.root_threshold} of {choices.roots} root keys decide who may act: move keys/root-*.key to where "
            "no network is"
        )
    if options.admission != "open":
        click.echo("miners must be admitted first: `grailnode admit PUBLICKEY`")
    elif options.work:
        hashes = f"{1 << options.work:,} hashes"
        click.echo(f"anybody may mine: each key does a proof of work of about {hashes} a day (--work {options.work})")
    for key in choices.remote_validators:
        click.echo(f"validator {key.hex()} is run by somebody else: it joins with `grailnode init --join`")
    if run.documents:
        _print_bucket(options.directory, run.documents, ["s3.credentials"])
    click.echo("start its nodes, each in a terminal of its own:")
    for command in workspace.start_commands:
        click.echo(f"  {command}")
    if run.url:
        click.echo(f"others join by {run.url}")


def _print_problems(problems: Dataset, max_tokens: int) -> None:
    lines = ", ".join(map(str, problems.held_out_lines[:_LISTED_LINES]))
    more = ", ..." if problems.held_out_size > _LISTED_LINES else ""
    click.echo(
        f"problems: {len(problems.training_problems)} to train on, {problems.held_out_size} held out "
        f"(of lines {lines}{more}); completions of up to {max_tokens} tokens"
    )


def _print_bucket(directory: Path, documents: Sequence[Document], credentials: Sequence[str]) -> None:
    """Print the commands that prepare a bucket: to apply its documents, and to store each file of credentials."""
    count = len(documents)
    click.echo(
        f"first prepare the bucket, which needs {count} documents, and store the credentials that you get for it:"
    )
    click.echo(f"  less {shlex.quote(str(directory / BUCKET_DIRECTORY / COMMANDS_FILE))}")
    for name in credentials:
        file = shlex.quote(str(directory / name))
        click.echo(f"  install -m 600 /dev/null {file} && editor {file}")
