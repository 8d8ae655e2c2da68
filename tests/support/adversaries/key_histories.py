"""Miners with windows of one group, and a run in which only the history of a key shows that one of them cheats."""

import torch

from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.proof import Arithmetic
from protocol.rollout.batch import Group
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.miners.registry import AdversarialProducer, Attempt, Behaviour
from tests.support.adversaries.miners.tokens import edit_tokens
from tests.support.builders.proofs import BFLOAT16, packaged_thresholds, proof_of

MAX_TOKENS = 8


def careless(share: float) -> Behaviour:
    """Return the behaviour of a miner that replaces a share of the honest tokens by the second-best one, at most one of
    each rollout, and continues from there.
    """

    async def behaviour(attempt: Attempt) -> list[Group]:
        tokens = sum(len(item.tokens) for group in await attempt.honest_groups() for item in group.rollouts)
        rng = attempt.rng()
        count = sum(rng.random() < share for _ in range(tokens))
        return await edit_tokens(attempt, min(count, attempt.harness.group_size * len(attempt.indices)))

    return behaviour


def careless_producers(harness: TrialHarness) -> dict[str, AdversarialProducer]:
    """Return miners that replace one token in so many, and one that delivers the honest groups, by name."""
    behaviours = {f"one token in {number}": careless(1 / number) for number in (20, 100)}
    behaviours["honest"] = Attempt.honest_groups
    return {name: AdversarialProducer(behaviour, harness) for name, behaviour in behaviours.items()}


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
