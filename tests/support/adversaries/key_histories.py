"""Miners with windows of one group, and a run in which only the history of a key shows that one of them cheats."""

import random
from collections.abc import Sequence

from grailnode.calibration.copies import quantized
from grailnode.calibration.pairs import CalibrationTask, measure_pair
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.proof import Thresholds
from protocol.rollout.batch import Group
from protocol.rollout.sampling import SamplingParams
from roles.miner.produce import MiningWindow
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.miners.registry import window_rng
from tests.support.adversaries.miners.tokens import edit_tokens
from tests.support.builders.proofs import FLOAT32, bfloat16_pairs, proof_of

MAX_TOKENS = 8
_EDITED_SHARE = 0.05


class CarelessProducer:
    """Replaces one honest token in twenty by the second-best one, and continues from there."""

    def __init__(self, harness: TrialHarness) -> None:
        self._harness = harness

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Implements Producer.produce."""
        tokens = sum(
            len(item.tokens)
            for group in await self._harness.honest_groups(mining_window, indices)
            for item in group.rollouts
        )
        count = _binomial(window_rng(mining_window), tokens)
        return await edit_tokens(
            self._harness, mining_window, indices, min(count, self._harness.group_size * len(indices))
        )


def _binomial(rng: random.Random, trials: int) -> int:
    return sum(rng.random() < _EDITED_SHARE for _ in range(trials))


class CachedHonestProducer:
    """Delivers the honest groups of a harness."""

    def __init__(self, harness: TrialHarness) -> None:
        self._harness = harness

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Implements Producer.produce."""
        return await self._harness.honest_groups(mining_window, indices)


async def mixed_thresholds(groups: int = 256) -> Thresholds:
    """Return thresholds that accept bfloat16, calibrated on a few groups of each pair."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    params = SamplingParams(1.0, MAX_TOKENS, policy.stops)
    task = CalibrationTask(policy, params, 8, lambda seed: environments.get("addition").problem(seed).prompt)
    pairs = {pair.name: pair for pair in bfloat16_pairs()}
    honest_samples = {
        name: [sample async for sample in measure_pair(task, pair, weights, groups)] for name, pair in pairs.items()
    }
    copy, pair = quantized(weights, 4), pairs["bfloat16-generated"]
    copy_samples = [sample async for sample in measure_pair(task, pair, weights, groups // 4, copy=copy)]
    return choose_thresholds(honest_samples, [copy_samples], FLOAT32, ThresholdDemands())


def packaged_policy_harness(thresholds: Thresholds) -> TrialHarness:
    """Return a harness for the packaged policy, with windows of one group."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    return TrialHarness(
        PolicyHistory(policy, 0, lambda _: weights),
        environments.get("addition"),
        proof_of(thresholds),
        MAX_TOKENS,
        groups=1,
    )
