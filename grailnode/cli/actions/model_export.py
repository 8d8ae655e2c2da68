"""`grailnode export`: the weights of a version as a Hugging Face directory."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import trio
from safetensors.torch import save_file

from grailnode import UserError
from grailnode.cli.actions.open_run import RunOptions
from grailnode.node.node_makers import make_spectator
from grailnode.observe.model_card import model_card
from grailnode.observe.observer import RECENT_WINDOWS, Observer, newest_summarized
from grailnode.observe.state import WindowRow
from grailnode.run.creation import fetch_model
from protocol.errors import ProtocolError
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.verified_weights import VerifiedWeights
from roles.ports import StoreError

_TOKENIZER_CONFIG = "tokenizer_config.json"


class ExportError(UserError):
    """A directory that cannot be written to: says why."""


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of the command: where to write, and which version; None for the newest."""

    directory: Path
    version: int | None


def export(**parameters: Any) -> None:
    """Run `grailnode export`."""
    options = Options(**parameters)
    if options.directory.exists() and (not options.directory.is_dir() or any(options.directory.iterdir())):
        raise ExportError(f"{options.directory}: there is something already; choose another directory")
    node = make_spectator(options.open_config_to_read())
    weights = trio.run(export_version, node, options.directory, options.version)
    click.echo(f"{options.directory}: version {weights.version}, weights {weights.digest.hex()}")


async def export_version(node: Node, directory: Path, version: int | None = None) -> VerifiedWeights:
    """Write a version's weights, the run's model files and a model card into a directory, and return the weights.

    The directory appears when everything in it is complete.

    Args:
        directory: missing or empty.
        version: None for the newest.

    Raises:
        StoreError, ProtocolError: an object cannot be fetched, or is not what the chain says.
        ExportError: the run has no such version; OSError: the directory cannot be written.
    """
    await refresh_authority(node)
    follower = await Follower.open(node, allow_expired=True)
    await follower.refresh()
    head = follower.chain.head
    assert head is not None  # or the refresh would have raised
    if version is not None and version > head.version:
        raise ExportError(f"--version {version}: the newest version is {head.version}")
    weights = await follower.rebuild(head.version if version is None else version)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await fetch_model(node.store, node.run, node.authority.trainers, partial)
    card = model_card(node.run_id, node.run, weights.version, weights.digest, await _windows(node))
    (partial / "README.md").write_text(card, encoding="utf-8")
    if not (partial / _TOKENIZER_CONFIG).exists():
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
        (partial / _TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    await node.run_sync(_write_weights, partial / "model.safetensors", weights)
    if directory.exists():
        directory.rmdir()
    partial.rename(directory)
    return weights


def _write_weights(path: Path, weights: VerifiedWeights) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates a private file; the others are not private


async def _windows(node: Node) -> tuple[WindowRow, ...]:
    """Return what validators measured lately; empty if nothing can be read, since the weights do not depend on it."""
    with suppress(StoreError, ProtocolError):
        newest = await newest_summarized(node)
        if newest is not None:
            observer = Observer(node, max(0, newest - RECENT_WINDOWS), last_window=newest)
            await observer.refresh()
            return observer.state().windows
    return ()
