"""Thresholds for a run whose miners generate with vLLM and whose validators check with torch, and what they detect.

The pairs are measured as by `grailnode calibrate` (docs/benchmarks/calibration.md), with vLLM on the generating side.
Copies of the policy are served by vLLM as well, in place of the policy: with rounded weights, and with every weight off
by a share of itself.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.engines.setting import directory, report
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement
from grailnode.calibration.separation import power
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol import environments
from protocol.digest import Weights
from protocol.proof import arithmetic_of
from protocol.rollout.sampling import SamplingParams
from roles.ports import Engine
from tests.support.measuring.pair_measurements import measure

_COPY_GROUPS = 64
_GROUPED = 4
_DEMANDS = ThresholdDemands()


def copies(weights: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield copies that have to be told from the policy, by name; the first one is that which must be refused."""
    for bits in (4, 3, 8):
        yield f"{bits}-bit weights", quantized(weights, bits)
    noise = torch.Generator().manual_seed(0)
    for share in (0.01, 0.02, 0.05):
        yield (
            f"weights off by {share:.0%}",
            {
                name: (tensor * (1.0 + share * torch.randn(tensor.shape, generator=noise))).to(tensor.dtype)
                for name, tensor in weights.items()
            },
        )


async def thresholds(python: Path, arguments: argparse.Namespace) -> None:
    """Measure the honest pairs, choose thresholds, and measure what they refuse of each copy."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    model, problems = build(policy), environments.get("addition")
    work = CalibrationTask(policy, SamplingParams(1.0, 24, policy.stops), 8, lambda seed: problems.problem(seed).prompt)
    for dtype in arguments.dtypes:
        with directory() as place:
            settings = VllmSettings(python=python, dtype=dtype, sequences=arguments.batches[-1])
            server = ChildServer(settings, policy.directory, place / "server")
            engine = VllmEngine(model, server, place / "engine", dtype=getattr(torch, dtype))
            checks = {
                checking: TorchEngine(model, dtype=getattr(torch, checking))
                for checking in dict.fromkeys((dtype, "float32"))
            }
            try:
                version = 0
                sides: list[Engine] = [engine, *checks.values()]
                for side in sides:
                    await side.stage(version, weights)
                    await side.commit()
                groups = arguments.rollouts // work.group_size
                honest = {
                    f"vllm-{dtype}, torch-{checking}": await _measured(work, engine, check, groups)
                    for checking, check in checks.items()
                }
                dishonest: dict[str, list[GroupMeasurement]] = {}
                for name, copy in copies(weights):
                    version += 1
                    await engine.stage(version, copy)
                    await engine.commit()
                    groups_of_copy = measure(work, engine, checks[dtype], _COPY_GROUPS)
                    dishonest[name] = [group async for group in groups_of_copy]
            finally:
                await engine.close()
        arithmetics = arithmetic_of("vllm", dtype), arithmetic_of("torch", dtype)
        spec = choose_thresholds(honest, [next(iter(dishonest.values()))], arithmetics, _DEMANDS)
        for name, measurements in honest.items():
            distances = np.concatenate([group.fresh for group in measurements])
            margins = np.concatenate([group.margins for group in measurements])
            report(
                kind="thresholds",
                pair=name,
                tokens=len(margins),
                states=len(distances),
                distance_999=int(np.quantile(distances, 0.999)),
                distance_max=int(distances.max()),
                margin_max=round(float(margins.max()), 4),
                margin_misses=int((margins > 0).sum()),
            )
        report(kind="thresholds", dtype=dtype, **spec.model_dump(mode="json"))
        for bits, (name, measurements) in enumerate(dishonest.items()):
            detected = power(bits, name, measurements, spec, _DEMANDS.window)
            report(
                kind="thresholds",
                dtype=dtype,
                copy=name,
                tokens=detected.tokens,
                groups_refused=round(detected.groups, 4),
                windows_refused=round(detected.windows, 4),
            )


async def _measured(
    work: CalibrationTask, engine: VllmEngine, check: TorchEngine, groups: int
) -> list[GroupMeasurement]:
    """Return a quarter of the rollouts in groups as in a run, the others alone, as `grailnode calibrate` does."""
    whole = groups // _GROUPED
    alone = replace(work, group_size=1)
    singles = (groups - whole) * work.group_size
    return [
        *[group async for group in measure(work, engine, check, whole)],
        *[group async for group in measure(alone, engine, check, singles, first=whole)],
    ]
