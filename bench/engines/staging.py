"""Processor time of staging a patch and of its commit, part by part, without a server; and a projection to 7B."""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from bench.engines.patches import ELEMENTS_OF_7B
from bench.engines.setting import report, with_changes
from grailnode.engine.vllm.inside.served_weights import ServedWeights
from grailnode.engine.vllm.inside.staging import stage_patch
from grailnode.engine.vllm.inside.tensor_map import map_tensors
from protocol.digest import digest_weights
from protocol.patch import PROFILES, encode
from protocol.patch.container import read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import PIECE_ELEMENTS
from protocol.patch.values import bits_of

_SHAPES: Final = {f"layers.{number}.weight": (4864, 3584) for number in range(8)}
_CORES: Final = 4
Weights = dict[str, torch.Tensor]


class _Model(torch.nn.Module):
    """A model as vLLM has them: each tensor is a parameter of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in _SHAPES.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            self.register_parameter(name.replace(".", "_"), parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name.replace(".", "_")).data.copy_(tensor)


async def staging(python: Path, arguments: argparse.Namespace) -> None:
    """Measure each share of changes with each dtype and profile, the best of several repetitions."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in _SHAPES.items()}
    for dtype in arguments.dtypes:
        model = _Model(getattr(torch, dtype))
        served = ServedWeights(map_tensors(model, _SHAPES))
        for share in arguments.shares:
            target = with_changes(weights, share, 1)
            for profile in PROFILES:
                model.load_weights(weights.items())
                served.verify(0, digest_weights(weights))
                _measure(served, weights, target, profile, arguments.repetitions, {"dtype": dtype, "share": share})


def _measure(
    served: ServedWeights, weights: Weights, target: Weights, profile: str, repetitions: int, names: dict[str, object]
) -> None:
    """Report nanoseconds of one core: of the commit for each change, of all else for each element."""
    patch, digest, buffer = encode(weights, target, profile=profile), digest_weights(target), served.buffer()
    undo, base = encode(target, weights), digest_weights(weights)
    header = read_header(patch)
    frames = list(split_frames(patch, header, header.table.units(weights)))
    elements = sum(tensor.numel() for tensor in weights.values())
    best: dict[str, float] = {}

    def timed(part: str, work: Callable[[], object], count: int = elements) -> None:
        start = time.process_time()
        work()
        nanoseconds = 1e9 * (time.process_time() - start) / count
        best[part] = min(best.get(part, nanoseconds), nanoseconds)

    for _ in range(repetitions):
        timed("read", lambda: [served.read(name, buffer=buffer) for name in _SHAPES])
        timed(
            "decode",
            lambda: [None for (row,), frame in frames for _ in decode_frame(row, frame, bits_of(weights[row.name]))],
        )
        timed("digest", lambda: [_digest(tensor) for tensor in target.values()])
        timed("stage", lambda: stage_patch(served, 1, patch, digest))
        staged = stage_patch(served, 1, patch, digest)
        changed = sum(len(change.places) for change in staged.changes)
        timed("commit", lambda: served.commit(staged), changed)  # noqa: B023 - called at once
        served.commit(stage_patch(served, 0, undo, base))
    changed_of_7b = changed * ELEMENTS_OF_7B / elements
    report(
        kind="staging",
        **names,
        profile=profile,
        **{part: round(nanoseconds, 2) for part, nanoseconds in best.items()},
        stage_7B_four_cores=round(best["stage"] * ELEMENTS_OF_7B / _CORES / 1e9, 2),
        digest_7B_four_cores=round(best["digest"] * ELEMENTS_OF_7B / _CORES / 1e9, 2),
        commit_7B_four_cores=round(best["commit"] * changed_of_7b / _CORES / 1e9, 2),
    )


def _digest(tensor: torch.Tensor) -> bytes:
    """Hash a tensor as the decoder does: on one thread, piece by piece."""
    hasher, data = blake3(), bits_of(tensor)
    for begin in range(0, data.size, PIECE_ELEMENTS):
        hasher.update(data[begin : begin + PIECE_ELEMENTS].data.cast("B"))
    return hasher.digest()
