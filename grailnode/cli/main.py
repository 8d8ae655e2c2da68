"""The command line. Exit codes: 0 done, 1 it failed (one line says why), 2 the command line is wrong, 130 Ctrl-C."""

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from grailnode.cli.keys import admit, keys
from protocol.limits import MAX_COMPLETION_TOKENS

if TYPE_CHECKING:
    from grailnode.convert.conversion import Format
    from grailnode.run.buckets import Provider

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

ROLES = ("trainer", "miner", "validator")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="grailnode")
@click.option("--role", type=click.Choice(ROLES), help="Run a node of this role until Ctrl-C.")
@click.option("--run", metavar="FILE-or-URL", help="The run.toml of the run, or the URL of its manifest (.../runs/ID).")
@click.option("--name", help="The node's name: its key and state. Default: the role (for a miner, miner-1).")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key of run.toml.")
@click.option("--trust-run", is_flag=True, help="Take a URL's word for which run it is, where no id is given.")
@click.pass_context
def cli(
    context: click.Context,
    role: str | None,
    run: str | None,
    name: str | None,
    overrides: tuple[str, ...],
    trust_run: bool,
) -> None:
    """Trainer, miner and validator for decentralized RL post-training.

    Start with `grailnode demo`: the whole network on this machine, in about three minutes.
    """
    if context.invoked_subcommand is not None:
        if role is not None:
            raise click.UsageError("give either --role or a command")
        return
    if role is None:
        click.echo(context.get_help())
        return
    if run is None:
        raise click.UsageError("--role needs --run FILE-or-URL; `grailnode init DIR` makes one")
    from grailnode.cli.node import run_role  # noqa: PLC0415 - imports torch: not for --help

    run_role(role, run, name, overrides, trust=trust_run)


def _options_run(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--trust-run", is_flag=True, help="Take a URL's word for which run it is."),
        click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."),
        click.option("--run", required=True, metavar="FILE-or-URL", help="The run.toml, or the manifest's URL."),
    ):
        function = option(function)
    return function


@cli.command()
@click.option(
    "--windows", type=click.IntRange(1, 10_000), default=None, help="How many windows. Default: 3 minutes' worth."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of all keys, hence of prompts and noise.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("grailnode-demo"),
    show_default=True,
    help="Where report.json and report.html go.",
)
@click.option("--keep", is_flag=True, help="Keep the run's directory (store, keys, logs) in --out.")
def demo(windows: int | None, seed: int, out: Path, keep: bool) -> None:
    """The whole network on this machine: 1 trainer, 2 miners, 1 validator and 1 cheat, as processes of their own."""
    from grailnode.cli.node import run_demo  # noqa: PLC0415

    run_demo(windows, seed, out, keep, command=shlex.join(["grailnode", *sys.argv[1:]]))


_OF_A_BUCKET = {"provider", "region", "url", "readers", "days", "join", "meeting", "name"}


def _given(names: set[str]) -> list[str]:
    """Those of the named parameters that this command line has, as it spells them."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
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
@click.option("--days", type=click.IntRange(1), default=7, show_default=True, help="That settled windows are kept.")
@click.option("--join", metavar="URL", help="Take part in the run whose manifest is there, instead of making one.")
@click.option("--meeting", help="With --join: the bucket in which participants announce themselves.")
@click.option("--name", default="miner-1", show_default=True, help="With --join: the node's name.")
@click.option("--roots", type=click.IntRange(1, 16), default=1, show_default=True, help="Root keys; 3 for a real run.")
@click.option("--threshold", type=click.IntRange(1, 16), help="Root keys that must sign. Default: 2, where there are.")
@click.option(
    "--validators", type=click.IntRange(0, 16), default=1, show_default=True, help="Keys of validators to make."
)
@click.option(
    "--validator", "elsewhere", multiple=True, metavar="PUBLICKEY", help="A validator whose key somebody else holds."
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
    help="Whose randomness: the run's own trainer's, or drand's, which nobody foresees.",
)
@click.option("--admission", type=click.Choice(["open", "allowlist", "invite"]), default="open", show_default=True)
@click.option(
    "--work", type=click.IntRange(0, 64), default=0, show_default=True, help="Bits an open run's miner works."
)
def init(
    directory: Path,
    policy: Path | None,
    environment: str,
    data: Path | None,
    max_tokens: int | None,
    proof: Path | None,
    bucket: str | None,
    provider: str,
    region: str,
    url: str,
    readers: tuple[str, ...],
    days: int,
    join: str | None,
    meeting: str | None,
    name: str,
    roots: int,
    threshold: int | None,
    validators: int,
    elsewhere: tuple[str, ...],
    quorum: int,
    window: float | None,
    beacon: str,
    admission: str,
    work: int,
) -> None:
    """Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest.

    With --bucket the run lives in a bucket of S3, and what the bucket needs (policies, CORS, lifecycle) is printed and
    written to DIRECTORY/bucket. With --join as well, DIRECTORY is for a node of somebody else's run.
    """
    from grailnode.cli import init as commands  # noqa: PLC0415
    from protocol.identity.authority import OPEN  # noqa: PLC0415

    rules = OPEN.model_copy(update={"policy": admission, "credential": "work" if work else "", "difficulty": work})
    founders = (roots, min(2, roots) if threshold is None else threshold)
    make = partial(
        commands.init_run,
        directory,
        policy,
        proof,
        environment,
        data,
        max_tokens,
        founders,
        rules,
        commands.ValidatorSet.parse(validators, elsewhere, quorum),
        window,
        None if beacon == "own" else beacon,
    )
    if bucket is None:
        if useless := _given(_OF_A_BUCKET):
            raise click.UsageError(f"{', '.join(useless)}: also give --bucket, where this run or node writes to")
        make()
        return
    if (join is None) != (meeting is None):
        raise click.UsageError("--join and --meeting go together")
    wanted = commands.BucketOptions(bucket, cast("Provider", provider), region, url, readers, days)
    if join is None or meeting is None:
        commands.init_bucket(make, wanted)
    else:
        commands.join_run(directory, wanted, join, meeting, name)


@cli.command()
@click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face checkpoint directory. Default: the packaged genesis.",
)
@click.option("--environment", default="addition", show_default=True, help="Whose prompts are completed.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its problems, for a task that reads them from a file.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='Prompts instead of the environment\'s: JSON Lines, each {"prompt": "..."}.',
)
@click.option("--rollouts", type=click.IntRange(1, 10_000_000), default=1000, show_default=True, help="Of each pair.")
@click.option(
    "--pairs", default="run", show_default=True, help="run: one dtype; all: several as well; or names, with commas."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of torch.")
@click.option("--temperature", type=click.FloatRange(0.0, min_open=True), default=None, help="The run's. Default: 1.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=None, help="The run's longest completion. Default: the task's."
)
@click.option("--sketch", type=click.Choice(["projection", "topk"]), default="projection", show_default=True)
@click.option(
    "--level",
    type=click.FloatRange(0.0, 0.1, min_open=True),
    default=1e-9,
    show_default=True,
    help="Probability with which one test may refuse honest work.",
)
@click.option(
    "--headroom",
    type=click.FloatRange(1.0),
    default=4.0,
    show_default=True,
    help="How much more than the worst measured pair an honest machine may be off.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts, noise and projections.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write. Default: proof.json in --policy, or here for the packaged one.",
)
def calibrate(**options: Any) -> None:
    """Measure how far honest nodes differ on a policy; write the thresholds of the check to proof.json.

    Refuses when a copy with 4-bit weights could not be told from honest work.
    """
    from grailnode.cli.calibrate import Options, calibrate_policy  # noqa: PLC0415

    calibrate_policy(Options(**options))


@cli.command()
@_options_run
def status(run: str, overrides: tuple[str, ...], trust_run: bool) -> None:
    """Print a run's head, windows, miners and scores, read from its store."""
    from grailnode.cli.node import open_config  # noqa: PLC0415
    from grailnode.cli.read import print_status  # noqa: PLC0415

    print_status(open_config(run, overrides, trust=trust_run))


@cli.command()
@_options_run
@click.option("--rollout", metavar="MINER/WINDOW/GROUP", help="Judge one group again, and show every statistic.")
@click.option("--ledger", is_flag=True, help="Check every validator's summaries against its verdicts, and its scores.")
def verify(run: str, overrides: tuple[str, ...], trust_run: bool, rollout: str | None, ledger: bool) -> None:
    """Check a run's chain from its oldest anchor to the head; exit 1 at the first lie."""
    from grailnode.cli.node import open_config  # noqa: PLC0415
    from grailnode.cli.read import verify_ledgers, verify_rollout, verify_run  # noqa: PLC0415

    config = open_config(run, overrides, trust=trust_run)
    if rollout is not None:
        verify_rollout(config, rollout)
    elif ledger:
        verify_ledgers(config)
    else:
        verify_run(config)


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--base", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The weights it applies to.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--all", "everything", is_flag=True, help="Unchanged tensors as well.")
def inspect(file: Path, base: Path | None, as_json: bool, everything: bool) -> None:
    """Show what a patch FILE holds, tensor by tensor; with --base, beside the least bits there are to send."""
    from grailnode.cli.read import inspect_file  # noqa: PLC0415

    inspect_file(file, base, as_json=as_json, everything=everything)


_FORMATS = click.Choice(["grailnode", "trl", "slime", "safetensors"])


@cli.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--from", "given", type=_FORMATS, required=True, help="The format of SOURCE.")
@click.option("--to", "wanted", type=_FORMATS, required=True, help="The format to write to OUT.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Safetensors file of the weights before; none for a full checkpoint.",
)
@click.option("--version", "number", type=click.IntRange(0), default=1, show_default=True, help="Version to write.")
@click.option("--base-version", type=click.IntRange(0), default=0, show_default=True, help="Version of --base.")
def convert(
    source: Path, out: Path, given: str, wanted: str, base: Path | None, number: int, base_version: int
) -> None:
    """Convert one weight update between our patches and TRL's and slime's layouts, bit for bit."""
    from grailnode.cli.read import convert_file  # noqa: PLC0415

    convert_file(source, out, cast("Format", given), cast("Format", wanted), base, versions=(number, base_version))


cli.add_command(keys)
cli.add_command(admit)


def main() -> None:
    """The console script. Every failure that a user can mend is one line on stderr."""
    try:
        cli.main(prog_name="grailnode", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BaseException as error:
        from grailnode.node.user_errors import explain  # noqa: PLC0415 - imports what can fail: not for --help

        line = explain(error)
        if line is None:
            raise
        if line:
            click.echo(f"grailnode: {line}", err=True)
            sys.exit(EXIT_FAILED)
        sys.exit(EXIT_INTERRUPTED)
