"""`grailnode export`, `publish` and `follow`: the weights of versions as files, of a run or of versions alone."""

import json
import re
import shutil
from pathlib import Path
from typing import Final, Unpack

import click
import trio
from jinja2 import Environment, StrictUndefined
from safetensors import SafetensorError
from safetensors.torch import save_file

from grailnode import UserError, library
from grailnode.cli.options import RunOptions, check_name, report_line
from grailnode.engine import models
from grailnode.engine.lora_model import adapter_files, merged_weights
from grailnode.node.node_makers import make_spectator
from grailnode.observe.chain_check import fetch_first_head
from grailnode.observe.observer import observe_newest
from grailnode.run.base_files import fetch_base
from grailnode.run.creation import fetch_model
from grailnode.run.files import write_whole
from grailnode.run.joining import open_config_to_read
from protocol.chain import safetensors
from protocol.digest import Weights
from protocol.quantization import dequantize
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.verified_weights import VerifiedWeights

_TOKENIZER_CONFIG = "tokenizer_config.json"
_CARD: Final = Path(__file__).parents[2] / "data" / "model_card.md"
_MARKUP: Final = "\\`*_{}[]<>|#!\r\n"


def export(directory: Path, version: int | None, merged: bool, **run_options: Unpack[RunOptions]) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: there is something already; choose another directory")
    node = make_spectator(open_config_to_read(**run_options))
    weights = trio.run(export_version, node, directory, version, merged)
    click.echo(f"{directory}: version {weights.version}, weights {weights.digest.hex()}")


async def export_version(
    node: Node, directory: Path, version: int | None = None, merge: bool = False
) -> VerifiedWeights:
    """Write a version's weights, the newest by default, with the run's model files and a model card into a directory
    that is missing or empty, and return the weights; UserError if there is no such version, or nothing to merge.

    Those of a LoRA run are written as PEFT's files, which need the base, or added to the base. Quantized ones are
    written as the BF16 weights that their codes stand for. The directory appears when everything in it is complete.
    """
    if merge and node.run.lora is None:
        raise UserError("--merged is for LoRA runs; this run's versions are whole models")
    await refresh_authority(node)
    await fetch_first_head(node)
    follower = await Follower(node, allow_expired=True).open()
    await follower.refresh()
    head = follower.chain.head
    assert head is not None  # or the refresh would have raised
    if version is not None and version > head.version:
        raise UserError(f"--version {version}: the newest version is {head.version}")
    weights = await follower.rebuild(head.version if version is None else version)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        await _write_version(node, partial, weights, merge)
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot be written ({error}): free space, or choose another directory") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return weights


async def _write_version(node: Node, directory: Path, weights: VerifiedWeights, merge: bool) -> None:
    policy = await fetch_model(node, directory)
    windows = (await observe_newest(node)).state().windows  # none where storage fails: the weights need none
    environment = Environment(  # noqa: S701 - the text is no HTML; names go through `plain`
        trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["plain"] = _plain
    card = environment.from_string(_CARD.read_text(encoding="utf-8")).render(
        run_id=node.run_id,
        run=node.run,
        sampling=node.run.sampling,
        version=weights.version,
        digest=weights.digest,
        windows=windows,
        merged=merge,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
    if not (directory / _TOKENIZER_CONFIG).exists():
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
        (directory / _TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    if node.run.lora is None:
        tensors = await node.run_sync(dequantize, weights.weights)
        await node.run_sync(_write_weights, directory / "model.safetensors", tensors)
    elif merge:
        shapes, base_directory = models.build(policy, lora=node.run.lora).shapes, directory / "base"
        base = await fetch_base(node, node.run.lora, node.authority.trainers, base_directory, shapes)
        tensors = await node.run_sync(merged_weights, base, weights.weights, node.run.lora.scale)
        await node.run_sync(_write_weights, directory / "model.safetensors", tensors)
        del base
        shutil.rmtree(base_directory)
    else:
        for name, data in adapter_files(node.run.lora, weights.weights).items():
            (directory / name).write_bytes(data)
        for name in ("config.json", "generation_config.json"):  # with these it would look like a whole model
            (directory / name).unlink(missing_ok=True)


def _write_weights(path: Path, weights: Weights) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates a private file; the others are not private


def _plain(text: str) -> str:
    """Return a text without characters that Markdown gives a meaning."""
    return "".join(char if char.isprintable() and char not in _MARKUP else " " for char in text).strip()


_own_name: Final = re.compile(r"\d{10}\.safetensors")


def publish(directory: Path, run: Path, name: str, step: int) -> None:
    check_name(name)
    with library.open_trainer(run, name, report=report_line) as trainer:
        version = trainer.publish(directory, step=step)
        trainer.wait_for_uploads()
    click.echo(f"{directory}: version {version} is in storage")


def follow(run: str, directory: Path, keep: int, once: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for version in library.follow(run, report=report_line):
        file = directory / f"{version.number:010d}.safetensors"
        write_whole(file, safetensors.write(version.weights))
        click.echo(f"{file}: version {version.number}, step {version.step}, weights {version.digest.hex()}")
        # After a rewind a newer version has a lower number, so the time of writing decides.
        own = [path for path in directory.iterdir() if _own_name.fullmatch(path.name) and path != file]
        for old in sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True)[keep - 1 :]:
            old.unlink()
        if once:
            return
