"""Table (h): how many groups of a changed policy pass the tests of a group, and how many those of a window as well.

The policy is the packaged one, with its own thresholds. Its groups have 8 rollouts of about 3 tokens, so one group
shows little.
"""

import itertools
from collections.abc import Iterator

from torch import Tensor

from bench.proofs.power import describe, perturbed
from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.variants import Variant, run_pairs
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import Weights
from protocol.judging.evidence import NO_EVIDENCE, is_improbable
from protocol.judging.verdict import own_rejection
from protocol.rollout.sampling import SamplingParams
from tests.support.adversaries.key_histories import MAX_TOKENS
from tests.support.builders.proofs import packaged_thresholds
from tests.support.measuring.pair_measurements import measure_pair

_WINDOW_GROUPS = 16  # groups


def _copies(weights: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "honest", dict(weights)
    for bits in (8, 4, 3):
        yield f"{bits}-bit weights", quantized(weights, bits)
    for share, seed in itertools.product((0.01, 0.02, 0.05), range(4)):
        yield f"weights off by {share:.0%}, {seed}", perturbed(weights, share, seed)


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
    (pair, *_) = run_pairs(Variant(), Variant())
    print(describe(proof))
    print(f"{'copy':22} {'groups':>6}  {'pass alone':>10}  {'accepted':>8}")
    for name, copy in _copies(weights):
        groups = measure_pair(task, pair, weights, windows * _WINDOW_GROUPS, copy=copy)
        counts = [group.counts(proof) async for group in groups]
        passing, accepted = [own_rejection(item, proof) is None for item in counts], 0
        for start in range(0, len(counts), _WINDOW_GROUPS):
            window = slice(start, start + _WINDOW_GROUPS)
            if not is_improbable(NO_EVIDENCE, counts[window], proof):
                accepted += sum(passing[window])
        print(f"{name:22} {len(counts):6}  {sum(passing):10}  {accepted:8}", flush=True)
