"""Measurements of honest pairs and of copies."""

from dataclasses import replace

import numpy as np
import pytest

from grailnode.calibration import pairs
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement
from grailnode.calibration.variants import Pair, Variant, run_pairs, select
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from tests.support.measuring.pair_measurements import measure_pair

BASE = Variant()
SAME = Pair("same", BASE, BASE)


async def measure(
    work: CalibrationTask, pair: Pair, weights: Weights, groups: int = 6, **options
) -> list[GroupMeasurement]:
    return [group async for group in measure_pair(work, pair, weights, groups, **options)]


@pytest.mark.trio
async def test_honest_pairs_agree(work: CalibrationTask, policy: Policy, weights: Weights) -> None:
    for pair in run_pairs(BASE, BASE, policy):
        groups = await measure(work, pair, weights)
        assert len(groups) == 6
        for group in groups:
            tokens = sum(group.lengths)
            assert len(group.lengths) == work.group_size
            assert len(group.distances) == len(group.repeats) == len(group.margins) == len(group.shifts) == tokens
            assert not group.repeats[: group.lengths[0]].any()
            # The first state is the prompt's in every rollout.
            assert len(group.fresh) == tokens - group.repeats.sum() < tokens
            assert group.distances.max() <= 1, pair.name
            assert group.margins.max() < 1e-3, pair.name
            assert group.shifts.max() < 1e-3, pair.name


@pytest.mark.trio
async def test_narrow_arithmetic_has_larger_distances(work: CalibrationTask, policy: Policy, weights: Weights) -> None:
    (pair,) = select("same", replace(BASE, dtype="bfloat16"), BASE, policy)
    groups = await measure(work, pair, weights)
    assert np.concatenate([group.distances for group in groups]).any()
    assert np.concatenate([group.shifts for group in groups]).max() > 1e-3


@pytest.mark.trio
async def test_a_copy_has_larger_distances(work: CalibrationTask, weights: Weights) -> None:
    perturbed = {name: tensor * 1.05 for name, tensor in weights.items()}
    groups = await measure(work, SAME, weights, copy=perturbed)
    assert np.median(np.concatenate([group.distances for group in groups])) > 1
    assert np.concatenate([group.margins for group in groups]).max() > 0.01


@pytest.mark.trio
async def test_groups_depend_on_their_numbers_alone(work: CalibrationTask, weights: Weights, monkeypatch) -> None:
    whole = await measure(work, SAME, weights)
    rest = await measure(work, SAME, weights, groups=2, first=4)
    assert [group.lengths for group in rest] == [group.lengths for group in whole[4:]]
    monkeypatch.setattr(pairs, "_CHUNK_ROLLOUTS", 1)
    assert [group.lengths for group in await measure(work, SAME, weights)] == [group.lengths for group in whole]
    other = await measure(replace(work, seed=1), SAME, weights)
    assert [group.lengths for group in other] != [group.lengths for group in whole]


def test_a_large_vocabulary_makes_small_chunks(work: CalibrationTask, policy: Policy) -> None:
    assert work.chunk == 128
    large = replace(policy, config=dict(policy.config) | {"vocab_size": 151_936})
    assert replace(work, policy=large, params=replace(work.params, max_tokens=100_000)).chunk == 1
