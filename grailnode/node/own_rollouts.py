"""Would a run accept this node's honest rollouts? A short calibration on this machine, judged by the run's own row.

The node's way to compute generates (or, for a validator, checks), torch on the CPU is the other side, and the evidence
of all groups is added up as validators add it (protocol/judging/evidence.py).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from grailnode import UserError
from grailnode.calibration.pairs import CalibrationTask, Prompts, check_groups, generate_groups
from grailnode.calibration.proof_file import calibration_command
from grailnode.calibration.variants import ALONE, DType, Pair, Variant
from grailnode.config import Config
from grailnode.engine.policy import Policy, PolicyError, load_weights
from grailnode.environments import registry
from grailnode.node.disk_check import free_memory, parameters
from grailnode.node.role_checks import SkippedError
from grailnode.store.checks import one_line
from protocol import environments
from protocol.digest import Weights
from protocol.environments import Environment
from protocol.environments.dataset import Dataset
from protocol.environments.mixture import drawn_member
from protocol.environments.record import EnvironmentSpec
from protocol.judging.evidence import NO_EVIDENCE, advance, exceeded
from protocol.proof import Thresholds, arithmetic_of
from protocol.run import RunManifest

_SECONDS: Final = 45.0
_MOST_GROUPS: Final = 16  # of each pair
_MOST_TOKENS: Final = 64  # of a completion
_MOST_PARAMETERS: Final = 200_000_000  # of a policy that generates on a CPU: a group takes about a minute
_BYTES: Final = {"bfloat16": 2, "float32": 4}  # of a parameter


def judge_own_rollouts(config: Config, run: RunManifest, policy: Policy, *, checks: bool) -> str:
    """Generate and check rollouts for at most a minute, and say that a run would accept them; a validator `checks` what
    miners generate. SkippedError if this machine cannot try it, UserError if the run would refuse them.
    """
    pairs = _pairs(config, run, checks=checks)
    source = _prompts(config, run)
    params = run.sampling.params()
    work = CalibrationTask(
        policy=policy,
        params=replace(params, max_tokens=min(params.max_tokens, _MOST_TOKENS)),
        group_size=run.group_size,
        prompt=source,
        kind=run.proof.sketch,
        chat=run.chat,
    )
    _check_costs([pair for pair, _ in pairs], work)
    try:
        weights = load_weights(policy.directory)
    except PolicyError as error:
        raise SkippedError(
            "the weights of the run's policy are not on this machine: `grailnode export` writes them, and --set "
            "trainer.policy=DIR names them"
        ) from error
    try:
        groups = sum([trio.run(_judge, pair, row, work, weights, _SECONDS / len(pairs)) for pair, row in pairs])
    except (RuntimeError, AssertionError, MemoryError) as error:  # of torch: a device that is missing, used or full
        raise SkippedError(f"this machine could not compute them: {one_line(error)}") from error
    names = ", ".join(sorted({row.validator if not checks else row.miner for _, row in pairs}))
    return (
        f"{groups} groups of {run.group_size} rollouts, computed here and by {names}, are within the run's thresholds"
    )


def _pairs(config: Config, run: RunManifest, *, checks: bool) -> Sequence[tuple[Pair, Thresholds]]:
    """Return this node's way to compute beside each of the run's that torch has, with the row of thresholds."""
    engine = config.engine
    if run.numerics == "exact":
        raise SkippedError("this run is exact: its nodes compute the same bits, or are refused at their start")
    if engine.kind != "torch" or run.lora is not None or run.precision != "bf16":
        raise SkippedError("vLLM, adapters and quantized weights are not tried here; `grailnode calibrate` does that")
    own = Variant(dtype=engine.dtype, device=engine.device, threads=engine.threads)
    name = arithmetic_of(engine.kind, engine.dtype)
    pairs = []
    for row in run.proof.table:
        ours, theirs = (row.validator, row.miner) if checks else (row.miner, row.validator)
        if ours != name or row.miner not in run.proof.miners or not theirs.startswith("torch-"):
            continue
        dtype: DType = "float32" if theirs.endswith("float32") else "bfloat16"
        other = Variant(dtype=dtype, threads=engine.threads)
        sides = (replace(other, batch_tokens=ALONE), own) if checks else (own, replace(other, batch_tokens=ALONE))
        pairs.append((Pair(f"{row.miner} checked in {row.validator}", *sides), row))
    if not pairs:
        raise SkippedError(f"nobody else in this run computes with torch; `{calibration_command(name, name)}` measures")
    return pairs


def _check_costs(pairs: Sequence[Pair], work: CalibrationTask) -> None:
    """Skip what would take more than the time, or than the memory that is free."""
    count = parameters(work.policy)
    sides = [[side for side in (pair.generating, pair.checking) if isinstance(side, Variant)] for pair in pairs]
    needed = count * max(2 + sum(_BYTES[side.dtype] for side in both if side.device == "cpu") for both in sides)
    free = free_memory()
    if needed > free:
        raise SkippedError(f"the policy computed twice takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    if count > _MOST_PARAMETERS and any(both[0].device == "cpu" for both in sides):
        raise SkippedError(f"a CPU takes too long for rollouts of {count:,} parameters")


def _prompts(config: Config, run: RunManifest) -> Prompts:
    data = config.trainer.data
    if run.data is not None and (data is None or not config.at(data).is_file()):
        raise SkippedError("the run's problems are not on this machine: --set trainer.data=FILE names them")
    sources = [_source(spec, None if data is None else config.at(data)) for spec in run.tasks]
    shares = [member.ppm for member in run.environment]
    return lambda seed: sources[drawn_member(shares, seed)].problem(seed).prompt


def _source(spec: EnvironmentSpec, data: Path | None) -> Environment | Dataset:
    if spec.is_plugin:
        return registry.open_plugin(spec.name, spec.config.decode()).environment
    if spec.name in environments.data_names and data is not None:
        return environments.dataset(spec.name, data.read_bytes())
    return environments.get(spec.name)


async def _judge(pair: Pair, row: Thresholds, work: CalibrationTask, weights: Weights, seconds: float) -> int:
    """Judge groups of one pair until the time is over, and return how many there were; UserError if one is refused."""
    assert isinstance(pair.generating, Variant)
    assert isinstance(pair.checking, Variant)
    generating, checking = [await side.serve(work.policy, weights) for side in (pair.generating, pair.checking)]
    end, evidence, groups = time.monotonic() + seconds, NO_EVIDENCE, 0
    while groups < _MOST_GROUPS and (not groups or time.monotonic() < end):
        async for submissions in generate_groups(work, generating, 1, first=groups):
            for measurement in await check_groups(work, checking, submissions):
                evidence = advance(evidence, measurement.counts(row), row)
        groups += 1
        if (statistic := exceeded(evidence, row)) is not None:
            raise UserError(
                f"honest rollouts of this machine would be refused ({statistic}, {pair.name}): try engine.device = "
                f'"cpu" or another engine.dtype, update torch, or ask the founder for thresholds that cover this '
                f"machine: `{calibration_command(*row.pair)}`"
            )
    return groups
