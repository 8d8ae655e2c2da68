"""Sketches: honest noise passes, and sketches that were computed without the hidden states do not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.rollout.challenge import stream
from protocol.rollout.sketch import SketchKind, commit, distances
from tests.protocol import slow_sketch
from tests.support.builders.samples import digest

KINDS: tuple[SketchKind, ...] = ("projection", "topk")
SEED = digest("sketch seed")
T, D = 400, 128
kinds = pytest.mark.parametrize("kind", KINDS)


def states(seed: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed)) * 3


@kinds
def test_four_bytes_a_token(kind: SketchKind) -> None:
    assert len(commit(kind, states(), SEED)) == 4 * T
    assert commit(kind, states(tokens=0), SEED) == b""


def noisy(relative: float) -> torch.Tensor:
    """Return the states with normal noise of a size relative to each value."""
    return states() * (1 + relative * torch.randn(T, D, generator=torch.Generator().manual_seed(9)))


@kinds
def test_honest_noise_passes(kind: SketchKind) -> None:
    differences = distances(commit(kind, noisy(1e-3), SEED), commit(kind, states(), SEED))
    assert (differences <= 3).mean() > (0.99 if kind == "projection" else 0.85)
    assert np.median(differences) <= 2


@kinds
def test_whoever_knows_the_states_roughly_fails(kind: SketchKind) -> None:
    """Values are known to a tenth only."""
    differences = distances(commit(kind, noisy(0.1), SEED), commit(kind, states(), SEED))
    assert (differences <= 32).mean() < 0.1
    assert np.median(differences) > 50


@kinds
def test_the_scale_of_a_state_does_not_matter(kind: SketchKind) -> None:
    """Both kinds normalize; powers of two are exact."""
    assert commit(kind, states() * 4, SEED) == commit(kind, states(), SEED)


@kinds
def test_the_size_of_a_batch_changes_only_the_rounding(kind: SketchKind) -> None:
    alone = b"".join(commit(kind, row, SEED) for row in states()[:, None])
    assert distances(alone, commit(kind, states(), SEED)).max() <= 1


@kinds
def test_cheap_imitations_fail(kind: SketchKind) -> None:
    """None of them is within 32 units more often than four random values on a circle of 256."""
    true = commit(kind, states(), SEED)
    imitations = {
        "zeros": bytes(4 * T),
        "random": np.random.default_rng(0).integers(0, 256, 4 * T).astype(np.uint8).tobytes(),
        "the position before": true[-4:] + true[:-4],
        "another state": commit(kind, states(1), SEED),
        "another seed": commit(kind, states(), digest("other seed")),
        # with coefficients by rank, the same values in other dimensions would give the same sketch
        "other dimensions": commit(kind, states().roll(1, dims=1), SEED),
    }
    for name, imitation in imitations.items():
        assert (distances(imitation, true) <= 32).mean() < 0.02, name


@kinds
def test_no_constant_is_near_to_many_values(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.uint8)
    assert np.abs(np.bincount(values // 32, minlength=8) - 4 * T / 8).max() < 0.25 * 4 * T / 8


@kinds
def test_the_opposite_state_has_the_opposite_sketch(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.uint8)
    assert (np.frombuffer(commit(kind, -states(), SEED), dtype=np.uint8) == np.uint8(0) - values).all()


@kinds
def test_the_slow_implementation_gives_the_same_values(kind: SketchKind) -> None:
    hidden = states(tokens=20)
    exact = slow_sketch.values(kind, hidden.double().numpy(), SEED)
    assert 384 < exact.std() < 640
    values = np.frombuffer(commit(kind, hidden, SEED), dtype=np.uint8).reshape(-1, 4)
    assert np.abs((values - exact + 128) % 256 - 128).max() < 0.51


def test_a_value_of_many_turns_is_on_the_circle() -> None:
    """A state in the direction of one projection's signs has the value 512 sqrt(D) = 5792.6 = 22 * 256 + 160.6."""
    signs = np.unpackbits(np.frombuffer(stream(SEED, "projection", 4 * D // 8), dtype=np.uint8)).reshape(D, 4)
    hidden = torch.from_numpy(signs[:, 0].astype(np.float32) * 2 - 1)[None]
    assert commit("projection", hidden, SEED)[0] == 161
    assert commit("projection", -hidden, SEED)[0] == 256 - 161


@kinds
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e38, 1e-38])
def test_odd_states_have_a_sketch(kind: SketchKind, value: float) -> None:
    assert len(commit(kind, torch.full((2, D), value), SEED)) == 8


@kinds
def test_a_state_may_have_few_dimensions(kind: SketchKind) -> None:
    assert len(commit(kind, states()[:, :5], SEED)) == 4 * T


def test_distances_are_on_the_circle() -> None:
    true = bytes([0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 129, 1, 2, 3, 4])
    other = bytes([0, 2, 254, 0, 10, 0, 3, 0, 0, 0, 0, 127, 129, 2, 3, 4])
    assert distances(other, true).tolist() == [2, 3, 2, 128]
    assert distances(b"", b"").size == 0


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_distances_of_any_bytes(first: bytes, second: bytes) -> None:
    expected = [min((a - b) % 256, (b - a) % 256) for a, b in zip(first, second, strict=True)]
    assert distances(first, second).tolist() == [max(expected[at : at + 4]) for at in range(0, 16, 4)]
    assert distances(first, second).tolist() == distances(second, first).tolist()


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_another_length_is_malformed(size: int) -> None:
    with pytest.raises(MalformedError):
        distances(bytes(size), bytes(4))
