"""`grailnode init`: make a run, or a directory for a node of somebody else's run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from grailnode.cli.from_model import given
from grailnode.cli.options import check_name
from grailnode.config import validate
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run.buckets import Document
from grailnode.run.new_run import COMMANDS, NewRun, create_run, join_run
from grailnode.run.requirements import completion_tokens
from grailnode.run.rules import Place, Rules
from grailnode.run.run_toml import read_recipe
from protocol.environments.dataset import Dataset

_LISTED_LINES: Final = 8


def init(directory: Path, policy: Path | None, recipe: Path | None, proof: Path | None, **parameters: Any) -> None:
    place_options = given(Place, parameters)
    place = validate(Place, place_options, "init")
    if place.bucket is None and place_options:
        useless = ", ".join(f"--{'reader' if name == 'readers' else name}" for name in place_options)
        raise click.UsageError(f"{useless}: also give --bucket, where this run or node writes to")
    if (place.join is None) != (place.meeting is None):
        raise click.UsageError("--join and --meeting go together")
    if place.join is None or place.meeting is None:
        constants = read_recipe(recipe, given(Rules, parameters))
        _print_run(directory, create_run(directory, constants, place, policy=policy or PACKAGED_POLICY, proof=proof))
        return
    check_name(place.name)
    key, documents = join_run(directory, place, place.join, place.meeting)
    click.echo(f"{place.name} is {key.hex()}")
    _print_bucket(directory, documents, ["s3.credentials", "meeting.credentials"])
    run = shlex.quote(str(directory / "run.toml"))
    click.echo("then start it, ROLE being miner, validator or worker:")
    click.echo(f"  grailnode --role ROLE --run {run} --name {place.name}")


def _print_run(directory: Path, run: NewRun) -> None:
    workspace, rules = run.workspace, run.workspace.rules
    click.echo(f"run {workspace.run_id.hex()[:16]} in {workspace.config}")
    if workspace.problems is not None:
        _print_problems(workspace.problems, completion_tokens(rules))
    if workspace.notice:
        click.echo(workspace.notice)
    if rules.roots > 1:
        click.echo(
            f"{rules.root_threshold} of {rules.roots} root keys decide who may act: move keys/root-*.key to where "
            "no network is"
        )
    if rules.admission != "open":
        click.echo("miners must be admitted first: `grailnode admit PUBLICKEY`")
    elif rules.work:
        hashes = f"{1 << rules.work:,} hashes"
        click.echo(f"anybody may mine: each key does a proof of work of about {hashes} a day (--work {rules.work})")
    for key in rules.validator_keys:
        click.echo(f"validator {key.lower()} is run by somebody else: it joins with `grailnode init --join`")
    if run.documents:
        _print_bucket(directory, run.documents, ["s3.credentials"])
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
    click.echo(f"  less {shlex.quote(str(directory / COMMANDS))}")
    for name in credentials:
        file = shlex.quote(str(directory / name))
        click.echo(f"  install -m 600 /dev/null {file} && editor {file}")
