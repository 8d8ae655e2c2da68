"""The base of a LoRA run in storage: safetensors files that the run manifest names by digest and size.

The trainer publishes them once, below its key, and each node fetches them once. Both go on where they were interrupted:
with the first file that is not there, or is not the right one. One file is in memory at a time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grailnode.engine import models
from grailnode.engine.lora_model import check_base, check_base_digest, initial_adapters
from grailnode.engine.policy import Policy, PolicyError, load_weights
from grailnode.run.files import is_object, write_whole
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.digest import Weights, digest_weights
from protocol.encoding import content_digest
from protocol.lora import DOWN, PREFIX, UP, LoraSpec
from protocol.objects import ObjectRef
from roles.node.identity import Node
from roles.records import fetch_run_file
from roles.trainer.tensor_shards import SHARD_BYTES, TensorSource

_ITEM_BYTES: Final = 2  # of BF16


@dataclass(frozen=True)
class LoraStart:
    """What a LoRA run begins with: what its manifest says, and the adapters of version 0."""

    spec: LoraSpec
    adapters: Weights


def start_lora(policy: Policy, rank: int, alpha: float, targets: Sequence[str]) -> LoraStart | None:
    """Return what a run of adapters on a policy begins with, None if the rank is 0; PolicyError if it cannot be."""
    if not rank:
        return None
    try:
        spec = lora_spec(load_weights(policy.directory), rank, alpha or 2.0 * rank, targets)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PolicyError(f"--lora-{first['loc'][0]}: {first['msg']}") from error
    shapes = models.build(policy, lora=spec).shapes
    names = {PREFIX + name: shape for name, shape in shapes.items() if name.endswith((DOWN, UP))}
    return LoraStart(spec, initial_adapters(names))


def lora_spec(
    base: Weights, rank: int, alpha: float, targets: Sequence[str], shard_bytes: int = SHARD_BYTES
) -> LoraSpec:
    """Return what a run manifest says of a base, BF16 by the names of a checkpoint's files, and of its adapters; a file
    has so many bytes of tensors, or one that is larger.
    """
    source = TensorSource.of(base)
    files = map(source.file, safetensors.shards(source.sizes, shard_bytes))
    refs = tuple(ObjectRef(digest=content_digest(data), size=len(data)) for data in files)
    return LoraSpec(rank=rank, alpha=alpha, targets=tuple(sorted(set(targets))), base=digest_weights(base), shards=refs)


async def publish_base(node: Node, lora: LoraSpec, base: Weights, shard_bytes: int = SHARD_BYTES) -> None:
    """Publish the files of a base that storage does not have yet; PolicyError if the weights are not the base that the
    run names, or this program would write them into other files.
    """
    await node.run_sync(check_base_digest, base, lora, "the trainer's policy")
    source, key = TensorSource.of(base), node.key.public
    prefix = paths.kind_prefix(key, "files")
    present = {(item.path, item.size) async for item in node.store.list(prefix)}
    files = safetensors.shards(source.sizes, shard_bytes)
    for number, ref in enumerate(lora.shards):
        path = paths.file(key, ref.digest)
        if (path, ref.size) in present:
            continue
        data = await node.run_sync(source.file, files[number]) if number < len(files) else b""
        if await node.run_sync(content_digest, data) != ref.digest:
            raise PolicyError(
                f"file {number} of the run's base cannot be written again; publish it with the release of grailnode "
                "that created the run"
            )
        await node.store.put(path, data)


async def fetch_base(
    node: Node, lora: LoraSpec, writers: Sequence[bytes], directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Fetch a base into a directory unless it is there, and return its weights, whose files are mapped.

    The files may be in the space of any writer. The shapes are those of the model with its adapters.
    """
    _check_sizes(lora, shapes)
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".*.safetensors.*"):  # what a process was writing when it was killed
        leftover.unlink()
    files = [directory / f"{number:05d}.safetensors" for number in range(len(lora.shards))]
    for number, (file, ref) in enumerate(zip(files, lora.shards, strict=True), start=1):
        if not await node.run_sync(is_object, file, ref.digest, ref.size):
            data = await fetch_run_file(node, ref, writers, f"{file.name} of the base")
            await node.run_sync(write_whole, file, data)
            node.telemetry.event("base-file-fetched", file=number, of=len(files), bytes=ref.size)
    base: dict[str, Tensor] = await node.run_sync(_read, files, lora, shapes)
    return base


def _check_sizes(lora: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the files of a base by their sizes: each is read into memory as a whole."""
    sizes = [_ITEM_BYTES * math.prod(shape) for name, shape in shapes.items() if not name.endswith((DOWN, UP))]
    header = limits.MAX_SAFETENSORS_HEADER_BYTES
    if len(lora.shards) > len(sizes):
        raise PolicyError(
            f"the run names a base in {len(lora.shards)} files, where its model has {len(sizes)} tensors of a base"
        )
    if not sum(sizes) < lora.base_bytes <= sum(sizes) + len(lora.shards) * header:
        raise PolicyError(
            f"the run names a base of {lora.base_bytes} bytes, where its model has {sum(sizes)} bytes of BF16 weights"
        )
    largest = max(ref.size for ref in lora.shards)
    if largest > max(limits.MAX_BASE_FILE_BYTES, *sizes) + header:
        raise PolicyError(f"the run's base has a file of {largest} bytes, which is more than a node reads at once")


def _read(files: Sequence[Path], lora: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    base: dict[str, Tensor] = {}
    for file in files:
        try:
            base |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"the run's base is no safetensors file ({error})") from error
    for name, tensor in base.items():
        if tensor.dtype != torch.bfloat16:
            raise PolicyError(f"the run's base: {name} has dtype {tensor.dtype}, and a base is BF16")
    check_base(base, shapes)
    check_base_digest(base, lora, "the run's base")
    return base
