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


@kinds
def test_honest_noise_passes(kind: SketchKind) -> None:
    hidden = states()
    noisy = hidden * (1 + 1e-3 * torch.randn(T, D, generator=torch.Generator().manual_seed(9)))
    differences = distances(commit(kind, noisy, SEED), commit(kind, hidden, SEED))
    assert (differences <= 2).mean() > (0.99 if kind == "projection" else 0.85)
    assert np.median(differences) <= 2


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
    true = commit(kind, states(), SEED)
    values = np.frombuffer(true, dtype=np.int8).reshape(-1, 4)
    imitations = {
        "zeros": bytes(4 * T),
        "the best constant": np.tile(np.median(values, axis=0).astype(np.int8), (T, 1)).tobytes(),
        "random": np.random.default_rng(0).normal(0, 32, (T, 4)).round().clip(-127, 127).astype(np.int8).tobytes(),
        "the position before": true[-4:] + true[:-4],
        "another state": commit(kind, states(1), SEED),
        "another seed": commit(kind, states(), digest("other seed")),
    }
    for name, imitation in imitations.items():
        assert (distances(imitation, true) <= 2).mean() < 0.02, name


@kinds
def test_coefficients_belong_to_dimensions(kind: SketchKind) -> None:
    """The same values in other dimensions give another sketch; coefficients by rank would give the same one."""
    rolled = states().roll(1, dims=1)
    assert (distances(commit(kind, rolled, SEED), commit(kind, states(), SEED)) <= 2).mean() < 0.02


@kinds
def test_the_opposite_state_has_the_opposite_sketch(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.int8)
    assert (np.frombuffer(commit(kind, -states(), SEED), dtype=np.int8) == -values).all()


@kinds
def test_values_spread_over_thirty_two_units(kind: SketchKind) -> None:
    values = np.frombuffer(commit(kind, states(), SEED), dtype=np.int8).astype(float)
    assert 24 < values.std() < 40
    assert abs(values.mean()) < 6


@kinds
def test_the_slow_implementation_gives_the_same_values(kind: SketchKind) -> None:
    hidden = states(tokens=20)
    exact = np.clip(slow_sketch.values(kind, hidden.double().numpy(), SEED), -127, 127)
    values = np.frombuffer(commit(kind, hidden, SEED), dtype=np.int8).reshape(-1, 4)
    assert np.abs(values - exact).max() < 0.51


@kinds
def test_values_saturate(kind: SketchKind) -> None:
    """A state in the direction of one projection's signs would have the value 32 sqrt(D) = 362."""
    signs = np.unpackbits(np.frombuffer(stream(SEED, "projection", 4 * D // 8), dtype=np.uint8)).reshape(D, 4)
    hidden = torch.from_numpy(signs[:, 0].astype(np.float32) * 2 - 1)[None]
    values = np.frombuffer(commit(kind, hidden, SEED), dtype=np.int8)
    assert values.min() >= -127
    if kind == "projection":
        assert values[0] == 127


@kinds
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e38, 1e-38])
def test_odd_states_have_a_sketch(kind: SketchKind, value: float) -> None:
    values = np.frombuffer(commit(kind, torch.full((2, D), value), SEED), dtype=np.int8)
    assert values.shape == (8,)
    assert values.min() >= -127


@kinds
def test_a_state_may_have_few_dimensions(kind: SketchKind) -> None:
    assert len(commit(kind, states()[:, :5], SEED)) == 4 * T


def test_distances() -> None:
    true = np.array([[0, 0, 0, 0], [10, 0, 0, 0], [0, 0, 0, -127]], dtype=np.int8).tobytes()
    other = np.array([[0, 2, -2, 0], [10, 0, 3, 0], [0, 0, 0, 127]], dtype=np.int8).tobytes()
    assert distances(other, true).tolist() == [2, 3, 254]
    assert distances(b"", b"").size == 0


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_distances_do_not_wrap_around(first: bytes, second: bytes) -> None:
    values = [[byte - 256 if byte > 127 else byte for byte in data] for data in (first, second)]
    assert distances(first, second).max() == max(abs(a - b) for a, b in zip(*values, strict=True))


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_another_length_is_malformed(size: int) -> None:
    with pytest.raises(MalformedError):
        distances(bytes(size), bytes(4))
