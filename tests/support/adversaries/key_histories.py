"""Miners with windows of one group, and a run in which only the history of a key shows that one of them cheats."""

from collections.abc import Sequence

import torch

from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.proof import Arithmetic
from protocol.rollout.batch import Group
from roles.miner.produce import MiningWindow
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.miners.registry import window_rng
from tests.support.adversaries.miners.tokens import edit_tokens
from tests.support.builders.proofs import BFLOAT16, packaged_thresholds, proof_of

MAX_TOKENS = 8


class CarelessProducer:
    """Replaces a share of the honest tokens by the second-best one, at most one of each rollout, and continues from
    there.
    """

    def __init__(self, harness: TrialHarness, share: float) -> None:
        self._harness = harness
        self._share = share

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        tokens = sum(
            len(item.tokens)
            for group in await self._harness.honest_groups(mining_window, indices)
            for item in group.rollouts
        )
        rng = window_rng(mining_window)
        count = sum(rng.random() < self._share for _ in range(tokens))
        return await edit_tokens(
            self._harness, mining_window, indices, min(count, self._harness.group_size * len(indices))
        )


class CachedHonestProducer:
    """Delivers the honest groups of a harness."""

    def __init__(self, harness: TrialHarness) -> None:
        self._harness = harness

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        return await self._harness.honest_groups(mining_window, indices)


def packaged_policy_harness(arithmetics: tuple[Arithmetic, Arithmetic]) -> TrialHarness:
    """Return a harness for the packaged policy and its thresholds, with windows of one group.

    Args:
        arithmetics: FLOAT32 or BFLOAT16.
    """
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    return TrialHarness(
        PolicyHistory(policy, 0, lambda _: weights),
        environments.get("addition"),
        proof_of(packaged_thresholds(*arithmetics)),
        MAX_TOKENS,
        groups=1,
        dtype=torch.bfloat16 if arithmetics == BFLOAT16 else torch.float32,
    )
