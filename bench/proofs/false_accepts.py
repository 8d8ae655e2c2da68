"""Table (g): how many groups of a changed policy pass the tests of a group, and how many those of a window as well.

The policy is the packaged one, with its own thresholds. Its groups have 8 rollouts of about 3 tokens, so one group
shows little.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.proofs.honest import describe
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.thresholds import is_refused
from grailnode.calibration.variants import Variant, run_pairs
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from protocol.judging.evidence import surprisal_threshold, window_surprisal
from protocol.rollout.sampling import SamplingParams
from tests.support.adversaries.key_histories import MAX_TOKENS
from tests.support.builders.proofs import packaged_thresholds
from tests.support.measuring.pair_measurements import measure_pair

_WINDOW_GROUPS = 16  # groups


def _perturbed(weights: Weights, share: float, seed: int) -> dict[str, Tensor]:
    """Return weights of which each one is off by a normally distributed share of itself."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: (tensor * (1.0 + share * torch.randn(tensor.shape, generator=noise))).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _copies(weights: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "honest", dict(weights)
    for bits in (8, 4, 3):
        yield f"{bits}-bit weights", quantized(weights, bits)
    for share, seed in itertools.product((0.01, 0.02, 0.05), range(4)):
        yield f"weights off by {share:.0%}, {seed}", _perturbed(weights, share, seed)


async def table(windows: int) -> None:
    """Print the table.

    Args:
        windows: windows of 16 groups of each copy.
    """
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    proof = packaged_thresholds()
    prompts = environments.get("addition")
    task = CalibrationTask(
        policy, SamplingParams(1.0, MAX_TOKENS, policy.stops), 8, lambda seed: prompts.problem(seed).prompt
    )
    (pair, *_) = run_pairs(Variant(), Variant(), policy)
    print(describe(proof))
    print(f"{'copy':22} {'groups':>6}  {'pass alone':>10}  {'accepted':>8}")
    for name, copy in _copies(weights):
        evidences = [
            group.weigh(proof) async for group in measure_pair(task, pair, weights, windows * _WINDOW_GROUPS, copy=copy)
        ]
        single_pass_count = accepted_count = 0
        for start in range(0, len(evidences), _WINDOW_GROUPS):
            window = evidences[start : start + _WINDOW_GROUPS]
            pass_count = sum(not is_refused(evidence, proof) for evidence in window)
            single_pass_count += pass_count
            accepted_count += pass_count * (
                window_surprisal([evidence.counts for evidence in window], proof) <= surprisal_threshold(proof)
            )
        print(f"{name:22} {len(evidences):6}  {single_pass_count:10}  {accepted_count:8}", flush=True)
