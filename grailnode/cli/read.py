"""`grailnode status`, `verify`, `inspect` and `convert`: they read a run or a file, and change neither."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import trio
from rich.console import Console

from grailnode.cli.options import RunOptions, run_options
from grailnode.config import Config
from grailnode.convert import conversion
from grailnode.convert.conversion import Conversion, Format
from grailnode.convert.inspect_patch import inspect_patch
from grailnode.node.processes import make_spectator, recheck_group
from grailnode.observe.chain_check import verify_chain
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import RECENT_WINDOWS, Observer, newest_summarized
from grailnode.observe.recheck import GroupReference, RecheckedGroup
from grailnode.ui.terminal import patch_table, recheck_table, render_status
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.errors import ProtocolError, error_context
from roles.authority_updates import refresh_authority
from roles.ports import NotFoundError, StoreError, TooLargeError

_FORMATS: Final = click.Choice(["grailnode", "trl", "slime", "safetensors"])
_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


@dataclass(frozen=True)
class VerifyOptions(RunOptions):
    """What to verify of a run: a group again, the ledgers of its validators, or by default its chain."""

    rollout: str | None
    ledger: bool


@dataclass(frozen=True)
class InspectOptions:
    """A patch, the weights that it applies to, and how to show it."""

    file: Path
    base: Path | None
    as_json: bool
    everything: bool


@dataclass(frozen=True)
class ConvertOptions:
    """A weight update, its format, and the format to write."""

    source: Path
    out: Path
    source_format: Format
    out_format: Format
    base: Path | None
    version: int
    base_version: int


@click.command()
@run_options
def status(**parameters: Any) -> None:
    """Print a run's head, windows, miners and scores, read from its store."""
    config = RunOptions(**parameters).open_config()
    Console().print(render_status(trio.run(_observe, config).state()))


async def _observe(config: Config) -> Observer:
    """Return an observer that has seen what the store shows of a run.

    Raises:
        StoreError: the storage does not answer at all.
    """
    node = make_spectator(config)
    newest = None
    with suppress(NotFoundError, TooLargeError):  # a run without a head is shown, storage that fails is an error
        head = paths.head(node.authority.trainers[0])
        await node.store.get(head, limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
    with suppress(StoreError, ProtocolError):  # the observer shows what can be read, and says what is wrong
        await refresh_authority(node)
        newest = await newest_summarized(node)
    observer = Observer(node, max(0, (newest or node.window()) - RECENT_WINDOWS), last_window=newest)
    await observer.refresh()
    return observer


@click.command()
@run_options
@click.option("--rollout", metavar="MINER/WINDOW/GROUP", help="Judge one group again, and show every statistic.")
@click.option("--ledger", is_flag=True, help="Check every validator's summaries against its verdicts, and its scores.")
def verify(**parameters: Any) -> None:
    """Check a run's chain from its oldest anchor to the head; exit 1 at the first lie."""
    options = VerifyOptions(**parameters)
    config = options.open_config()
    if options.rollout is not None:
        _verify_rollout(config, options.rollout)
    elif options.ledger:
        trio.run(_verify_ledgers, config)
    else:
        trio.run(_verify_chain, config)
        sys.stdout.flush()


async def _verify_chain(config: Config) -> None:
    node = make_spectator(config)
    await refresh_authority(node)
    weights = await verify_chain(node, click.echo)
    click.echo(f"version {weights.version} holds: weights {weights.digest.hex()}")


async def _verify_ledgers(config: Config) -> None:
    node = make_spectator(config)
    await refresh_authority(node)
    for validator in node.authority.validators:
        if not await verify_ledger(node, validator, click.echo):
            click.echo(f"validator {validator.hex()[:16]}: no summaries")


def _verify_rollout(config: Config, text: str) -> None:
    """Judge one group again, and print it beside the judgements of the validators.

    Raises:
        UsageError: the text names no group.
        ClickException: a validator came to another judgement.
    """
    try:
        reference = GroupReference.parse(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    async def recheck() -> RecheckedGroup:
        return await recheck_group(config, reference)

    group = trio.run(recheck)
    Console().print(recheck_table(reference, group))
    if any(result.contradicts for result in group.validators):
        raise click.ClickException("a validator came to another judgement")


@click.command()
@click.argument("file", type=_FILE)
@click.option("--base", type=_FILE, help="The weights it applies to.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--all", "everything", is_flag=True, help="Unchanged tensors as well.")
def inspect(**parameters: Any) -> None:
    """Show what a patch FILE holds, tensor by tensor; with --base, beside the least bits there are to send."""
    options = InspectOptions(**parameters)
    with error_context(options.base):
        weights = safetensors.read(options.base.read_bytes()) if options.base else None
    with error_context(options.file):
        patch = inspect_patch(options.file.read_bytes(), weights)
    if options.as_json:
        click.echo(json.dumps(patch.to_json(), indent=2))
    else:
        Console().print(patch_table(patch, unchanged=options.everything))


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--from", "source_format", type=_FORMATS, required=True, help="The format of SOURCE.")
@click.option("--to", "out_format", type=_FORMATS, required=True, help="The format to write to OUT.")
@click.option("--base", type=_FILE, help="Safetensors file of the weights before; none for a full checkpoint.")
@click.option("--version", type=click.IntRange(0), default=1, show_default=True, help="Version to write.")
@click.option("--base-version", type=click.IntRange(0), default=0, show_default=True, help="Version of --base.")
def convert(**parameters: Any) -> None:
    """Convert one weight update between our patches and TRL's and slime's layouts, bit for bit."""
    options = ConvertOptions(**parameters)
    formats = options.source_format, options.out_format
    versions = options.version, options.base_version
    for path in conversion.convert(Conversion(options.source, *formats, options.out, options.base, *versions)):
        click.echo(f"{path}: {path.stat().st_size} bytes")
