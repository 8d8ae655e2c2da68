"""Tokens a second of the torch engine with and without a draft, how often the draft is right, and its memory."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.engines.setting import directory, problems_of, report
from bench.engines.speed import Task, compared
from grailnode.engine.draft_engine import DraftEngine
from grailnode.engine.int8_copy import Int8Matrix, int8_copy
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams, batch_margins, token_places
from roles.policy.causal_model import CausalModel
from roles.ports import Generation, Request
from tests.support.builders.policies import inline


class CopyEngine(TorchEngine):
    """An engine that serves the 8-bit copy itself."""

    def _convert(self, weights: Weights) -> dict[str, Tensor]:
        return int8_copy(super()._convert(weights))


async def drafts(python: Path | None, arguments: Namespace) -> None:
    """Compare the two engines for each size, dtype and batch, and the copy's choices with those of the policy.

    Matrices are random, and what layers add is small, so that rounding is not amplified as in no trained policy. The
    packaged policy shows what is right in one that was trained.
    """
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        policy = Policy.load(PACKAGED_POLICY)
        weights, requests = load_weights(PACKAGED_POLICY), problems_of(policy, 256)
        plain = await _serving(TorchEngine(build(policy), dtype=dtype, run_sync=inline), weights)
        generations = await plain.generate(requests, SamplingParams(1.0, 32, policy.stops))
        share = await _share_right(build(policy), weights, dtype, requests, generations)
        report(kind="drafts", size="genesis", dtype=name, right=share)
        for size in arguments.sizes:
            with directory() as place:
                for batch in arguments.batches:
                    arguments.rollouts = batch
                    await _compare(Task.of_size(size, place, arguments), size, dtype, arguments)


async def _compare(task: Task, size: str, dtype: torch.dtype, arguments: Namespace) -> None:
    task = replace(task, weights=_random_weights(task.model))
    engines = [kind(task.model, dtype=dtype, run_sync=inline) for kind in (TorchEngine, DraftEngine)]
    plain, drafting = [await task.serve(engine) for engine in engines]
    rates = await compared({"plain": plain, "draft": drafting}, "plain", [], arguments)
    expected, generations = await plain(), await drafting()
    equal = sum(one.tokens == other.tokens for one, other in zip(expected, generations, strict=True))
    share = await _share_right(task.model, task.weights, dtype, task.requests, generations)
    copies = [tensor for tensor in int8_copy(task.weights).values() if isinstance(tensor, Int8Matrix)]
    sizes = {
        "policy_bytes": sum(tensor.numel() for tensor in task.weights.values()) * dtype.itemsize,
        "copy_bytes": sum(copy.codes.nbytes + copy.scales.nbytes for copy in copies),
    }
    name = str(dtype).removeprefix("torch.")
    fields = {"size": size, "dtype": name, "batch": len(task.requests), "right": share, "equal": equal}
    report(kind="drafts", **fields, **rates, **sizes)


async def _serving(engine: TorchEngine, weights: Weights) -> TorchEngine:
    await engine.stage(0, weights)
    await engine.commit()
    return engine


async def _share_right(
    model: CausalModel,
    weights: Weights,
    dtype: torch.dtype,
    requests: Sequence[Request],
    generations: Sequence[Generation],
) -> float:
    """Return for which share of tokens the copy chooses the same after the same tokens."""
    engine = await _serving(CopyEngine(model, dtype=dtype, run_sync=inline), weights)
    forwards = await engine.forward([r.prompt for r in requests], [g.tokens for g in generations])
    margins = [
        batch_margins(forward.logits, torch.tensor(item.tokens), *token_places([request.seed], [len(item.tokens)]), 1.0)
        for request, item, forward in zip(requests, generations, forwards, strict=True)
    ]
    return round(float((torch.cat(margins) == 0).float().mean()), 4)


def _random_weights(model: CausalModel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in model.shapes.items():
        deviation = 0.0 if len(shape) == 1 else shape[1] ** -0.5
        deviation *= 4.0 if "embed" in name else 0.25 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        matrix = torch.randn(shape, generator=generator) * deviation + (len(shape) == 1)
        weights[name] = matrix.to(torch.bfloat16)
    return weights
