"""Table (g): how many groups of a copy pass by luck, and how many are left where all groups of a window are held
together.

The packaged policy by its own thresholds: groups of 8 rollouts of about 3 tokens, so that one group shows little.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.proofs.honest import describe
from bench.proofs.keys import MAX_TOKENS
from grailnode.calibration import proof_file
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask, measure_pair
from grailnode.calibration.thresholds import is_refused
from grailnode.calibration.variants import Variant, run_pairs
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from protocol.judging.evidence import surprisal_threshold, window_surprisal
from protocol.rollout.sampling import SamplingParams

_WINDOW = 16  # groups


def _perturbed(weights: Weights, share: float, seed: int) -> dict[str, Tensor]:
    """Every weight off by a normally distributed share of itself."""
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
    """Print it.

    Args:
        windows: of 16 groups, of each copy.
    """
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME).thresholds
    prompts = environments.get("addition")
    work = CalibrationTask(
        policy, SamplingParams(1.0, MAX_TOKENS, policy.eos), 8, lambda seed: prompts.problem(seed).prompt
    )
    (same, *_) = run_pairs(Variant(), policy)
    print(describe(proof))
    print(f"{'copy':22} {'groups':>6}  {'pass alone':>10}  {'accepted':>8}")
    for name, copy in _copies(weights):
        found = [group.weigh(proof) async for group in measure_pair(work, same, weights, windows * _WINDOW, copy=copy)]
        alone = accepted = 0
        for start in range(0, len(found), _WINDOW):
            window = found[start : start + _WINDOW]
            passed = sum(not is_refused(evidence, proof) for evidence in window)
            alone += passed
            accepted += passed * (
                window_surprisal([evidence.counts for evidence in window], proof) <= surprisal_threshold(proof)
            )
        print(f"{name:22} {len(found):6}  {alone:10}  {accepted:8}", flush=True)
