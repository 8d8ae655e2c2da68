"""Nodes whose log-probabilities differ to one side: who shifts them is found, and honest noise never is."""

import math

import numpy as np
import pytest

from grailnode.store.memory import MemoryStore
from roles.trainer.collect.logprob_bias import BiasEvidence, GroupSums, LogprobBias, add_groups
from roles.trainer.tensor_shards import run_inline
from tests.support.builders.proofs import proof_of
from tests.support.builders.samples import key, thresholds
from tests.support.simulation.virtual_clock import simulated

ONE, OTHER, THIRD = sorted(key(f"validator {number}").public for number in range(3))
BIAS = 2_000
PROOF = proof_of(thresholds(logprob_bias=BIAS))
GROUPS = 16  # of a window
NODES = 3  # two validators and the trainer
NOTHING = BiasEvidence(next_window=0, nodes=(), values=b"", biased=b"")
TOKENS, OPEN_TOKENS = 512, 154  # of a group; 3 in 10 tokens have a probability below 0.9
TOKEN_NOISE, SHARED_NOISE = 0.03, 0.003  # of each open token by itself, and the same for all of a group


def differences(groups: int, shift: float, seed: int) -> np.ndarray:
    """Return the sums over the tokens of groups of what two nodes in bfloat16 differ by, in millionths: int64 [groups].

    Args:
        shift: what one of them adds to the log-probability of each open token.
    """
    generator = np.random.default_rng(seed)
    noise = generator.normal(0.0, TOKEN_NOISE * math.sqrt(OPEN_TOKENS), groups)
    shared = generator.normal(0.0, SHARED_NOISE, groups) * OPEN_TOKENS
    return np.rint((noise + shared + shift * OPEN_TOKENS) * 1e6).astype(np.int64)


def groups_of(values: np.ndarray) -> list[GroupSums]:
    """Return groups of which the sums of two nodes differ by these values."""
    return [{ONE: ("torch-float32", value, TOKENS), OTHER: ("torch-float32", 0, TOKENS)} for value in values.tolist()]


def is_found(values: np.ndarray, nodes: int = NODES) -> bool:
    """Return whether two nodes whose sums differ by these values are found."""
    return any(add_groups(NOTHING, groups_of(values), PROOF, nodes).biased)


@pytest.mark.parametrize("factor", [1.02, 1 / 1.02, 1.1, 1.81])
def test_who_calls_every_open_token_more_or_less_likely_is_found_within_three_windows(factor: float) -> None:
    assert all(is_found(differences(3 * GROUPS, math.log(factor), seed)) for seed in range(50))


@pytest.mark.parametrize(
    ("offset", "windows"), [(0, 500), (-BIAS, 500), (BIAS, 500), pytest.param(BIAS, 10_000, marks=pytest.mark.slow)]
)
def test_honest_noise_is_not_found_whatever_its_allowed_bias(offset: int, windows: int) -> None:
    values = differences(windows * GROUPS, 0.0, seed=windows) + offset * TOKENS
    assert not is_found(values)


def test_a_shift_within_the_allowed_bias_is_not_found() -> None:
    shift = BIAS * 1e-6 * TOKENS / OPEN_TOKENS
    assert not is_found(differences(2_000, shift, seed=1))


@pytest.mark.parametrize(("nodes", "groups"), [(3, 38), (1024, 57)])
def test_more_nodes_need_more_evidence(nodes: int, groups: int) -> None:
    values = np.full(groups, 10**9)
    assert is_found(values, nodes)
    assert not is_found(values[1:], nodes)


def test_a_pair_that_was_found_stays_found() -> None:
    found = add_groups(NOTHING, groups_of(np.full(40, 10**9)), PROOF, NODES)
    assert add_groups(found, groups_of(np.zeros(40, np.int64)), PROOF, NODES).biased == found.biased != bytes(4)


@pytest.mark.parametrize(
    "group",
    [
        {ONE: ("torch-float32", 10**9, TOKENS), OTHER: ("torch-float32", 0, TOKENS - 1)},
        {ONE: ("torch-float32", 10**9, TOKENS)},
        {},
    ],
    ids=["other numbers of tokens", "one node", "no node"],
)
def test_groups_that_two_nodes_do_not_judge_alike_are_no_evidence(group: GroupSums) -> None:
    assert not any(add_groups(NOTHING, [group] * 99, PROOF, NODES).biased)


@simulated
async def test_a_window_counts_once_whatever_a_restart_repeats() -> None:
    state = MemoryStore()
    sums = {node: ("torch-float32", -(10**9) * place, TOKENS) for place, node in enumerate((ONE, OTHER))}
    for window in range(3):
        for _ in range(3):
            bias = LogprobBias(state, run_inline)
            await bias.open()
            await bias.count(window, [sums] * 12, PROOF, NODES)
        assert not bias.biased_pairs
    await bias.count(3, [sums] * 12, PROOF, NODES)
    restarted = LogprobBias(state, run_inline)
    await restarted.open()
    assert restarted.biased_pairs == bias.biased_pairs == {frozenset((ONE, OTHER))}


@simulated
async def test_of_three_nodes_the_one_that_shifts_differs_from_both_others() -> None:
    bias = LogprobBias(MemoryStore(), run_inline)
    values = differences(3 * GROUPS, math.log(1.02), seed=2).tolist()
    noise = differences(3 * GROUPS, 0.0, seed=3).tolist()
    groups = [
        {node: ("torch-float32", total, TOKENS) for node, total in ((ONE, 0), (OTHER, shifted), (THIRD, honest))}
        for shifted, honest in zip(values, noise, strict=True)
    ]
    await bias.count(0, groups, PROOF, NODES + 1)
    assert bias.biased_pairs == {frozenset((ONE, OTHER)), frozenset((OTHER, THIRD))}
