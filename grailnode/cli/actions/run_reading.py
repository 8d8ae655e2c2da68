"""`grailnode status`, `rollouts`, `verify`, `inspect` and `convert`: they read a run or a file, and change neither."""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, Unpack

import click
import trio
from rich.console import Console
from rich.live import Live

from grailnode.cli.options import RunOptions
from grailnode.config import Config
from grailnode.convert import conversion
from grailnode.convert.inspect_patch import inspect_patch
from grailnode.node.bodies import fetch_task
from grailnode.node.node_makers import make_auditor, make_spectator
from grailnode.observe.chain_check import verify_chain
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.node_logs import with_local_knowledge
from grailnode.observe.observer import RECENT_WINDOWS, newest_summarized, observe_newest
from grailnode.observe.recheck import GroupReference, RecheckedGroup, recheck
from grailnode.observe.rollout_reader import PublishedRollout, ReadWindow, find_miners, read_rollouts
from grailnode.run.creation import fetch_model
from grailnode.run.joining import open_config_to_read
from grailnode.ui.formatting import clean
from grailnode.ui.terminal.pages import run_page
from grailnode.ui.terminal.verb_tables import patch_table, recheck_table
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.errors import error_context
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.ports import NotFoundError, TooLargeError

_WATCHES: Final = 20  # of a window


def status(as_json: bool, watch: bool, **run_options: Unpack[RunOptions]) -> None:
    config = open_config_to_read(**run_options)
    trio.run(_show_status, config, make_auditor(config), as_json, watch)


async def _show_status(config: Config, node: Node, as_json: bool, watch: bool) -> None:
    with suppress(NotFoundError, TooLargeError):  # a run without a head is shown, storage that fails is an error
        head = paths.head(node.authority.trainers[0])
        await node.store.get(head, limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
    observer = await observe_newest(node)
    console = Console()
    is_live = watch and console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            state = with_local_knowledge(config, node, observer.state())
            if as_json:
                click.echo(json.dumps(asdict(state), indent=None if watch else 2))
            elif live is not None:
                live.update(run_page("status", state), refresh=True)
            else:
                console.print(run_page("status", state))
            if not watch:
                return
            await trio.sleep(max(1.0, state.window_seconds / _WATCHES))
            await observer.follow()


def verify(rollout: str | None, ledger: bool, **run_options: Unpack[RunOptions]) -> None:
    config = open_config_to_read(**run_options)
    if rollout is not None:
        try:
            reference = GroupReference.parse(rollout)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        group = trio.run(_recheck, config, reference)
        Console().print(recheck_table(reference, group))
        if any(result.contradicts for result in group.validators):
            raise click.ClickException("a validator came to another judgement")
    elif ledger:
        trio.run(_verify_ledgers, config)
    else:
        trio.run(_verify_chain, config)
        sys.stdout.flush()


async def _verify_chain(config: Config) -> None:
    node = make_auditor(config)
    await refresh_authority(node)
    weights = await verify_chain(node, click.echo)
    click.echo(f"version {weights.version} holds: weights {weights.digest.hex()}")


async def _verify_ledgers(config: Config) -> None:
    node = make_auditor(config)
    await refresh_authority(node)
    for validator in node.authority.validators:
        if not await verify_ledger(node, validator, click.echo):
            click.echo(f"validator {validator.hex()[:16]}: no summaries")


async def _recheck(config: Config, reference: GroupReference) -> RecheckedGroup:
    node = make_auditor(config)
    with tempfile.TemporaryDirectory(prefix="grailnode-verify-") as directory:
        task, compute = await fetch_task(node, config, Path(directory))
        return await recheck(node, task, compute, reference)


def inspect(file: Path, base: Path | None, as_json: bool, everything: bool) -> None:
    with error_context(base):
        weights = safetensors.read(base.read_bytes()) if base else None
    with error_context(file):
        patch = inspect_patch(file.read_bytes(), weights)
    if as_json:
        click.echo(json.dumps(asdict(patch), indent=2))
    else:
        Console().print(patch_table(patch, unchanged=everything))


def convert(**parameters: Any) -> None:
    for path in conversion.convert(**parameters):
        click.echo(f"{path}: {path.stat().st_size} bytes")


_LONGEST_LINE: Final = 100_000


Selection = Literal["best", "worst", "rejected"] | None


def rollouts(
    window: int | None,
    miner: str,
    best: bool,
    worst: bool,
    rejected: bool,
    count: int,
    as_json: bool,
    **run_options: Unpack[RunOptions],
) -> None:
    options: dict[Selection, bool] = {"best": best, "worst": worst, "rejected": rejected}
    chosen = [name for name, is_given in options.items() if is_given]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]}: choose one of them")
    node = make_spectator(open_config_to_read(**run_options))
    read = trio.run(_read, node, window, miner)
    for line in read.unread:
        click.echo(f"not read: {clean(line, 400)}", err=True)
    selected = select(read.rollouts, chosen[0] if chosen else None)
    listing = selected[:count] if count else selected
    for rollout in listing:
        click.echo(rollout_json(rollout) if as_json else rollout_text(rollout))
    click.echo(f"{len(listing)} of {len(selected)} rollouts", err=True)


async def _read(node: Node, window: int | None, miner: str) -> ReadWindow:
    await refresh_authority(node)
    miners, newest = await find_miners(node, miner), await newest_summarized(node)
    if window is None and newest is None:
        raise click.ClickException("no validator has summarized a window yet; name one with --window")
    if window is not None and window > node.window():
        raise click.ClickException(f"--window {window}: not open yet; the newest one is {node.window()}")
    windows = range(newest, max(-1, newest - RECENT_WINDOWS), -1) if window is None and newest is not None else [window]
    with tempfile.TemporaryDirectory(prefix="grailnode-rollouts-") as directory:
        policy = await fetch_model(node, Path(directory))
        for number in windows:
            read = await read_rollouts(node, policy.tokenizer, number or 0, miners)
            if read.rollouts or read.unread:
                return read
    whose = f"the miner {miner}" if miner else "a miner"
    if window is None:
        raise click.ClickException(f"no groups of {whose} are in storage for the newest {len(windows)} judged windows")
    judged = "no window has been judged yet" if newest is None else f"the newest judged window is {newest}"
    raise click.ClickException(
        f"--window {window}: no groups of {whose} are in storage; they were never delivered, or have been deleted "
        f"since; {judged}"
    )


def select(published: Sequence[PublishedRollout], selection: Selection) -> list[PublishedRollout]:
    """Return the rollouts of a selection: the best or the worst first, those of rejected groups, or all as they are."""
    if selection == "rejected":
        return [rollout for rollout in published if rollout.reasons]
    if selection is None:
        return list(published)
    return sorted(published, key=lambda rollout: rollout.reward, reverse=selection == "best")


def rollout_text(rollout: PublishedRollout) -> str:
    lines = [
        f"{rollout.place} rollout {rollout.index}, version {rollout.version}, {rollout.tokens} tokens",
        f"  reward {rollout.reward:g}, {clean(rollout.status, 200)}",
    ]
    texts = {"prompt": rollout.prompt, "completion": rollout.completion}
    if rollout.end is not None:
        texts["uncounted"] = rollout.uncounted
    for name, text in texts.items():
        lines += [f"  {name:<10} | {clean(line, _LONGEST_LINE)}" for line in text.splitlines() or [""]]
    return "\n".join(lines)


def rollout_json(rollout: PublishedRollout) -> str:
    values = {name: value for name, value in vars(rollout).items() if name not in ("miner", "reasons")}
    return json.dumps({"miner": rollout.miner.hex(), "reasons": list(rollout.reasons), **values})
