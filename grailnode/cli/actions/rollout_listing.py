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
from grailnode.observe.observer import newest_summarized
from grailnode.observe.rollout_reader import PublishedRollout, ReadWindow, read_rollouts
from grailnode.run.creation import fetch_model
from grailnode.run.joining import open_config_to_read
from grailnode.ui.formatting import clean
from roles.authority_updates import refresh_authority
from roles.node.identity import Node

_LONGEST_LINE: Final = 100_000


Selection = Literal["best", "worst", "rejected"] | None


def rollouts(
    window: int | None, miner: str, selection: Selection, count: int, as_json: bool, **run_options: Unpack[RunOptions]
) -> None:
    """Run `grailnode rollouts`."""
    node = make_spectator(open_config_to_read(**run_options))
    read = trio.run(_read, node, window, miner.lower())
    for line in read.unread:
        click.echo(f"not read: {clean(line, 400)}", err=True)
    selected = select(read.rollouts, selection)
    listing = selected[:count] if count else selected
    for rollout in listing:
        click.echo(_json(rollout) if as_json else _text(rollout))
    click.echo(f"{len(listing)} of {len(selected)} rollouts", err=True)


async def _read(node: Node, window: int | None, miner: str) -> ReadWindow:
    await refresh_authority(node)
    if window is None:
        window = await newest_summarized(node)
    if window is None:
        raise click.ClickException("no validator has summarized a window yet; name one with --window")
    with tempfile.TemporaryDirectory(prefix="grailnode-rollouts-") as directory:
        policy = await fetch_model(node, Path(directory))
        return await read_rollouts(node, policy.tokenizer, window, miner)


def select(published: Sequence[PublishedRollout], selection: Selection) -> list[PublishedRollout]:
    """Return the rollouts of a selection: the best or the worst first, those of rejected groups, or all as they are."""
    if selection == "rejected":
        return [rollout for rollout in published if rollout.reasons]
    if selection is None:
        return list(published)
    return sorted(published, key=lambda rollout: rollout.reward, reverse=selection == "best")


def _text(rollout: PublishedRollout) -> str:
    return "\n".join(
        [
            f"{rollout.place} rollout {rollout.index}, version {rollout.version}, {rollout.tokens} tokens",
            f"  reward {rollout.reward:g}, {clean(rollout.status, 200)}",
            *(f"  prompt     | {clean(line, _LONGEST_LINE)}" for line in rollout.prompt.splitlines() or [""]),
            *(f"  completion | {clean(line, _LONGEST_LINE)}" for line in rollout.completion.splitlines() or [""]),
        ]
    )


def _json(rollout: PublishedRollout) -> str:
    values = {name: value for name, value in vars(rollout).items() if name not in ("miner", "reasons")}
    return json.dumps({"miner": rollout.miner.hex(), "reasons": list(rollout.reasons), **values})
