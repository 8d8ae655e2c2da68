"""The step of the shared state against a slow reference, its shards, and what a contribution must be."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol import pseudogradient
from protocol.digest import digest_weights
from protocol.errors import ContributionError, MalformedError, ProtocolError
from protocol.identity.signing import Signed, open_signed, sign
from protocol.limits import MAX_ROUND_GROUPS, MAX_WORKERS
from protocol.outer.round_checks import RefusedContributionError, check_contribution, most_groups, owner
from protocol.outer.round_records import RoundContribution, RoundManifest, RoundRules
from protocol.outer.shared_state import SharedState
from tests.outer.methods import METHODS
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, TRAINER, WORKERS

Tensors = dict[str, NDArray[np.float32]]


def step(
    weights: Tensors,
    momentum: Tensors,
    contributions: Sequence[Mapping[str, NDArray[np.float32]]],
    factors: Sequence[float],
    mu: float,
    alpha: float,
) -> tuple[Tensors, Tensors]:
    """Return weights and momentum after a round, by docs/spec/pseudogradient.md, section 2."""
    new_weights, new_momentum = {}, {}
    for name, base in weights.items():
        total = np.zeros_like(base)
        for values, factor in zip(contributions, factors, strict=True):
            total = total + np.float32(factor) * values[name]
        mean = total / np.float32(len(contributions))
        new_momentum[name] = momentum[name]
        direction = mean
        if mu:
            new_momentum[name] = np.float32(mu) * momentum[name] + mean
            direction = np.float32(mu) * new_momentum[name] + mean
        new_weights[name] = base - np.float32(alpha) * direction
    return new_weights, new_momentum


# The step of the shared state, against a slow reference; its shards


SHAPES = {"embed": (37, 96), "layers.0.weight": (96, 130), "layers.0.norm": (96,), "scale": (1,)}
FACTORS = (1.0, 0.7, 1 / 3)


def weights(seed: int, scale: float = 0.02) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(random.standard_normal(shape) * scale, np.float32))
        for name, shape in SHAPES.items()
    }


def payloads(state: SharedState, rules: RoundRules, count: int = 3) -> list[pseudogradient.Payload]:
    """Return contributions of some sites that moved in different directions."""
    result = []
    for seed in range(count):
        move = weights(100 + seed, 1e-4)
        local = {name: (tensor - move[name]).contiguous() for name, tensor in state.weights.items()}
        result.append(pseudogradient.encode(state.weights, local, None, rules.coding, state.digests.weights).payload)
    return result


def begin(rules: RoundRules) -> SharedState:
    return SharedState.begin(weights(1), has_momentum=rules.momentum > 0)


def arrays(tensors: object) -> Tensors:
    return {name: tensor.numpy() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_the_slow_reference(name: str) -> None:
    rules = METHODS[name]
    state = begin(rules)
    expected = arrays(state.weights)
    momentum = {key: np.zeros_like(values) for key, values in expected.items()}
    for number in range(1, 4):
        contributions = payloads(state, rules)
        values = []
        for payload in contributions:
            row: dict[str, torch.Tensor] = {}
            for part, flat in pseudogradient.decode(payload, state.weights, state.digests.weights):
                row |= part.scatter(flat)
            values.append(arrays(row))
        expected, momentum = step(expected, momentum, values, FACTORS, rules.momentum, rules.outer_rate)
        state = state.after(contributions, FACTORS, rules)
        assert state.step == number
        for key, array in arrays(state.weights).items():
            assert (array.view(np.uint32) == expected[key].view(np.uint32)).all(), key
        if rules.momentum:
            assert state.momentum is not None
            for key, array in arrays(state.momentum).items():
                assert (array.view(np.uint32) == momentum[key].view(np.uint32)).all(), key


def test_the_order_of_contributions_matters_so_it_is_part_of_the_manifest() -> None:
    rules = METHODS["dense"]
    state = begin(rules)
    contributions = payloads(state, rules)
    orders = (contributions, contributions, contributions[::-1])
    one, again, reverse = (state.after(order, (1.0,) * 3, rules).digests for order in orders)
    assert one == again != reverse


def test_no_contribution_or_a_broken_one_leaves_the_state_as_it_is() -> None:
    rules = METHODS["grid"]
    state = begin(rules)
    assert state.after([], (), rules) is state
    contributions = payloads(state, rules)
    contributions[2] = [bytes(contributions[2][0][:])[:-1]]
    with pytest.raises(ProtocolError):
        state.after(contributions, FACTORS, rules)
    assert digest_weights(state.weights) == state.digests.weights


def test_a_state_gets_a_momentum_when_the_rules_first_need_one() -> None:
    state = begin(METHODS["averaging"])
    assert state.digests.momentum == b""
    assert state.with_momentum(METHODS["averaging"]) is state
    with_zeros = state.with_momentum(METHODS["dense"])
    assert with_zeros.digests == begin(METHODS["dense"]).digests


@pytest.mark.parametrize("name", ["dense", "averaging"])
@pytest.mark.parametrize("shard_bytes", [1000, 4096, 1 << 30])
def test_a_state_comes_back_from_its_shards(name: str, shard_bytes: int) -> None:
    state = begin(METHODS[name])
    state = state.after(payloads(state, METHODS[name]), FACTORS, METHODS[name])
    shards = list(state.shards(shard_bytes))
    assert {len(shard) for shard in shards[:-1]} <= {shard_bytes}
    copy = SharedState.from_shards(iter(shards), state.digests, state.parts)
    assert copy.digests == state.digests


def test_shards_of_another_state_are_refused() -> None:
    state = begin(METHODS["dense"])
    shards = list(state.shards(4096))
    altered = [bytes([shards[0][0] ^ 1]) + shards[0][1:], *shards[1:]]
    for hostile, error in (
        (altered, ContributionError),
        (shards[1:] + shards[:1], ContributionError),
        (shards[:-1], MalformedError),
        ([*shards, b"\0"], MalformedError),
        ([], MalformedError),
    ):
        with pytest.raises(error):
            SharedState.from_shards(iter(hostile), state.digests, state.parts)


# What a contribution must be, given the manifest that opened its round; and how groups are dealt


OPENING: Signed[RoundManifest] = open_signed(sign(samples.round_manifest(), TRAINER), RoundManifest, [TRAINER.public])
GROUPS = [samples.digest(f"group {index}") for index in range(64)]
OWN = tuple(sorted(group for group in GROUPS if owner(RUN_ID, 1, group, WORKERS) == WORKERS[0]))
FOREIGN = tuple(sorted(set(GROUPS) - set(OWN)))


def contribution(**changes: Any) -> RoundContribution:
    return samples.contribution(**({"opening": OPENING.digest, "groups": OWN} | changes))


def test_a_sound_contribution_is_accepted() -> None:
    check_contribution(OPENING, contribution(), set())
    check_contribution(OPENING, contribution(groups=()), set(GROUPS))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": samples.digest("other")}, "malformed"),
        ({"number": 2}, "malformed"),
        ({"opening": samples.digest("other")}, "other-state"),
        ({"beacon_round": OPENING.record.closes}, "late"),
        ({"state": samples.outer_state(weights=samples.digest("other"))}, "other-state"),
        ({"state": samples.outer_state(momentum=samples.digest("other"))}, "other-state"),
        ({"groups": FOREIGN[:1]}, "undealt"),
        ({"worker": WORKERS[1]}, "undealt"),
    ],
)
def test_a_contribution_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedContributionError) as error_info:
        check_contribution(OPENING, contribution(**changes), set())
    assert error_info.value.reason == reason


def test_a_group_that_is_used_up_is_refused() -> None:
    with pytest.raises(RefusedContributionError, match="used up") as error_info:
        check_contribution(OPENING, contribution(), {OWN[3]})
    assert error_info.value.reason == "undealt"


def test_each_worker_gets_its_share_and_another_one_in_the_next_turn() -> None:
    workers = [samples.digest(f"worker {index}") for index in range(4)]
    groups = [samples.digest(f"dealt {index}") for index in range(2000)]
    owners = {group: owner(RUN_ID, 1, group, workers) for group in groups}
    assert all(400 < count < 600 for count in Counter(owners.values()).values())
    assert {owner(RUN_ID, 2, group, workers) == owners[group] for group in groups} == {True, False}


def test_many_sites_may_use_fewer_groups_each() -> None:
    workers = tuple(sorted(samples.digest(f"worker {index}") for index in range(MAX_WORKERS)))
    manifest = samples.round_manifest(workers=workers)
    opening: Signed[RoundManifest] = open_signed(sign(manifest, TRAINER), RoundManifest, [TRAINER.public])
    digests = (samples.digest(f"group {index}") for index in itertools.count())
    own = (group for group in digests if owner(RUN_ID, 1, group, workers) == workers[0])
    groups = tuple(sorted(itertools.islice(own, most_groups(MAX_WORKERS) + 1)))
    changes = {"opening": opening.digest, "worker": workers[0]}
    check_contribution(opening, contribution(**changes, groups=groups[1:]), set())
    with pytest.raises(RefusedContributionError, match="so many sites"):
        check_contribution(opening, contribution(**changes, groups=groups), set())
    assert most_groups(1) == most_groups(128) == MAX_ROUND_GROUPS > most_groups(MAX_WORKERS) > 500


def test_the_error_feedback_is_frozen_in_the_first_steps() -> None:
    rules = samples.round_rules(frozen_steps=2)
    assert [rules.uses_feedback(step) for step in range(4)] == [False, False, True, True]
    assert not samples.round_rules(feedback_decay=0.0).uses_feedback(5)
