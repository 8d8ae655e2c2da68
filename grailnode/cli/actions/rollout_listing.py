"""`grailnode rollouts`: print what miners wrote, what it earned, and why it was rejected."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Unpack

import click
import trio

from grailnode.cli.options import RunOptions
from grailnode.node.node_makers import make_spectator
from grailnode.observe.observer import RECENT_WINDOWS, newest_summarized
from grailnode.observe.rollout_reader import PublishedRollout, ReadWindow, find_miners, read_rollouts
from grailnode.run.creation import fetch_model
from grailnode.run.joining import open_config_to_read
from grailnode.ui.formatting import clean
from roles.authority_updates import refresh_authority
from roles.node.identity import Node

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
