"""Memory of a node that follows a chain and generates with vLLM, and of vLLM's worker.

A chain of a few versions lies on the disk. A follower goes from its anchor to the newest version, and vLLM serves each
of them, with the follower's weights in the node's memory and in mapped files. *private* is memory that lies in no file;
*files* are mapped pages, which the kernel writes to the disk and drops when others need the memory. Both are those
above what the process had before, and *peak* is the largest private memory meanwhile.
"""

import argparse
import ctypes
import gc
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import trio
from torch import Tensor

from bench.engines.faults import WORKER, process_of
from bench.engines.setting import directory, policy_of, report, with_changes
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from grailnode.node.mapped_tensors import mapped_tensors
from grailnode.node.processes import FOLLOWER_BLOCK, return_large_blocks
from grailnode.store.local import LocalStore
from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.run import RunManifest
from roles.policy.follower import Follower
from roles.policy.serving import serve
from tests.support.builders.chains import Chain, make_node, small_run
from tests.support.measuring.patch_kernels import compile_patch_kernels
from tests.support.simulation.network import BEGIN, Log

_VERSIONS: Final = 3
_HOUR_MS: Final = 3_600_000
_SECONDS: Final = 0.01  # between two looks at the memory


@dataclass(frozen=True)
class PublishedChain:
    """A run whose versions lie in a directory, and its policy."""

    directory: Path
    policy: Policy
    run_id: bytes
    run: RunManifest
    parameters: int


class PrivateMemory:
    """The memory of this process that lies in no file, and its peak."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = memory_of("self")
        self.peak = 0

    async def watch(self) -> None:
        """Note the peak until cancelled."""
        while True:
            self.peak = max(self.peak, memory_of("self")[0])
            await trio.sleep(_SECONDS)


async def memory(python: Path, arguments: argparse.Namespace) -> None:
    """Measure each place of the follower's weights."""
    return_large_blocks(FOLLOWER_BLOCK)
    compile_patch_kernels()
    for size in arguments.sizes:
        with directory() as place:
            policy, weights = policy_of(size, place, arguments.device)
            chain = await _publish(policy, weights, place / "store", arguments.shares[0])
            for name in ("memory", "files"):
                fields = await _follow(python, chain, place, name)
                report(kind="memory", size=Path(size).name, weights=name, parameters=chain.parameters, **fields)


async def _publish(policy: Policy, weights: dict[str, Tensor], directory: Path, share: float) -> PublishedChain:
    """Publish a chain in which each version differs from the one before in a share of its elements."""
    run_id, run = small_run(digest_weights(weights))
    chain = Chain(run_id, LocalStore(directory), int(BEGIN * 1000) + _HOUR_MS)
    for version in range(_VERSIONS):
        await chain.publish(weights)
        weights = with_changes(weights, share, version)
    return PublishedChain(directory, policy, run_id, run, sum(tensor.numel() for tensor in weights.values()))


async def _follow(python: Path, chain: PublishedChain, place: Path, name: str) -> dict[str, float]:
    """Follow the chain and serve its versions; return what memory that took."""
    model = build(chain.policy)
    server = ChildServer(
        VllmSettings(python=python, dtype="bfloat16"), chain.policy.directory, place / f"server-{name}"
    )
    engine = VllmEngine(model, server, place / f"engine-{name}", dtype=torch.bfloat16)
    node = make_node(chain.run_id, chain.run, LocalStore(chain.directory), MemoryStore(), Log("miner"))
    node = replace(node, run_sync=trio.to_thread.run_sync)
    new_tensors = partial(mapped_tensors, place / f"versions-{name}") if name == "files" else None
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        follower = await Follower(node, new_tensors=new_tensors).open()
        await follower.refresh()
        private = PrivateMemory()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(private.watch)
            for version in range(_VERSIONS):
                await serve(node, engine, await follower.rebuild(version))
            await engine.verify()
            nursery.cancel_scope.cancel()
        worker = memory_of(process_of(server, WORKER))
    now = memory_of("self")
    private_bytes, peak_bytes = now[0] - private.before[0], private.peak - private.before[0]
    return {
        "private_mb": _mb(private_bytes),
        "files_mb": _mb(now[1] - private.before[1]),
        "peak_mb": _mb(peak_bytes),
        "bytes_per_parameter": round(private_bytes / chain.parameters, 2),
        "peak_bytes_per_parameter": round(peak_bytes / chain.parameters, 2),
        "worker_private_mb": _mb(worker[0]),
        "worker_files_mb": _mb(worker[1]),
    }


def memory_of(process: int | str) -> tuple[int, int]:
    """Return the private bytes of a process, and those of mapped files."""
    with Path(f"/proc/{process}/status").open() as status:
        fields = dict(line.split(":", 1) for line in status)
    private, files = (1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return private, files


def _mb(size: int) -> int:
    return round(size / 1e6)
