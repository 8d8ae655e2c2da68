"""Groups judged by vLLM beside the torch judge: what differs in their numbers, and which decisions do."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.engines.setting import directory, report
from grailnode.calibration import proof_file
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, check_groups, generate_groups
from grailnode.calibration.procedure import quantized
from grailnode.calibration.variants import Variant, VllmServers, VllmVariant
from grailnode.cli.actions.policy_evaluation import PolicyRules
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.vllm.installation import installed_version
from protocol import environments
from protocol.judging.verdict import own_rejection
from protocol.proof import Thresholds, arithmetic_of
from protocol.run import SamplingSpec
from roles.policy.assignment import PolicyTask

_GROUP_SIZE = 8
_SHARES = {"honest": (2, None), "8-bit copy": (4, 8), "4-bit copy": (4, 4)}  # of the rollouts, one in so many; bits


async def judging(python: Path, arguments: argparse.Namespace) -> None:
    """Judge the same rollouts with both engines, by precision and by what generated them.

    Rollouts are those of torch on a run's prompts. Both judge by the row of torch, so that a decision differs only
    where their numbers do.
    """
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    environment = environments.get("addition")
    sampling = SamplingSpec(temperature=1.0, max_tokens=24, stops=policy.stops)
    task = PolicyTask(bytes(32), PolicyRules(sampling), environment, policy.tokenizer, policy.vocabulary)
    work = CalibrationTask(
        *(policy, sampling.params(), _GROUP_SIZE, lambda seed: environment.problem(seed).prompt),
        seed=arguments.seed,
        task=task,
    )
    rows = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    for dtype in arguments.dtypes:
        arithmetic, side, servers = arithmetic_of("torch", dtype), Variant(dtype=dtype), VllmServers()
        thresholds = rows.row(arithmetic, arithmetic)
        with directory() as place:
            variant = VllmVariant(python, place, installed_version(python), dtype, arguments.device)
            torch_judge = await side.serve(policy, weights)
            vllm_judge = await servers.serve(variant, policy, weights)
            try:
                for name, (share, bits) in _SHARES.items():
                    groups = arguments.rollouts // _GROUP_SIZE // share
                    copy = weights if bits is None else quantized(weights, bits)
                    miner = await side.serve(policy, copy)
                    pairs = list[tuple[GroupMeasurement, GroupMeasurement]]()
                    async for part in generate_groups(work, miner, groups):
                        both = [await check_groups(work, judge, part) for judge in (torch_judge, vllm_judge)]
                        pairs += zip(*both, strict=True)
                    _report(dtype, name, pairs, thresholds)
            finally:
                await servers.close()


def _report(
    dtype: str, name: str, pairs: Sequence[tuple[GroupMeasurement, GroupMeasurement]], thresholds: Thresholds
) -> None:
    """Print how far the two judges are apart; their sketches by their distances from the miner's."""

    def largest(field: str) -> float:
        return max(float(np.abs(getattr(a, field).astype(float) - getattr(b, field)).max()) for a, b in pairs)

    reasons = [tuple(own_rejection(item.counts(thresholds), thresholds) for item in pair) for pair in pairs]
    report(
        kind="judging",
        dtype=dtype,
        rollouts=name,
        count=sum(len(own.lengths) for own, _ in pairs),
        tokens=sum(len(own.margins) for own, _ in pairs),
        largest_difference_of_margins=round(largest("margins"), 6),
        tokens_right_for_one_judge_only=sum(int(((a.margins > 0) != (b.margins > 0)).sum()) for a, b in pairs),
        largest_difference_of_sketch_distances=largest("distances"),
        largest_difference_of_log_probabilities=round(largest("differences"), 6),
        stops_that_differ=sum(int((a.stops != b.stops).sum()) for a, b in pairs),
        groups=len(pairs),
        refused_by_torch=sum(own is not None for own, _ in reasons),
        refused_by_vllm=sum(other is not None for _, other in reasons),
        decisions_that_differ=sum(own != other for own, other in reasons),
    )
