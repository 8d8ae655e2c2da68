"""Runs of adapters beside runs of all weights: bytes of versions and patches, learning, and a trainer's memory.

    python -m bench.lora payloads
    python -m bench.lora memory 75M 0.5B

`payloads` lets the packaged policy learn by `bench.learning`'s simulation, with all weights and with adapters, and
encodes the patches of the last ten versions as a trainer publishes them. `change` is by how much learning has changed
the matrices: the length of the difference as a share of the matrix's, median and largest. About 10 CPU seconds a row.

`memory` takes two training steps in bfloat16, each row in a process of its own, with random weights in the shapes of
bench.sizes, and prints the largest resident memory above that of the process before it has weights. 0.5B needs 10 GB
and some minutes; `--all-weights` adds the rows of a learner of all weights.
"""

import argparse
import math
import resource
import statistics
import subprocess
import sys
from itertools import pairwise
from typing import Final

import torch

from bench.sizes import SHAPES
from grailnode.engine.lora_model import LoraModel, initial_adapters, merged_weights
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol import patch
from protocol.digest import Weights
from protocol.lora import DOWN, UP, LoraSpec
from protocol.objects import ObjectRef
from roles.trainer.learn.learner import Learner, LearnerSettings
from tests.support.builders.verified_batches import make_group
from tests.support.simulation.learning import Setup, Simulation

_ALL: Final = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_ATTENTION: Final = "q_proj,v_proj"
_ROWS: Final = (  # rank, targets, learning rate
    (0, "", 7e-6),
    (4, _ATTENTION, 1e-3),
    (16, _ATTENTION, 1e-3),
    (4, _ALL, 2e-4),
    (16, _ALL, 2e-4),
)
_RANK: Final = 16
_PROMPT, _LENGTH = 16, 32
_MB: Final = 1e6


def _payloads(windows: int, rows: list[int]) -> None:
    print("what is trained          rate   weights  version   patch, compact      fast   changed  pass@1  change")
    for rank, targets, rate in (_ROWS[row] for row in rows):
        simulation = Simulation(Setup(windows=windows, learning_rate=rate, lora_rank=rank, lora_targets=targets))
        simulation.serve(0)
        last = [simulation.window(number)["pass_at_1"] for number in range(windows)][-1]
        versions = list(pairwise(simulation.versions))[-10:]
        compact, fast = (
            statistics.fmean(len(patch.encode(old, new, profile=profile)) for old, new in versions)
            for profile in ("compact", "fast")
        )
        weights = sum(tensor.numel() for tensor in simulation.versions[0].values())
        changed = 1 - statistics.fmean(simulation.sparsity[-10:])
        middle, largest = _changes(simulation.versions[0], simulation.versions[-1], rank)
        what = "all weights" if not rank else f"rank {rank}, {'q and v' if targets == _ATTENTION else 'all seven'}"
        print(
            f"{what:<22} {rate:>6.0e} {weights:>9,} {2 * weights / 1e3:>5.0f} kB {compact / 1e3:>12.1f} kB "
            f"{fast / 1e3:>6.1f} kB {changed:>9.1%}  {last:.3f} {middle:>7.2%}, {largest:.2%}",
            flush=True,
        )


def _changes(first: Weights, last: Weights, rank: int) -> tuple[float, float]:
    """Return by how much matrices have changed as a share of their lengths, Frobenius norms: median and largest."""
    base = {name: tensor.to(torch.float32) for name, tensor in load_weights(PACKAGED_POLICY).items()}
    new = merged_weights(base, last, 2.0) if rank else {name: tensor.to(torch.float32) for name, tensor in last.items()}
    old = base if rank else {name: tensor.to(torch.float32) for name, tensor in first.items()}
    changes = [
        float((tensor - old[name]).norm() / old[name].norm())
        for name, tensor in new.items()
        if tensor.dim() == 2 and tensor is not old[name]
    ]
    return statistics.median(changes), max(changes)


def _spec() -> LoraSpec:
    shard = ObjectRef(digest=bytes(32), size=1)
    return LoraSpec(rank=_RANK, alpha=32.0, targets=tuple(sorted(_ALL.split(","))), base=bytes(32), shards=(shard,))


def _measure(size: str, completions: int, *, all_weights: bool) -> None:
    """Print memory above that before there are weights."""
    torch.manual_seed(0)
    vocabulary, width, inner, layers, heads, key_heads, head = SHAPES[size]
    config = Qwen3Config(vocabulary, width, inner, layers, heads, key_heads, head, 1e-6, 10_000.0, True)
    inner_model = Qwen3(config, recompute=True, lora=None if all_weights else _spec())
    settings = LearnerSettings(logits_chunk=256)
    tokens = torch.randint(vocabulary, (completions, _LENGTH)).tolist()
    logprobs = [torch.full((_LENGTH,), -11.0) for _ in tokens]
    group = make_group(bytes(32), 0, range(_PROMPT), tokens, logprobs, [float(n % 2) for n in range(completions)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    base = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(1.0 if len(shape) == 1 else 0.0, 0.02)
        for name, shape in inner_model.shapes.items()
        if not name.endswith((DOWN, UP))
    }
    parameters = sum(tensor.numel() for tensor in base.values())
    if all_weights:
        learner = Learner(inner_model, base, settings, dtype=torch.bfloat16)
    else:
        model = LoraModel(inner_model, base, dtype=torch.bfloat16)
        learner = Learner(model, initial_adapters(model.shapes), settings, dtype=torch.bfloat16)
    state = sum(learner.state_rows().source().sizes.values())
    del base
    for _ in range(2):
        learner.step([group])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    what = "all weights" if all_weights else f"rank {_RANK}, all seven"
    print(
        f"{size:>5} {what:<20} {parameters:>13,} {learner.parameters:>13,} {state / _MB:>9.0f} MB "
        f"{peak / _MB:>8.0f} MB {peak / parameters:>8.2f}",
        flush=True,
    )


def _memory(sizes: list[str], completions: int, *, all_weights: bool) -> None:
    print(" size what is trained      weights of base       trained  its state      peak  B/weight", flush=True)
    for size in sizes:
        for row in (False, True) if all_weights else (False,):
            options = ["--completions", str(completions), "--row", "all" if row else "lora"]
            subprocess.run([sys.executable, "-m", "bench.lora", "memory", size, *options], check=True)
    _print_projection()


def _print_projection() -> None:
    """Print the arithmetic for Qwen2.5-7B in bfloat16 on a GPU."""
    layers, width, inner, vocabulary, tokens, chunk = 28, 3584, 18_944, 152_064, 4096, 1024
    config = Qwen3Config(vocabulary, width, inner, layers, 28, 4, 128, 1e-6, 1e6, False)
    shapes = Qwen3(config, lora=_spec()).shapes
    adapters = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith((DOWN, UP)))
    base = sum(math.prod(shape) for shape in shapes.values()) - adapters
    parts = {
        "base, 2 B a weight": 2 * base,
        "adapters: masters, moments, gradients, view: 20 B": 20 * adapters,
        f"what enters each layer, {tokens} tokens": 2 * layers * tokens * width,
        "inside one layer, computed again: 6 inner + 16 width values a token": 2 * tokens * (6 * inner + 16 * width),
        f"logits of {chunk} tokens, float32, 4 copies": 16 * chunk * vocabulary,
    }
    print(f"\nQwen2.5-7B, {base:,} weights, rank {_RANK} on all seven matrices: {adapters:,} weights; by arithmetic:")
    for name, size in parts.items():
        print(f"{size / 1e9:>7.2f} GB  {name}")
    print(f"{sum(parts.values()) / 1e9:>7.2f} GB  together; versions of {2 * adapters / _MB:.0f} MB")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    payloads = commands.add_parser("payloads")
    payloads.add_argument("--windows", type=int, default=20)
    payloads.add_argument("--rows", type=int, nargs="+", default=list(range(len(_ROWS))), help="of the table, from 0")
    memory = commands.add_parser("memory")
    memory.add_argument("sizes", nargs="+", choices=list(SHAPES))
    memory.add_argument("--completions", type=int, default=8, help="rollouts of a step, 32 tokens each")
    memory.add_argument("--all-weights", action="store_true")
    memory.add_argument("--row", choices=["lora", "all"], help="measure this row in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "payloads":
        _payloads(arguments.windows, arguments.rows)
    elif arguments.row is None:
        _memory(arguments.sizes, arguments.completions, all_weights=arguments.all_weights)
    else:
        _measure(arguments.sizes[0], arguments.completions, all_weights=arguments.row == "all")


if __name__ == "__main__":
    main()
