"""Which contributions count, and with which factors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol.outer.comparing import PROJECTED, SETTLED, Comparison, SentSums, compare
from protocol.outer.robust import PLAIN_MEAN, RobustSettings, Weighting, weigh, weigh_round
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import DILOCO, encode

Vector = NDArray[np.float64]
SIZE = 4000
ROBUST = RobustSettings()


def honest(seed: int, count: int = 4, agreement: float = 0.3) -> list[Vector]:
    """Return updates of about the same length whose cosines with each other are about `agreement`."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal(SIZE)
    return [np.sqrt(agreement) * shared + np.sqrt(1 - agreement) * random.standard_normal(SIZE) for _ in range(count)]


def result(vectors: list[Vector], settings: RobustSettings = ROBUST) -> Weighting:
    matrix = np.array(vectors)
    return weigh(matrix @ matrix.T, settings)


def noise(seed: int) -> Vector:
    return np.random.default_rng(1000 + seed).standard_normal(SIZE)


def one_tensor(own: Vector) -> Vector:
    mass = np.zeros(SIZE)
    mass[:40] = np.linalg.norm(own) / np.sqrt(40)
    return mass


ATTACKS: dict[str, Callable[[Vector, int], Vector]] = {
    "sign flip": lambda own, _: -own,
    "times -10": lambda own, _: -10 * own,
    "noise": lambda _, seed: noise(seed),
    "noise times 100": lambda _, seed: 100 * noise(seed),
    "one tensor": lambda own, _: one_tensor(own),
}


@pytest.mark.parametrize("agreement", [0.1, 0.3, 0.9])
def test_honest_sites_all_count(agreement: float) -> None:
    for seed in range(20):
        factors = result(honest(seed, agreement=agreement)).factors
        assert min(factors) > 0.9


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_poisoned_site_in_four_is_refused(attack: str) -> None:
    for seed in range(20):
        vectors = honest(seed)
        vectors[2] = ATTACKS[attack](vectors[2], seed)
        factors = result(vectors).factors
        assert factors[2] == 0
        assert min(factors[:2] + factors[3:]) > 0.9


def test_the_plain_mean_refuses_nobody() -> None:
    vectors = honest(1)
    vectors[2] *= -10
    assert result(vectors, PLAIN_MEAN).factors == (1.0,) * 4


def test_a_long_contribution_is_scaled_to_the_median_length() -> None:
    vectors = honest(2)
    vectors[1] *= 50
    factors = result(vectors).factors
    lengths = sorted(factor * float(np.linalg.norm(vector)) for factor, vector in zip(factors, vectors, strict=True))
    assert lengths[-1] == pytest.approx(lengths[1], rel=0.02)


def test_no_site_has_more_than_its_share() -> None:
    vectors = [0.01 * vector for vector in honest(3, 4)]
    vectors[0] *= 100
    factors = result(vectors, RobustSettings(clips=False, agreement=None, share=0.4)).factors
    lengths = [factor * float(np.linalg.norm(vector)) for factor, vector in zip(factors, vectors, strict=True)]
    assert lengths[0] / sum(lengths) == pytest.approx(0.4)
    assert factors[1:] == (1.0,) * 3
    two = [10 * vectors[1], vectors[1]]
    assert result(two, RobustSettings(clips=False, agreement=None, share=0.4)).factors == (1.0, 1.0)


def test_fewer_than_half_are_removed() -> None:
    for count in range(1, 8):
        vectors = [noise(seed) for seed in range(count)]
        factors = result(vectors, RobustSettings(agreement=1.0)).factors
        assert sum(factor == 0 for factor in factors) <= max(0, (count - 1) // 2)


def test_two_sites_and_updates_of_zero() -> None:
    own = noise(1)
    assert result([own, -own]).factors == (1.0, 1.0)
    assert all(np.isfinite(result([np.zeros(SIZE)] * 3).factors))
    assert weigh(np.zeros((0, 0)), ROBUST).factors == ()


def test_half_of_the_sites_cannot_have_the_others_refused_by_sending_nothing() -> None:
    own, empty = noise(1), np.zeros(SIZE)
    assert result([empty, own]).factors == (1.0, 1.0)
    assert result([empty, own, 2 * own, empty]).factors[1:3] == pytest.approx((1.0, 0.5))
    assert result([empty, empty, own]).factors == (1.0, 1.0, 0.0)  # one site moves nothing against all others


def drifting_rounds(sine: float, rounds: int, *, signal: float = 0.45, absent: int = 0) -> list[tuple[float, ...]]:
    """Return the factors of some rounds in which site 2 turns its updates by an angle towards a fixed direction.

    Args:
        absent: rounds at the beginning in which site 0 sends nothing.
    """
    random = np.random.default_rng(5)
    direction, sums, result = random.standard_normal(SIZE), SentSums(), []
    direction /= np.linalg.norm(direction)
    for number in range(rounds):
        vectors = honest(100 + number, agreement=signal)
        length = np.linalg.norm(vectors[2])
        vectors[2] = np.sqrt(1 - sine**2) * vectors[2] + sine * length * direction
        places = [place for place in range(4) if place or number >= absent]
        matrix = np.array([vectors[place] for place in places])
        projections = np.zeros((len(places), PROJECTED))
        projections[:, :SIZE] = matrix
        comparison = Comparison(matrix @ matrix.T, projections)
        factors = weigh_round([bytes([place]) for place in places], comparison, sums, ROBUST).factors
        result.append(tuple(dict(zip(places, factors, strict=True)).get(place, 1.0) for place in range(4)))
    return result


@pytest.mark.parametrize("sine", [0.5, 0.6, 0.9, 0.99])
def test_a_drift_over_many_rounds_is_refused(sine: float) -> None:
    rounds = drifting_rounds(sine, 20)
    assert all(factors[2] == 0 for factors in rounds[SETTLED:])
    assert all(factors[place] > 0.9 for factors in rounds for place in (0, 1, 3))


@pytest.mark.parametrize("absent", [0, 3, 15])
def test_honest_sites_count_in_every_round(absent: int) -> None:
    for factors in drifting_rounds(0.0, 20, absent=absent):
        assert min(factors) > 0.9


def test_sums_without_a_common_direction_refuse_nobody_who_agrees_by_chance() -> None:
    refused = sum(factor == 0 for factors in drifting_rounds(0.0, 30, signal=0.001) for factor in factors)
    short = sum(factor == 0 for number in range(30) for factor in result(honest(100 + number, agreement=0.001)).factors)
    assert refused == short


def test_projections_keep_inner_products_and_depend_on_the_secret() -> None:
    random = np.random.default_rng(3)
    shared = SharedState.begin({"w": torch.zeros(300, 200), "x": torch.zeros(7)}, has_momentum=False)
    common = torch.from_numpy(random.standard_normal((300, 200)).astype(np.float32))
    payloads = []
    for _ in range(3):
        own = common + torch.from_numpy(random.standard_normal((300, 200)).astype(np.float32))
        local = {"w": own, "x": torch.ones(7)}
        payloads.append(encode(shared.weights, local, None, DILOCO.coding, shared.digests.weights).payload)
    first, second = (compare(shared, payloads, bytes([number] * 32)) for number in range(2))
    assert np.allclose(first.products, second.products)
    assert first.products[0, 1] == pytest.approx(60_000, rel=0.05)
    error = np.abs(first.projections @ first.projections.T - first.products) / first.products[0, 0]
    assert 0 < error.max() < 0.05
    assert not np.allclose(first.projections, second.projections)


def test_workers_that_left_are_forgotten() -> None:
    sums, projections = SentSums(), np.ones((2, PROJECTED))
    for _ in range(SETTLED):
        long = sums.add([b"a", b"b"], projections, [1.0, 1.0])
    assert long.settled == (True, True)
    sums.keep({b"b"})
    assert sums.add([b"a", b"b"], projections, [1.0, 1.0]).settled == (False, True)


def test_an_honest_site_that_was_away_while_the_direction_changed_is_not_refused() -> None:
    random = np.random.default_rng(5)
    directions = random.standard_normal((2, PROJECTED))
    sums, workers = SentSums(), [bytes([place]) for place in range(4)]

    def refused(number: int, present: list[bytes]) -> list[bytes]:
        vectors = [directions[int(number >= 12)] + random.standard_normal(PROJECTED) for _ in present]
        products = np.array(vectors) @ np.array(vectors).T
        factors = weigh_round(present, Comparison(products, np.array(vectors)), sums, ROBUST).factors
        return [worker for worker, factor in zip(present, factors, strict=True) if factor == 0]

    for number in range(40):
        away = 10 <= number < 22
        assert refused(number, workers[:3] if away else workers) == []
    assert {count for count, _ in sums.rows().values()} == {SETTLED}
