"""What `grailnode status`, `verify`, `inspect` and `convert` do."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import click
import trio
from rich.console import Console

from grailnode.config import Config
from grailnode.convert.conversion import Conversion, Format, convert
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


def print_status(config: Config) -> None:
    """What the store shows of a run."""

    async def show() -> None:
        node = make_spectator(config)
        newest = None
        with suppress(NotFoundError, TooLargeError):  # where storage does not answer at all there is nothing to show
            await node.store.get(
                paths.head(node.authority.trainers[0]), limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES
            )
        with suppress(StoreError, ProtocolError):  # the observer shows what can be had, and says what is wrong
            await refresh_authority(node)
            newest = await newest_summarized(node)
        observer = Observer(node, max(0, (newest or node.window()) - RECENT_WINDOWS), last_window=newest)
        await observer.refresh()
        Console().print(render_status(observer.state()))

    trio.run(show)


def verify_run(config: Config) -> None:
    """Check a run's chain."""

    async def check() -> None:
        node = make_spectator(config)
        await refresh_authority(node)
        held = await verify_chain(node, click.echo)
        click.echo(f"version {held.version} holds: weights {held.digest.hex()}")

    trio.run(check)
    sys.stdout.flush()


def verify_ledgers(config: Config) -> None:
    """Check what every validator of a run has written."""

    async def check() -> None:
        node = make_spectator(config)
        await refresh_authority(node)
        for validator in node.authority.validators:
            if not await verify_ledger(node, validator, click.echo):
                click.echo(f"validator {validator.hex()[:16]}: no summaries")

    trio.run(check)


def verify_rollout(config: Config, which: str) -> None:
    """Judge one group again; exit 1 if a validator judged it otherwise."""
    try:
        reference = GroupReference.parse(which)
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    async def judge() -> RecheckedGroup:
        return await recheck_group(config, reference)

    group = trio.run(judge)
    Console().print(recheck_table(reference, group))
    if any(result.contradicts for result in group.validators):
        raise click.ClickException("a validator came to another judgement")


def inspect_file(file: Path, base: Path | None, *, as_json: bool, everything: bool) -> None:
    """What a patch holds."""
    with error_context(base):
        weights = safetensors.read(base.read_bytes()) if base else None
    with error_context(file):
        inspected = inspect_patch(file.read_bytes(), weights)
    if as_json:
        click.echo(json.dumps(inspected.to_json(), indent=2))
    else:
        Console().print(patch_table(inspected, unchanged=everything))


def convert_file(
    source: Path, out: Path, given: Format, wanted: Format, base: Path | None, *, versions: tuple[int, int]
) -> None:
    """One weight update in another format."""
    for written in convert(Conversion(source, given, wanted, out, base, *versions)):
        click.echo(f"{written}: {written.stat().st_size} bytes")
