"""`grailnode init`: make a run, or a directory for a node of somebody else's run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from grailnode.cli.options import check_name
from grailnode.run.buckets import Document
from grailnode.run.new_run import BUCKET_DIRECTORY, InitOptions, NewRun, create_run, join_run
from protocol.environments.dataset import Dataset
from protocol.limits import MAX_COMPLETION_TOKENS

_LISTED_LINES: Final = 8
_BUCKET_OPTIONS: Final = {"provider", "region", "url", "readers", "days", "join", "meeting", "name"}
"""The options that say something only beside --bucket."""


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--title", help="What the run is called. Default: the directory's name.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face checkpoint directory. Default: the packaged genesis.",
)
@click.option("--environment", default="addition", show_default=True, help="The task: docs/spec/environments.md.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON Lines with the problems, for a task that reads them.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_COMPLETION_TOKENS), help="The longest completion. Default: the task's."
)
@click.option(
    "--proof",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Thresholds that `grailnode calibrate` measured. Default: proof.json in the policy's directory.",
)
@click.option("--bucket", help="Keep the run in a bucket: NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX.")
@click.option("--provider", type=click.Choice(["aws", "r2", "minio"]), default="aws", show_default=True)
@click.option("--region", default="", help="Of the bucket. Default: us-east-1; auto on R2.")
@click.option(
    "--url", default="", help="Where everybody reads the bucket. Default: the service's own URL; R2 has none."
)
@click.option("--reader", "readers", multiple=True, help="A principal that may read; without any, everybody may.")
@click.option(
    "--days",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Days for which objects of closed windows are kept.",
)
@click.option("--join", metavar="URL", help="Take part in the run whose manifest is there, instead of making one.")
@click.option("--meeting", help="With --join: the bucket in which participants announce themselves.")
@click.option("--name", default="miner-1", show_default=True, help="With --join: the node's name.")
@click.option("--roots", type=click.IntRange(1, 16), default=1, show_default=True, help="Root keys; 3 for a real run.")
@click.option("--threshold", type=click.IntRange(1, 16), help="Root keys that must sign. Default: 2, or 1 of 1.")
@click.option(
    "--validators", type=click.IntRange(0, 16), default=1, show_default=True, help="Keys of validators to make."
)
@click.option(
    "--validator",
    "validator_keys",
    multiple=True,
    metavar="PUBLICKEY",
    help="A validator whose key somebody else holds.",
)
@click.option("--quorum", type=click.IntRange(1, 16), default=1, show_default=True, help="Validators that must accept.")
@click.option(
    "--window",
    type=click.FloatRange(0.4, 3600),
    default=None,
    help="Seconds. Default: 2, for one machine; with a public beacon 60.",
)
@click.option(
    "--beacon",
    type=click.Choice(["own", "quicknet"]),
    default="own",
    show_default=True,
    help="Source of randomness: the run's own trainer, or drand, which nobody can predict.",
)
@click.option("--admission", type=click.Choice(["open", "allowlist", "invite"]), default="open", show_default=True)
@click.option(
    "--work",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Bits of proof of work that an open run's miner does.",
)
def init(**parameters: Any) -> None:
    """Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest.

    With --bucket the run lives in a bucket of S3, and what the bucket needs (policies, CORS, lifecycle) is printed and
    written to DIRECTORY/bucket. With --join as well, DIRECTORY is for a node of somebody else's run.
    """
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
    _print_documents(options.directory, member.documents)


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
    click.echo("start its nodes, each in a terminal of its own:")
    for command in workspace.start_commands:
        click.echo(f"  {command}")
    if options.admission != "open":
        click.echo("miners must be admitted first: `grailnode admit PUBLICKEY`")
    for key in choices.remote_validators:
        click.echo(f"validator {key.hex()} is run by somebody else: it joins with `grailnode init --join`")
    _print_documents(options.directory, run.documents)
    if run.url:
        click.echo(f"\nothers join by {run.url}")


def _print_problems(problems: Dataset, max_tokens: int) -> None:
    lines = ", ".join(map(str, problems.held_out_lines[:_LISTED_LINES]))
    more = ", ..." if problems.held_out_size > _LISTED_LINES else ""
    click.echo(
        f"problems: {len(problems.training_problems)} to train on, {problems.held_out_size} held out "
        f"(of lines {lines}{more}); completions of up to {max_tokens} tokens"
    )


def _print_documents(directory: Path, documents: Sequence[Document]) -> None:
    for document in documents:
        click.echo(f"\n# {directory / BUCKET_DIRECTORY / document.name}\n{document.text}# {document.command}")
