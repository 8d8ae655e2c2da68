"""The step of the shared state, against a slow reference; its shards."""

import numpy as np
import pytest
import torch

from protocol import pseudogradient
from protocol.digest import digest_weights
from protocol.errors import ContributionError, MalformedError, ProtocolError
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from tests.outer import slow_outer
from tests.support.builders import samples

SHAPES = {"embed": (37, 96), "layers.0.weight": (96, 130), "layers.0.norm": (96,), "scale": (1,)}
RULES = {
    "diloco": samples.round_rules(values="dense", fraction=0),
    "averaging": samples.round_rules(values="dense", fraction=0, momentum=0.0, outer_rate=1.0),
    "pulseloco exact": samples.round_rules(values="exact", fraction=0),
    "pulseloco grid": samples.round_rules(),
    "sparseloco": samples.round_rules(
        values="chunked", fraction=0, chosen=128, feedback_decay=0.95, momentum=0.0, outer_rate=1.0
    ),
}
FACTORS = (1.0, 0.7, 1 / 3)


def weights(seed: int, scale: float = 0.02) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(random.standard_normal(shape) * scale, np.float32))
        for name, shape in SHAPES.items()
    }


def payloads(state: SharedState, rules: RoundRules, count: int = 3) -> list[bytes]:
    """Return contributions of some sites that moved in different directions."""
    result = []
    for seed in range(count):
        move = weights(100 + seed, 1e-4)
        local = {name: (tensor - move[name]).contiguous() for name, tensor in state.weights.items()}
        result.append(pseudogradient.encode(state.weights, local, None, rules.coding, state.digests.weights).payload)
    return result


def begin(rules: RoundRules) -> SharedState:
    return SharedState.begin(weights(1), has_momentum=rules.momentum > 0)


def arrays(tensors: object) -> slow_outer.Tensors:
    return {name: tensor.numpy() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RULES)
def test_rounds_are_those_of_the_slow_reference(name: str) -> None:
    rules = RULES[name]
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
        expected, momentum = slow_outer.step(expected, momentum, values, FACTORS, rules.momentum, rules.outer_rate)
        state = state.after(contributions, FACTORS, rules)
        assert state.step == number
        for key, array in arrays(state.weights).items():
            assert (array.view(np.uint32) == expected[key].view(np.uint32)).all(), key
        if rules.momentum:
            assert state.momentum is not None
            for key, array in arrays(state.momentum).items():
                assert (array.view(np.uint32) == momentum[key].view(np.uint32)).all(), key


def test_the_order_of_contributions_matters_so_it_is_part_of_the_manifest() -> None:
    rules = RULES["diloco"]
    state = begin(rules)
    contributions = payloads(state, rules)
    assert (
        state.after(contributions, (1.0,) * 3, rules).digests
        != state.after(contributions[::-1], (1.0,) * 3, rules).digests
    )
    assert (
        state.after(contributions, (1.0,) * 3, rules).digests == state.after(contributions, (1.0,) * 3, rules).digests
    )


def test_no_contribution_leaves_the_state_as_it_is() -> None:
    state = begin(RULES["diloco"])
    assert state.after([], (), RULES["diloco"]) is state


def test_a_broken_payload_leaves_the_state_whole() -> None:
    rules = RULES["pulseloco grid"]
    state = begin(rules)
    contributions = payloads(state, rules)
    contributions[2] = contributions[2][:-1]
    with pytest.raises(ProtocolError):
        state.after(contributions, FACTORS, rules)
    assert digest_weights(state.weights) == state.digests.weights


def test_a_state_gets_a_momentum_when_the_rules_first_need_one() -> None:
    state = begin(RULES["averaging"])
    assert state.digests.momentum == b""
    assert state.with_momentum(RULES["averaging"]) is state
    with_zeros = state.with_momentum(RULES["diloco"])
    assert with_zeros.digests == begin(RULES["diloco"]).digests


@pytest.mark.parametrize("name", ["diloco", "averaging"])
@pytest.mark.parametrize("shard_bytes", [1000, 4096, 1 << 30])
def test_a_state_comes_back_from_its_shards(name: str, shard_bytes: int) -> None:
    state = begin(RULES[name])
    state = state.after(payloads(state, RULES[name]), FACTORS, RULES[name])
    shards = list(state.shards(shard_bytes))
    assert {len(shard) for shard in shards[:-1]} <= {shard_bytes}
    copy = SharedState.from_shards(iter(shards), state.digests, state.parts)
    assert copy.digests == state.digests


def test_shards_of_another_state_are_refused() -> None:
    state = begin(RULES["diloco"])
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
