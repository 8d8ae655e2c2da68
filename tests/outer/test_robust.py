"""Which contributions count, and with which factors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol.outer import comparing, robust
from protocol.outer.comparing import (
    PROJECTED,
    Comparison,
    SentRound,
    SentRounds,
    compare,
    length_factors,
    projection_size,
)
from protocol.outer.drift import drift_factors, largest_drift, settled_contributions
from protocol.outer.robust import DISTRUST, Weighting, limit_shares, weigh_round
from protocol.outer.round_shares import fits_projections
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import DILOCO, decode, encode
from tests.support.builders.samples import round_rules

Vector = NDArray[np.float64]
SIZE = 4000
STEPS = 8  # local steps of a round
SETTLED = settled_contributions(STEPS)


def honest(seed: int, count: int = 4, agreement: float = 0.3, *, direction: int | None = None) -> list[Vector]:
    """Return updates of about the same length whose cosines with each other are about `agreement`.

    Args:
        direction: seed of what they share, if that is not new for each `seed`.
    """
    random = np.random.default_rng(seed)
    shared = (random if direction is None else np.random.default_rng(direction)).standard_normal(SIZE)
    return [np.sqrt(agreement) * shared + np.sqrt(1 - agreement) * random.standard_normal(SIZE) for _ in range(count)]


def comparison_of(vectors: Sequence[Vector] | Vector) -> Comparison:
    """Compare updates that are shorter than a projection, so that they stand for their own."""
    matrix = np.array(vectors).reshape(len(vectors), -1) if len(vectors) else np.empty((0, SIZE))
    lengths = np.linalg.norm(matrix, axis=1)
    scaled = matrix * np.array(length_factors(lengths.tolist()))[:, None]
    return Comparison(lengths, scaled @ scaled.sum(axis=0), matrix, STEPS)


def weigh(vectors: list[Vector], sent: SentRounds, places: Sequence[int] | None = None) -> tuple[Weighting, SentRounds]:
    """Weigh a round of the sites at some places, by default the first ones; return what was sent so far as well."""
    workers = [bytes([place]) for place in (range(len(vectors)) if places is None else places)]
    weighting = weigh_round(workers, comparison_of(vectors), sent)
    return weighting, sent.after(weighting.sent)


def result(vectors: list[Vector]) -> Weighting:
    workers = [bytes([place]) for place in range(len(vectors))]
    return weigh_round(workers, comparison_of(vectors), SentRounds())


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


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_poisoned_site_in_four_counts_for_a_tenth_and_is_refused_if_it_goes_on(attack: str) -> None:
    sent = SentRounds()
    for seed in range(20):
        vectors = honest(seed)
        lengths = sorted(np.linalg.norm(vector) for vector in vectors)
        vectors[2] = ATTACKS[attack](vectors[2], seed)
        weighting, sent = weigh(vectors, sent)
        factors = weighting.factors
        assert factors[2] * np.linalg.norm(vectors[2]) <= 1.01 * DISTRUST * lengths[2]
        assert (factors[2] == 0) == (seed + 1 >= SETTLED)
        assert min(factors[:2] + factors[3:]) > 0.9
    weighting, _ = weigh(honest(20), sent)
    assert min(weighting.factors) > 0  # as soon as it agrees again, but for a drift that it had


def test_no_site_has_more_than_its_share() -> None:
    lengths, factors = [100.0, 1.1, 0.9, 1.0], [1.0] * 4
    limit_shares(factors, lengths, range(4), 0.4)
    scaled = [factor * length for factor, length in zip(factors, lengths, strict=True)]
    assert scaled[0] / sum(scaled) == pytest.approx(0.4)
    assert factors[1:] == [1.0] * 3
    two = [1.0, 1.0]
    limit_shares(two, [10.0, 1.0], range(2), 0.4)
    assert two == [1.0, 1.0]


def test_fewer_than_half_are_scaled_down_since_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "AGREEMENT", 1.0)
    for count in range(1, 8):
        vectors = [noise(seed) for seed in range(count)]
        factors = result(vectors).factors
        assert sum(factor <= DISTRUST for factor in factors) <= max(0, (count - 1) // 2)


def test_two_sites_and_updates_of_zero() -> None:
    own = noise(1)
    assert result([own, -own]).factors == (1.0, 1.0)
    assert all(np.isfinite(result([np.zeros(SIZE)] * 3).factors))
    assert result([]).factors == ()


def test_sites_that_send_nothing_have_no_say_in_the_median_length() -> None:
    own, empty = noise(1), np.zeros(SIZE)
    assert result([empty, own]).factors == (1.0, 1.0)
    assert result([empty, own, 2 * own, empty]).factors[1:3] == pytest.approx((1.0, 0.5))
    assert result([empty, own, empty, 2 * own, empty]).factors[1:4:2] == pytest.approx((1.0, 0.5))
    assert result([empty, empty, own]).factors == (1.0,) * 3


@pytest.mark.parametrize("length", [0.0, 1e-3, 0.05])
def test_an_empty_or_very_short_contribution_is_not_refused(length: float) -> None:
    for seed in range(10):
        vectors = honest(seed)
        vectors[1] = length * noise(seed)
        assert min(result(vectors).factors) > 0.9
        vectors[2] *= -1
        factors = result(vectors).factors
        assert factors[2] <= DISTRUST
        assert min(factors[:2] + factors[3:]) > 0.9  # the other sites are told apart as without it


Attendance = Callable[[int, int], bool]
"""Whether a site takes part in a round."""

EVERYBODY: Attendance = lambda site, number: True  # noqa: E731


def drifting_rounds(
    sine: float, rounds: int, attends: Attendance = EVERYBODY, *, signal: float = 0.45, steady: bool = True
) -> list[dict[int, float]]:
    """Return the factors, by site, of some rounds in which site 2 turns its updates by an angle towards a fixed
    direction.

    Args:
        steady: whether honest sites share the same direction in all rounds.
    """
    random = np.random.default_rng(5)
    direction, sent, result = random.standard_normal(SIZE), SentRounds(), []
    direction /= np.linalg.norm(direction)
    for number in range(rounds):
        vectors = honest(100 + number, agreement=signal, direction=7 if steady else None)
        length = np.linalg.norm(vectors[2])
        vectors[2] = np.sqrt(1 - sine**2) * vectors[2] + sine * length * direction
        places = [place for place in range(4) if attends(place, number)]
        weighting, sent = weigh([vectors[place] for place in places], sent, places)
        result.append(dict(zip(places, weighting.factors, strict=True)))
    return result


def honest_factors(rounds: list[dict[int, float]]) -> list[float]:
    return [factor for factors in rounds for place, factor in factors.items() if place != 2]


@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.parametrize("sine", [0.5, 0.6, 0.9, 0.99])
def test_a_drift_over_many_rounds_is_clipped_and_the_rest_counts(sine: float, steady: bool) -> None:
    rounds = drifting_rounds(sine, 20, steady=steady)
    bound = max(DISTRUST, 1.3 * largest_drift(4) * 0.45**0.5)
    assert all(sine * factors[2] < bound for factors in rounds[SETTLED:])
    assert min(honest_factors(rounds)) > 0.9


@pytest.mark.parametrize("period", [2, 3, 8])
@pytest.mark.parametrize("signal", [0.1, 0.45])
def test_a_site_that_drifts_in_some_of_the_rounds_is_clipped_after_as_many_of_its_own(
    period: int, signal: float
) -> None:
    rounds = drifting_rounds(
        0.5, (SETTLED + 1) * period, lambda site, number: site != 2 or number % period == 0, signal=signal
    )
    own = [factors[2] for factors in rounds if 2 in factors]
    assert max(own[SETTLED:]) < 0.75 < min(own[: SETTLED - 1])
    assert min(honest_factors(rounds)) > 0.9


def test_a_site_that_drifts_under_several_names_in_turn_is_clipped_under_each() -> None:
    sent, direction = SentRounds(), noise(1)
    for number in range(4 * (SETTLED + 2)):
        vectors = honest(number, 3, 0.45)
        vectors[2] += 0.6 * direction
        workers = [bytes([place]) for place in (0, 1, 2 + number % 4)]
        sent = sent.after(weigh_round(workers, comparison_of(vectors), sent).sent)
    factors = drift_factors(sent.rounds, STEPS)
    assert sorted(factors) == [bytes([place]) for place in range(2, 6)]
    assert max(factors.values()) < 0.2


def test_a_site_whose_projection_is_zero_makes_no_other_one_shorter() -> None:
    first = np.zeros(2 * PROJECTED)
    first[::PROJECTED] = 1e-3, -1e-3
    sent = SentRound((b"a", b"b"), np.array([first[:PROJECTED] + first[PROJECTED:], first[:PROJECTED]], np.float32))
    assert [sent.relative_length(worker) for worker in sent.workers] == [0.0, 1.0]


@pytest.mark.parametrize("attends", [
    EVERYBODY,
    lambda site, number: site > 0 or number >= 15,  # late
    lambda site, number: site > 0 or not 10 <= number < 22,  # away
    lambda site, number: site > 0 or number % 2 == 0,
    lambda site, number: site > 1 or (number + site) % 2 == 0,  # two sites in turn
    lambda site, number: (7 * site + 5 * number + site * number) % 3 > 0,
])  # fmt: skip
@pytest.mark.parametrize(("signal", "steady"), [(0.1, True), (0.45, True), (0.45, False)])
def test_honest_sites_count_in_every_round(attends: Attendance, signal: float, steady: bool) -> None:
    for factors in drifting_rounds(0.0, 40, attends, signal=signal, steady=steady):
        assert min(factors.values()) > 0.9


def test_noise_that_goes_on_in_the_next_contribution_is_no_drift() -> None:
    """What a gate held back is sent a round later, and an optimizer remembers its gradients. Site 0 came late, so its
    contributions are alike, and those of the others are opposite, as in `bench.outer_network`.
    """
    random, sent = np.random.default_rng(7), SentRounds()
    white = random.standard_normal((41, 4, SIZE))
    shares = np.array([0.3, -0.1, -0.1, -0.1])[:, None]
    for number in range(40):
        noise_of_sites = white[number + 1] + shares * white[number]
        vectors = list(0.8 * random.standard_normal(SIZE) + noise_of_sites)
        present = [0, 1, 2, 3] if number >= 10 else [1, 2, 3]
        weighting, sent = weigh([vectors[place] for place in present], sent, present)
        assert min(weighting.factors) > 0


@pytest.mark.parametrize("length", [0.125, 0.5])
def test_a_site_with_shorter_contributions_makes_no_other_one_drift(length: float) -> None:
    """What is common in the mean is longer than in two of the contributions, if one of these is short."""
    sent = SentRounds()
    for number in range(40):
        vectors = honest(number, agreement=0.8)
        weighting, sent = weigh([length * vectors[0], *vectors[1:]], sent)
        assert weighting.drift_factors == (1.0,) * 4


@pytest.mark.parametrize(("count", "agreement", "length", "rounds"), [(9, 0.1, 1.0, 14), (4, 0.45, 0.4, 32)])
def test_a_site_that_drifts_far_makes_no_honest_one_drift_the_other_way(
    count: int, agreement: float, length: float, rounds: int
) -> None:
    """Short contributions are those of fewer steps, so their drift shows later than it would in the others."""
    drift, sent = noise(1), SentRounds()
    for number in range(rounds):
        vectors = honest(number, count, agreement)
        vectors[0] = length * (0.5 * vectors[0] + 0.9 * drift)
        weighting, sent = weigh(vectors, sent)
        assert min(weighting.drift_factors[1:]) > 0.9
    assert weighting.drift_factors[0] < 0.1


def test_noise_hides_no_drift() -> None:
    """A site that adds much noise to its drift, and little of what the others send, is clipped over the rounds."""
    random, sent, factors = np.random.default_rng(4), SentRounds(), []
    direction = random.standard_normal(SIZE)
    for number in range(20):
        *vectors, like_the_others = honest(number, 5)
        vectors[2] = 0.5 * like_the_others + 0.3 * direction + noise(number)
        weighting, sent = weigh(vectors, sent)
        factors.append(weighting.factors)
    assert all(0.3 * own[2] < 1.3 * largest_drift(5) * 0.3**0.5 for own in factors[SETTLED:])
    assert min(own[place] for own in factors for place in (0, 1, 3)) > 0.8


@pytest.mark.parametrize(("size", "error"), [(PROJECTED, 0.01), (2048, 0.05)])
def test_the_drift_factor_leaves_the_drift_that_is_allowed(
    size: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of length 1 with a drift of 0.5, of which 0.45 is common to all without it; and projections as short as
    those of 1,024 sites.
    """
    monkeypatch.setattr(comparing, "REMEMBERED_NUMBERS", 4 * size)
    random, sent = np.random.default_rng(4), SentRounds()
    direction = random.standard_normal(PROJECTED)
    direction /= np.linalg.norm(direction)
    workers = [bytes([place]) for place in range(4)]
    for number in range(20):
        own = np.random.default_rng(number)
        shared, noises = own.standard_normal(PROJECTED), own.standard_normal((4, PROJECTED))
        vectors = (np.sqrt(0.45) * shared + np.sqrt(0.55) * noises) / np.sqrt(PROJECTED)
        vectors[2] = np.sqrt(0.75) * vectors[2] + 0.5 * direction
        weighting = weigh_round(workers, comparison_of(vectors), sent)
        sent = sent.after(weighting.sent)
    assert weighting.drift_factors[2] == pytest.approx((largest_drift(4) * np.sqrt(0.45) / 0.5) ** 2, abs=error)
    assert [weighting.drift_factors[place] for place in (0, 1, 3)] == [1.0] * 3
    assert {own.projections.shape for own in sent.rounds} == {(4, size)}


def test_what_a_disagreeing_site_sent_does_not_count_among_the_others() -> None:
    """Else a site that disagrees in each of its rounds could hide another one's drift."""
    random, sent = np.random.default_rng(1), SentRounds()
    for number in range(20):
        vectors = honest(number, 5)
        vectors[4] = -vectors[4] + random.standard_normal(SIZE)
        _, sent = weigh(vectors, sent)
    assert all(own.disagreeing == {bytes([4])} for own in sent.rounds)
    assert bytes([0]) not in drift_factors(sent.rounds, STEPS)


def test_projections_keep_inner_products_and_depend_on_the_secret() -> None:
    random = np.random.default_rng(3)
    shared = SharedState.begin({"w": torch.zeros(300, 200), "x": torch.zeros(7)}, has_momentum=False)
    common = torch.from_numpy(random.standard_normal((300, 200)).astype(np.float32))
    payloads = []
    for _ in range(3):
        own = common + torch.from_numpy(random.standard_normal((300, 200)).astype(np.float32))
        local = {"w": own, "x": torch.ones(7)}
        payloads.append(encode(shared.weights, local, None, DILOCO.coding, shared.digests.weights).payload)
    first, second = (compare(shared, payloads, round_rules(), bytes([number] * 32)) for number in range(2))
    values = [
        np.concatenate([own for _, own in decode(data, shared.weights, shared.digests.weights)]) for data in payloads
    ]
    products = np.array(values, np.float64) @ np.array(values, np.float64).T
    scales = np.array(length_factors(first.lengths.tolist()))
    assert np.allclose(first.lengths**2, np.diag(products))
    assert np.allclose(first.with_all, scales * (products @ scales))
    assert np.allclose(first.with_all, second.with_all)
    error = np.abs(first.projections @ first.projections.T - products) / products[0, 0]
    assert 0 < error.max() < 0.05
    assert not np.allclose(first.projections, second.projections)
    assert fits_projections(first) and fits_projections(second)
    lies = (replace(first, with_all=first.with_all + lie * first.lengths**2) for lie in ([0.3, 0, 0], [0, 0, -0.3]))
    assert not any(fits_projections(lie) for lie in lies)


def test_rounds_of_many_and_of_few_sites_are_remembered_by_projections_of_one_size() -> None:
    rows = np.random.default_rng(1).standard_normal((3, PROJECTED)).astype(np.float32)
    few = SentRound((b"a", b"b", b"c"), rows)
    workers = tuple(place.to_bytes(2, "big") for place in range(300))
    many = SentRound(workers, np.ones((300, 4096), np.float32))
    assert [projection_size(sites) for sites in (0, 128, 129, 300, 1024)] == [PROJECTED, PROJECTED, 8192, 4096, 2048]
    rounds = SentRounds([few]).after(many).after(few).rounds
    assert [len(own.projections[0]) for own in rounds] == [4096] * 3
    assert np.allclose(rounds[0].projections, rows.reshape(3, 4, 4096).sum(axis=1), atol=1e-5)


def test_threads_and_memory_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts, of which one has several chunks, and rounds with and without momentum."""
    random, rules = np.random.default_rng(3), round_rules()
    shapes = {"a": (1000, 1100), "b": (5,), "c": (1024, 1024), "d": (7, 300_000), "e": (3,)}
    shared = SharedState.begin(
        {name: torch.from_numpy(random.uniform(-1, 1, shape)) for name, shape in shapes.items()},
        has_momentum=rules.momentum > 0,
    )
    payloads = []
    for _ in range(3):
        local = {name: own - torch.from_numpy(random.uniform(-1, 1, own.shape)) for name, own in shared.weights.items()}
        local = {name: own.float() for name, own in local.items()}
        payloads.append(encode(shared.weights, local, None, DILOCO.coding, shared.digests.weights).payload)
    first, *others = (compare(shared, payloads, rules, bytes(32), threads) for threads in (1, 3))
    monkeypatch.setattr(comparing, "_DECODED_BYTES", 0)
    others += [compare(shared, payloads, rules, bytes(32), threads) for threads in (1, 2, 3)]
    for other in others:
        names = ("lengths", "with_all", "projections")
        assert all((getattr(first, name) == getattr(other, name)).all() for name in names)
    states = [shared.after(payloads, [1.0, 0.3, 0.7], rules, threads) for threads in (1, 3)]
    assert states[0].digests == states[1].digests != shared.digests


def test_rounds_with_two_sites_and_rounds_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = 2 * SETTLED
    monkeypatch.setattr(comparing, "REMEMBERED_ROUNDS", remembered)
    sent, vectors, first = SentRounds(), honest(1), bytes([0])
    for _ in range(SETTLED):
        _, sent = weigh(vectors[:2], sent)
    assert first not in drift_factors(sent.rounds, STEPS)
    for number in range(remembered):
        assert bool(drift_factors(sent.rounds, STEPS)) == (number >= SETTLED)
        _, sent = weigh(vectors[:3], sent)
    for _ in range(remembered - SETTLED + 1):
        _, sent = weigh(vectors[:3], sent, (1, 2, 3))
    assert len(sent.rounds) == remembered
    assert first not in drift_factors(sent.rounds, STEPS)


def test_an_honest_site_that_was_away_while_the_direction_changed_is_not_refused() -> None:
    random = np.random.default_rng(5)
    directions = random.standard_normal((2, SIZE))
    sent = SentRounds()
    for number in range(40):
        present = range(3 if 10 <= number < 22 else 4)
        vectors = [directions[int(number >= 12)] + random.standard_normal(SIZE) for _ in present]
        weighting, sent = weigh(vectors, sent)
        assert min(weighting.factors) > 0
